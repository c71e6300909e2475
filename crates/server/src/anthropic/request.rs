//! Requests of Anthropic's API.

use std::collections::HashMap;

use forebay_engine::chat::Message;
use forebay_engine::conversation::{ReplyOptions, ToolChoice};
use forebay_engine::{ChatRequest, Engine};
use serde::Deserialize;
use serde_json::{Map, Value, json};

use crate::error::ApiError;
use crate::openai::fields::{Fields, Said, Unchecked, Unsupported, integer, or_default};
use crate::openai::{self, Endpoint, unsupported};

/// The body of a request. Fields that are neither here nor listed as unsupported are ignored, for example `metadata` and
/// `cache_control` (prompts are always cached).
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct Body {
    #[serde(deserialize_with = "or_default")]
    messages: Vec<Spoken>,
    system: Option<Value>,
    #[serde(deserialize_with = "integer")]
    max_tokens: Option<u64>,
    stop_sequences: Option<Vec<String>>,
    temperature: Option<f32>,
    top_p: Option<f32>,
    tools: Option<Vec<Value>>,
    tool_choice: Option<Choice>,
    thinking: Option<Thinking>,
    output_config: Option<OutputConfig>,
    /// The former name of `output_config.format`.
    output_format: Option<Value>,
    context_management: Option<ContextManagement>,
    stream: Option<bool>,
    /// Fields that have the same name in OpenAI's API, `top_k` among them.
    #[serde(skip)]
    from_chat: Map<String, Value>,
}

impl Fields for Body {
    const UNSUPPORTED: &'static [&'static [Unsupported]] = &[UNSUPPORTED, unsupported::ANY];
    const FROM_CHAT: &'static [&'static str] = &unsupported::ANYWHERE;

    fn keep(&mut self, from_chat: Map<String, Value>) {
        self.from_chat = from_chat;
    }
}

const UNSUPPORTED: &[Unsupported] = &[
    Unsupported {
        name: "thread",
        harmless: &[],
        reason: "this server stores no conversations: send all messages",
    },
    Unsupported {
        name: "mcp_servers",
        harmless: &[Said::Empty],
        reason: "the server calls no other servers: send tools instead",
    },
    Unsupported { name: "container", harmless: &[], reason: "the server has no containers" },
    Unsupported {
        name: "compaction",
        harmless: &[],
        reason: "this server does not summarise conversations: ask for a summary in a message",
    },
];

/// The body, if all of its fields are supported.
pub fn supported(body: Unchecked<Body>) -> Result<Body, ApiError> {
    body.supported().map_err(|error| {
        let error = ApiError::from(error);
        // After this detail, Anthropic's libraries continue without threads.
        let details = (error.param.as_deref() == Some("thread")).then(|| {
            Box::new(json!({ "error_code": "thread_unsupported_request", "unsupported": ["thread"] }))
        });
        ApiError { details, ..error }
    })
}

/// A message of the conversation.
#[derive(Debug, Deserialize)]
struct Spoken {
    role: String,
    content: Value,
}

#[derive(Debug, Deserialize)]
struct Choice {
    #[serde(rename = "type")]
    kind: String,
    name: Option<String>,
    disable_parallel_tool_use: Option<bool>,
}

#[derive(Debug, Deserialize)]
struct Thinking {
    #[serde(rename = "type")]
    kind: String,
    #[serde(default, deserialize_with = "integer")]
    budget_tokens: Option<u64>,
    /// Whether clients receive the reasoning.
    display: Option<String>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct OutputConfig {
    effort: Option<String>,
    format: Option<Value>,
    task_budget: Option<Value>,
}

/// Edits that would remove parts of the conversation.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct ContextManagement {
    #[serde(deserialize_with = "or_default")]
    edits: Vec<Value>,
}

/// The names of OpenAI's fields in this API.
const NAMES: [(&str, &str); 3] = [
    ("max_completion_tokens", "max_tokens"),
    ("response_format", "output_config.format"),
    ("stop", "stop_sequences"),
];

/// Converts the field name of an error.
pub fn in_own_words(error: ApiError) -> ApiError {
    error.renamed(&NAMES)
}

impl Body {
    /// Whether the answer is streamed.
    pub fn streams(&self) -> bool {
        self.stream == Some(true)
    }

    /// The options of the answer.
    pub fn options(&self, engine: &Engine) -> Result<ReplyOptions, ApiError> {
        let max_tokens = self.max_tokens.ok_or_else(|| ApiError::invalid("max_tokens", "Field required"))?;
        let mut body = json!({
            "max_completion_tokens": i64::try_from(max_tokens).unwrap_or(i64::MAX),
            "stop": self.stop_sequences.as_ref().filter(|stops| !stops.is_empty()),
            "temperature": self.temperature,
            "top_p": self.top_p,
            "response_format": self.format()?,
            "thinking_budget": self.thinking.as_ref().and_then(|thinking| thinking.budget_tokens),
        });
        if let Value::Object(body) = &mut body {
            body.extend(self.from_chat.clone());
        }
        let body = openai::Body::read(body)?;
        body.options(Endpoint::Chat, engine).map_err(|error| in_own_words(error.into()))
    }

    /// The format of the answer, in the form of OpenAI's API.
    fn format(&self) -> Result<Option<Value>, ApiError> {
        let format = self.output_config.as_ref().and_then(|config| config.format.as_ref());
        let format = format.or(self.output_format.as_ref());
        let Some(format) = format.filter(|format| !format.is_null()) else { return Ok(None) };
        match (format["type"].as_str(), format.get("schema")) {
            (Some("json_schema"), Some(schema @ Value::Object(_))) => {
                Ok(Some(json!({ "type": "json_schema", "json_schema": { "schema": schema } })))
            }
            _ => Err(ApiError::invalid(
                "output_config.format",
                "the format must be a json_schema with its schema",
            )),
        }
    }

    /// The conversation. `think` is the server's own setting for reasoning.
    pub fn chat(self, options: ReplyOptions, think: Option<bool>) -> Result<ChatRequest, ApiError> {
        self.refuse_edits()?;
        let tools = self.tools.iter().flatten().enumerate().map(|(i, tool)| read_tool(i, tool));
        let tools = tools.collect::<Result<Vec<_>, _>>()?;
        let (tool_choice, parallel_tool_calls) = self.tool_choice()?;
        let kwargs = self.kwargs(think)?;
        let mut conversation = Conversation::default();
        if let Some(system) = &self.system {
            let texts = texts(system, "system")?;
            conversation.push_text("system", &texts, "\n");
        }
        for (i, spoken) in self.messages.iter().enumerate() {
            conversation.take(i, spoken)?;
        }
        if conversation.messages.last().is_some_and(|message| message.role == "assistant") {
            let message = "the last message is from the assistant, and the server cannot continue it: end with a message from the user";
            return Err(ApiError::invalid("messages", message));
        }
        let mut request = ChatRequest::new(conversation.messages);
        request.tools = tools;
        request.tool_choice = tool_choice;
        request.parallel_tool_calls = parallel_tool_calls;
        request.kwargs = kwargs;
        request.options = options;
        Ok(request)
    }

    /// Whether clients receive the reasoning, or only empty thinking blocks.
    pub fn shows_thinking(&self) -> Result<bool, ApiError> {
        match self.thinking.as_ref().and_then(|thinking| thinking.display.as_deref()) {
            None | Some("summarized") => Ok(true),
            Some("omitted") => Ok(false),
            Some(other) => {
                let message = format!("it must be summarized or omitted, not {other:?}");
                Err(ApiError::invalid("thinking.display", message))
            }
        }
    }

    /// Refuses edits of the conversation.
    fn refuse_edits(&self) -> Result<(), ApiError> {
        for (i, edit) in self.context_management.iter().flat_map(|management| &management.edits).enumerate() {
            // Keeping all reasoning is allowed: the chat template decides about it in any case.
            if kind(edit) != "clear_thinking_20251015" || edit["keep"] != "all" {
                let message =
                    "the server removes nothing from a conversation: send only what the model is to see";
                return Err(ApiError::invalid(format!("context_management.edits.{i}"), message));
            }
        }
        let budget = self.output_config.as_ref().and_then(|config| config.task_budget.as_ref());
        if budget.is_some_and(|budget| !budget.is_null()) {
            let message = "the server does not tell the model about budgets: use max_tokens";
            return Err(ApiError::invalid("output_config.task_budget", message));
        }
        Ok(())
    }

    fn tool_choice(&self) -> Result<(ToolChoice, bool), ApiError> {
        let Some(choice) = &self.tool_choice else { return Ok((ToolChoice::Auto, true)) };
        let several = choice.disable_parallel_tool_use != Some(true);
        match (choice.kind.as_str(), &choice.name) {
            ("auto", _) => Ok((ToolChoice::Auto, several)),
            ("none", _) => Ok((ToolChoice::None, several)),
            ("any", _) => Ok((ToolChoice::Required, several)),
            ("tool", Some(name)) => Ok((ToolChoice::Named(name.clone()), several)),
            ("tool", None) => Err(ApiError::invalid("tool_choice.name", "Field required")),
            (other, _) => {
                let message = format!("it must be auto, any, tool or none, not {other:?}");
                Err(ApiError::invalid("tool_choice.type", message))
            }
        }
    }

    /// Variables for the chat template.
    fn kwargs(&self, think: Option<bool>) -> Result<Map<String, Value>, ApiError> {
        let mut kwargs = Map::new();
        let think = match self.thinking.as_ref().map(|thinking| thinking.kind.as_str()) {
            // In this API, reasoning is off by default, unless the server's flag sets it.
            None => think.is_none().then_some(false),
            Some("disabled") => Some(false),
            Some("enabled") => Some(true),
            Some("adaptive" | "between_tools") => None,
            Some(other) => {
                let message = format!("it must be enabled, disabled or adaptive, not {other:?}");
                return Err(ApiError::invalid("thinking.type", message));
            }
        };
        if let Some(think) = think {
            // Templates use either name.
            kwargs.insert("enable_thinking".into(), think.into());
            kwargs.insert("thinking".into(), think.into());
        }
        if let Some(effort) = self.output_config.as_ref().and_then(|config| config.effort.clone()) {
            kwargs.insert("reasoning_effort".into(), effort.into());
        }
        if let Some(Value::Object(own)) = self.from_chat.get("chat_template_kwargs") {
            kwargs.extend(own.clone());
        }
        Ok(kwargs)
    }
}

/// A tool in the form of OpenAI's API.
fn read_tool(index: usize, tool: &Value) -> Result<Value, ApiError> {
    let wrong =
        |field: &str, message: &str| Err(ApiError::invalid(format!("tools.{index}.{field}"), message));
    if let Some(kind) = tool.get("type").and_then(Value::as_str).filter(|kind| *kind != "custom") {
        return wrong(
            "type",
            &format!("only tools that the client runs are supported, not tools of type {kind}"),
        );
    }
    let Some(name) = tool.get("name").and_then(Value::as_str).filter(|name| !name.is_empty()) else {
        return wrong("name", "Field required");
    };
    let Some(schema @ Value::Object(_)) = tool.get("input_schema") else {
        return wrong("input_schema", "Field required");
    };
    let mut function = json!({ "name": name });
    if let Some(description) = tool.get("description").filter(|text| text.is_string()) {
        function["description"] = description.clone();
    }
    function["parameters"] = schema.clone();
    Ok(json!({ "type": "function", "function": function }))
}

/// Converts messages to the form that templates expect.
#[derive(Default)]
struct Conversation {
    messages: Vec<Message>,
    /// The names of called tools, by the ids of the calls.
    called: HashMap<String, String>,
}

impl Conversation {
    fn take(&mut self, index: usize, spoken: &Spoken) -> Result<(), ApiError> {
        let place = format!("messages.{index}");
        match spoken.role.as_str() {
            "assistant" => self.take_assistant(&place, &spoken.content),
            role @ ("user" | "system") => self.take_user(&place, role, &spoken.content),
            other => Err(ApiError::invalid(
                format!("{place}.role"),
                format!("the role must be user, assistant or system, not {other:?}"),
            )),
        }
    }

    /// The user's text and the results of tools, in their order.
    fn take_user(&mut self, place: &str, role: &str, content: &Value) -> Result<(), ApiError> {
        let mut said = Vec::new();
        let before = self.messages.len();
        for (place, block) in blocks(content, place)? {
            match kind(&block) {
                "tool_result" => {
                    self.push_text(role, &said, "\n");
                    said.clear();
                    self.push_result(&place, &block)?;
                }
                _ => said.push(text_of(&block, &place)?),
            }
        }
        self.push_text(role, &said, "\n");
        if self.messages.len() == before {
            return Err(ApiError::invalid(
                format!("{place}.content"),
                format!("the message of the {role} is empty"),
            ));
        }
        Ok(())
    }

    fn push_text(&mut self, role: &str, texts: &[String], between: &str) {
        if !texts.is_empty() {
            self.messages.push(Message::new(role, texts.join(between)));
        }
    }

    fn push_result(&mut self, place: &str, block: &Value) -> Result<(), ApiError> {
        let Some(id) = block.get("tool_use_id").and_then(Value::as_str) else {
            return Err(ApiError::invalid(format!("{place}.tool_use_id"), "Field required"));
        };
        let texts = match block.get("content") {
            None | Some(Value::Null) => Vec::new(),
            Some(content) => texts(content, &format!("{place}.content"))?,
        };
        let mut message = Message::new("tool", texts.join("\n"));
        message.extra.insert("tool_call_id".into(), id.into());
        if let Some(name) = self.called.get(id) {
            message.extra.insert("name".into(), name.as_str().into());
        }
        self.messages.push(message);
        Ok(())
    }

    fn take_assistant(&mut self, place: &str, content: &Value) -> Result<(), ApiError> {
        let (mut said, mut thought, mut calls) = (String::new(), String::new(), Vec::new());
        for (place, block) in blocks(content, place)? {
            match kind(&block) {
                "thinking" => {
                    thought.push_str(block.get("thinking").and_then(Value::as_str).unwrap_or_default())
                }
                // Only its author can decrypt it.
                "redacted_thinking" => {}
                "tool_use" => calls.push(self.call(&place, &block)?),
                _ => said.push_str(&text_of(&block, &place)?),
            }
        }
        let mut message = Message::new("assistant", said);
        if !thought.is_empty() {
            message.extra.insert("reasoning_content".into(), thought.into());
        }
        if !calls.is_empty() {
            message.extra.insert("tool_calls".into(), calls.into());
        }
        self.messages.push(message);
        Ok(())
    }

    /// A call in the form of OpenAI's API.
    fn call(&mut self, place: &str, block: &Value) -> Result<Value, ApiError> {
        let field = |name: &str| {
            let text = block.get(name).and_then(Value::as_str).filter(|text| !text.is_empty());
            text.ok_or_else(|| ApiError::invalid(format!("{place}.{name}"), "Field required"))
        };
        let (id, name) = (field("id")?, field("name")?);
        let Some(input @ Value::Object(_)) = block.get("input") else {
            return Err(ApiError::invalid(format!("{place}.input"), "the input of a tool must be an object"));
        };
        self.called.insert(id.to_owned(), name.to_owned());
        Ok(json!({ "id": id, "type": "function", "function": { "name": name, "arguments": input } }))
    }
}

fn kind(block: &Value) -> &str {
    block.get("type").and_then(Value::as_str).unwrap_or_default()
}

/// The blocks of a message, each with its place.
fn blocks(content: &Value, place: &str) -> Result<Vec<(String, Value)>, ApiError> {
    let place = format!("{place}.content");
    match content {
        Value::String(text) => Ok(vec![(place, json!({ "type": "text", "text": text }))]),
        Value::Array(blocks) => {
            Ok(blocks.iter().enumerate().map(|(i, block)| (format!("{place}.{i}"), block.clone())).collect())
        }
        _ => Err(ApiError::invalid(place, "it must be a text or a list of blocks")),
    }
}

/// Content that must be text.
fn texts(content: &Value, place: &str) -> Result<Vec<String>, ApiError> {
    match content {
        Value::String(text) => Ok(vec![text.clone()]),
        Value::Array(blocks) => {
            blocks.iter().enumerate().map(|(i, block)| text_of(block, &format!("{place}.{i}"))).collect()
        }
        _ => Err(ApiError::invalid(place, "it must be a text or a list of blocks")),
    }
}

fn text_of(block: &Value, place: &str) -> Result<String, ApiError> {
    match (kind(block), block.get("text").and_then(Value::as_str)) {
        ("text", Some(text)) => Ok(text.to_owned()),
        ("text", None) => Err(ApiError::invalid(format!("{place}.text"), "Field required")),
        ("", _) => Err(ApiError::invalid(format!("{place}.type"), "Field required")),
        (other, _) => {
            let message = format!("blocks of type {other} are not supported here: the model reads only text");
            Err(ApiError::invalid(place, message))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chat(body: Value) -> Result<ChatRequest, ApiError> {
        let body = openai::read_fields::<Unchecked<Body>>(body).map_err(ApiError::from)?;
        supported(body)?.chat(ReplyOptions::default(), None)
    }

    #[test]
    fn a_conversation_with_tools_becomes_what_templates_know() {
        let request = chat(json!({
            "system": [{ "type": "text", "text": "Be brief.", "cache_control": { "type": "ephemeral" } },
                       { "type": "text", "text": "Be kind." }],
            "messages": [
                { "role": "user", "content": "Weather?" },
                { "role": "assistant", "content": [
                    { "type": "thinking", "thinking": "Hm.", "signature": "x" },
                    { "type": "redacted_thinking", "data": "y" },
                    { "type": "text", "text": "I look." },
                    { "type": "tool_use", "id": "t1", "name": "weather", "input": { "city": "Oslo" } },
                ] },
                { "role": "user", "content": [
                    { "type": "tool_result", "tool_use_id": "t1", "content": [{ "type": "text", "text": "rain" }] },
                    { "type": "text", "text": "And?" },
                ] },
            ],
            "tools": [{ "name": "weather", "description": "d", "input_schema": { "type": "object" } }],
            "tool_choice": { "type": "tool", "name": "weather", "disable_parallel_tool_use": true },
            "thinking": { "type": "enabled", "budget_tokens": 2000 },
            "betas": ["whatever"], "metadata": { "user_id": "me" },
        }))
        .unwrap();
        let messages = serde_json::to_value(&request.messages).unwrap();
        let arguments = json!({ "city": "Oslo" });
        let call = json!({ "id": "t1", "type": "function", "function": { "name": "weather", "arguments": arguments } });
        assert_eq!(
            messages,
            json!([
                { "role": "system", "content": "Be brief.\nBe kind." },
                { "role": "user", "content": "Weather?" },
                { "role": "assistant", "content": "I look.", "reasoning_content": "Hm.", "tool_calls": [call] },
                { "role": "tool", "content": "rain", "tool_call_id": "t1", "name": "weather" },
                { "role": "user", "content": "And?" },
            ])
        );
        let function = json!({ "name": "weather", "description": "d", "parameters": { "type": "object" } });
        assert_eq!(request.tools, [json!({ "type": "function", "function": function })]);
        assert_eq!(request.tool_choice, ToolChoice::Named("weather".into()));
        assert!(!request.parallel_tool_calls);
        assert_eq!(request.kwargs["enable_thinking"], true);
    }

    #[test]
    fn who_does_not_ask_for_reasoning_gets_none_unless_the_server_says_so() {
        let kwargs = |body: Value, think| openai::read_fields::<Body>(body).unwrap().kwargs(think).unwrap();
        assert_eq!(kwargs(json!({}), None)["enable_thinking"], false);
        assert!(kwargs(json!({}), Some(true)).is_empty());
        assert!(kwargs(json!({ "thinking": { "type": "adaptive" } }), None).is_empty());
        assert_eq!(kwargs(json!({ "thinking": { "type": "disabled" } }), Some(true))["thinking"], false);
    }

    #[test]
    fn what_cannot_be_read_is_named() {
        let said = |block: Value| json!({ "messages": [{ "role": "user", "content": [block] }] });
        let ask = |field: &str, value: Value| {
            let mut body = json!({ "messages": [{ "role": "user", "content": "x" }] });
            body[field] = value;
            body
        };
        for (body, param, part) in [
            (said(json!({ "type": "image", "source": {} })), "messages.0.content.0", "image"),
            (said(json!({ "type": "document", "source": {} })), "messages.0.content.0", "document"),
            (said(json!({ "type": "text" })), "messages.0.content.0.text", "required"),
            (
                said(json!({ "type": "tool_result", "tool_use_id": "t", "content": [{ "type": "image" }] })),
                "messages.0.content.0.content.0",
                "image",
            ),
            (
                ask("tools", json!([{ "type": "web_search_20250305", "name": "s" }])),
                "tools.0.type",
                "web_search_20250305",
            ),
            (ask("tools", json!([{ "name": "s" }])), "tools.0.input_schema", "required"),
            (ask("tool_choice", json!({ "type": "maybe" })), "tool_choice.type", "maybe"),
            (ask("thinking", json!({ "type": "deep" })), "thinking.type", "deep"),
            (ask("mcp_servers", json!([{}])), "mcp_servers", "tools"),
            (ask("container", json!("c")), "container", "containers"),
            (ask("compaction", json!({ "type": "summarize" })), "compaction", "summary"),
            (ask("thread", json!({ "type": "create" })), "thread", "send all messages"),
            (
                ask("context_management", json!({ "edits": [{ "type": "clear_tool_uses_20250919" }] })),
                "context_management.edits.0",
                "removes nothing",
            ),
            (ask("output_config", json!({ "task_budget": {} })), "output_config.task_budget", "max_tokens"),
            (ask("grammar", json!("root ::= \"x\"")), "grammar", "schema"),
            (ask("messages", json!([{ "role": "assistant", "content": "x" }])), "messages", "last message"),
            (ask("messages", json!([{ "role": "robot", "content": "x" }])), "messages.0.role", "robot"),
            (ask("messages", json!([{ "role": "user", "content": [] }])), "messages.0.content", "empty"),
            (ask("messages", json!(1)), "messages", "is invalid"),
        ] {
            let error = chat(body.clone()).err().unwrap_or_else(|| panic!("{body} is taken"));
            assert_eq!((error.status.as_u16(), error.param.as_deref()), (400, Some(param)), "{body}");
            assert!(error.message.contains(part), "{body}: {}", error.message);
        }
    }
}
