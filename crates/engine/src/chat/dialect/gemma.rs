//! Calls of Gemma 4: `call:NAME{KEY:VALUE,…}` between tags, with a tag as the quote of strings.

use super::input::{Begins, Found, Input, MOST_NAME, MOST_SPACE, begins, trim, trim_start};
use super::json::pass_up_to;
use super::values::{escaped, quoted};
use super::{Piece, Progress};

/// The tags around a call.
pub(super) const OPEN: &str = "<|tool_call>";
pub(super) const CLOSE: &str = "<tool_call|>";

/// The tag before and after a string.
pub(super) const QUOTE: &str = "<|\"|>";

/// The text before the name.
pub(super) const CALL: &str = "call:";

/// The tag before the name of a channel, and the tag that ends the channel.
pub(super) const CHANNEL: [&str; 2] = ["<|channel>", "<channel|>"];

/// The longest value that is neither a string nor in brackets, in bytes.
const MOST_WORD: usize = 4096;

/// A call that is being read. Its arguments are converted to JSON as they arrive.
#[derive(Clone, Debug)]
pub(super) struct Call {
    state: GemmaState,
    /// The open brackets, with whether nothing is in them so far.
    open: Vec<(Bracket, bool)>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Bracket {
    Object,
    List,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum GemmaState {
    /// Before the name; nothing has been consumed.
    Name,
    /// Before a key or a value, or before the bracket that closes its container.
    Item,
    /// After a key.
    Value,
    /// Inside a string.
    Text,
    AfterValue,
    /// After the last bracket.
    Close,
    /// Not this format; everything up to the closing tag is emitted unchanged.
    Raw,
}

impl Call {
    /// A call after its tag.
    pub(super) fn new() -> Call {
        Call { state: GemmaState::Name, open: Vec::new() }
    }

    pub(super) fn step(&mut self, input: &mut Input, emit: &mut dyn FnMut(Piece<'_>)) -> Progress {
        loop {
            let done = match self.state {
                GemmaState::Name => self.name(input, emit),
                GemmaState::Item => self.item(input, emit),
                GemmaState::Value => self.value(input, emit),
                GemmaState::Text => self.text(input, emit),
                GemmaState::AfterValue => self.after_value(input, emit),
                GemmaState::Close => Some(close(input)),
                GemmaState::Raw => Some(pass_up_to(CLOSE, input, emit)),
            };
            if let Some(progress) = done {
                return progress;
            }
        }
    }

    /// Ends a call that the end of the text cuts off.
    pub(super) fn cut(&self) -> Progress {
        if self.state == GemmaState::Name { Progress::NotACall } else { Progress::Done }
    }

    fn name(&mut self, input: &mut Input, emit: &mut dyn FnMut(Piece<'_>)) -> Option<Progress> {
        let rest = input.rest();
        let inner = trim_start(rest);
        let lead = rest.len() - inner.len();
        let name = match begins(inner, &[CALL], input.ended()) {
            _ if lead > MOST_SPACE => return Some(Progress::NotACall),
            Begins::With(_) => &inner[CALL.len()..],
            Begins::Maybe => return Some(Progress::Wait),
            Begins::Without => return Some(Progress::NotACall),
        };
        let end = match name.find(['{', '<', '\n']) {
            Some(end) if end <= MOST_NAME => end,
            None if name.len() <= MOST_NAME => return Some(Progress::Wait),
            Some(_) | None => return Some(Progress::NotACall),
        };
        let (name, after) = (trim(&name[..end]), &name[end..]);
        if !after.starts_with('{') || name.is_empty() || name.contains(' ') {
            return Some(Progress::NotACall);
        }
        emit(Piece::Call { name });
        emit(Piece::Arguments("{"));
        input.advance(lead + CALL.len() + end + 1);
        self.open.push((Bracket::Object, true));
        self.state = GemmaState::Item;
        None
    }

    /// Reads a key of an object up to its colon, or what follows the bracket or comma of a list.
    fn item(&mut self, input: &mut Input, emit: &mut dyn FnMut(Piece<'_>)) -> Option<Progress> {
        input.skip_space();
        let Some(first) = input.rest().chars().next() else { return Some(Progress::Wait) };
        if matches!(first, '}' | ']') {
            return self.end_bracket(input, emit);
        }
        let Some((bracket, empty)) = self.open.last_mut() else { return self.give_up() };
        let separator = if *empty { "" } else { "," };
        if *bracket == Bracket::List {
            *empty = false;
            if !separator.is_empty() {
                emit(Piece::Arguments(separator));
            }
            self.state = GemmaState::Value;
            return None;
        }
        // A key may be quoted.
        let (key, skip) = match input.begins(&[QUOTE]) {
            Begins::Maybe => return Some(Progress::Wait),
            Begins::With(_) => {
                let inner = &input.rest()[QUOTE.len()..];
                match inner.find(QUOTE) {
                    Some(end) if end <= MOST_NAME => (&inner[..end], end + 2 * QUOTE.len()),
                    None if inner.len() <= MOST_NAME + QUOTE.len() => return Some(Progress::Wait),
                    Some(_) | None => return self.give_up(),
                }
            }
            Begins::Without => match input.rest().find([':', '<', '}', ']', '{', '[', ',']) {
                Some(end) if end <= MOST_NAME => (trim(&input.rest()[..end]), end),
                None if input.rest().len() <= MOST_NAME => return Some(Progress::Wait),
                Some(_) | None => return self.give_up(),
            },
        };
        let after = trim_start(&input.rest()[skip..]);
        let before = input.rest().len() - after.len();
        if after.is_empty() && before <= MOST_NAME + MOST_SPACE {
            return Some(Progress::Wait);
        }
        if !after.starts_with(':') || key.is_empty() || before > MOST_NAME + MOST_SPACE {
            return self.give_up();
        }
        emit(Piece::Arguments(&format!("{separator}{}:", quoted(key))));
        *empty = false;
        input.advance(before + 1);
        self.state = GemmaState::Value;
        None
    }

    fn value(&mut self, input: &mut Input, emit: &mut dyn FnMut(Piece<'_>)) -> Option<Progress> {
        input.skip_space();
        match input.begins(&[QUOTE, "{", "["]) {
            _ if input.rest().is_empty() => return Some(Progress::Wait),
            Begins::Maybe => return Some(Progress::Wait),
            Begins::With(0) => {
                emit(Piece::Arguments("\""));
                input.advance(QUOTE.len());
                self.state = GemmaState::Text;
            }
            Begins::With(which) => {
                let (bracket, text) = [(Bracket::Object, "{"), (Bracket::List, "[")][which - 1];
                emit(Piece::Arguments(text));
                input.advance(1);
                self.open.push((bracket, true));
                self.state = GemmaState::Item;
            }
            Begins::Without => {
                let rest = input.rest();
                let end = match rest.find([',', '}', ']', '<']) {
                    Some(end) if end <= MOST_WORD => end,
                    None if rest.len() <= MOST_WORD => return Some(Progress::Wait),
                    Some(_) | None => return self.give_up(),
                };
                let word = trim(&rest[..end]);
                if word.is_empty() || rest[end..].starts_with('<') {
                    return self.give_up();
                }
                emit(Piece::Arguments(&word_json(word)));
                input.advance(end);
                self.state = GemmaState::AfterValue;
            }
        }
        None
    }

    fn text(&mut self, input: &mut Input, emit: &mut dyn FnMut(Piece<'_>)) -> Option<Progress> {
        let (count, ended) = match input.find(&[QUOTE]) {
            Found::Tag { at, .. } => (at, true),
            Found::Nothing { sure } => (sure, false),
        };
        if count > 0 {
            emit(Piece::Arguments(&escaped(&input.rest()[..count])));
        }
        if !ended {
            if count > 0 {
                input.advance(count);
            }
            return Some(Progress::Wait);
        }
        emit(Piece::Arguments("\""));
        input.advance(count + QUOTE.len());
        self.state = GemmaState::AfterValue;
        None
    }

    fn after_value(&mut self, input: &mut Input, emit: &mut dyn FnMut(Piece<'_>)) -> Option<Progress> {
        input.skip_space();
        match input.rest().chars().next() {
            None => Some(Progress::Wait),
            Some(',') => {
                input.advance(1);
                self.state = GemmaState::Item;
                None
            }
            Some('}' | ']') => self.end_bracket(input, emit),
            Some(_) => self.give_up(),
        }
    }

    /// Closes the innermost bracket.
    fn end_bracket(&mut self, input: &mut Input, emit: &mut dyn FnMut(Piece<'_>)) -> Option<Progress> {
        let text = match self.open.last() {
            Some((Bracket::Object, _)) => "}",
            Some((Bracket::List, _)) => "]",
            None => return self.give_up(),
        };
        if !input.rest().starts_with(text) {
            return self.give_up();
        }
        emit(Piece::Arguments(text));
        input.advance(1);
        self.open.pop();
        self.state = if self.open.is_empty() { GemmaState::Close } else { GemmaState::AfterValue };
        None
    }

    fn give_up(&mut self) -> Option<Progress> {
        self.state = GemmaState::Raw;
        None
    }
}

/// The JSON of a value without quotes: a number or a constant, or a string whose quotes the model forgot.
fn word_json(word: &str) -> String {
    match word {
        "True" => "true".into(),
        "False" => "false".into(),
        "None" => "null".into(),
        word if serde_json::from_str::<serde_json::Value>(word).is_ok() => word.into(),
        word => quoted(word),
    }
}

fn close(input: &mut Input) -> Progress {
    input.skip_space();
    match input.begins(&[CLOSE]) {
        Begins::With(_) => {
            input.advance(CLOSE.len());
            Progress::Done
        }
        Begins::Maybe => Progress::Wait,
        Begins::Without => Progress::Done,
    }
}
