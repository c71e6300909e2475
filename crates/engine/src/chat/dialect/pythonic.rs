//! Calls as a Python list, `[name(key=value, …), …]`.

use super::input::{Begins, Input, MOST_NAME, is_space, trim, trim_start};
use super::json::pass_up_to;
use super::values::{Tools, escaped, quoted};
use super::{Piece, Progress};

/// How a model writes such a list.
#[derive(Debug)]
pub(super) struct Tags {
    /// The dialect's name in messages.
    pub(super) name: &'static str,
    /// The tags around the list.
    pub(super) around: [&'static str; 2],
    /// The tag that starts calls, if they may follow text.
    pub(super) begins: &'static [&'static str],
    /// How an answer that consists of the list starts. Only a known name makes it a list of calls.
    pub(super) whole: &'static [&'static str],
    /// Whether strings may contain quotes without a backslash before them.
    plain_quotes: bool,
}

/// Llama 3.2, ToolACE and others.
pub(super) static WHOLE: Tags = Tags {
    name: "pythonic",
    around: ["<|python_start|>", "<|python_end|>"],
    begins: &[],
    whole: &["<|python_start|>", "["],
    plain_quotes: false,
};

/// LFM2 and LFM2.5, whose templates print strings between quotes as they are.
pub(super) static LFM2: Tags = Tags {
    name: "lfm2",
    around: ["<|tool_call_start|>", "<|tool_call_end|>"],
    begins: &["<|tool_call_start|>"],
    whole: &[],
    plain_quotes: true,
};

/// The JSON of a Python literal in brackets; `None` if the text is none.
pub(super) fn json(text: &str) -> Option<String> {
    let mut value = Calls { state: PythonicState::Value, ..Calls::new(&WHOLE) };
    let mut json = String::new();
    for c in text.chars() {
        value.take(c, &mut json);
        if !matches!(
            value.state,
            PythonicState::Value
                | PythonicState::Text { .. }
                | PythonicState::Escape { .. }
                | PythonicState::Word
                | PythonicState::AfterValue
        ) {
            return None;
        }
    }
    (value.state == PythonicState::AfterValue && value.open.is_empty()).then_some(json)
}

/// A list of calls. Its values are converted to JSON as they arrive.
#[derive(Clone, Debug)]
pub(super) struct Calls {
    tags: &'static Tags,
    state: PythonicState,
    /// Whether there is certainly a call.
    certain: bool,
    /// The open brackets of values.
    open: Vec<Bracket>,
    /// The number of arguments of the current call.
    count: usize,
    /// The name, word or escape that is being read, or the white space after a quote.
    text: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PythonicState {
    /// Before the list; nothing has been consumed.
    Start,
    /// Before, inside or after the name of another call.
    Name,
    /// Before or inside the name of an argument.
    Key,
    /// Before a value, or before the bracket that closes its container.
    Value,
    Text {
        quote: char,
    },
    /// After a backslash in a string.
    Escape {
        quote: char,
    },
    /// After a quote that ends a string, unless the string goes on.
    Quote {
        quote: char,
    },
    /// A number, a constant, or a string without quotes.
    Word,
    AfterValue,
    AfterCall,
    AfterList,
    /// Not Python; everything is emitted unchanged.
    Raw,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Bracket {
    /// A list or a tuple, without elements so far if `empty`.
    List {
        empty: bool,
    },
    /// A dictionary, at a key or at a value.
    Keys {
        empty: bool,
    },
    Values,
}

impl Calls {
    pub(super) fn new(tags: &'static Tags) -> Calls {
        Calls {
            tags,
            state: PythonicState::Start,
            certain: false,
            open: Vec::new(),
            count: 0,
            text: String::new(),
        }
    }

    pub(super) fn step(
        &mut self,
        input: &mut Input,
        tools: &Tools,
        emit: &mut dyn FnMut(Piece<'_>),
    ) -> Progress {
        if self.state == PythonicState::Start {
            match first_name(input.rest()) {
                Some((name, skip)) if !self.tags.begins.is_empty() || tools.knows(name) => {
                    emit(Piece::Call { name });
                    input.advance(skip);
                    self.certain = true;
                    self.state = PythonicState::Key;
                }
                None if !input.ended() && may_be_a_list(input.rest()) => return Progress::Wait,
                _ => return Progress::NotACall,
            }
        }
        if self.is_raw_up_to_tag() {
            return pass_up_to(self.tags.around[1], input, emit);
        }
        // JSON of this call that has not been emitted.
        let mut json = String::new();
        let mut read = 0;
        for (at, c) in input.rest().char_indices() {
            read = at;
            if !self.goes_on_with(c) {
                self.state = PythonicState::AfterList;
                break;
            }
            if self.state == PythonicState::Name && c == '(' {
                emit(Piece::Call { name: trim(&self.text) });
                self.text.clear();
                self.count = 0;
                self.state = PythonicState::Key;
            } else {
                self.take(c, &mut json);
            }
            if self.is_raw_up_to_tag() {
                read = at + c.len_utf8();
                break;
            }
            // A call's arguments must be emitted before the next call.
            if self.state == PythonicState::AfterCall && !json.is_empty() {
                emit(Piece::Arguments(&std::mem::take(&mut json)));
            }
            read = at + c.len_utf8();
        }
        if read > 0 {
            input.advance(read);
        }
        if !json.is_empty() {
            emit(Piece::Arguments(&json));
        }
        if self.is_raw_up_to_tag() {
            return pass_up_to(self.tags.around[1], input, emit);
        }
        if self.state != PythonicState::AfterList {
            return Progress::Wait;
        }
        input.skip_space();
        let [_, end] = self.tags.around;
        match input.begins(&[end]) {
            Begins::With(_) => {
                input.advance(end.len());
                Progress::Done
            }
            Begins::Maybe => Progress::Wait,
            Begins::Without => Progress::Done,
        }
    }

    /// Whether everything up to the closing tag is emitted unchanged.
    fn is_raw_up_to_tag(&self) -> bool {
        self.state == PythonicState::Raw && !self.tags.begins.is_empty()
    }

    /// Ends calls that the end of the text cuts off.
    pub(super) fn cut(&self) -> Progress {
        if self.certain { Progress::Done } else { Progress::NotACall }
    }

    /// Whether a character continues the list.
    fn goes_on_with(&self, c: char) -> bool {
        let space = c.is_ascii() && is_space(c as u8);
        match self.state {
            PythonicState::AfterList => false,
            PythonicState::AfterCall => space || matches!(c, ',' | ']'),
            PythonicState::Name => space || is_name_char(c) || (c == '(' && is_name(trim(&self.text))),
            _ => true,
        }
    }

    /// Reads a character of a call and writes the resulting JSON.
    fn take(&mut self, c: char, json: &mut String) {
        let space = c.is_ascii() && is_space(c as u8);
        self.state = match self.state {
            PythonicState::Start | PythonicState::AfterList => return,
            PythonicState::Name => {
                self.text.push(c);
                return;
            }
            PythonicState::Key => match c {
                ')' if trim(&self.text).is_empty() => {
                    json.push_str(if self.count == 0 { "{}" } else { "}" });
                    PythonicState::AfterCall
                }
                '=' => {
                    let key = std::mem::take(&mut self.text);
                    json.push(if self.count == 0 { '{' } else { ',' });
                    json.push_str(&quoted(trim(&key)));
                    json.push(':');
                    self.count += 1;
                    PythonicState::Value
                }
                _ if c.is_alphanumeric() || c == '_' || space => {
                    self.text.push(c);
                    PythonicState::Key
                }
                _ => self.give_up(c, json),
            },
            PythonicState::Value => match c {
                _ if space => PythonicState::Value,
                '\'' | '"' => {
                    self.begin(json);
                    json.push('"');
                    PythonicState::Text { quote: c }
                }
                '[' | '(' => {
                    self.begin(json);
                    json.push('[');
                    self.open.push(Bracket::List { empty: true });
                    PythonicState::Value
                }
                '{' => {
                    self.begin(json);
                    json.push('{');
                    self.open.push(Bracket::Keys { empty: true });
                    PythonicState::Value
                }
                // An empty container, or a comma after the last element.
                ']' | ')' | '}' if !self.open.is_empty() => self.close(c, json),
                ',' | ':' | '=' | ']' | ')' | '}' => self.give_up(c, json),
                _ => {
                    self.begin(json);
                    self.text.push(c);
                    PythonicState::Word
                }
            },
            PythonicState::Text { quote } => match c {
                '\\' => PythonicState::Escape { quote },
                _ if c == quote && self.tags.plain_quotes => PythonicState::Quote { quote },
                _ if c == quote => {
                    json.push('"');
                    PythonicState::AfterValue
                }
                _ => {
                    json.push_str(&escaped(c.encode_utf8(&mut [0; 4])));
                    PythonicState::Text { quote }
                }
            },
            // Python keeps a backslash without meaning; the same happens to an incomplete code here.
            PythonicState::Escape { quote } if !self.text.is_empty() && !c.is_ascii_hexdigit() => {
                json.push_str(&escaped(&format!("\\{}", std::mem::take(&mut self.text))));
                self.state = PythonicState::Text { quote };
                return self.take(c, json);
            }
            PythonicState::Escape { quote } => {
                self.text.push(c);
                match unescaped(&self.text) {
                    None => PythonicState::Escape { quote },
                    Some(text) => {
                        json.push_str(&text);
                        self.text.clear();
                        PythonicState::Text { quote }
                    }
                }
            }
            PythonicState::Quote { .. } if space => {
                self.text.push(c);
                return;
            }
            PythonicState::Quote { quote } => {
                let space = std::mem::take(&mut self.text);
                self.state = if matches!(c, ',' | ':' | ')' | ']' | '}') {
                    json.push('"');
                    PythonicState::AfterValue
                } else {
                    json.push_str(&escaped(&format!("{quote}{space}")));
                    PythonicState::Text { quote }
                };
                return self.take(c, json);
            }
            PythonicState::Word => match c {
                ',' | ']' | ')' | '}' => {
                    self.end_word(json);
                    self.after_value(c, json)
                }
                ':' if matches!(self.open.last(), Some(Bracket::Keys { .. })) => {
                    self.end_word(json);
                    self.after_value(c, json)
                }
                _ => {
                    self.text.push(c);
                    PythonicState::Word
                }
            },
            PythonicState::AfterValue if space => PythonicState::AfterValue,
            PythonicState::AfterValue => self.after_value(c, json),
            PythonicState::AfterCall => match c {
                ',' => PythonicState::Name,
                ']' => PythonicState::AfterList,
                _ => PythonicState::AfterCall,
            },
            PythonicState::Raw => {
                json.push(c);
                PythonicState::Raw
            }
        };
    }

    /// Writes the separator between this value and the previous one.
    fn begin(&mut self, json: &mut String) {
        match self.open.last_mut() {
            Some(Bracket::List { empty } | Bracket::Keys { empty }) => {
                if !std::mem::take(empty) {
                    json.push(',');
                }
            }
            Some(Bracket::Values) | None => {}
        }
    }

    /// Reads the character after a value.
    fn after_value(&mut self, c: char, json: &mut String) -> PythonicState {
        match (c, self.open.last_mut()) {
            (',', None) => PythonicState::Key,
            (')', None) => {
                json.push('}');
                PythonicState::AfterCall
            }
            (',', Some(Bracket::List { .. })) => PythonicState::Value,
            (':', Some(bracket @ Bracket::Keys { .. })) => {
                json.push(':');
                *bracket = Bracket::Values;
                PythonicState::Value
            }
            (',', Some(bracket @ Bracket::Values)) => {
                *bracket = Bracket::Keys { empty: false };
                PythonicState::Value
            }
            (']' | ')' | '}', Some(_)) => self.close(c, json),
            _ => self.give_up(c, json),
        }
    }

    /// Closes the innermost bracket.
    fn close(&mut self, c: char, json: &mut String) -> PythonicState {
        match (c, self.open.last()) {
            (']' | ')', Some(Bracket::List { .. })) => json.push(']'),
            ('}', Some(Bracket::Keys { .. } | Bracket::Values)) => json.push('}'),
            _ => return self.give_up(c, json),
        }
        self.open.pop();
        PythonicState::AfterValue
    }

    fn end_word(&mut self, json: &mut String) {
        let text = std::mem::take(&mut self.text);
        let is_key = matches!(self.open.last(), Some(Bracket::Keys { .. }));
        json.push_str(&match trim(&text) {
            word if is_key => quoted(word),
            "True" => "true".into(),
            "False" => "false".into(),
            "None" => "null".into(),
            word if serde_json::from_str::<serde_json::Value>(word).is_ok() => word.into(),
            word => quoted(word),
        });
    }

    /// The text is not Python: emits what the model wrote.
    fn give_up(&mut self, c: char, json: &mut String) -> PythonicState {
        json.push_str(&std::mem::take(&mut self.text));
        json.push(c);
        PythonicState::Raw
    }
}

/// The longest start of a list, up to its first arguments.
const MOST_HEAD: usize = 2 * MOST_NAME;

/// The name of the first call of a list, and the number of bytes up to its arguments.
fn first_name(text: &str) -> Option<(&str, usize)> {
    let list = trim_start(text).strip_prefix('[')?;
    let (name, _) = list.split_once('(')?;
    let skip = text.len() - list.len() + name.len() + 1;
    let name = trim(name);
    (is_name(name) && skip <= MOST_HEAD).then_some((name, skip))
}

/// Whether a text may be the start of a list of calls.
fn may_be_a_list(text: &str) -> bool {
    let name = match trim(text).strip_prefix('[') {
        Some(name) => trim(name),
        None => trim(text),
    };
    text.len() < MOST_HEAD && (name.is_empty() || (trim_start(text).starts_with('[') && is_name(name)))
}

fn is_name(text: &str) -> bool {
    !text.is_empty() && text.chars().all(is_name_char)
}

fn is_name_char(c: char) -> bool {
    c.is_alphanumeric() || matches!(c, '_' | '.' | '-')
}

/// The JSON of an escape, once it is complete.
fn unescaped(text: &str) -> Option<String> {
    let kind = text.chars().next()?;
    let digits = match kind {
        'x' => 2,
        'u' => 4,
        'U' => 8,
        _ => 0,
    };
    let code = &text[kind.len_utf8()..];
    if code.len() < digits {
        return None;
    }
    let number = || u32::from_str_radix(code, 16).unwrap_or(u32::MAX);
    Some(match kind {
        'n' | 't' | 'r' | 'b' | 'f' | '"' | '\\' => format!("\\{kind}"),
        '\'' | '/' => kind.into(),
        '\n' => String::new(),
        '0' => "\\u0000".into(),
        'a' => "\\u0007".into(),
        'v' => "\\u000b".into(),
        // A surrogate stays a surrogate, as in JSON.
        'x' | 'u' => format!("\\u{:04x}", number()),
        'U' => {
            let c = char::from_u32(number()).unwrap_or(char::REPLACEMENT_CHARACTER);
            escaped(c.encode_utf8(&mut [0; 4]))
        }
        _ => escaped(&format!("\\{text}")),
    })
}
