//! The format of gpt-oss (Harmony): messages, each with a header that names its channel and its recipient.

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

/// Ends reasoning. If the channel were left open, the model would continue its reasoning.
pub(super) const REASONING_END: &str = "<|end|><|start|>assistant<|channel|>final<|message|>";

/// Tags that end a message: those for the end, and those that start the next message.
const ENDS: &[&str] = &[END, CALL, RETURN, START, CHANNEL];

/// The possible starts of a header.
const HEADS: &[&str] = &[START, CHANNEL, MESSAGE, "<|constrain|>", "to=", "assistant"];

/// The longest header in bytes.
const MOST_HEADER: usize = 1024;

/// Whether a prompt ends inside a message.
pub(super) fn is_in_message(prompt: &str) -> bool {
    prompt.rsplit_once(MESSAGE).is_some_and(|(_, text)| !ENDS.iter().any(|end| text.contains(end)))
}

/// Reads an answer's messages.
#[derive(Clone, Debug)]
pub(super) struct Harmony {
    tools: Tools,
    state: HarmonyState,
    /// Whether text was emitted: reasoning, and content.
    said: [bool; 2],
}

#[derive(Clone, Debug)]
enum HarmonyState {
    Header,
    /// The text of a message; nothing of it has arrived if `fresh`.
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
    /// A parser for what follows a prompt.
    pub(super) fn after(prompt: &str, tools: Tools) -> Harmony {
        let mut harmony = Harmony { tools, state: HarmonyState::Header, said: [false; 2] };
        // The prompt may have started a message.
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

    /// Reads a header once all of it has arrived. Returns whether there is more to read.
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
            // A header without a message is dropped.
            _ if header.contains("<|") && at <= MOST_HEADER => {
                input.advance(at);
                if let Some(which) = which {
                    self.end(input, which - 1);
                }
            }
            // What starts like a header but is none is text.
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

    /// Emits text of a message.
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
        // Messages of one kind are separated as paragraphs.
        if std::mem::take(fresh) && std::mem::replace(&mut self.said[channel as usize], true) {
            emit(piece("\n\n"));
        }
        emit(piece(&input.rest()[..count]));
        input.advance(count);
    }

    /// Consumes the tag that ends a message, unless it belongs to the next one.
    fn end(&mut self, input: &mut Input, which: usize) {
        let tag = ENDS[which];
        if ![START, CHANNEL].contains(&tag) {
            input.advance(tag.len());
        }
        self.state = HarmonyState::Header;
    }
}

/// The tool that a header addresses. A tool that the request does not have, such as one from the model's training, is
/// called anyway, and the caller can report the mistake. If the request has no tools, text to a tool is no answer
/// either, and counts as reasoning.
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
