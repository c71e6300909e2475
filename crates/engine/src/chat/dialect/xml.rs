//! Calls whose arguments are text between tags.

use super::input::{Begins, Found, Input, MOST_NAME, MOST_SPACE, begins, trim, trim_start};
use super::values::{Kinds, Reading, Tools, escaped, quoted};
use super::{Piece, Progress};

/// How a model writes them.
#[derive(Debug)]
pub(super) struct Tags {
    /// The dialect's name in messages.
    pub(super) name: &'static str,
    /// The tags around all calls, if there are any.
    pub(super) calls: Option<[&'static str; 2]>,
    /// The tags around one call: the text before its name, and the tag that ends it. Without them, the tags around
    /// all calls enclose one call, whose name is the first word.
    pub(super) function: Option<Function>,
    /// The text before and after the name of a parameter.
    pub(super) key: [&'static str; 2],
    /// The tag before a value, if there is one.
    pub(super) value: Option<&'static str>,
    /// The tag after a value.
    pub(super) value_end: &'static str,
    /// Other tags that end a value, because models forget the right one.
    pub(super) value_cut: &'static [&'static str],
    /// The tags that start calls: the one around all calls, or the one of a call.
    pub(super) begins: &'static [&'static str],
    /// Which tags and values are on their own lines.
    pub(super) layout: Layout,
    /// Whether a value may be in a CDATA section.
    pub(super) sections: bool,
    /// Whether names are quoted.
    pub(super) quotes: bool,
    /// Whether a parameter can declare itself a string, as `string="true"` after its name.
    pub(super) says_text: bool,
}

/// What is on its own line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Layout {
    Nothing,
    Tags,
    TagsAndValues,
}

/// The tags around one call.
#[derive(Debug)]
pub(super) struct Function {
    pub(super) open: &'static str,
    /// The text after the name.
    pub(super) name_end: &'static str,
    pub(super) close: &'static str,
}

/// Qwen3-Coder and Qwen3.5.
pub(super) static QWEN: Tags = Tags {
    name: "qwen-xml",
    calls: Some(["<tool_call>", "</tool_call>"]),
    function: Some(Function { open: "<function=", name_end: ">", close: "</function>" }),
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
    function: Some(Function { open: "<invoke name=", name_end: ">", close: "</invoke>" }),
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

/// Hy3.
pub(super) static HY3: Tags = Tags {
    name: "hy3",
    calls: Some(["<tool_calls:opensource>", "</tool_calls:opensource>"]),
    function: Some(Function {
        open: "<tool_call:opensource>",
        name_end: "<tool_sep:opensource>",
        close: "</tool_call:opensource>",
    }),
    key: ["<arg_key:opensource>", "</arg_key:opensource>"],
    value: Some("<arg_value:opensource>"),
    value_end: "</arg_value:opensource>",
    begins: &["<tool_calls:opensource>", "<tool_call:opensource>"],
    ..HY3_PREVIEW_TAGS
};

/// The preview of Hy3, whose tags have no suffix.
pub(super) static HY3_PREVIEW: Tags = HY3_PREVIEW_TAGS;

const HY3_PREVIEW_TAGS: Tags = Tags {
    name: "hy3-preview",
    calls: Some(["<tool_calls>", "</tool_calls>"]),
    function: Some(Function { open: "<tool_call>", name_end: "<tool_sep>", close: "</tool_call>" }),
    key: ["<arg_key>", "</arg_key>"],
    value: Some("<arg_value>"),
    value_end: "</arg_value>",
    value_cut: &[],
    begins: &["<tool_calls>", "<tool_call>"],
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
    function: Some(Function { open: "<｜DSML｜invoke name=", name_end: ">", close: "</｜DSML｜invoke>" }),
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
    function: Some(Function { open: "<function name=", name_end: ">", close: "</function>" }),
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

/// The tags around a value in which nothing else is a tag.
pub(super) const SECTION: [&str; 2] = ["<![CDATA[", "]]>"];

/// A call that is being read.
#[derive(Clone, Debug)]
pub(super) struct Call {
    tags: &'static Tags,
    state: XmlState,
    /// Whether the tag around all calls is missing: then only a known name makes this a call.
    alone: bool,
    /// Whether this is certainly a call.
    certain: bool,
    /// The number of bytes before the name.
    lead: usize,
    name: String,
    key: String,
    /// Whether the parameter declares itself a string.
    is_text: bool,
    /// Whether its value is in a CDATA section.
    in_section: bool,
    /// The number of arguments of the call so far.
    count: usize,
}

#[derive(Clone, Debug)]
enum XmlState {
    /// Before a call, or after the last one.
    Function,
    /// Inside the name.
    Name,
    /// Between parameters.
    Parameters,
    /// Inside the name of a parameter.
    Key,
    /// Before a parameter's value.
    BeforeValue,
    /// Inside a value.
    Value(Value),
}

/// A value that is being read.
#[derive(Clone, Debug)]
enum Value {
    /// Nothing was emitted, and only a line break before the value was consumed.
    Waiting { reading: Reading, kinds: Kinds, started: bool },
    /// A string that is emitted as it arrives.
    Text,
}

/// How a value starts.
enum Start {
    Wait,
    Plain,
    /// With a CDATA section.
    Section,
}

impl Call {
    /// A call after the tag around all calls, or after the tag of the call.
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

    /// Ends a call that the end of the text cuts off.
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

    /// Reads the name. Consumes nothing until the name is certain.
    fn name(
        &mut self,
        input: &mut Input,
        tools: &Tools,
        emit: &mut dyn FnMut(Piece<'_>),
    ) -> Option<Progress> {
        let rest = &input.rest()[self.lead..];
        let ends: &[char] = if self.tags.function.is_some() { &['>', '<', '\n'] } else { &['<', '\n'] };
        let Some(end) = rest.find(ends) else {
            // The white space before a name without tags may be incomplete.
            if self.tags.function.is_none() && rest.is_empty() {
                self.state = XmlState::Function;
            }
            return Some(if rest.len() > MOST_NAME { self.cut() } else { Progress::Wait });
        };
        let name = unquoted(&rest[..end]);
        let ended = if let Some(function) = &self.tags.function {
            match begins(&rest[end..], &[function.name_end], input.ended()) {
                Begins::With(_) => true,
                Begins::Maybe => return Some(Progress::Wait),
                Begins::Without => false,
            }
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
        input.advance(
            self.lead + end + self.tags.function.as_ref().map_or(0, |function| function.name_end.len()),
        );
        self.state = XmlState::Parameters;
        None
    }

    fn parameters(&mut self, input: &mut Input, emit: &mut dyn FnMut(Piece<'_>)) -> Option<Progress> {
        let tags = self.tags;
        let mut known = vec![tags.key[0]];
        // First the tag that ends this call, then those that end all calls or start another.
        known.extend(tags.function.as_ref().map(|function| function.close));
        known.extend(tags.calls.iter().flat_map(|[open, close]| [close, open]));
        known.extend(tags.function.as_ref().map(|function| function.open));
        let (at, which) = match input.find(&known) {
            Found::Tag { at, which } => (at, which),
            Found::Nothing { sure } => {
                // Text between parameters is dropped.
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
        // Without tags around each call, the tag that ended it ended all calls.
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
        // The line break before the end tag is not part of the value. Whether this is that line break is not known
        // yet.
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

/// How a value starts.
fn start(tags: &Tags, input: &Input) -> Start {
    let [section, _] = SECTION;
    match input.begins(&[section]) {
        _ if input.rest().is_empty() => Start::Wait,
        Begins::With(_) if tags.sections => Start::Section,
        Begins::Maybe if tags.sections => Start::Wait,
        Begins::With(_) | Begins::Maybe | Begins::Without => Start::Plain,
    }
}

/// A name without enclosing white space and quotes.
fn unquoted(name: &str) -> &str {
    let name = trim(name);
    ['"', '\''].into_iter().find_map(|quote| name.strip_prefix(quote)?.strip_suffix(quote)).unwrap_or(name)
}
