//! Dialects: parses what a model writes into reasoning, content and tool calls.
//!
//! Each family writes these in its own format, which its chat template shows. A [`Parser`] reads the text of an
//! answer as it arrives. However the text is cut, the joined pieces are the same.
//!
//! Callers can rely on this:
//! - Content without tags is returned unchanged. White space around calls and around reasoning is dropped.
//! - Text that starts like a call but is none (broken before its name, or without a name) is content, including its
//!   tags.
//! - A call's name comes before its arguments. The arguments are one JSON object: as the model wrote it, or converted
//!   from what it wrote. Without arguments it is `{}`. If the model wrote broken JSON, it stays broken.
//! - If the text ends inside a call, the arguments received so far have been emitted and are not complete JSON. For a
//!   call that is cut off right after its name there are none.

mod gemma;
mod grammar;
mod harmony;
mod input;
mod json;
mod limit;
mod pythonic;
mod sections;
mod text;
mod values;
mod xml;

use serde_json::Value;

#[cfg(feature = "grammar")]
pub(crate) use self::grammar::WHITESPACE;
pub use self::limit::ReasoningLimit;

use self::harmony::Harmony;
use self::input::Input;
use self::text::{Enclosure, Text, Think};
use self::values::Tools;
use crate::TokenId;
use crate::error::Result;
use crate::tokenizer::{Bos, EncodeOptions, Tokenizer};

/// A piece of an answer.
///
/// # Examples
/// ```
/// use forebay_engine::chat::dialect::Piece;
///
/// fn print(piece: Piece<'_>) {
///     match piece {
///         Piece::Reasoning(text) => eprint!("{text}"),
///         Piece::Content(text) => print!("{text}"),
///         Piece::Call { name } => print!("[calls {name}] "),
///         Piece::Arguments(json) => print!("{json}"),
///     }
/// }
/// # print(Piece::Content("Hello!"));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Piece<'a> {
    /// Reasoning.
    Reasoning(&'a str),
    /// Content for the user.
    Content(&'a str),
    /// A tool call starts.
    Call {
        /// The tool's name.
        name: &'a str,
    },
    /// More JSON text of the arguments of the last call.
    Arguments(&'a str),
}

/// The format in which a model writes reasoning and tool calls.
///
/// # Examples
/// ```
/// use forebay_engine::chat::dialect::{Dialect, Piece};
/// use serde_json::json;
///
/// // The chat template shows the model's format.
/// let dialect = Dialect::of(r#"<think> <tool_call>{"name": …, "arguments": …}</tool_call>"#);
/// let tools = [json!({ "type": "function", "function": { "name": "now" } })];
/// let mut parser = dialect.parser("", &tools);
/// let mut calls = Vec::new();
/// let mut take = |piece: Piece<'_>| {
///     if let Piece::Call { name } = piece {
///         calls.push(name.to_owned());
///     }
/// };
/// parser.push("<think>Hm.</think><tool_call>{\"name\": \"now\"}</tool_call>", &mut take);
/// parser.finish(&mut take);
/// assert_eq!(calls, ["now"]);
/// ```
#[derive(Clone, Debug)]
pub struct Dialect {
    format: Format,
    /// The tags around reasoning.
    think: &'static Think,
    /// Whether the template uses these tags.
    thinks: bool,
    /// Text around an answer that does not belong to it.
    enclosure: Option<&'static Enclosure>,
    /// Whether a call's id is next to its name.
    numbered: bool,
    /// Whether JSON is in a code block.
    fenced: bool,
    /// The tags that are control tokens of the model.
    controls: Vec<(&'static str, TokenId)>,
}

/// The format of calls.
#[derive(Clone, Copy, Debug)]
enum Format {
    /// The model has none.
    None,
    /// JSON after a tag.
    Json(&'static json::Tags),
    /// JSON that is the whole answer.
    Llama,
    /// A Python list of calls.
    Pythonic(&'static pythonic::Tags),
    /// A name and arguments in Gemma 4's own notation.
    Gemma,
    /// Tags around names and arguments.
    Xml(&'static xml::Tags),
    /// A section of calls, with names between tags and arguments in JSON.
    Sections(&'static sections::Tags),
    /// Messages with headers.
    Harmony,
}

impl PartialEq for Format {
    fn eq(&self, other: &Format) -> bool {
        match (self, other) {
            (Format::Json(a), Format::Json(b)) => std::ptr::eq(*a, *b),
            (Format::Pythonic(a), Format::Pythonic(b)) => std::ptr::eq(*a, *b),
            (Format::Xml(a), Format::Xml(b)) => std::ptr::eq(*a, *b),
            (Format::Sections(a), Format::Sections(b)) => std::ptr::eq(*a, *b),
            _ => std::mem::discriminant(self) == std::mem::discriminant(other),
        }
    }
}

/// The tags that a template of each format contains. The first format whose tags are all present is chosen.
static DIALECTS: &[(&[&str], Format)] = &[
    (&["<|channel|>", "<|message|>"], Format::Harmony),
    (&["<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"], Format::Sections(&sections::DEEPSEEK)),
    (&["<|tool_call_begin|>", "<|tool_call_argument_begin|>"], Format::Sections(&sections::KIMI)),
    // Templates may compose these tags from a mark and a name.
    (&["｜DSML｜", "function_calls>"], Format::Xml(&xml::DSML)),
    (&["｜DSML｜", "tool_calls>"], Format::Xml(&xml::DSML_V4)),
    (&["<minimax:tool_call>", "<invoke name="], Format::Xml(&xml::MINIMAX)),
    // This template composes its tags from names and a suffix.
    (&["<tool_sep{}>", "<arg_key{}>", ":opensource"], Format::Xml(&xml::HY3)),
    (&["<tool_calls>", "<tool_sep>", "<arg_key>"], Format::Xml(&xml::HY3_PREVIEW)),
    (&["<tool_call>", "<arg_key>"], Format::Xml(&xml::GLM)),
    (&["<tool_call>", "<function=", "<parameter="], Format::Xml(&xml::QWEN)),
    (&["<function name=", "<param name=", "<![CDATA["], Format::Xml(&xml::MINICPM)),
    (&["[TOOL_CALLS]", "[ARGS]"], Format::Sections(&sections::MISTRAL)),
    (&["[TOOL_CALLS]["], Format::Json(&json::MISTRAL)),
    (&["[TOOL_CALLS] ["], Format::Json(&json::MISTRAL)),
    (
        &["<|tool_call:begin|>", "<|tool_call:name|>", "<|tool_call:args|>"],
        Format::Sections(&sections::SOLAR),
    ),
    (&["<|role_sep|>", "<|message_sep|>", "<|function_call|>"], Format::Json(&json::GIGACHAT31)),
    (&["<|role_sep|>", "<|message_sep|>", "function call"], Format::Json(&json::GIGACHAT3)),
    (&["<tool_calls>["], Format::Json(&json::APRIEL)),
    (&["<|tool_call>", "<tool_call|>", gemma::QUOTE], Format::Gemma),
    (&["<|START_ACTION|>", "\"tool_name\":", "<|START_TEXT|>"], Format::Json(&json::COHERE)),
    (&["<|START_ACTION|>", "\"tool_name\":", "<|START_RESPONSE|>"], Format::Json(&json::COHERE_RESPONSE)),
    (&["<|tool_call|>", "<|start_of_role|>"], Format::Json(&json::GRANITE)),
    (&["<|tool_call_start|>", "<|tool_call_end|>"], Format::Pythonic(&pythonic::LFM2)),
    // These templates of the same family list tools, but leave the tags of calls to the conversation.
    (&["<|tool_list_start|>", "<|tool_list_end|>"], Format::Pythonic(&pythonic::LFM2)),
    (&["<|im_start|>", "List of tools: ["], Format::Pythonic(&pythonic::LFM2)),
    (&["<tool_call>", "</tool_call>", "\"name", "\"arguments"], Format::Json(&json::HERMES)),
    (&["<|start_header_id|>", "\"parameters\":", "tool_calls"], Format::Llama),
    // ERNIE 4.5.
    (&["<tool_call>", "</tool_call>", "<response>", "<global_setting>"], Format::Json(&json::HERMES)),
    // These show a call in words.
    (&["<|start_header_id|>", "[func_name1("], Format::Pythonic(&pythonic::WHOLE)),
    (&["<|header_start|>", "[func_name1("], Format::Pythonic(&pythonic::WHOLE)),
    (&["<start_of_turn>", "[func_name1("], Format::Pythonic(&pythonic::WHOLE)),
    (&["<|header_start|>", "\"parameters\":", "tool_calls"], Format::Llama),
];

/// The tags in templates of models that enclose their answers.
static ENCLOSURES: &[(&[&str], &Enclosure)] = &[
    (&["<response>", "</response>", "<global_setting>"], &text::RESPONSE),
    (&["<response>", "</response>", "<|start_of_role|>"], &text::RESPONSE),
    // The template of Hunyuan-A13B does not have the tags of answers.
    (&["<|extra_0|>", "<|extra_4|>"], &text::ANSWER),
];

impl Dialect {
    /// The dialect of a chat template, by the tags that it contains. If not all tags of a format are present, there
    /// are no calls: tags that another family uses too would be forced on the model.
    pub fn of(template_source: &str) -> Dialect {
        let has = |tag: &str| template_source.contains(tag);
        let found = DIALECTS.iter().find(|(tags, _)| tags.iter().all(|tag| has(tag)));
        let format = found.map_or(Format::None, |&(_, format)| format);
        let think = match format {
            format if format == Format::Sections(&sections::SOLAR) => &text::SOLAR_THINK,
            format if format == Format::Xml(&xml::HY3) => &text::HY3_THINK,
            Format::Gemma => &text::GEMMA_THINK,
            _ if has(text::MISTRAL_THINK.open) => &text::MISTRAL_THINK,
            _ if has(text::COHERE_THINK.open) => &text::COHERE_THINK,
            _ => &text::THINK,
        };
        let enclosure = ENCLOSURES.iter().find(|(tags, _)| tags.iter().all(|tag| has(tag)));
        let numbered = has("[CALL_ID]");
        Dialect {
            format,
            think,
            thinks: has(think.open) || has("<think{}>"),
            enclosure: enclosure.map(|&(_, enclosure)| enclosure),
            numbered,
            fenced: has("```json"),
            controls: Vec::new(),
        }
    }

    /// The same dialect for a model with these tokens. Tags may be control tokens, which are not text unless they are
    /// [shown](Dialect::shown), and which grammars refer to by number.
    pub fn with_tokens(mut self, tokenizer: &Tokenizer) -> Dialect {
        let tokens = self.tags().into_iter().filter_map(|tag| Some((tag, tokenizer.find(tag)?)));
        self.controls = tokens.filter(|&(_, token)| tokenizer.is_control(token)).collect();
        self
    }

    /// The control tokens that a [parser](Dialect::parser) for these tools must see as text, for
    /// [`Request::shown`](crate::Request::shown).
    pub fn shown(&self, tools: &[Value]) -> Vec<TokenId> {
        // Without tools, the tags of calls would be mistaken for text.
        let all = !tools.is_empty() || self.format == Format::Harmony;
        let outside = self.outside_calls();
        let needed = |tag: &str| all || outside.iter().any(|outside| outside.starts_with(tag.trim_end()));
        self.controls.iter().filter(|(tag, _)| needed(tag)).map(|&(_, token)| token).collect()
    }

    /// The dialect's name, for messages.
    pub fn name(&self) -> &'static str {
        match self.format {
            Format::None => "none",
            Format::Json(tags) => tags.name,
            Format::Llama => "llama",
            Format::Pythonic(tags) => tags.name,
            Format::Gemma => "gemma4",
            Format::Xml(tags) => tags.name,
            Format::Sections(tags) => tags.name,
            Format::Harmony => "harmony",
        }
    }

    /// A Lark grammar for an answer that calls one of these tools, after reasoning unless the prompt excludes it.
    ///
    /// # Errors
    /// If the template does not show how the model calls tools, or there are no tools.
    pub fn call_grammar(&self, prompt: &str, tools: &[Value]) -> Result<String> {
        grammar::calls(self, prompt, tools)
    }

    /// A Lark grammar for an answer that is JSON of this schema or calls one of these tools, after reasoning unless
    /// the prompt excludes it.
    pub fn answer_grammar(&self, prompt: &str, schema: &Value, tools: &[Value]) -> String {
        grammar::answer(self, prompt, schema, tools)
    }

    /// A Lark grammar for an answer without calls, after reasoning unless the prompt excludes it. `None` if calls
    /// cannot be told from text.
    pub fn text_grammar(&self, prompt: &str) -> Option<String> {
        grammar::text(self, prompt)
    }

    /// A parser for the answer to a prompt. Without tools there are no calls, and text that looks like one is
    /// content.
    pub fn parser(&self, prompt: &str, tools: &[Value]) -> Parser {
        let tools = Tools::new(tools);
        let machine = match self.format {
            Format::Harmony => Machine::Harmony(Harmony::after(prompt, tools)),
            _ => Machine::Text(Text::after(prompt, self, tools)),
        };
        Parser { input: Input::default(), machine }
    }

    /// A limit of `most` tokens of reasoning for the answer to a prompt, for
    /// [`Request::reasoning`](crate::Request::reasoning).
    ///
    /// # Errors
    /// If the model has no tokens for the text that ends its reasoning.
    pub fn limit(
        &self,
        most: usize,
        prompt: &str,
        tools: &[Value],
        tokenizer: &Tokenizer,
    ) -> Result<ReasoningLimit> {
        let end = match self.format {
            Format::Harmony => harmony::REASONING_END,
            _ => self.think.end,
        };
        let end = tokenizer.encode(end, EncodeOptions { special: true, bos: Bos::Never })?;
        Ok(ReasoningLimit::new(self.parser(prompt, tools), most, end))
    }
}

impl Dialect {
    /// The tags that may occur outside calls.
    fn outside_calls(&self) -> Vec<&'static str> {
        let mut tags = vec![self.think.open, self.think.close];
        tags.extend(self.format.silent());
        if let Some(enclosure) = self.enclosure {
            tags.extend(enclosure.opens);
            tags.push(enclosure.close);
        }
        tags
    }

    /// All tags that may occur.
    fn tags(&self) -> Vec<&'static str> {
        let mut tags = self.outside_calls();
        match self.format {
            Format::None => {}
            Format::Json(json) => tags.extend(json.around.into_iter().flatten()),
            Format::Llama => tags.push(text::PYTHON_TAG),
            Format::Pythonic(pythonic) => tags.extend(pythonic.around),
            Format::Gemma => {
                tags.extend([gemma::OPEN, gemma::CLOSE, gemma::QUOTE]);
                tags.extend(gemma::CHANNEL);
            }
            Format::Xml(xml) => {
                tags.extend(xml.calls.into_iter().flatten());
                if let Some(function) = &xml.function {
                    tags.extend([function.open, function.name_end, function.close]);
                }
                tags.extend([xml.key[0], xml.key[1], xml.value_end]);
                tags.extend(xml.value);
            }
            Format::Sections(s) => {
                tags.extend(s.section.into_iter().flatten());
                tags.extend([s.call, s.separator]);
                tags.extend(s.call_end);
                tags.extend(s.naming.tag());
            }
            Format::Harmony => tags.extend(harmony::TAGS),
        }
        if self.format == Format::Sections(&sections::SOLAR) {
            tags.push(sections::SOLAR_BEGIN);
        }
        // A line break after a tag may be part of the tag's token.
        let alone: Vec<&str> = tags.iter().map(|tag| tag.trim_end()).collect();
        tags.extend(alone);
        tags.retain(|tag| !tag.trim().is_empty());
        tags.sort_unstable();
        tags.dedup();
        tags
    }
}

/// Parses an answer's text as it arrives into [`Piece`]s.
///
/// # Examples
/// ```
/// use forebay_engine::chat::dialect::{Dialect, Piece};
///
/// let mut parser = Dialect::of("<think></think>").parser("", &[]);
/// let (mut thought, mut said) = (String::new(), String::new());
/// let mut take = |piece: Piece<'_>| match piece {
///     Piece::Reasoning(text) => thought += text,
///     Piece::Content(text) => said += text,
///     _ => unreachable!("there are no tools"),
/// };
/// // Text may be cut anywhere.
/// for text in ["<thi", "nk>Hm.</th", "ink>Hello!"] {
///     parser.push(text, &mut take);
/// }
/// parser.finish(&mut take);
/// assert_eq!((&*thought, &*said), ("Hm.", "Hello!"));
/// ```
#[derive(Clone, Debug)]
pub struct Parser {
    input: Input,
    machine: Machine,
}

#[derive(Clone, Debug)]
enum Machine {
    Text(Text),
    Harmony(Harmony),
}

impl Parser {
    /// Parses more text and emits what is certain.
    pub fn push(&mut self, text: &str, emit: &mut dyn FnMut(Piece<'_>)) {
        self.input.push(text);
        self.step(emit);
    }

    /// Ends the text and emits what was held back.
    pub fn finish(mut self, emit: &mut dyn FnMut(Piece<'_>)) {
        self.input.end();
        self.step(emit);
    }

    /// Whether what comes next is reasoning, as far as is known.
    fn is_reasoning(&self) -> bool {
        match &self.machine {
            Machine::Text(text) => text.is_reasoning(),
            Machine::Harmony(harmony) => harmony.is_reasoning(),
        }
    }

    fn step(&mut self, emit: &mut dyn FnMut(Piece<'_>)) {
        match &mut self.machine {
            Machine::Text(text) => text.step(&mut self.input, emit),
            Machine::Harmony(harmony) => harmony.step(&mut self.input, emit),
        }
    }
}

/// The state of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Progress {
    /// More text is needed.
    Wait,
    /// The call is complete.
    Done,
    /// It is not a call; nothing of it was emitted, and only its opening tag was consumed.
    NotACall,
}
