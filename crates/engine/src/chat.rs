//! Chat templates: a conversation to the text that the model was trained to continue.
//!
//! Templates are written in Jinja for Hugging Face's Python code, so what they can see there they see here:
//! the same settings, variables, functions and spellings of values.

mod json;
mod strftime;

use std::path::Path;
use std::time::SystemTime;

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Serde, ValueKind};
use minijinja::{AutoEscape, Environment, ErrorKind, Value};
use minijinja_contrib::pycompat::unknown_method_callback;
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::format::Metadata;
use crate::tokenizer::Tokenizer;

/// One message of a conversation.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Message {
    /// Who speaks: `system`, `user`, `assistant` or `tool`; what is allowed is up to the template.
    pub role: String,
    /// What is said: text, a list of parts, or null where a message only calls tools.
    #[serde(default)]
    pub content: serde_json::Value,
    /// What else the message holds, as templates expect it: `tool_calls`, `reasoning_content` and so on.
    #[serde(flatten)]
    pub extra: serde_json::Map<String, serde_json::Value>,
}

impl Message {
    /// A message of text.
    pub fn new(role: impl Into<String>, content: impl Into<String>) -> Message {
        Message { role: role.into(), content: content.into().into(), extra: serde_json::Map::new() }
    }
}

/// What a template gets besides the messages.
#[derive(Clone, Debug, Default)]
pub struct RenderOptions {
    /// Whether the text ends where the assistant's answer starts.
    pub add_generation_prompt: bool,
    /// The tools that the model may call, as JSON schemas of functions.
    pub tools: Vec<serde_json::Value>,
    /// Further variables, such as `enable_thinking`.
    pub kwargs: serde_json::Map<String, serde_json::Value>,
    /// What `strftime_now` takes for now; the clock's time if absent.
    pub now: Option<SystemTime>,
}

/// A compiled chat template.
#[derive(Debug)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    bos: Option<String>,
    eos: Option<String>,
}

impl ChatTemplate {
    /// Compiles a template; `bos` and `eos` are the texts of those tokens.
    pub fn new(source: &str, bos: Option<&str>, eos: Option<&str>) -> Result<ChatTemplate> {
        let mut environment = environment();
        environment
            .add_template_owned(NAME, source.to_owned())
            .map_err(|e| Error::Invalid(format!("the chat template does not compile: {}", describe(&e))))?;
        Ok(ChatTemplate { environment, bos: bos.map(str::to_owned), eos: eos.map(str::to_owned) })
    }

    /// Compiles the template that a model file brings, if it brings one; `path` names the file in messages.
    pub fn from_metadata(
        path: &Path,
        metadata: &Metadata,
        tokenizer: &Tokenizer,
    ) -> Result<Option<ChatTemplate>> {
        const KEY: &str = "tokenizer.chat_template";
        let Some(value) = metadata.get(KEY) else { return Ok(None) };
        let source = value.as_str().ok_or_else(|| Error::format(path, format!("{KEY} is not text")))?;
        let text = |id| tokenizer.token_text(id);
        let (bos, eos) = (tokenizer.bos().map(text), tokenizer.eos().map(text));
        match ChatTemplate::new(source, bos.as_deref(), eos.as_deref()) {
            Err(Error::Invalid(message)) => Err(Error::format(path, message)),
            other => other.map(Some),
        }
    }

    /// The text of a conversation.
    ///
    /// A template may refuse one, for example because two messages of the user follow each other; the error
    /// then holds the template's own words.
    pub fn render(&self, messages: &[Message], options: &RenderOptions) -> Result<String> {
        let failed = |e| Error::Invalid(explain(&e));
        let template = self.environment.get_template(NAME).map_err(failed)?;
        template.render(self.context(messages, options)).map_err(failed)
    }

    /// The variables of a template.
    fn context(&self, messages: &[Message], options: &RenderOptions) -> Value {
        let mut variables: Vec<(&str, Value)> = Vec::new();
        // A token that the model does not have is undefined, as opposed to `tools` and `documents`, which are
        // always there and may be none.
        variables.extend(self.bos.as_deref().map(|bos| ("bos_token", Value::from(bos))));
        variables.extend(self.eos.as_deref().map(|eos| ("eos_token", Value::from(eos))));
        variables.push(("documents", Value::from(())));
        let now = options.now;
        let strftime_now =
            move |format: &str| strftime::strftime(format, now.unwrap_or_else(SystemTime::now));
        variables.push(("strftime_now", Value::from_function(strftime_now)));
        variables.extend(options.kwargs.iter().map(|(k, v)| (k.as_str(), Value::from(Serde(v)))));
        let tools =
            if options.tools.is_empty() { Value::from(()) } else { Value::from(Serde(&options.tools)) };
        variables.push(("tools", tools));
        variables.push(("messages", Value::from(Serde(messages))));
        variables.push(("add_generation_prompt", Value::from(options.add_generation_prompt)));
        Value::from_pairs(variables)
    }
}

/// The one template of the environment.
const NAME: &str = "chat";

/// Instructions that one rendering may run. A long conversation takes thousands per message; a template that
/// loops without end is stopped within seconds.
const FUEL: u64 = 50_000_000;

/// Jinja with the settings of Hugging Face's `apply_chat_template`.
fn environment() -> Environment<'static> {
    let mut environment = Environment::new();
    environment.set_syntax(
        SyntaxConfig::builder()
            .trim_blocks(true)
            .lstrip_blocks(true)
            .build()
            .expect("the delimiters are the default ones"),
    );
    // A prompt is no HTML.
    environment.set_auto_escape_callback(|_| AutoEscape::None);
    environment.set_unknown_method_callback(unknown_method_callback);
    environment.set_fuel(Some(FUEL));
    environment.add_filter("tojson", json::tojson);
    environment.add_function("raise_exception", raise_exception);
    // Python cannot iterate over None, and counts text and mappings among the sequences.
    environment.add_test("iterable", |v: &Value| !v.is_none() && v.try_iter().is_ok());
    environment.add_test("sequence", |v: &Value| {
        matches!(v.kind(), ValueKind::Seq | ValueKind::String | ValueKind::Map)
    });
    environment
}

/// What a template says when it refuses a conversation.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Refusal(String);

fn raise_exception(message: String) -> Result<Value, minijinja::Error> {
    Err(minijinja::Error::new(ErrorKind::InvalidOperation, message.clone()).with_source(Refusal(message)))
}

/// Why a rendering failed, for people.
fn explain(error: &minijinja::Error) -> String {
    let mut cause: Option<&dyn std::error::Error> = Some(error);
    while let Some(e) = cause {
        if let Some(refusal) = e.downcast_ref::<Refusal>() {
            return format!("the chat template refuses the conversation: {refusal}");
        }
        cause = e.source();
    }
    format!("the chat template fails: {}", describe(error))
}

/// An error of a template with its line.
fn describe(error: &minijinja::Error) -> String {
    let line = error.line().map(|line| format!("line {line}: ")).unwrap_or_default();
    let detail = error.detail().map(|detail| format!(": {detail}")).unwrap_or_default();
    format!("{line}{}{detail}", error.kind())
}
