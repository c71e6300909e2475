//! Calls whose arguments stand between tags, each as text.

use super::input::{Begins, Found, Input, MOST_NAME, MOST_SPACE, begins, trim, trim_start};
use super::values::{Kinds, Reading, Tools, escaped, quoted};
use super::{Piece, Progress};

/// How a model writes such calls.
#[derive(Debug)]
pub(super) struct Tags {
    /// The dialect's name, for people.
    pub(super) name: &'static str,
    /// Around calls.
    pub(super) open: &'static str,
    pub(super) close: &'static str,
    /// Around one call, with its name: what is before the name, and what ends the call. Without them there is one call
    /// between `open` and `close`, and its name is the first word.
    pub(super) function: Option<Function>,
    /// Before and after the name of a parameter.
    pub(super) key: [&'static str; 2],
    /// Before the value, if anything is.
    pub(super) value: Option<&'static str>,
    /// After it.
    pub(super) value_end: &'static str,
    /// What ends a value as well, since models forget to.
    pub(super) value_cut: &'static [&'static str],
    /// What calls begin with: the tag around them or, second, that of a call itself.
    pub(super) begins: &'static [&'static str],
    /// Whether a value stands on lines of its own.
    pub(super) lines: bool,
    /// Whether names stand in quotes.
    pub(super) quotes: bool,
    /// Whether a parameter says if it is text, as `string="true"` after its name.
    pub(super) says_text: bool,
}

/// What is around one call.
#[derive(Debug)]
pub(super) struct Function {
    pub(super) open: &'static str,
    pub(super) close: &'static str,
}

/// Qwen3-Coder and Qwen3.5.
pub(super) static QWEN: Tags = Tags {
    name: "qwen-xml",
    open: "<tool_call>",
    close: "</tool_call>",
    function: Some(Function { open: "<function=", close: "</function>" }),
    key: ["<parameter=", ">"],
    value: None,
    value_end: "</parameter>",
    value_cut: &["<parameter=", "</function>"],
    begins: &["<tool_call>", "<function="],
    lines: true,
    quotes: false,
    says_text: false,
};

/// MiniMax M2.
pub(super) static MINIMAX: Tags = Tags {
    name: "minimax",
    open: "<minimax:tool_call>",
    close: "</minimax:tool_call>",
    function: Some(Function { open: "<invoke name=", close: "</invoke>" }),
    key: ["<parameter name=", ">"],
    value: None,
    value_end: "</parameter>",
    value_cut: &["</invoke>"],
    begins: &["<minimax:tool_call>"],
    lines: false,
    quotes: true,
    says_text: false,
};

/// GLM 4.5 and later.
pub(super) static GLM: Tags = Tags {
    name: "glm",
    open: "<tool_call>",
    close: "</tool_call>",
    function: None,
    key: ["<arg_key>", "</arg_key>"],
    value: Some("<arg_value>"),
    value_end: "</arg_value>",
    value_cut: &[],
    begins: &["<tool_call>"],
    lines: false,
    quotes: false,
    says_text: false,
};

/// DeepSeek V3.2.
pub(super) static DSML: Tags = DSML_V3;

/// DeepSeek V4.
pub(super) static DSML_V4: Tags = Tags {
    name: "deepseek-v4",
    open: "<｜DSML｜tool_calls>",
    close: "</｜DSML｜tool_calls>",
    begins: &["<｜DSML｜tool_calls>"],
    ..DSML_V3
};

const DSML_V3: Tags = Tags {
    name: "deepseek-dsml",
    open: "<｜DSML｜function_calls>",
    close: "</｜DSML｜function_calls>",
    function: Some(Function { open: "<｜DSML｜invoke name=", close: "</｜DSML｜invoke>" }),
    key: ["<｜DSML｜parameter name=", ">"],
    value: None,
    value_end: "</｜DSML｜parameter>",
    value_cut: &["</｜DSML｜invoke>"],
    begins: &["<｜DSML｜function_calls>"],
    lines: false,
    quotes: true,
    says_text: true,
};

/// A call.
#[derive(Clone, Debug)]
pub(super) struct Call {
    tags: &'static Tags,
    state: State,
    /// Whether the tag around all calls has not come: then only a known name makes it a call.
    alone: bool,
    /// Whether a call is certain.
    certain: bool,
    /// How many bytes are before the name.
    lead: usize,
    name: String,
    key: String,
    /// Whether the parameter says that it is text.
    is_text: bool,
    /// Arguments of the call so far.
    count: usize,
}

#[derive(Clone, Debug)]
enum State {
    /// Before a call, or after the last.
    Function,
    /// Inside the name.
    Name,
    /// Between parameters.
    Parameters,
    /// Inside the name of a parameter.
    Key,
    /// Before its value.
    BeforeValue,
    /// Inside a value.
    Value(Value),
}

/// A value that comes.
#[derive(Clone, Debug)]
enum Value {
    /// Nothing has been passed on, and nothing left behind but a line break before it.
    Waiting { reading: Reading, kinds: Kinds, started: bool },
    /// Text that is passed on.
    Text,
}

impl Call {
    /// A call after its opening tag; or, if `alone`, after the tag of the call itself.
    pub(super) fn new(tags: &'static Tags, alone: bool) -> Call {
        let state = if alone { State::Name } else { State::Function };
        Call {
            tags,
            state,
            alone,
            certain: false,
            lead: 0,
            name: String::new(),
            key: String::new(),
            is_text: false,
            count: 0,
        }
    }

    pub(super) fn step(
        &mut self,
        input: &mut Input,
        tools: &Tools,
        emit: &mut dyn FnMut(Piece<'_>),
    ) -> Progress {
        loop {
            let done = match &mut self.state {
                State::Function => self.function(input),
                State::Name => self.name(input, tools, emit),
                State::Parameters => self.parameters(input, emit),
                State::Key => self.key(input),
                State::BeforeValue => self.before_value(input, tools),
                State::Value(_) => self.value(input, emit),
            };
            if let Some(progress) = done {
                return progress;
            }
        }
    }

    /// What a call that is not there, or not all of it, has come to.
    pub(super) fn cut(&self) -> Progress {
        if self.certain { Progress::Done } else { Progress::NotACall }
    }

    fn function(&mut self, input: &mut Input) -> Option<Progress> {
        let rest = input.rest();
        let inner = trim_start(rest);
        self.lead = rest.len() - inner.len();
        if self.lead > MOST_SPACE {
            return Some(self.cut());
        }
        let Some(function) = &self.tags.function else {
            self.state = State::Name;
            return None;
        };
        match begins(inner, &[function.open, self.tags.close], input.ended()) {
            Begins::With(0) => {
                self.lead += function.open.len();
                self.state = State::Name;
                None
            }
            Begins::With(_) if self.certain => {
                input.advance(self.lead + self.tags.close.len());
                Some(Progress::Done)
            }
            Begins::Maybe => Some(Progress::Wait),
            Begins::With(_) | Begins::Without => Some(self.cut()),
        }
    }

    /// Reads the name up to what ends it. Until it is certain that there is one, nothing is left behind.
    fn name(
        &mut self,
        input: &mut Input,
        tools: &Tools,
        emit: &mut dyn FnMut(Piece<'_>),
    ) -> Option<Progress> {
        let rest = &input.rest()[self.lead..];
        let ends: &[char] = if self.tags.function.is_some() { &['>', '<', '\n'] } else { &['<', '\n'] };
        let Some(end) = rest.find(ends) else {
            // The white space before a name without tags has not all been seen.
            if self.tags.function.is_none() && rest.is_empty() {
                self.state = State::Function;
            }
            return Some(if rest.len() > MOST_NAME { self.cut() } else { Progress::Wait });
        };
        let name = unquoted(&rest[..end]);
        let ended = if self.tags.function.is_some() {
            rest[end..].starts_with('>')
        } else {
            let next = trim_start(&rest[end..]);
            match begins(next, &[self.tags.key[0], self.tags.close], input.ended()) {
                Begins::With(_) => true,
                Begins::Maybe if rest.len() <= MOST_NAME + MOST_SPACE => return Some(Progress::Wait),
                Begins::Maybe | Begins::Without => false,
            }
        };
        let sound = !name.is_empty() && name.len() <= MOST_NAME && !name.contains([' ', '\t', '"', '{', '}']);
        if !ended || !sound || (self.alone && !self.certain && !tools.knows(name)) {
            return Some(self.cut());
        }
        self.name = name.to_owned();
        self.certain = true;
        self.count = 0;
        emit(Piece::Call { name });
        input.advance(self.lead + end + usize::from(self.tags.function.is_some()));
        self.state = State::Parameters;
        None
    }

    fn parameters(&mut self, input: &mut Input, emit: &mut dyn FnMut(Piece<'_>)) -> Option<Progress> {
        let tags = self.tags;
        let (open, close) = tags.function.as_ref().map_or((tags.open, tags.close), |f| (f.open, f.close));
        let known = [tags.key[0], close, tags.close, open, tags.open];
        let (at, which) = match input.find(&known) {
            Found::Tag { at, which } => (at, which),
            Found::Nothing { sure } => {
                // Between parameters there is nothing to say.
                if sure > 0 {
                    input.advance(sure);
                }
                return Some(Progress::Wait);
            }
        };
        input.advance(at);
        match which {
            0 => {
                input.advance(tags.key[0].len());
                self.state = State::Key;
                return None;
            }
            1 => input.advance(close.len()),
            _ => {}
        }
        emit(Piece::Arguments(if self.count == 0 { "{}" } else { "}" }));
        self.state = State::Function;
        // Without tags around each call, the one that ended it ended all.
        if tags.function.is_none() { Some(Progress::Done) } else { None }
    }

    fn key(&mut self, input: &mut Input) -> Option<Progress> {
        let rest = input.rest();
        let end = self.tags.key[1];
        let near = rest.floor_char_boundary(MOST_NAME + end.len());
        match rest[..near].find(end) {
            Some(at) => {
                let mut key = &rest[..at];
                if self.tags.says_text {
                    let said = key.split_once(" string=");
                    self.is_text = said.is_some_and(|(_, said)| unquoted(said) == "true");
                    key = said.map_or(key, |(name, _)| name);
                }
                self.key = unquoted(key).to_owned();
                input.advance(at + end.len());
                self.state = State::BeforeValue;
                None
            }
            None if near < rest.len() => {
                self.state = State::Parameters;
                None
            }
            None => Some(Progress::Wait),
        }
    }

    fn before_value(&mut self, input: &mut Input, tools: &Tools) -> Option<Progress> {
        if let Some(tag) = self.tags.value {
            input.skip_space();
            match input.begins(&[tag]) {
                Begins::With(_) => input.advance(tag.len()),
                Begins::Maybe => return Some(Progress::Wait),
                Begins::Without => {
                    self.state = State::Parameters;
                    return None;
                }
            }
        }
        let kinds = match tools.kinds(&self.name, &self.key) {
            kinds if self.is_text && kinds.may_be_text() => Kinds::TEXT,
            kinds => kinds,
        };
        let value = Value::Waiting { reading: kinds.reading(), kinds, started: !self.tags.lines };
        self.state = State::Value(value);
        None
    }

    fn value(&mut self, input: &mut Input, emit: &mut dyn FnMut(Piece<'_>)) -> Option<Progress> {
        let State::Value(value) = &mut self.state else { return None };
        if let Value::Waiting { started: started @ false, .. } = value {
            if input.rest().is_empty() {
                return Some(Progress::Wait);
            }
            *started = true;
            if input.rest().starts_with('\n') {
                input.advance(1);
            }
        }
        let mut ends = vec![self.tags.value_end];
        ends.extend(self.tags.value_cut);
        let found = input.find(&ends);
        let (mut text, over) = match found {
            Found::Tag { at, .. } => (&input.rest()[..at], true),
            Found::Nothing { sure } => (&input.rest()[..sure], false),
        };
        // The line break before the end is no part of the value, and whether it is before the end is not known yet.
        if self.tags.lines && (over || !input.ended()) {
            text = text.strip_suffix('\n').unwrap_or(text);
        }
        let before = if self.count == 0 { '{' } else { ',' };
        match value {
            Value::Waiting { reading: Reading::Text, .. } if over || !text.is_empty() => {
                emit(Piece::Arguments(&format!("{before}{}:\"", quoted(&self.key))));
                *value = Value::Text;
                return None;
            }
            Value::Waiting { reading: reading @ Reading::TextOrNull, kinds, .. } => {
                let may_be_null = text.len() <= MOST_NAME
                    && ["null", "None"].iter().any(|null| null.starts_with(trim(text)));
                if !may_be_null {
                    *reading = Reading::Text;
                    return None;
                }
                if over {
                    let json = if text.is_empty() { "\"\"".into() } else { kinds.json(text) };
                    emit(Piece::Arguments(&format!("{before}{}:{json}", quoted(&self.key))));
                }
            }
            Value::Waiting { reading: Reading::Whole, kinds, .. } if over => {
                let json = kinds.json(text);
                emit(Piece::Arguments(&format!("{before}{}:{json}", quoted(&self.key))));
            }
            Value::Waiting { .. } => {}
            Value::Text => {
                if !text.is_empty() {
                    emit(Piece::Arguments(&escaped(text)));
                }
                if over {
                    emit(Piece::Arguments("\""));
                } else {
                    let count = text.len();
                    if count > 0 {
                        input.advance(count);
                    }
                    return Some(Progress::Wait);
                }
            }
        }
        let Found::Tag { at, which } = found else { return Some(Progress::Wait) };
        self.count += 1;
        input.advance(at);
        if which == 0 {
            input.advance(self.tags.value_end.len());
        }
        self.state = State::Parameters;
        None
    }
}

/// A name without white space and quotes around it.
fn unquoted(name: &str) -> &str {
    let name = trim(name);
    ['"', '\''].into_iter().find_map(|quote| name.strip_prefix(quote)?.strip_suffix(quote)).unwrap_or(name)
}
