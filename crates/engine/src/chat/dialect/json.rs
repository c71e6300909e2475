//! Calls in JSON, and the scanner for JSON inside calls of other formats.

use super::input::{Begins, Found, Input, is_space};
use super::values::Tools;
use super::{Piece, Progress};

/// How a model writes calls that are JSON objects.
#[derive(Debug)]
pub(super) struct Tags {
    /// The dialect's name in messages.
    pub(super) name: &'static str,
    /// The tags that start calls.
    pub(super) begins: &'static [&'static str],
    /// The tag that ends them, if there is one.
    pub(super) close: Option<&'static str>,
    /// Tags (which may be tokens) and text before and after the object of a call.
    pub(super) around: [&'static [&'static str]; 2],
    /// Whether the objects are in a JSON list.
    pub(super) list: bool,
    /// Tags outside calls that are not text.
    pub(super) silent: &'static [&'static str],
    /// The key of the name.
    name_key: &'static str,
    /// The text of the object before the name and before the arguments.
    pub(super) object: [&'static str; 2],
    /// The tags around an answer without calls, if there are any.
    pub(super) answer: Option<[&'static str; 2]>,
}

/// What most families have in common.
const PLAIN: Tags = Tags {
    name: "",
    begins: &[],
    close: None,
    around: [&[], &[]],
    list: false,
    silent: &[],
    name_key: "name",
    object: ["{\"name\": ", ", \"arguments\": "],
    answer: None,
};

/// Qwen2.5, Qwen3, Hermes and others.
pub(super) static HERMES: Tags = Tags {
    name: "hermes",
    begins: &["<tool_call>"],
    close: Some("</tool_call>"),
    around: [&["<tool_call>", "\n"], &["\n", "</tool_call>"]],
    ..PLAIN
};

/// Apriel 1.5 and 1.6, and Hunyuan-A13B.
pub(super) static APRIEL: Tags = Tags {
    name: "apriel",
    begins: &["<tool_calls>"],
    close: Some("</tool_calls>"),
    around: [&["<tool_calls>", "["], &["]", "</tool_calls>"]],
    list: true,
    ..PLAIN
};

/// Mistral 7B v0.3, Nemo and others up to 2024.
pub(super) static MISTRAL: Tags = Tags {
    name: "mistral-json",
    begins: &["[TOOL_CALLS]"],
    around: [&["[TOOL_CALLS]", "["], &["]"]],
    list: true,
    ..PLAIN
};

/// Granite 3. Granite 3.1 may write the tag without bars.
pub(super) static GRANITE: Tags = Tags {
    name: "granite",
    begins: &["<|tool_call|>", "<tool_call>"],
    around: [&["<|tool_call|>", "["], &["]"]],
    list: true,
    ..PLAIN
};

/// Command A+ and North.
pub(super) static COHERE: Tags =
    Tags { name: "cohere", answer: Some(["<|START_TEXT|>", "<|END_TEXT|>"]), ..COHERE_CALLS };

/// Command R7B and Command A.
pub(super) static COHERE_RESPONSE: Tags = Tags {
    name: "cohere-response",
    answer: Some(["<|START_RESPONSE|>", "<|END_RESPONSE|>"]),
    ..COHERE_CALLS
};

const COHERE_CALLS: Tags = Tags {
    begins: &["<|START_ACTION|>"],
    close: Some("<|END_ACTION|>"),
    around: [&["<|START_ACTION|>", "[\n    "], &["\n]", "<|END_ACTION|>"]],
    list: true,
    silent: &["<|START_TEXT|>", "<|END_TEXT|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>"],
    name_key: "tool_name",
    object: ["{\"tool_call_id\": \"0\", \"tool_name\": ", ", \"parameters\": "],
    ..PLAIN
};

/// GigaChat 3, in which a call is a message of another role.
pub(super) static GIGACHAT3: Tags = Tags {
    name: "gigachat3",
    begins: &["function call<|role_sep|>"],
    around: [&["<|message_sep|>\n\n", "function call", "<|role_sep|>\n"], &[]],
    silent: &["<|message_sep|>"],
    ..PLAIN
};

/// GigaChat 3.1.
pub(super) static GIGACHAT31: Tags = Tags {
    name: "gigachat3.1",
    begins: &["<|function_call|>"],
    around: [&["<|function_call|>"], &[]],
    silent: &["<|message_sep|>"],
    ..PLAIN
};

/// The most bytes of a call that wait for its name.
const MOST_HELD: usize = 256 << 10;

/// The state of a JSON value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Status {
    /// More is needed.
    Open,
    /// It is complete.
    Complete,
    /// This is not JSON.
    Broken,
}

/// Follows a JSON value to its end. It checks only brackets and strings, not words and numbers.
#[derive(Clone, Debug, Default)]
pub(super) struct Scan {
    /// Open brackets.
    open: Vec<u8>,
    in_string: bool,
    escaped: bool,
    /// Whether the value is a word or a number.
    word: bool,
}

impl Scan {
    /// A scan that starts inside an object, after its bracket.
    fn inside_object() -> Scan {
        Scan { open: vec![b'}'], ..Scan::default() }
    }

    /// Reads bytes. Returns how many of them belong to the value.
    fn feed(&mut self, bytes: &[u8]) -> (usize, Status) {
        for (i, &byte) in bytes.iter().enumerate() {
            if self.in_string {
                match byte {
                    _ if self.escaped => self.escaped = false,
                    b'\\' => self.escaped = true,
                    b'"' => {
                        self.in_string = false;
                        if self.open.is_empty() {
                            return (i + 1, Status::Complete);
                        }
                    }
                    _ => {}
                }
                continue;
            }
            let outside = self.open.is_empty();
            match byte {
                b'+' | b'-' | b'.' | b'0'..=b'9' | b'a'..=b'z' | b'A'..=b'Z' => self.word |= outside,
                // A word ends only where something else starts.
                _ if outside && self.word => return (i, Status::Complete),
                b'"' => self.in_string = true,
                b'{' => self.open.push(b'}'),
                b'[' => self.open.push(b']'),
                b'}' | b']' => {
                    if self.open.pop() != Some(byte) {
                        return (i, Status::Broken);
                    }
                    if self.open.is_empty() {
                        return (i + 1, Status::Complete);
                    }
                }
                b',' | b':' if !outside => {}
                _ if is_space(byte) => {}
                _ => return (i, Status::Broken),
            }
        }
        (bytes.len(), Status::Open)
    }
}

/// The arguments of a call that end with a tag: JSON, emitted unchanged.
#[derive(Clone, Debug)]
pub(super) enum Arguments {
    /// Before the value.
    Start,
    /// Inside the value.
    Value(Scan),
    /// After the value.
    After,
    /// Not JSON; everything that follows is emitted.
    Raw,
}

/// What ended the arguments of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ended {
    /// The tag with this index, which has not been consumed.
    ByTag(usize),
    /// Their last bracket; something else follows.
    ByThemselves,
}

impl Arguments {
    /// Reads the arguments up to their end. If `closed`, only a tag ends them.
    pub(super) fn step(
        &mut self,
        input: &mut Input,
        ends: &[&str],
        closed: bool,
        emit: &mut dyn FnMut(Piece<'_>),
    ) -> Option<Ended> {
        loop {
            match self {
                Arguments::Start => {
                    input.skip_space();
                    match input.begins(ends) {
                        Begins::With(which) => {
                            emit(Piece::Arguments("{}"));
                            return Some(Ended::ByTag(which));
                        }
                        Begins::Maybe => return None,
                        Begins::Without => *self = Arguments::Value(Scan::default()),
                    }
                }
                Arguments::Value(scan) => {
                    let (count, status) = scan.feed(input.rest().as_bytes());
                    pass_on(input, count, emit);
                    match status {
                        Status::Open => return None,
                        Status::Complete => *self = Arguments::After,
                        Status::Broken => *self = Arguments::Raw,
                    }
                }
                Arguments::After => {
                    // The end of a code block around the JSON.
                    let rest = input.rest();
                    let space = rest.bytes().take_while(|&b| is_space(b) || b == b'`').count();
                    input.advance(space);
                    match input.begins(ends) {
                        Begins::With(which) => return Some(Ended::ByTag(which)),
                        Begins::Maybe => return None,
                        Begins::Without if !closed => return Some(Ended::ByThemselves),
                        Begins::Without => *self = Arguments::Raw,
                    }
                }
                Arguments::Raw => {
                    return match input.find(ends) {
                        Found::Tag { at, which } => {
                            pass_on(input, at, emit);
                            Some(Ended::ByTag(which))
                        }
                        Found::Nothing { sure } => {
                            pass_on(input, sure, emit);
                            None
                        }
                    };
                }
            }
        }
    }
}

/// Emits everything up to a tag unchanged, and consumes the tag.
pub(super) fn pass_up_to(tag: &str, input: &mut Input, emit: &mut dyn FnMut(Piece<'_>)) -> Progress {
    match input.find(&[tag]) {
        Found::Tag { at, .. } => {
            pass_on(input, at, emit);
            input.advance(tag.len());
            Progress::Done
        }
        Found::Nothing { sure } => {
            pass_on(input, sure, emit);
            Progress::Wait
        }
    }
}

fn pass_on(input: &mut Input, count: usize, emit: &mut dyn FnMut(Piece<'_>)) {
    if count > 0 {
        emit(Piece::Arguments(&input.rest()[..count]));
        input.advance(count);
    }
}

/// A call that is a JSON object with a name and arguments.
#[derive(Clone, Debug)]
pub(super) struct Call {
    /// The tags around it. Without tags only a known name makes it a call.
    tags: Option<&'static Tags>,
    state: JsonState,
    /// How far the object has been read while it is not certain to be a call.
    read: usize,
    /// The start of the value that is being read.
    start: usize,
    key: String,
    name: Option<String>,
    /// Arguments that came before the name, or are not an object.
    arguments: Option<String>,
}

#[derive(Clone, Debug)]
enum JsonState {
    Open,
    KeyOrEnd,
    Key(Scan),
    Colon,
    Value,
    OtherValue(Scan),
    CommaOrEnd,
    /// The arguments of a certain call.
    Arguments(Scan),
    /// After arguments that were not JSON.
    Broken,
    /// The rest of the call's object.
    Rest(Scan),
    /// After the object.
    Close,
}

/// The result of reading the start of a call.
enum Head {
    Wait,
    NotACall,
    /// The name is known, and the arguments start here.
    Streams,
    /// The object is complete.
    Over,
}

impl Call {
    pub(super) fn new(tags: Option<&'static Tags>) -> Call {
        Call {
            tags,
            state: JsonState::Open,
            read: 0,
            start: 0,
            key: String::new(),
            name: None,
            arguments: None,
        }
    }

    fn close(&self) -> Option<&'static str> {
        self.tags.and_then(|tags| tags.close)
    }

    fn is_in_list(&self) -> bool {
        self.tags.is_some_and(|tags| tags.list)
    }

    pub(super) fn step(
        &mut self,
        input: &mut Input,
        tools: &Tools,
        emit: &mut dyn FnMut(Piece<'_>),
    ) -> Progress {
        loop {
            match &mut self.state {
                JsonState::Arguments(scan) => {
                    let (count, status) = scan.feed(input.rest().as_bytes());
                    pass_on(input, count, emit);
                    match status {
                        Status::Open => return Progress::Wait,
                        Status::Complete => self.state = JsonState::Rest(Scan::inside_object()),
                        Status::Broken => self.state = JsonState::Broken,
                    }
                }
                JsonState::Rest(scan) => {
                    let (count, status) = scan.feed(input.rest().as_bytes());
                    input.advance(count);
                    match status {
                        Status::Open => return Progress::Wait,
                        // Models forget the last bracket.
                        Status::Complete | Status::Broken => self.state = JsonState::Close,
                    }
                }
                JsonState::Broken => {
                    // Emits the rest of the call, so that the caller can repair it.
                    return match self.close() {
                        Some(close) => pass_up_to(close, input, emit),
                        None => Progress::Done,
                    };
                }
                JsonState::Close => {
                    if self.tags.is_none() {
                        return Progress::Done;
                    }
                    let list = self.is_in_list();
                    // Models write one bracket too many.
                    let is_between = |byte| is_space(byte) || byte == b'}' || (list && b",]".contains(&byte));
                    let skip = input.rest().bytes().take_while(|&byte| is_between(byte)).count();
                    input.advance(skip);
                    let ends: Vec<&str> = ["{"].into_iter().chain(self.close()).collect();
                    match input.begins(&ends) {
                        Begins::With(0) => *self = Call::new(self.tags),
                        Begins::With(which) => {
                            input.advance(ends[which].len());
                            return Progress::Done;
                        }
                        Begins::Maybe => return Progress::Wait,
                        Begins::Without => return Progress::Done,
                    }
                }
                _ => match self.head(input, tools) {
                    Head::Wait => return Progress::Wait,
                    Head::NotACall => return Progress::NotACall,
                    Head::Streams => {
                        emit(Piece::Call { name: self.name.as_deref().unwrap_or_default() });
                        input.advance(self.read);
                        self.state = JsonState::Arguments(Scan::default());
                    }
                    Head::Over => {
                        emit(Piece::Call { name: self.name.as_deref().unwrap_or_default() });
                        emit(Piece::Arguments(&plain(self.arguments.take())));
                        input.advance(self.read);
                        self.state = JsonState::Close;
                    }
                },
            }
        }
    }

    /// Ends a call that the end of the text cuts off.
    pub(super) fn cut(&self, emit: &mut dyn FnMut(Piece<'_>)) -> Progress {
        match (&self.state, &self.name, self.tags) {
            (JsonState::Arguments(_) | JsonState::Broken | JsonState::Rest(_) | JsonState::Close, _, _) => {
                Progress::Done
            }
            (_, Some(name), Some(_)) => {
                emit(Piece::Call { name });
                Progress::Done
            }
            _ => Progress::NotACall,
        }
    }

    /// Reads on in an object of which nothing has been emitted.
    fn head(&mut self, input: &Input, tools: &Tools) -> Head {
        let rest = input.rest();
        let bytes = rest.as_bytes();
        loop {
            if self.read > MOST_HELD {
                return Head::NotACall;
            }
            if let JsonState::Key(scan) | JsonState::OtherValue(scan) = &mut self.state {
                let (count, status) = scan.feed(&bytes[self.read..]);
                self.read += count;
                match status {
                    Status::Open => return Head::Wait,
                    Status::Broken => return Head::NotACall,
                    Status::Complete => {}
                }
                let value = &rest[self.start..self.read];
                if matches!(self.state, JsonState::Key(_)) {
                    let Ok(key) = serde_json::from_str(value) else { return Head::NotACall };
                    self.key = key;
                    self.state = JsonState::Colon;
                } else if self.take(value, tools) {
                    self.state = JsonState::CommaOrEnd;
                } else {
                    return Head::NotACall;
                }
                continue;
            }
            let Some(&byte) = bytes.get(self.read) else { return Head::Wait };
            if is_space(byte) {
                self.read += 1;
                continue;
            }
            self.state = match (&self.state, byte) {
                (JsonState::Open, b'{') => JsonState::KeyOrEnd,
                (JsonState::Open, b'[') if self.is_in_list() => JsonState::Open,
                (JsonState::KeyOrEnd, b'"') => {
                    self.start = self.read;
                    JsonState::Key(Scan::default())
                }
                (JsonState::Colon, b':') => JsonState::Value,
                (JsonState::Value, _) => {
                    if byte == b'{' && is_arguments(&self.key) && self.name.is_some() {
                        return Head::Streams;
                    }
                    self.start = self.read;
                    JsonState::OtherValue(Scan::default())
                }
                (JsonState::CommaOrEnd, b',') => JsonState::KeyOrEnd,
                (JsonState::KeyOrEnd | JsonState::CommaOrEnd, b'}') => {
                    self.read += 1;
                    return self.over();
                }
                (JsonState::CommaOrEnd, b'<') => return self.over(),
                _ => return Head::NotACall,
            };
            // A value must be read from its first byte on.
            if !matches!(self.state, JsonState::Key(_) | JsonState::OtherValue(_)) {
                self.read += 1;
            }
        }
    }

    fn over(&self) -> Head {
        let complete = self.name.is_some() && (self.tags.is_some() || self.arguments.is_some());
        if complete { Head::Over } else { Head::NotACall }
    }

    /// Takes the value of a key. Returns whether the object may still be a call.
    fn take(&mut self, value: &str, tools: &Tools) -> bool {
        if self.key == self.tags.map_or(PLAIN.name_key, |tags| tags.name_key) {
            self.name = serde_json::from_str(value).ok().filter(|name: &String| !name.is_empty());
            self.name.as_ref().is_some_and(|name| self.tags.is_some() || tools.knows(name))
        } else {
            if is_arguments(&self.key) {
                self.arguments = Some(value.to_owned());
            }
            true
        }
    }
}

fn is_arguments(key: &str) -> bool {
    matches!(key, "arguments" | "parameters")
}

/// Arguments as a JSON object, even if they are missing, null, or an object in a string.
fn plain(arguments: Option<String>) -> String {
    let Some(arguments) = arguments else { return "{}".into() };
    match serde_json::from_str::<serde_json::Value>(&arguments) {
        Ok(serde_json::Value::Null) => "{}".into(),
        Ok(serde_json::Value::String(text)) if text.trim().is_empty() => "{}".into(),
        Ok(serde_json::Value::String(text))
            if serde_json::from_str::<&serde_json::value::RawValue>(&text).is_ok() =>
        {
            text
        }
        _ => arguments,
    }
}
