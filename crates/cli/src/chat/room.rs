//! The space that is left in the context, and the turns that are dropped when none is left.

use forebay_engine::chat::Message;

/// The warning after an answer that leaves less than a fifth of the context.
pub fn warning(used: usize, context: usize) -> Option<String> {
    let left = context.saturating_sub(used);
    (5 * left < context && left > 0).then(|| {
        let percent = 100 * used / context;
        format!("The context is {percent} % full: {left} of {context} tokens are left. /drop drops the oldest turns.")
    })
}

/// The number of messages in the oldest turn: a user's message and everything before the next one.
pub fn oldest_turn(messages: &[Message]) -> usize {
    let next = messages.iter().skip(1).position(|message| message.role == "user");
    next.map_or(messages.len(), |next| next + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_warning_comes_in_time_and_not_when_it_is_too_late() {
        assert_eq!(warning(800, 1000), None);
        let expected = "The context is 84 % full: 153 of 1000 tokens are left. /drop drops the oldest turns.";
        assert_eq!(warning(847, 1000).as_deref(), Some(expected));
        assert_eq!(warning(1000, 1000), None);
    }

    #[test]
    fn a_turn_ends_where_the_next_one_begins() {
        let messages = |roles: &[&str]| roles.iter().map(|role| Message::new(*role, "")).collect::<Vec<_>>();
        assert_eq!(oldest_turn(&messages(&["user", "assistant", "user"])), 2);
        assert_eq!(oldest_turn(&messages(&["user", "user"])), 1);
        assert_eq!(oldest_turn(&messages(&["assistant", "user"])), 1, "a conversation that was loaded");
        assert_eq!(oldest_turn(&messages(&["user", "assistant"])), 2);
        assert_eq!(oldest_turn(&[]), 0);
    }
}
