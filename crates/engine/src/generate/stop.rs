//! Ends an answer at a stop string, even if the stop string arrives in several pieces.

use crate::error::{Error, Result};

/// Watches a stream of text for stop strings.
///
/// The output is the text before the first occurrence of any stop string, however the text was cut into pieces. If two
/// occurrences overlap, the one that begins first counts. Text is held back only while it may be the beginning of a
/// stop string.
#[derive(Clone, Debug)]
pub struct StopMatcher {
    stops: Vec<String>,
    longest: usize,
    /// Text that is held back: empty, or the beginning of a stop string.
    held: String,
    /// The stop string that occurred.
    met: Option<usize>,
}

/// The result of adding a piece of text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StopOutcome {
    /// Text that can be shown now.
    pub emit: String,
    /// Whether a stop string occurred: no more text follows.
    pub stopped: bool,
}

impl StopMatcher {
    /// A matcher for these strings. The list may be empty, but no string in it may be.
    pub fn new(stops: Vec<String>) -> Result<StopMatcher> {
        if stops.iter().any(String::is_empty) {
            return Err(Error::Invalid("a stop string is empty: it would end every answer at once".into()));
        }
        let longest = stops.iter().map(String::len).max().unwrap_or(0);
        Ok(StopMatcher { stops, longest, held: String::new(), met: None })
    }

    /// Adds a piece of text.
    pub fn push(&mut self, text: &str) -> StopOutcome {
        if self.stopped() {
            return StopOutcome { emit: String::new(), stopped: true };
        }
        self.held.push_str(text);
        let hold_from = self.first_beginning();
        let kept = match self.first_occurrence() {
            // An occurrence is final unless a longer stop string may still begin before it.
            Some((start, stop)) if start <= hold_from => {
                self.met = Some(stop);
                self.held.truncate(start);
                String::new()
            }
            _ => self.held.split_off(hold_from),
        };
        StopOutcome { emit: std::mem::replace(&mut self.held, kept), stopped: self.stopped() }
    }

    /// Returns the text that was held back, when no more text follows.
    pub fn finish(&mut self) -> String {
        if let Some((start, stop)) = self.first_occurrence() {
            self.met = Some(stop);
            self.held.truncate(start);
        }
        std::mem::take(&mut self.held)
    }

    /// Whether a stop string occurred.
    pub fn stopped(&self) -> bool {
        self.met.is_some()
    }

    /// The stop string that occurred.
    pub fn met(&self) -> Option<&str> {
        self.met.map(|stop| self.stops[stop].as_str())
    }

    /// The position of the first complete stop string, and its index.
    fn first_occurrence(&self) -> Option<(usize, usize)> {
        // A search takes time in proportion to the text even if it fails, so strings longer than the text are skipped.
        let fit = self.stops.iter().enumerate().filter(|(_, stop)| stop.len() <= self.held.len());
        fit.filter_map(|(i, stop)| Some((self.held.find(stop.as_str())?, i))).min()
    }

    /// Where the end of the text first matches the beginning of a stop string, or the text's length.
    fn first_beginning(&self) -> usize {
        // A stop string that begins earlier would be complete already.
        let from = self.held.len().saturating_sub(self.longest.saturating_sub(1));
        (from..self.held.len())
            .filter(|&i| self.held.is_char_boundary(i))
            .find(|&i| self.stops.iter().any(|stop| stop.starts_with(&self.held[i..])))
            .unwrap_or(self.held.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn matcher(stops: &[&str]) -> StopMatcher {
        StopMatcher::new(stops.iter().map(|s| s.to_string()).collect()).expect("no stop string is empty")
    }

    fn emit(emit: &str) -> StopOutcome {
        StopOutcome { emit: emit.into(), stopped: false }
    }

    fn stop(emit: &str) -> StopOutcome {
        StopOutcome { emit: emit.into(), stopped: true }
    }

    #[test]
    fn text_without_stop_strings_passes_at_once() {
        let mut m = matcher(&[]);
        assert_eq!(m.push("any text"), emit("any text"));
        assert_eq!(m.finish(), "");
    }

    #[test]
    fn only_what_may_begin_a_stop_string_is_held_back() {
        let mut m = matcher(&["</s>"]);
        assert_eq!(m.push("a < b <"), emit("a < b "));
        assert_eq!(m.push("/"), emit(""));
        assert_eq!(m.push("p></s"), emit("</p>"));
        assert_eq!(m.finish(), "</s");
    }

    #[test]
    fn a_stop_string_in_pieces_ends_the_text() {
        let mut m = matcher(&["</s>"]);
        assert_eq!(m.push("end<"), emit("end"));
        assert_eq!(m.push("/s"), emit(""));
        assert_eq!(m.push("> and more"), stop(""));
        assert_eq!(m.push("still more"), stop(""));
        assert_eq!(m.finish(), "");
    }

    #[test]
    fn a_false_start_may_hold_the_true_one() {
        let mut m = matcher(&["aab"]);
        assert_eq!(m.push("aa"), emit(""));
        assert_eq!(m.push("a"), emit("a"));
        assert_eq!(m.push("b"), stop(""));
    }

    #[test]
    fn a_match_waits_for_one_that_may_have_begun_before_it() {
        let mut m = matcher(&["bc", "abcd"]);
        assert_eq!(m.push("xabc"), emit("x"));
        assert_eq!(m.clone().push("d"), stop(""));
        assert_eq!(m.clone().push("x"), stop("a"));
        assert_eq!((m.finish(), m.met()), ("a".into(), Some("bc")));
    }

    #[test]
    fn a_longer_stop_string_with_the_same_beginning_delays_nothing() {
        let mut m = matcher(&["abc", "ab"]);
        assert_eq!(m.push("xab"), stop("x"));
        assert_eq!(m.met(), Some("ab"));
    }

    #[test]
    fn an_empty_stop_string_is_refused() {
        let refused = StopMatcher::new(vec!["a".into(), String::new()]);
        assert!(refused.unwrap_err().to_string().contains("empty"));
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, cases: 2000, ..Default::default() })]

        /// A small alphabet generates stop strings that overlap, repeat and contain one another.
        #[test]
        fn the_cut_into_pieces_does_not_matter(
            stops in prop::collection::vec("[abé]{1,5}", 0..4),
            pieces in prop::collection::vec("[abé]{0,4}", 0..12),
        ) {
            let text = pieces.concat();
            let end = stops.iter().filter_map(|s| text.find(s.as_str())).min();

            let mut m = StopMatcher::new(stops).unwrap();
            let mut shown = String::new();
            for piece in &pieces {
                let outcome = m.push(piece);
                prop_assert!(!outcome.stopped || end.is_some());
                shown += &outcome.emit;
            }
            shown += &m.finish();
            prop_assert_eq!(&shown, &text[..end.unwrap_or(text.len())]);
        }

        /// Held text is a proper prefix of a stop string, and no earlier text could begin one.
        #[test]
        fn no_more_is_held_back_than_needed(
            stops in prop::collection::vec("[abé]{1,5}", 1..4),
            text in "[abé]{0,20}",
        ) {
            let mut m = StopMatcher::new(stops.clone()).unwrap();
            let outcome = m.push(&text);
            if !outcome.stopped {
                let held = &text[outcome.emit.len()..];
                let begins = |tail: &str| stops.iter().any(|s| s.starts_with(tail) && s != tail);
                prop_assert!(held.is_empty() || begins(held));
                prop_assert!(outcome.emit.char_indices().all(|(i, _)| !begins(&text[i..])));
            }
        }
    }
}
