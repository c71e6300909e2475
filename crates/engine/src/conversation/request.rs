//! Chat requests and their options.

use serde_json::{Map, Value, json};

use crate::chat::Message;
use crate::error::{Error, Result};
use crate::generate::client::Client;
use crate::generate::grammar::Grammar;
use crate::generate::sampler::SamplingOverrides;

/// A conversation, to which the model writes the next message.
///
/// # Examples
/// ```
/// use forebay_engine::ChatRequest;
/// use forebay_engine::chat::Message;
///
/// let request = ChatRequest::new(vec![
///     Message::new("system", "You tell stories in one sentence."),
///     Message::new("user", "Tell me a story about a cat."),
/// ]);
/// let request = request.max_tokens(100).think(false);
/// assert!(request.check().is_ok());
/// ```
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ChatRequest {
    /// The messages so far. Content is text or a list of text parts; call arguments are objects or JSON text.
    pub messages: Vec<Message>,
    /// The tools that the model may call, in OpenAI's format: `{"type": "function", "function": {"name": …}}`.
    pub tools: Vec<Value>,
    /// Whether the model calls tools.
    pub tool_choice: ToolChoice,
    /// Whether the model may call several tools at once. Otherwise the answer ends after the first call.
    pub parallel_tool_calls: bool,
    /// Additional variables for the chat template.
    pub kwargs: Map<String, Value>,
    /// Whether the model reasons first, if its template supports that. The variables `enable_thinking` and `thinking`
    /// in `kwargs` take precedence. `None`: the [prompter's](super::Prompter::with_think) setting, or else the
    /// template's default.
    pub think: Option<bool>,
    /// Options for the answer.
    pub options: ReplyOptions,
}

impl Default for ChatRequest {
    fn default() -> ChatRequest {
        ChatRequest {
            messages: Vec::new(),
            tools: Vec::new(),
            tool_choice: ToolChoice::Auto,
            parallel_tool_calls: true,
            kwargs: Map::new(),
            think: None,
            options: ReplyOptions::default(),
        }
    }
}

impl ChatRequest {
    /// A request with these messages.
    pub fn new(messages: Vec<Message>) -> ChatRequest {
        ChatRequest { messages, ..ChatRequest::default() }
    }

    /// A request with one user message.
    pub fn user(text: impl Into<String>) -> ChatRequest {
        ChatRequest::new(vec![Message::new("user", text)])
    }

    /// Sets the [tools](Self::tools).
    pub fn tools(mut self, tools: Vec<Value>) -> ChatRequest {
        self.tools = tools;
        self
    }

    /// Sets whether the model calls tools.
    pub fn tool_choice(mut self, choice: ToolChoice) -> ChatRequest {
        self.tool_choice = choice;
        self
    }

    /// Sets whether the model [reasons first](Self::think).
    pub fn think(mut self, think: bool) -> ChatRequest {
        self.think = Some(think);
        self
    }

    /// Sets the most tokens of the answer.
    pub fn max_tokens(mut self, most: usize) -> ChatRequest {
        self.options.max_tokens = Some(most);
        self
    }

    /// Sets the form of the answer.
    pub fn format(mut self, format: Format) -> ChatRequest {
        self.options.format = format;
        self
    }

    /// Sets how tokens are sampled.
    pub fn sampling(mut self, sampling: SamplingOverrides) -> ChatRequest {
        self.options.sampling = sampling;
        self
    }

    /// Checks the request before it is rendered.
    ///
    /// # Errors
    /// If there are no messages, or a tool is not a function with a name.
    pub fn check(&self) -> Result<()> {
        if self.messages.is_empty() {
            return Err(Error::field("messages", "there are no messages"));
        }
        for (i, tool) in self.tools.iter().enumerate() {
            if tool.get("type").and_then(Value::as_str).is_some_and(|kind| kind != "function") {
                let message = format!("only functions are supported, not tools of type {}", tool["type"]);
                return Err(Error::field(format!("tools[{i}].type"), message));
            }
            if tool_name(tool).is_none_or(str::is_empty) {
                return Err(Error::field(format!("tools[{i}].function.name"), "a tool has no name"));
            }
        }
        Ok(())
    }
}

/// Whether the model calls tools.
///
/// # Examples
/// ```
/// use forebay_engine::ChatRequest;
/// use forebay_engine::conversation::ToolChoice;
/// use serde_json::json;
///
/// let weather = json!({
///     "type": "function",
///     "function": {
///         "name": "weather",
///         "parameters": { "type": "object", "properties": { "city": { "type": "string" } } },
///     },
/// });
/// let request = ChatRequest::user("Do I need an umbrella in Oslo?")
///     .tools(vec![weather])
///     .tool_choice(ToolChoice::Named("weather".into()));
/// # assert!(request.check().is_ok());
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum ToolChoice {
    /// The model decides.
    #[default]
    Auto,
    /// It calls none.
    None,
    /// It calls at least one.
    Required,
    /// It calls the tool of this name.
    Named(String),
}

impl ToolChoice {
    /// The tools of which one must be called; `None` if none must.
    pub(super) fn required(&self, tools: &[Value]) -> Result<Option<Vec<Value>>> {
        match self {
            ToolChoice::Auto | ToolChoice::None => Ok(None),
            ToolChoice::Required if tools.is_empty() => {
                Err(Error::field("tool_choice", "a call is required, but there are no tools"))
            }
            ToolChoice::Required => Ok(Some(tools.to_vec())),
            ToolChoice::Named(wanted) => {
                let named: Vec<Value> =
                    tools.iter().filter(|tool| tool_name(tool) == Some(wanted)).cloned().collect();
                if named.is_empty() {
                    return Err(Error::field("tool_choice", format!("there is no tool {wanted:?}")));
                }
                Ok(Some(named))
            }
        }
    }
}

/// Options for an answer.
///
/// # Examples
/// ```
/// use forebay_engine::ChatRequest;
///
/// let mut request = ChatRequest::user("Count to ten.");
/// request.options.max_tokens = Some(50);
/// request.options.stop = vec!["seven".into()];
/// ```
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct ReplyOptions {
    /// Who sent the request.
    pub client: Client,
    /// The most tokens of the answer. `None`: until the context is full.
    pub max_tokens: Option<usize>,
    /// The most tokens of reasoning. After that, the model must answer.
    pub reasoning: Option<usize>,
    /// Sampling parameters. Those that are not set come from the model's file.
    pub sampling: SamplingOverrides,
    /// Strings that end the answer and are not part of it.
    pub stop: Vec<String>,
    /// See [`Request::ignore_end`](crate::Request::ignore_end).
    pub ignore_end: bool,
    /// The form of the answer.
    pub format: Format,
    /// See [`Request::logprobs`](crate::Request::logprobs).
    pub logprobs: Option<usize>,
    /// The prefix of call ids; the call's number in its answer follows. `None`: ids are random.
    pub call_ids: Option<String>,
}

/// The form of an answer.
///
/// # Examples
/// ```
/// use forebay_engine::conversation::Format;
/// use forebay_engine::{ChatRequest, Driver, DriverOptions};
/// use serde_json::json;
///
/// # let model = std::path::Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/tales-qwen3moe-Q4_K_M.gguf"));
/// # let engine = forebay_engine::Engine::open(model, &forebay_engine::Options::new().threads(1))?;
/// # let driver = Driver::start(&engine, DriverOptions::new(1))?;
/// let animal = json!({ "enum": ["cat", "dog"] });
/// let request = ChatRequest::user("Name an animal.").format(Format::JsonSchema(animal));
/// let reply = driver.chat(request)?.whole()?;
///
/// assert!(["\"cat\"", "\"dog\""].contains(&&*reply.content));
/// # Ok::<(), forebay_engine::Error>(())
/// ```
#[derive(Clone, Debug, Default)]
pub enum Format {
    /// Any text.
    #[default]
    Text,
    /// Any JSON object.
    JsonObject,
    /// JSON that satisfies this schema.
    JsonSchema(Value),
    /// Text that matches this grammar, from the first token on. It has no reasoning and no calls.
    Grammar(Grammar),
}

impl Format {
    /// The grammar of the whole answer, if there is one.
    pub(super) fn grammar(&self) -> Option<&Grammar> {
        if let Format::Grammar(grammar) = self { Some(grammar) } else { None }
    }

    /// The schema of the answer, if there is one.
    pub(super) fn schema(&self) -> Option<Value> {
        match self {
            Format::Text | Format::Grammar(_) => None,
            Format::JsonObject => Some(json!({ "type": "object" })),
            Format::JsonSchema(schema) => Some(schema.clone()),
        }
    }
}

fn tool_name(tool: &Value) -> Option<&str> {
    tool.get("function").and_then(|function| function.get("name")).and_then(Value::as_str)
}
