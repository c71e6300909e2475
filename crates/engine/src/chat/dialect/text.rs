//! Answers that are text: reasoning between tags, then what is said, with calls between.

use super::input::{Begins, Found, Input, MOST_SPACE, begins, trim_start, without_space_at_end};
use super::values::Tools;
use super::{Format, Piece, Progress, json, sections, xml};

pub(super) const THINK: &str = "<think>";
pub(super) const THINK_END: &str = "</think>";
/// What ends reasoning wherever it is, on a line of its own: after half a sentence the model would go on with the other.
pub(super) const REASONING_END: &str = "\n</think>\n\n";
pub(super) const PYTHON_TAG: &str = "<|python_tag|>";

/// What stands before another object that is a call.
const BETWEEN: [&str; 2] = ["; {", ";{"];

/// Reads an answer.
#[derive(Clone, Debug)]
pub(super) struct Text {
    /// How calls are written; plain text if there is nothing to call.
    format: Format,
    tools: Tools,
    state: State,
    /// White space that comes next is no part of what follows.
    trim: bool,
    /// Whether there was a call.
    called: bool,
}

#[derive(Clone, Debug)]
enum State {
    /// Nothing but white space has come.
    Start {
        reasoning: Opened,
    },
    Reasoning,
    Content,
    Call {
        call: Call,
        before: String,
    },
}

/// Who opened the reasoning.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Opened {
    /// Nobody yet.
    Not,
    /// The prompt.
    ByPrompt,
    /// It is over.
    Over,
}

/// A call that is being read.
#[derive(Clone, Debug)]
enum Call {
    Json(json::Call),
    Xml(xml::Call),
    Sections(sections::Calls),
}

impl Text {
    /// For what follows a prompt.
    pub(super) fn after(prompt: &str, format: Format, tools: Tools) -> Text {
        let prompt = prompt.trim_end();
        let reasoning = if prompt.ends_with(THINK) { Opened::ByPrompt } else { Opened::Not };
        let format = if tools.is_empty() { Format::None } else { format };
        Text {
            format,
            tools,
            state: State::Start { reasoning },
            trim: reasoning == Opened::ByPrompt || prompt.ends_with(THINK_END),
            called: false,
        }
    }

    pub(super) fn is_reasoning(&self) -> bool {
        matches!(self.state, State::Reasoning | State::Start { reasoning: Opened::ByPrompt })
    }

    pub(super) fn step(&mut self, input: &mut Input, emit: &mut dyn FnMut(Piece<'_>)) {
        while match &mut self.state {
            State::Start { .. } => self.start(input),
            State::Reasoning => self.reasoning(input, emit),
            State::Content => self.content(input, emit),
            State::Call { .. } => self.call(input, emit),
        } {}
    }

    /// Finds out what the answer begins with.
    fn start(&mut self, input: &mut Input) -> bool {
        let State::Start { reasoning } = self.state else { return true };
        if self.trim {
            input.skip_space();
        }
        let rest = input.rest();
        let inner = trim_start(rest);
        let space = rest.len() - inner.len();
        // A model reasons first or not at all; and one that has been led to it may say so again.
        let mut tags = Vec::new();
        if reasoning != Opened::Over {
            tags.push(THINK);
        }
        let bare_json = self.format == Format::Llama && reasoning != Opened::ByPrompt;
        if bare_json {
            tags.extend([PYTHON_TAG, "{"]);
        }
        if bare_json && self.called {
            tags.extend(BETWEEN);
        }
        self.state = match begins(inner, &tags, input.ended()) {
            Begins::With(which) if tags[which] == THINK => {
                input.advance(space + THINK.len());
                self.trim = true;
                State::Reasoning
            }
            Begins::With(which) => {
                let lead = space + tags[which].trim_end_matches('{').len();
                let before = input.rest()[..lead].to_owned();
                input.advance(lead);
                State::Call { call: Call::Json(json::Call::new(None)), before }
            }
            Begins::Maybe if space <= MOST_SPACE => return false,
            _ if reasoning == Opened::ByPrompt => State::Reasoning,
            _ => State::Content,
        };
        true
    }

    fn reasoning(&mut self, input: &mut Input, emit: &mut dyn FnMut(Piece<'_>)) -> bool {
        if self.trim {
            input.skip_space();
        }
        let mut tags = vec![THINK_END];
        // Tags that are no text end the reasoning as well.
        if let Format::Sections(sections) = self.format {
            tags.extend([sections.section, sections.call]);
        }
        let found = input.find(&tags);
        let text = match found {
            Found::Tag { at, .. } => &input.rest()[..at],
            Found::Nothing { sure } => &input.rest()[..sure],
        };
        let count = without_space_at_end(text);
        if count > 0 {
            self.trim = false;
            emit(Piece::Reasoning(&text[..count]));
        }
        match found {
            Found::Tag { at, which } => {
                input.advance(at);
                self.trim = true;
                self.state = if which == 0 {
                    input.advance(THINK_END.len());
                    State::Start { reasoning: Opened::Over }
                } else {
                    State::Content
                };
                true
            }
            Found::Nothing { .. } => {
                if count > 0 {
                    input.advance(count);
                }
                false
            }
        }
    }

    fn content(&mut self, input: &mut Input, emit: &mut dyn FnMut(Piece<'_>)) -> bool {
        if self.trim {
            input.skip_space();
        }
        let tags = self.format.opening();
        let found = input.find(tags);
        let (count, keep) = match found {
            _ if tags.is_empty() => (input.rest().len(), false),
            Found::Tag { at, .. } => (at, true),
            Found::Nothing { sure } => (sure, !input.ended()),
        };
        let text = &input.rest()[..count];
        let count = if keep { without_space_at_end(text) } else { count };
        if count > 0 {
            self.trim = false;
            emit(Piece::Content(&text[..count]));
        }
        match found {
            Found::Tag { at, which } if !tags.is_empty() => {
                let end = at + tags[which].len();
                let before = input.rest()[count..end].to_owned();
                input.advance(end);
                self.state = State::Call { call: self.format.call(which), before };
                true
            }
            _ => {
                if count > 0 {
                    input.advance(count);
                }
                false
            }
        }
    }

    fn call(&mut self, input: &mut Input, emit: &mut dyn FnMut(Piece<'_>)) -> bool {
        let State::Call { call, before } = &mut self.state else { return true };
        let mut progress = match call {
            Call::Json(call) => call.step(input, &self.tools, emit),
            Call::Xml(call) => call.step(input, &self.tools, emit),
            Call::Sections(calls) => calls.step(input, emit),
        };
        if progress == Progress::Wait {
            if !input.ended() {
                return false;
            }
            progress = match call {
                Call::Json(call) => call.cut(emit),
                Call::Xml(call) => call.cut(),
                Call::Sections(calls) => calls.cut(),
            };
            if progress == Progress::Done {
                input.advance(input.rest().len());
            }
        }
        if progress == Progress::NotACall {
            if !before.is_empty() {
                emit(Piece::Content(before));
            }
            self.trim = false;
            self.state = State::Content;
        } else {
            self.trim = true;
            self.called = true;
            // Where nothing but itself says that an object is a call, another may follow.
            self.state = match self.format {
                Format::Llama => State::Start { reasoning: Opened::Over },
                _ => State::Content,
            };
        }
        true
    }
}

impl Format {
    /// The tags that calls begin with.
    pub(super) fn opening(self) -> &'static [&'static str] {
        match self {
            Format::None | Format::Llama | Format::Harmony => &[],
            Format::Json(tags) => tags.begins,
            Format::Xml(tags) => tags.begins,
            Format::Sections(tags) => tags.begins,
        }
    }

    /// A call that began with the tag of this number.
    fn call(self, which: usize) -> Call {
        match self {
            Format::Xml(tags) => Call::Xml(xml::Call::new(tags, which == 1)),
            Format::Sections(tags) => Call::Sections(sections::Calls::new(tags, which == 1)),
            Format::Json(tags) => Call::Json(json::Call::new(Some(tags))),
            Format::None | Format::Llama | Format::Harmony => Call::Json(json::Call::new(None)),
        }
    }
}
