//! Answers that are text: reasoning between tags, then content with calls.

use std::ops::Range;

use super::input::{Begins, Found, Input, MOST_SPACE, begins, trim_start, without_space_at_end};
use super::values::Tools;
use super::{Dialect, Format, Piece, Progress, gemma, json, pythonic, sections, xml};

/// The tags around reasoning.
#[derive(Debug)]
pub(super) struct Think {
    pub(super) open: &'static str,
    pub(super) close: &'static str,
    /// Text that ends reasoning at any point. It starts on a new line; after half a sentence the model would write
    /// the other half.
    pub(super) end: &'static str,
    /// Whether the model may reason again after a part of its answer.
    again: bool,
}

pub(super) static THINK: Think =
    Think { open: "<think>", close: "</think>", end: "\n</think>\n\n", again: false };
pub(super) static MISTRAL_THINK: Think =
    Think { open: "[THINK]", close: "[/THINK]", end: "\n[/THINK]\n\n", again: false };
pub(super) static HY3_THINK: Think = Think {
    open: "<think:opensource>",
    close: "</think:opensource>",
    end: "\n</think:opensource>",
    again: false,
};
/// The answer's tag follows, or a call's.
pub(super) static COHERE_THINK: Think =
    Think { open: "<|START_THINKING|>", close: "<|END_THINKING|>", end: "<|END_THINKING|>", again: false };
/// Gemma 4 may write an empty channel after its answer.
pub(super) static GEMMA_THINK: Think =
    Think { open: "<|channel>thought", close: "<channel|>", end: "\n<channel|>", again: true };
/// Reasoning and answer are messages here, so the answer's header follows.
pub(super) static SOLAR_THINK: Think =
    Think { open: "<|think|>", close: "<|end|>", end: "<|end|><|begin|>assistant<|content|>", again: false };

/// Text around an answer, after reasoning, that does not belong to the answer.
#[derive(Debug)]
pub(super) struct Enclosure {
    /// What may come before the answer.
    pub(super) opens: &'static [&'static str],
    pub(super) close: &'static str,
}

/// ERNIE 4.5 and Granite 3.
pub(super) static RESPONSE: Enclosure = Enclosure { opens: &["<response>"], close: "</response>" };
/// Hunyuan-A13B. Its template tells the model to begin an answer without calls with a word.
pub(super) static ANSWER: Enclosure = Enclosure { opens: &["<answer>", "助手："], close: "</answer>" };

pub(super) const PYTHON_TAG: &str = "<|python_tag|>";

/// What may separate a call that is a bare object from the next one.
const BETWEEN: [&str; 2] = ["; {", ";{"];

/// Reads an answer.
#[derive(Clone, Debug)]
pub(super) struct Text {
    /// The format of calls; none if there are no tools.
    format: Format,
    think: &'static Think,
    /// Tags outside calls that are not text.
    silent: &'static [&'static str],
    enclosure: Option<&'static Enclosure>,
    /// Whether the answer is enclosed so far.
    enclosed: bool,
    tools: Tools,
    state: TextState,
    /// Whether white space that comes next is dropped.
    trim: bool,
    /// Whether there was a call.
    called: bool,
    /// Whether a call came inside reasoning that was not ended. The tag that ends reasoning may still come and is
    /// dropped.
    unended: bool,
}

#[derive(Clone, Debug)]
enum TextState {
    /// Only white space has arrived.
    Start {
        reasoning: Opened,
    },
    Reasoning,
    Content,
    Call {
        call: Call,
        /// The text before the call, with its white space: content, if this is no call.
        before: String,
        /// Whether the call came inside reasoning.
        inside: bool,
    },
}

/// What opened the reasoning.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Opened {
    /// Nothing yet.
    Not,
    /// The prompt.
    ByPrompt,
    /// Reasoning is over.
    Over,
}

/// A call that is being read.
#[derive(Clone, Debug)]
enum Call {
    Json(json::Call),
    Xml(xml::Call),
    Sections(sections::Calls),
    Pythonic(pythonic::Calls),
    Gemma(gemma::Call),
}

impl Text {
    /// A parser for what follows a prompt.
    pub(super) fn after(prompt: &str, dialect: &Dialect, tools: Tools) -> Text {
        let think = dialect.think;
        let prompt = prompt.trim_end();
        let reasoning = if prompt.ends_with(think.open) { Opened::ByPrompt } else { Opened::Not };
        let format = if tools.is_empty() { Format::None } else { dialect.format };
        Text {
            format,
            think,
            silent: dialect.format.silent(),
            enclosure: dialect.enclosure,
            enclosed: false,
            tools,
            state: TextState::Start { reasoning },
            trim: reasoning == Opened::ByPrompt || prompt.ends_with(think.close),
            called: false,
            unended: false,
        }
    }

    pub(super) fn is_reasoning(&self) -> bool {
        matches!(self.state, TextState::Reasoning | TextState::Start { reasoning: Opened::ByPrompt })
    }

    pub(super) fn step(&mut self, input: &mut Input, emit: &mut dyn FnMut(Piece<'_>)) {
        while match &mut self.state {
            TextState::Start { .. } => self.start(input),
            TextState::Reasoning => self.reasoning(input, emit),
            TextState::Content => self.content(input, emit),
            TextState::Call { .. } => self.call(input, emit),
        } {}
    }

    /// Decides what the answer starts with.
    fn start(&mut self, input: &mut Input) -> bool {
        let TextState::Start { reasoning } = self.state else { return true };
        if self.trim {
            input.skip_space();
        }
        let rest = input.rest();
        let inner = trim_start(rest);
        let space = rest.len() - inner.len();
        // A model reasons first or not at all. If the prompt opens the reasoning, it may repeat the tag.
        let mut tags = Vec::new();
        if reasoning != Opened::Over {
            tags.push(self.think.open);
        }
        let mut opens: &[&str] = &[];
        if reasoning != Opened::ByPrompt {
            tags.extend(self.format.whole(self.called));
            opens = self.enclosure.map_or(opens, |enclosure| enclosure.opens);
            tags.extend(opens);
        }
        self.state = match begins(inner, &tags, input.ended()) {
            Begins::With(which) if tags[which] == self.think.open => {
                input.advance(space + self.think.open.len());
                self.trim = true;
                TextState::Reasoning
            }
            Begins::With(which) if opens.contains(&tags[which]) => {
                input.advance(space + tags[which].len());
                self.trim = true;
                self.enclosed = true;
                TextState::Start { reasoning: Opened::Over }
            }
            Begins::With(which) => {
                let lead = space + tags[which].trim_end_matches(['{', '[']).len();
                let before = input.rest()[..lead].to_owned();
                input.advance(lead);
                TextState::Call { call: self.format.call(""), before, inside: false }
            }
            Begins::Maybe if space <= MOST_SPACE => return false,
            _ if reasoning == Opened::ByPrompt => TextState::Reasoning,
            _ => TextState::Content,
        };
        true
    }

    /// Reads reasoning up to its end or to a call, because models that want to call a tool may forget to end their
    /// reasoning. Reasoning that only mentions the tag of a call contains no call.
    fn reasoning(&mut self, input: &mut Input, emit: &mut dyn FnMut(Piece<'_>)) -> bool {
        if self.trim {
            input.skip_space();
        }
        let mut tags = vec![self.think.close];
        tags.extend(self.format.opening());
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
            Found::Tag { at, which: 0 } => {
                input.advance(at + tags[0].len());
                self.trim = true;
                self.state = TextState::Start { reasoning: Opened::Over };
                true
            }
            Found::Tag { at, which } => {
                self.open(input, count..at + tags[which].len(), tags[which], true);
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
        let calls = self.format.opening();
        let mut tags = calls.to_vec();
        if self.think.again {
            tags.push(self.think.open);
        }
        tags.extend(self.silent);
        if self.unended {
            tags.push(self.think.close);
        }
        let end = self.enclosure.filter(|_| self.enclosed).map(|enclosure| enclosure.close);
        tags.extend(end);
        let found = input.find(&tags);
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
            Found::Tag { at, which } if which < calls.len() => {
                self.open(input, count..at + tags[which].len(), tags[which], false);
                true
            }
            Found::Tag { at, which } => {
                input.advance(at + tags[which].len());
                self.unended &= tags[which] != self.think.close;
                self.enclosed &= Some(tags[which]) != end;
                self.trim = true;
                if tags[which] == self.think.open {
                    self.state = TextState::Reasoning;
                }
                // A message starts or ends, and the next may be reasoning.
                if self.silent.contains(&tags[which]) {
                    self.state = TextState::Start { reasoning: Opened::Not };
                }
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

    /// Consumes a tag that opens a call, at `place`, with the white space before it.
    fn open(&mut self, input: &mut Input, place: Range<usize>, tag: &str, inside: bool) {
        let before = input.rest()[place.clone()].to_owned();
        input.advance(place.end);
        self.state = TextState::Call { call: self.format.call(tag), before, inside };
    }

    fn call(&mut self, input: &mut Input, emit: &mut dyn FnMut(Piece<'_>)) -> bool {
        let TextState::Call { call, before, inside } = &mut self.state else { return true };
        let inside = *inside;
        let mut progress = match call {
            Call::Json(call) => call.step(input, &self.tools, emit),
            Call::Xml(call) => call.step(input, &self.tools, emit),
            Call::Sections(calls) => calls.step(input, emit),
            Call::Pythonic(calls) => calls.step(input, &self.tools, emit),
            Call::Gemma(call) => call.step(input, emit),
        };
        if progress == Progress::Wait {
            if !input.ended() {
                return false;
            }
            progress = match call {
                Call::Json(call) => call.cut(emit),
                Call::Xml(call) => call.cut(),
                Call::Sections(calls) => calls.cut(),
                Call::Pythonic(calls) => calls.cut(),
                Call::Gemma(call) => call.cut(),
            };
            if progress == Progress::Done {
                input.advance(input.rest().len());
            }
        }
        if progress == Progress::NotACall {
            if !before.is_empty() {
                emit(if inside { Piece::Reasoning(before) } else { Piece::Content(before) });
            }
            self.trim = false;
            self.state = if inside { TextState::Reasoning } else { TextState::Content };
        } else {
            self.trim = true;
            self.called = true;
            self.unended |= inside;
            // After a call that is a bare object, another may follow.
            self.state = match self.format {
                Format::Llama => TextState::Start { reasoning: Opened::Over },
                _ => TextState::Content,
            };
        }
        true
    }
}

impl Format {
    /// The tags that start calls.
    pub(super) fn opening(self) -> &'static [&'static str] {
        match self {
            Format::None | Format::Llama | Format::Harmony => &[],
            Format::Json(tags) => tags.begins,
            Format::Pythonic(tags) => tags.begins,
            Format::Gemma => &[gemma::OPEN],
            Format::Xml(tags) => tags.begins,
            Format::Sections(tags) => tags.begins,
        }
    }

    /// Tags outside calls that are not text.
    pub(super) fn silent(self) -> &'static [&'static str] {
        match self {
            Format::Json(tags) => tags.silent,
            Format::Sections(tags) => tags.silent,
            // Llama 4 may enclose the text before its calls.
            Format::Llama => &pythonic::WHOLE.around,
            Format::Gemma => &gemma::CHANNEL[1..],
            Format::None | Format::Pythonic(_) | Format::Xml(_) | Format::Harmony => &[],
        }
    }

    /// How an answer that consists of a call starts; `called` means that such a call came before.
    fn whole(self, called: bool) -> impl Iterator<Item = &'static str> {
        let (first, next): (&[&str], &[&str]) = match self {
            Format::Llama => (&[PYTHON_TAG, "{"], &BETWEEN),
            Format::Pythonic(tags) => (tags.whole, &[]),
            Format::None
            | Format::Json(_)
            | Format::Gemma
            | Format::Xml(_)
            | Format::Sections(_)
            | Format::Harmony => (&[], &[]),
        };
        first.iter().chain(next.iter().filter(move |_| called)).copied()
    }

    /// A call after this tag.
    fn call(self, opened: &str) -> Call {
        match self {
            Format::Xml(tags) => Call::Xml(xml::Call::new(tags, opened)),
            Format::Sections(tags) => Call::Sections(sections::Calls::new(tags, opened)),
            Format::Json(tags) => Call::Json(json::Call::new(Some(tags))),
            Format::Pythonic(tags) => Call::Pythonic(pythonic::Calls::new(tags)),
            Format::Gemma => Call::Gemma(gemma::Call::new()),
            Format::None | Format::Llama | Format::Harmony => Call::Json(json::Call::new(None)),
        }
    }
}
