//! Calls whose arguments stand between tags, each as text.

use super::input::{Begins, Found, Input, MOST_NAME, MOST_SPACE, begins, trim, trim_start};
use super::values::{Kinds, Reading, Tools, escaped, quoted};
use super::{Piece, Progress};

/// How a model writes such calls.
#[derive(Debug)]
pub(super) struct Tags {
    /// The dialect's name, for people.
    pub(super) name: &'static str,
    /// Around calls, if anything is.
    pub(super) calls: Option<[&'static str; 2]>,
    /// Around one call, with its name: what is before the name, and what ends the call. Without them there is one call
    /// between the tags around calls, and its name is the first word.
    pub(super) function: Option<Function>,
    /// Before and after the name of a parameter.
    pub(super) key: [&'static str; 2],
    /// Before the value, if anything is.
    pub(super) value: Option<&'static str>,
    /// After it.
    pub(super) value_end: &'static str,
    /// What ends a value as well, since models forget to.
    pub(super) value_cut: &'static [&'static str],
    /// What calls begin with: the tag around them, or that of a call itself.
    pub(super) begins: &'static [&'static str],
    /// Whether tags stand on lines of their own, and values, too.
    pub(super) layout: Layout,
    /// Whether a value may be in a section that says that nothing in it is a tag.
    pub(super) sections: bool,
    /// Whether names stand in quotes.
    pub(super) quotes: bool,
    /// Whether a parameter says if it is text, as `string="true"` after its name.
    pub(super) says_text: bool,
}

/// What stands on lines of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Layout {
    Nothing,
    Tags,
    TagsAndValues,
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
    calls: Some(["<tool_call>", "</tool_call>"]),
    function: Some(Function { open: "<function=", close: "</function>" }),
    key: ["<parameter=", ">"],
    value: None,
    value_end: "</parameter>",
    value_cut: &["<parameter=", "</function>"],
    begins: &["<tool_call>", "<function="],
    layout: Layout::TagsAndValues,
    sections: false,
    quotes: false,
    says_text: false,
};

/// MiniMax M2.
pub(super) static MINIMAX: Tags = Tags {
    name: "minimax",
    calls: Some(["<minimax:tool_call>", "</minimax:tool_call>"]),
    function: Some(Function { open: "<invoke name=", close: "</invoke>" }),
    key: ["<parameter name=", ">"],
    value: None,
    value_end: "</parameter>",
    value_cut: &["</invoke>"],
    begins: &["<minimax:tool_call>"],
    layout: Layout::Tags,
    sections: false,
    quotes: true,
    says_text: false,
};

/// GLM 4.5 and later.
pub(super) static GLM: Tags = Tags {
    name: "glm",
    calls: Some(["<tool_call>", "</tool_call>"]),
    function: None,
    key: ["<arg_key>", "</arg_key>"],
    value: Some("<arg_value>"),
    value_end: "</arg_value>",
    value_cut: &[],
    begins: &["<tool_call>"],
    layout: Layout::Tags,
    sections: false,
    quotes: false,
    says_text: false,
};

/// DeepSeek V3.2.
pub(super) static DSML: Tags = DSML_V3;

/// DeepSeek V4.
pub(super) static DSML_V4: Tags = Tags {
    name: "deepseek-v4",
    calls: Some(["<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>"]),
    begins: &["<｜DSML｜tool_calls>"],
    ..DSML_V3
};

const DSML_V3: Tags = Tags {
    name: "deepseek-dsml",
    calls: Some(["<｜DSML｜function_calls>", "</｜DSML｜function_calls>"]),
    function: Some(Function { open: "<｜DSML｜invoke name=", close: "</｜DSML｜invoke>" }),
    key: ["<｜DSML｜parameter name=", ">"],
    value: None,
    value_end: "</｜DSML｜parameter>",
    value_cut: &["</｜DSML｜invoke>"],
    begins: &["<｜DSML｜function_calls>"],
    layout: Layout::Tags,
    sections: false,
    quotes: true,
    says_text: true,
};

/// MiniCPM5.
pub(super) static MINICPM: Tags = Tags {
    name: "minicpm",
    calls: None,
    function: Some(Function { open: "<function name=", close: "</function>" }),
    key: ["<param name=", ">"],
    value: None,
    value_end: "</param>",
    value_cut: &["</function>"],
    begins: &["<function name="],
    layout: Layout::Nothing,
    sections: true,
    quotes: true,
    says_text: false,
};

/// What is around a value in which nothing is a tag.
pub(super) const SECTION: [&str; 2] = ["<![CDATA[", "]]>"];

/// A call.
#[derive(Clone, Debug)]
pub(super) struct Call {
    tags: &'static Tags,
    state: XmlState,
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
    /// Whether its value is in a section in which nothing is a tag.
    in_section: bool,
    /// Arguments of the call so far.
    count: usize,
}

#[derive(Clone, Debug)]
enum XmlState {
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

/// How a value begins.
enum Start {
    Wait,
    Plain,
    /// In a section in which nothing is a tag.
    Section,
}

impl Call {
    /// A call after the tag around calls, or after that of the call itself.
    pub(super) fn new(tags: &'static Tags, opened: &str) -> Call {
        let alone = tags.function.as_ref().is_some_and(|function| function.open == opened);
        let state = if alone { XmlState::Name } else { XmlState::Function };
        Call {
            tags,
            state,
            alone,
            certain: false,
            lead: 0,
            name: String::new(),
            key: String::new(),
            is_text: false,
            in_section: false,
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
                XmlState::Function => self.function(input),
                XmlState::Name => self.name(input, tools, emit),
                XmlState::Parameters => self.parameters(input, emit),
                XmlState::Key => self.key(input),
                XmlState::BeforeValue => self.before_value(input, tools),
                XmlState::Value(_) => self.value(input, emit),
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
            self.state = XmlState::Name;
            return None;
        };
        let known: Vec<&str> =
            [function.open].into_iter().chain(self.tags.calls.map(|[_, close]| close)).collect();
        match begins(inner, &known, input.ended()) {
            Begins::With(0) => {
                self.lead += function.open.len();
                self.state = XmlState::Name;
                None
            }
            Begins::With(which) if self.certain => {
                input.advance(self.lead + known[which].len());
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
                self.state = XmlState::Function;
            }
            return Some(if rest.len() > MOST_NAME { self.cut() } else { Progress::Wait });
        };
        let name = unquoted(&rest[..end]);
        let ended = if self.tags.function.is_some() {
            rest[end..].starts_with('>')
        } else {
            let next = trim_start(&rest[end..]);
            let known: Vec<&str> =
                [self.tags.key[0]].into_iter().chain(self.tags.calls.map(|[_, close]| close)).collect();
            match begins(next, &known, input.ended()) {
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
        self.state = XmlState::Parameters;
        None
    }

    fn parameters(&mut self, input: &mut Input, emit: &mut dyn FnMut(Piece<'_>)) -> Option<Progress> {
        let tags = self.tags;
        let mut known = vec![tags.key[0]];
        // What ends this call comes first, then what ends all, or begins another.
        known.extend(tags.function.as_ref().map(|function| function.close));
        known.extend(tags.calls.iter().flat_map(|[open, close]| [close, open]));
        known.extend(tags.function.as_ref().map(|function| function.open));
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
                self.state = XmlState::Key;
                return None;
            }
            1 => input.advance(known[1].len()),
            _ => {}
        }
        emit(Piece::Arguments(if self.count == 0 { "{}" } else { "}" }));
        self.state = XmlState::Function;
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
                self.state = XmlState::BeforeValue;
                None
            }
            None if near < rest.len() => {
                self.state = XmlState::Parameters;
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
                    self.state = XmlState::Parameters;
                    return None;
                }
            }
        }
        let kinds = match tools.kinds(&self.name, &self.key) {
            kinds if self.is_text && kinds.may_be_text() => Kinds::TEXT,
            kinds => kinds,
        };
        self.in_section = false;
        let value = Value::Waiting { reading: kinds.reading(), kinds, started: false };
        self.state = XmlState::Value(value);
        None
    }

    fn value(&mut self, input: &mut Input, emit: &mut dyn FnMut(Piece<'_>)) -> Option<Progress> {
        let XmlState::Value(value) = &mut self.state else { return None };
        let lines = self.tags.layout == Layout::TagsAndValues;
        if let Value::Waiting { started: started @ false, .. } = value {
            match start(self.tags, input) {
                Start::Wait => return Some(Progress::Wait),
                Start::Plain if lines && input.rest().starts_with('\n') => input.advance(1),
                Start::Plain => {}
                Start::Section => {
                    input.advance(SECTION[0].len());
                    self.in_section = true;
                }
            }
            *started = true;
        }
        let mut ends = vec![if self.in_section { SECTION[1] } else { self.tags.value_end }];
        ends.extend(self.tags.value_cut.iter().filter(|_| !self.in_section));
        let found = input.find(&ends);
        let (mut text, over) = match found {
            Found::Tag { at, .. } => (&input.rest()[..at], true),
            Found::Nothing { sure } => (&input.rest()[..sure], false),
        };
        // The line break before the end is no part of the value, and whether it is before the end is not known yet.
        if lines && (over || !input.ended()) {
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
            input.advance(ends[0].len());
        }
        self.state = XmlState::Parameters;
        None
    }
}

/// How a value begins.
fn start(tags: &Tags, input: &Input) -> Start {
    let [section, _] = SECTION;
    match input.begins(&[section]) {
        _ if input.rest().is_empty() => Start::Wait,
        Begins::With(_) if tags.sections => Start::Section,
        Begins::Maybe if tags.sections => Start::Wait,
        Begins::With(_) | Begins::Maybe | Begins::Without => Start::Plain,
    }
}

/// A name without white space and quotes around it.
fn unquoted(name: &str) -> &str {
    let name = trim(name);
    ['"', '\''].into_iter().find_map(|quote| name.strip_prefix(quote)?.strip_suffix(quote)).unwrap_or(name)
}
