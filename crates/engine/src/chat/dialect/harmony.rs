//! The messages of gpt-oss: each has a header that names its channel and whom it is for.

use super::Piece;
use super::input::{Begins, Found, Input, begins, trim_start};
use super::json::{Arguments, Ended};
use super::values::Tools;

const START: &str = "<|start|>";
const CHANNEL: &str = "<|channel|>";
const MESSAGE: &str = "<|message|>";
const END: &str = "<|end|>";
const CALL: &str = "<|call|>";
const RETURN: &str = "<|return|>";

/// All of its tags.
pub(super) const TAGS: &[&str] = &[START, CHANNEL, MESSAGE, "<|constrain|>", END, CALL, RETURN];

/// What ends reasoning wherever it is. With the channel left open, the model would go on with what it was thinking.
pub(super) const REASONING_END: &str = "<|end|><|start|>assistant<|channel|>final<|message|>";

/// What ends a message: what says so, and what begins the next.
const ENDS: &[&str] = &[END, CALL, RETURN, START, CHANNEL];

/// What a header may begin with.
const HEADS: &[&str] = &[START, CHANNEL, MESSAGE, "<|constrain|>", "to=", "assistant"];

/// The longest header.
const MOST_HEADER: usize = 1024;

/// Whether a prompt ends inside a message.
pub(super) fn is_in_message(prompt: &str) -> bool {
    prompt.rsplit_once(MESSAGE).is_some_and(|(_, text)| !ENDS.iter().any(|end| text.contains(end)))
}

/// Reads messages.
#[derive(Clone, Debug)]
pub(super) struct Harmony {
    tools: Tools,
    state: HarmonyState,
    /// What has been said, in reasoning and to the user.
    said: [bool; 2],
}

#[derive(Clone, Debug)]
enum HarmonyState {
    Header,
    /// A message; nothing of it has come if `fresh`.
    Text {
        channel: Channel,
        fresh: bool,
    },
    Call(Arguments),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Channel {
    Reasoning,
    Content,
}

impl Harmony {
    /// For what follows a prompt.
    pub(super) fn after(prompt: &str, tools: Tools) -> Harmony {
        let mut harmony = Harmony { tools, state: HarmonyState::Header, said: [false; 2] };
        // The prompt may have begun a message.
        if let Some((_, begun)) = prompt.rsplit_once(START) {
            let mut input = Input::default();
            input.push(begun.strip_prefix("assistant").unwrap_or(begun));
            harmony.step(&mut input, &mut |_| {});
            harmony.said = [false; 2];
        }
        harmony
    }

    pub(super) fn is_reasoning(&self) -> bool {
        matches!(self.state, HarmonyState::Text { channel: Channel::Reasoning, .. })
    }

    pub(super) fn step(&mut self, input: &mut Input, emit: &mut dyn FnMut(Piece<'_>)) {
        loop {
            let goes_on = match &mut self.state {
                HarmonyState::Header => self.header(input, emit),
                HarmonyState::Text { .. } => self.text(input, emit),
                HarmonyState::Call(arguments) => match arguments.step(input, ENDS, true, emit) {
                    Some(Ended::ByTag(which)) => {
                        self.end(input, which);
                        true
                    }
                    Some(Ended::ByThemselves) | None => false,
                },
            };
            if !goes_on {
                return;
            }
        }
    }

    /// Reads a header when all of it is there. Whether there is more to read.
    fn header(&mut self, input: &mut Input, emit: &mut dyn FnMut(Piece<'_>)) -> bool {
        let rest = input.rest();
        let inner = trim_start(rest);
        let lead = match begins(inner, HEADS, input.ended()) {
            Begins::With(which) => rest.len() - inner.len() + HEADS[which].len(),
            Begins::Maybe if rest.len() <= MOST_HEADER => return false,
            Begins::Maybe | Begins::Without => {
                self.state = HarmonyState::Text { channel: Channel::Content, fresh: true };
                return !rest.is_empty();
            }
        };
        let (at, which) = match input.find_near(&[MESSAGE, END, CALL, RETURN], MOST_HEADER) {
            Found::Tag { at, which } => (at, Some(which)),
            Found::Nothing { sure } if sure > MOST_HEADER => (sure, None),
            Found::Nothing { .. } if !input.ended() => return false,
            Found::Nothing { sure } => (sure, None),
        };
        let header = &input.rest()[..at];
        match which {
            Some(0) => {
                self.state = match called(header) {
                    Some(name) if !self.tools.is_empty() => {
                        emit(Piece::Call { name });
                        HarmonyState::Call(Arguments::Start)
                    }
                    Some(_) => HarmonyState::Text { channel: Channel::Reasoning, fresh: true },
                    None => HarmonyState::Text { channel: Channel::of(header), fresh: true },
                };
                input.advance(at + MESSAGE.len());
            }
            // A header without a message says nothing.
            _ if header.contains("<|") && at <= MOST_HEADER => {
                input.advance(at);
                if let Some(which) = which {
                    self.end(input, which - 1);
                }
            }
            // What begins like a header and is none is text.
            _ => {
                self.state = HarmonyState::Text { channel: Channel::Content, fresh: true };
                self.say(input, lead, emit);
            }
        }
        true
    }

    fn text(&mut self, input: &mut Input, emit: &mut dyn FnMut(Piece<'_>)) -> bool {
        let (count, end) = match input.find(ENDS) {
            Found::Tag { at, which } => (at, Some(which)),
            Found::Nothing { sure } => (sure, None),
        };
        self.say(input, count, emit);
        if let Some(which) = end {
            self.end(input, which);
        }
        end.is_some()
    }

    /// Passes on text of a message.
    fn say(&mut self, input: &mut Input, count: usize, emit: &mut dyn FnMut(Piece<'_>)) {
        let HarmonyState::Text { channel, fresh } = &mut self.state else { return };
        if count == 0 {
            return;
        }
        let channel = *channel;
        let piece = |text| match channel {
            Channel::Reasoning => Piece::Reasoning(text),
            Channel::Content => Piece::Content(text),
        };
        // Messages of one kind are paragraphs.
        if std::mem::take(fresh) && std::mem::replace(&mut self.said[channel as usize], true) {
            emit(piece("\n\n"));
        }
        emit(piece(&input.rest()[..count]));
        input.advance(count);
    }

    /// Leaves the tag behind that ends a message, if it is no part of the next.
    fn end(&mut self, input: &mut Input, which: usize) {
        let tag = ENDS[which];
        if ![START, CHANNEL].contains(&tag) {
            input.advance(tag.len());
        }
        self.state = HarmonyState::Header;
    }
}

/// The tool that a header addresses. One that nobody has declared, such as those that the model was trained with, is called
/// all the same: whoever gets the call can say so. Where nobody has declared any, what is written to it is no answer either,
/// and counts as reasoning.
fn called(header: &str) -> Option<&str> {
    let mut words = header.split(|c: char| c.is_whitespace() || c == '<' || c == '>');
    let recipient = words.find_map(|word| word.strip_prefix("to="))?;
    let name = recipient.strip_prefix("functions.").unwrap_or(recipient);
    (!matches!(name, "" | "assistant" | "user" | "all")).then_some(name)
}

impl Channel {
    fn of(header: &str) -> Channel {
        let channel = header.rsplit_once(CHANNEL).map_or("", |(_, channel)| channel);
        if trim_start(channel).starts_with("analysis") { Channel::Reasoning } else { Channel::Content }
    }
}
