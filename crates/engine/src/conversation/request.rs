//! What is asked, and how it is to be answered.

use serde_json::{Map, Value, json};

use crate::chat::Message;
use crate::error::{Error, Result};
use crate::generate::client::Client;
use crate::generate::grammar::Grammar;
use crate::generate::sampler::SamplingOverrides;

/// A conversation whose next message is asked for.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ChatRequest {
    /// What was said so far. The content of a message is text or a list of parts that are text; the arguments of its calls
    /// are objects or JSON text.
    pub messages: Vec<Message>,
    /// The tools that the model is told of, in OpenAI's shape: `{"type": "function", "function": {"name": …}}`.
    pub tools: Vec<Value>,
    /// Whether it calls them.
    pub tool_choice: ToolChoice,
    /// Whether it may call several at once. If not, the answer ends after the first call.
    pub parallel_tool_calls: bool,
    /// Further variables of the chat template.
    pub kwargs: Map<String, Value>,
    /// Whether the model reasons first, where its template can say that; overruled by `enable_thinking` and `thinking` among the
    /// variables. `None`: as the [prompter](super::Prompter::with_think) or else the template has it.
    pub think: Option<bool>,
    /// How the answer is made.
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
    /// Asks for the answer to the last of these messages.
    pub fn new(messages: Vec<Message>) -> ChatRequest {
        ChatRequest { messages, ..ChatRequest::default() }
    }

    /// Asks for the answer to one text.
    pub fn user(text: impl Into<String>) -> ChatRequest {
        ChatRequest::new(vec![Message::new("user", text)])
    }

    /// Tells the model of these [tools](Self::tools).
    pub fn tools(mut self, tools: Vec<Value>) -> ChatRequest {
        self.tools = tools;
        self
    }

    /// Whether tools are called.
    pub fn tool_choice(mut self, choice: ToolChoice) -> ChatRequest {
        self.tool_choice = choice;
        self
    }

    /// Whether the model [reasons first](Self::think).
    pub fn think(mut self, think: bool) -> ChatRequest {
        self.think = Some(think);
        self
    }

    /// The most tokens of the answer.
    pub fn max_tokens(mut self, most: usize) -> ChatRequest {
        self.options.max_tokens = Some(most);
        self
    }

    /// What the answer must be.
    pub fn format(mut self, format: Format) -> ChatRequest {
        self.options.format = format;
        self
    }

    /// How tokens are chosen.
    pub fn sampling(mut self, sampling: SamplingOverrides) -> ChatRequest {
        self.options.sampling = sampling;
        self
    }

    /// Finds what is wrong with a conversation before it is rendered.
    ///
    /// # Errors
    /// If there are no messages, or a tool is no function with a name.
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

/// Whether tools are called.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum ToolChoice {
    /// The model decides.
    #[default]
    Auto,
    /// None are.
    None,
    /// At least one is.
    Required,
    /// The one of this name is.
    Named(String),
}

impl ToolChoice {
    /// Those of the tools that one has to be called of, if one has to be.
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

/// How an answer is made, to a conversation or to a text.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct ReplyOptions {
    /// Who asks.
    pub client: Client,
    /// The most tokens of the answer; without it, until the context is full.
    pub max_tokens: Option<usize>,
    /// The most tokens of reasoning: then the model is made to answer.
    pub reasoning: Option<usize>,
    /// How tokens are chosen, where the model's file is not to say.
    pub sampling: SamplingOverrides,
    /// Texts that end the answer and are not part of it.
    pub stop: Vec<String>,
    /// See [`Request::ignore_end`](crate::Request::ignore_end).
    pub ignore_end: bool,
    /// What the answer must be.
    pub format: Format,
    /// See [`Request::logprobs`](crate::Request::logprobs).
    pub logprobs: Option<usize>,
    /// What the ids of calls begin with; the number of the call in its answer follows. Without it, ids are random.
    pub call_ids: Option<String>,
}

/// What an answer must be.
#[derive(Clone, Debug, Default)]
pub enum Format {
    /// Anything.
    #[default]
    Text,
    /// Any JSON object.
    JsonObject,
    /// JSON that this schema describes.
    JsonSchema(Value),
    /// A text of this grammar, from the first token on: nothing in it is reasoning or a call.
    Grammar(Grammar),
}

impl Format {
    /// The grammar of the whole answer, where one is given.
    pub(super) fn grammar(&self) -> Option<&Grammar> {
        if let Format::Grammar(grammar) = self { Some(grammar) } else { None }
    }

    /// The schema of the answer, where one describes it.
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
