//! Chat templates convert a conversation to the text that the model was trained to continue.
//!
//! Templates are written in Jinja for Hugging Face's Python code. They find the same settings, variables, functions
//! and formats of values here as there.

mod adapt;
pub mod dialect;
mod folder;
mod guard;
mod jinja;
mod json;
mod lists;
mod python;
mod strftime;
mod taint;
mod texts;

use std::path::Path;
use std::sync::Arc;
use std::time::SystemTime;

use minijinja::value::{Kwargs, ValueKind};
use minijinja::{Environment, ErrorKind, Value};
use serde::{Deserialize, Deserializer, Serialize};

use self::adapt::Findings;
use self::guard::Run;
pub use self::taint::Rendered;
use self::taint::{Planes, Taint};
use crate::error::{Error, Result};
use crate::format::{Metadata, ModelFile};
use crate::tokenizer::Tokenizer;

/// One message of a conversation.
///
/// # Examples
/// ```
/// use forebay_engine::chat::Message;
///
/// let message = Message::new("user", "Hello!");
/// // The same in OpenAI's JSON.
/// let read: Message = serde_json::from_str(r#"{ "role": "user", "content": "Hello!" }"#)?;
/// assert_eq!(read, message);
/// # Ok::<(), serde_json::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Message {
    /// The speaker: `system`, `user`, `assistant` or `tool`; the template decides what is allowed.
    pub role: String,
    /// The text, or a list of parts. A message that only calls tools has none or null, and templates distinguish the
    /// two.
    #[serde(default, deserialize_with = "present", skip_serializing_if = "Option::is_none")]
    pub content: Option<serde_json::Value>,
    /// Further fields that templates use: `tool_calls`, `reasoning_content` and so on.
    #[serde(flatten)]
    pub extra: serde_json::Map<String, serde_json::Value>,
}

impl Message {
    /// A message of text.
    pub fn new(role: impl Into<String>, content: impl Into<String>) -> Message {
        let content = Some(content.into().into());
        Message { role: role.into(), content, extra: serde_json::Map::new() }
    }

    /// The message for a template. Reasoning has several names; whichever the message uses, it gets the two that
    /// templates read.
    fn value(&self, taint: Taint) -> Value {
        let names = ["reasoning_content", "thinking", "reasoning"];
        let reasoning = names.iter().find_map(|name| self.extra.get(*name).filter(|value| !value.is_null()));
        let mut fields: Vec<(Value, Value)> = Vec::with_capacity(self.extra.len() + 4);
        let mut set = |name: &str, value| fields.push((Value::from(name), value));
        if let Some(reasoning) = reasoning {
            set("thinking", taint.json(reasoning));
        }
        let known = ROLES.contains(&&*self.role);
        set("role", if known { Value::from(&*self.role) } else { taint.taint_text(&self.role).into() });
        if let Some(content) = &self.content {
            set("content", taint.json(content));
        }
        for (name, value) in &self.extra {
            set(&taint.taint_text(name), taint.json(value));
        }
        if let Some(reasoning) = reasoning {
            set("reasoning_content", taint.json(reasoning));
        }
        taint.map(fields)
    }
}

/// Roles that templates may build control tokens from, as in `'<|' + message.role + '|>'`. Other roles are text of
/// the request.
const ROLES: [&str; 8] =
    ["system", "developer", "user", "assistant", "tool", "function", "ipython", "observation"];

/// Deserialises a value that is present, even if it is null.
fn present<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<serde_json::Value>, D::Error> {
    serde_json::Value::deserialize(deserializer).map(Some)
}

/// The input of a template besides the messages.
///
/// # Examples
/// ```
/// use forebay_engine::chat::{ChatTemplate, Message, RenderOptions};
///
/// let source = "{{ messages[0].content }}{% if add_generation_prompt %} {{ name }}:{% endif %}";
/// let template = ChatTemplate::new(source, &[])?;
/// let mut options = RenderOptions { add_generation_prompt: true, ..Default::default() };
/// options.kwargs.insert("name".into(), "Bot".into());
/// assert_eq!(template.render(&[Message::new("user", "Hello!")], &options)?, "Hello! Bot:");
/// # Ok::<(), forebay_engine::Error>(())
/// ```
#[derive(Clone, Debug, Default)]
pub struct RenderOptions {
    /// Whether the text ends where the assistant's answer starts.
    pub add_generation_prompt: bool,
    /// The tools that the model may call, as JSON schemas of functions.
    pub tools: Vec<serde_json::Value>,
    /// Further variables, such as `enable_thinking`.
    pub kwargs: serde_json::Map<String, serde_json::Value>,
    /// The time for `strftime_now`; the current time if absent.
    pub now: Option<SystemTime>,
}

/// A compiled chat template, or two: a model may have a separate one for conversations with tools.
///
/// # Examples
/// ```
/// use forebay_engine::chat::{ChatTemplate, Message, RenderOptions};
///
/// let source = "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}\n{% endfor %}";
/// let template = ChatTemplate::new(source, &[("eos_token", "</s>")])?;
/// let text = template.render(&[Message::new("user", "Hello!")], &RenderOptions::default())?;
/// assert_eq!(text, "user: Hello!</s>\n");
/// # Ok::<(), forebay_engine::Error>(())
/// ```
#[derive(Debug)]
pub struct ChatTemplate {
    sources: Sources,
    /// The texts of special tokens, by their names in templates, such as `bos_token`.
    tokens: Vec<(String, String)>,
    /// What the template accepts, as far as it was tested.
    findings: Findings,
}

impl ChatTemplate {
    /// Compiles a template. `tokens` are the texts of special tokens, by their names in templates, such as
    /// `bos_token`.
    pub fn new(source: &str, tokens: &[(&str, &str)]) -> Result<ChatTemplate> {
        let tokens = tokens.iter().map(|&(name, text)| (name.to_owned(), text.to_owned())).collect();
        ChatTemplate::compile(&Sources { default: source.to_owned(), tool_use: None }, tokens)
    }

    /// Compiles a template that replaces the one of a model with this tokenizer.
    ///
    /// # Errors
    /// If it is not a template.
    pub fn of_source(source: &str, tokenizer: &Tokenizer) -> Result<ChatTemplate> {
        ChatTemplate::compile(
            &Sources { default: source.to_owned(), tool_use: None },
            special_tokens(tokenizer),
        )
    }

    /// Compiles the template of a GGUF file, if it has one; `path` is only used in messages.
    pub fn from_metadata(
        path: &Path,
        metadata: &Metadata,
        tokenizer: &Tokenizer,
    ) -> Result<Option<ChatTemplate>> {
        let text = |key: &str| match metadata.get(key).map(|value| value.as_str()) {
            None => Ok(None),
            Some(Some(text)) => Ok(Some(text.to_owned())),
            Some(None) => Err(Error::format(path, format!("{key} is not a string"))),
        };
        let Some(default) = text("tokenizer.chat_template")? else { return Ok(None) };
        let sources = Sources { default, tool_use: text("tokenizer.chat_template.tool_use")? };
        ChatTemplate::compile(&sources, special_tokens(tokenizer)).map(Some).map_err(|e| at(path, e))
    }

    /// Compiles the template of a model in any format, if it has one.
    pub fn of(model: &ModelFile, tokenizer: &Tokenizer) -> Result<Option<ChatTemplate>> {
        match model.folder() {
            Some(folder) => ChatTemplate::from_folder(folder),
            None => ChatTemplate::from_metadata(model.path(), &model.metadata, tokenizer),
        }
    }

    /// Compiles the template of a Hugging Face folder, if it has one: `chat_template.jinja`, or the setting in
    /// `tokenizer_config.json`.
    pub fn from_folder(folder: &Path) -> Result<Option<ChatTemplate>> {
        let Some(found) = folder::find(folder)? else { return Ok(None) };
        ChatTemplate::compile(&found.sources, found.tokens).map(Some).map_err(|e| at(&found.path, e))
    }

    /// The template's source; if there are two, the one for conversations with tools.
    pub fn source(&self) -> &str {
        self.sources.tool_use.as_ref().unwrap_or(&self.sources.default)
    }

    fn compile(sources: &Sources, tokens: Vec<(String, String)>) -> Result<ChatTemplate> {
        let compile = |source: &String| {
            let source = jinja::without_unary_plus(&without_generation_tags(source));
            match guard::check(&source) {
                Ok(()) => Ok(source),
                Err(e) => {
                    Err(Error::Invalid(format!("the chat template does not compile: {}", describe(&e))))
                }
            }
        };
        let sources = Sources {
            default: compile(&sources.default)?,
            tool_use: sources.tool_use.as_ref().map(compile).transpose()?,
        };
        Ok(ChatTemplate { sources, tokens, findings: Findings::default() })
    }

    /// Renders a conversation as text.
    ///
    /// A template may refuse a conversation, for example because one user message follows another. The error then
    /// contains the template's message.
    pub fn render(&self, messages: &[Message], options: &RenderOptions) -> Result<String> {
        self.write(messages, options).map(|rendered| rendered.text)
    }

    /// Renders a conversation as text and marks the parts that came from the request: only what the template itself
    /// writes may become control tokens. See [`render`](Self::render).
    pub fn write(&self, messages: &[Message], options: &RenderOptions) -> Result<Rendered> {
        let with_tools = self.sources.tool_use.as_ref().filter(|_| !options.tools.is_empty());
        let source = with_tools.unwrap_or(&self.sources.default);
        let taint = self.taint(source, messages, options)?;
        let run = Arc::new(Run::new(taint));
        let variables = self.variables(messages, options, taint);
        let written = guard::render(&environment(&run), source, variables, &run)
            .map_err(|e| Error::Invalid(taint.plain_text(&explain(&e)).into_owned()))?;
        Ok(taint.separate(&written))
    }

    /// The marks for the texts of a request.
    fn taint(&self, source: &str, messages: &[Message], options: &RenderOptions) -> Result<Taint> {
        let mut planes = Planes::default();
        planes.add(source);
        self.tokens.iter().for_each(|(_, text)| planes.add(text));
        for message in messages {
            planes.add(&message.role);
            message.content.iter().for_each(|content| planes.add_json(content));
            message.extra.iter().for_each(|(name, value)| {
                planes.add(name);
                planes.add_json(value);
            });
        }
        options.tools.iter().for_each(|tool| planes.add_json(tool));
        options.kwargs.values().for_each(|value| planes.add_json(value));
        Taint::new(&planes)
    }

    /// The variables of a template.
    fn variables<'a>(
        &'a self,
        messages: &[Message],
        options: &'a RenderOptions,
        taint: Taint,
    ) -> Vec<(&'a str, Value)> {
        let mut variables: Vec<(&str, Value)> = Vec::new();
        // A token that the model does not have is undefined, while `tools` and `documents` are always defined and may
        // be none.
        variables.extend(self.tokens.iter().map(|(name, text)| (&**name, Value::from(&**text))));
        variables.push(("documents", Value::from(())));
        let now = options.now;
        let strftime_now = move |format: &Value| {
            let now = now.unwrap_or_else(SystemTime::now);
            taint.looking(std::slice::from_ref(format), |format| match format[0].as_str() {
                Some(format) => Ok(Value::from(strftime::strftime(format, now))),
                None => {
                    Err(minijinja::Error::new(ErrorKind::InvalidOperation, "strftime_now takes a string"))
                }
            })
        };
        variables.push(("strftime_now", Value::from_function(strftime_now)));
        variables.extend(options.kwargs.iter().map(|(k, v)| (k.as_str(), taint.json(v))));
        let tools = options.tools.iter().map(|tool| taint.json(tool));
        let tools = if options.tools.is_empty() { Value::from(()) } else { tools.collect() };
        variables.push(("tools", tools));
        let messages = messages.iter().map(|message| message.value(taint));
        variables.push(("messages", messages.collect()));
        variables.push(("add_generation_prompt", Value::from(options.add_generation_prompt)));
        variables
    }
}

/// The names of templates if there are several.
const DEFAULT: &str = "default";
const TOOL_USE: &str = "tool_use";

/// The templates of a model.
#[derive(Debug)]
struct Sources {
    default: String,
    /// The template for conversations with tools.
    tool_use: Option<String>,
}

/// The texts of a tokenizer's special tokens, by their names in templates.
fn special_tokens(tokenizer: &Tokenizer) -> Vec<(String, String)> {
    let special = [("bos_token", tokenizer.bos()), ("eos_token", tokenizer.eos())].into_iter();
    special.filter_map(|(name, id)| Some((name.to_owned(), tokenizer.token_text(id?).into_owned()))).collect()
}

/// Turns a template's error into one about the file that it came from.
fn at(path: &Path, error: Error) -> Error {
    match error {
        Error::Invalid(message) => Error::format(path, message),
        other => other,
    }
}

/// Hugging Face's tag `{% generation %}` marks what the model is trained to write, and prints its contents.
fn without_generation_tags(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(open) = rest.find("{%") {
        let (before, tag) = rest.split_at(open);
        out.push_str(before);
        let Some(len) = tag[2..].find("%}") else {
            rest = tag;
            break;
        };
        let inner = &tag[2..2 + len];
        let word = inner.trim_start_matches(['-', '+']).trim_end_matches(['-', '+']).trim();
        let same = match word {
            "generation" => "if true",
            "endgeneration" => "endif",
            _ => word,
        };
        // Replaces only the tag's name, so that signs that strip white space stay.
        match inner.find(word) {
            Some(at) if same != word => {
                out.extend(["{%", &inner[..at], same, &inner[at + word.len()..], "%}"]);
                rest = &tag[2 + len + 2..];
            }
            _ => {
                // The end of this tag may be inside a string, so only its start is skipped.
                out.push_str("{%");
                rest = &tag[2..];
            }
        }
    }
    out.push_str(rest);
    out
}

/// The instructions that one rendering may execute. A long conversation takes thousands per message; a template that
/// loops without end is stopped within seconds.
const FUEL: u64 = 16_000_000;

/// Jinja with the additions of Hugging Face's `apply_chat_template`.
fn environment(run: &Arc<Run>) -> Environment<'static> {
    let mut environment = Environment::new();
    environment.set_fuel(Some(FUEL));
    texts::add(&mut environment, run);
    jinja::add(&mut environment, run);
    let taint = run.taint;
    environment.add_filter("tojson", move |value: &Value, kwargs: Kwargs| json::tojson(value, kwargs, taint));
    // They create lists of any length from a number, and no chat template needs them.
    environment.remove_filter("batch");
    environment.remove_filter("slice");
    // They print values in Rust's syntax, and Jinja does not have them.
    environment.remove_filter("pprint");
    environment.remove_global("debug");
    environment.add_function("raise_exception", raise_exception);
    // In Python, None is not iterable, and strings and mappings are sequences.
    environment.add_test("iterable", |v: &Value| !v.is_none() && v.try_iter().is_ok());
    environment.add_test("sequence", |v: &Value| {
        matches!(v.kind(), ValueKind::Seq | ValueKind::String | ValueKind::Map)
    });
    environment
}

/// A template's message when it refuses a conversation.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Refusal(String);

fn raise_exception(message: String) -> Result<Value, minijinja::Error> {
    Err(minijinja::Error::new(ErrorKind::InvalidOperation, message.clone()).with_source(Refusal(message)))
}

/// Why rendering failed, for people.
fn explain(error: &minijinja::Error) -> String {
    let mut cause: Option<&dyn std::error::Error> = Some(error);
    while let Some(e) = cause {
        if let Some(refusal) = e.downcast_ref::<Refusal>() {
            return format!("the chat template refuses the conversation: {refusal}");
        }
        cause = e.source();
    }
    format!("the chat template failed: {}", describe(error))
}

/// A template's error with its line.
fn describe(error: &minijinja::Error) -> String {
    let line = error.line().map(|line| format!("line {line}: ")).unwrap_or_default();
    let detail = error.detail().map(|detail| format!(": {detail}")).unwrap_or_default();
    format!("{line}{}{detail}", error.kind())
}
