//! `/v1/responses`: a conversation's next items. Nothing is kept: whoever asks again sends all that was said.

mod input;
mod output;

use std::sync::Arc;

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::sync::oneshot;

use self::output::Output;
use super::{answering, chat};
use crate::openai::{self, Endpoint};
use crate::serve::app::{App, Loaded, now};
use crate::serve::body::Json;
use crate::serve::error::ApiError;
use crate::serve::sse::{self, Events, Gone};
use crate::serve::turn::{Answering, ChatRequest, ToolChoice, Turn, TurnEvent};

/// Asks for how likely tokens were.
const LOGPROBS: &str = "message.output_text.logprobs";

/// Asks for reasoning in a form that can be sent back.
const ENCRYPTED: &str = "reasoning.encrypted_content";

/// The body of a request. Fields that are not here are ignored; `store` is among them, as clients say it without being
/// asked to.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct Body {
    input: Option<Value>,
    instructions: Option<String>,
    tools: Option<Vec<Value>>,
    tool_choice: Option<Value>,
    parallel_tool_calls: Option<bool>,
    text: Option<TextConfig>,
    reasoning: Option<Reasoning>,
    max_output_tokens: Option<i64>,
    temperature: Option<f64>,
    top_p: Option<f64>,
    top_logprobs: Option<usize>,
    include: Option<Vec<String>>,
    stream: Option<bool>,
    chat_template_kwargs: Option<Value>,
    metadata: Option<Value>,
    prompt_cache_key: Option<String>,
    safety_identifier: Option<String>,
    user: Option<String>,
    // Known, and not supported:
    previous_response_id: Option<String>,
    conversation: Option<Value>,
    background: Option<bool>,
    prompt: Option<Value>,
    truncation: Option<String>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct TextConfig {
    format: Option<Value>,
    verbosity: Option<String>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Reasoning {
    effort: Option<String>,
    summary: Option<String>,
}

/// What this API calls the fields of a chat.
const NAMES: [(&str, &str); 4] = [
    ("max_completion_tokens", "max_output_tokens"),
    ("response_format", "text.format"),
    ("messages", "input"),
    ("reasoning_effort", "reasoning.effort"),
];

/// Answers a conversation.
pub async fn responses(State(app): State<Arc<App>>, Json(body): Json<Body>) -> Result<Response, ApiError> {
    body.refuse_what_is_kept()?;
    let streams = body.stream == Some(true);
    let carries = body.includes(ENCRYPTED);
    let scorer = if body.scores() { Some(app.loaded()?.engine.clone()) } else { None };
    let (sender, skeleton) = oneshot::channel();
    let model = app.model.clone();
    let read = move |loaded: &Loaded| {
        let (answering, chat_body) = body.answering(&loaded.engine)?;
        let (tools, tool_choice) = body.tools()?;
        let request = ChatRequest {
            messages: input::messages(body.instructions.as_deref(), body.input.as_ref())?,
            tools,
            tool_choice,
            parallel_tool_calls: body.parallel_tool_calls.unwrap_or(true),
            kwargs: chat_body.kwargs(),
            answering,
        };
        // Where nobody wants it any more the client has left.
        let _ = sender.send(body.skeleton(&model));
        Ok(request)
    };
    let turn = app.turn(read).await.map_err(|error| error.renamed(&NAMES))?;
    let skeleton = skeleton.await.map_err(|_| ApiError::internal("the request could not be read"))?;
    let output = Output::new(skeleton, carries, scorer);
    if streams {
        Ok(sse::respond(move |events| stream(events, output, turn)))
    } else {
        whole(output, turn).await.map(|response| Json(response).into_response())
    }
}

async fn whole(mut output: Output, mut turn: Turn) -> Result<Value, ApiError> {
    while let Some((_, event)) = turn.next().await {
        match event {
            TurnEvent::Failed(error) => return Err(error),
            event => drop(output.take(event)),
        }
    }
    Ok(output.response())
}

async fn stream(events: Events, mut output: Output, mut turn: Turn) -> Result<(), Gone> {
    // Before anything is computed: whoever waits knows that the request is being answered.
    for event in output.start() {
        events.typed(&event).await?;
    }
    while let Some((_, event)) = events.next(&mut turn).await? {
        for event in output.take(event) {
            events.typed(&event).await?;
        }
    }
    Ok(())
}

impl Body {
    /// What a server that keeps nothing cannot do.
    fn refuse_what_is_kept(&self) -> Result<(), ApiError> {
        let given = |value: &Option<Value>| value.as_ref().is_some_and(|value| !value.is_null());
        let kept = "this server keeps no conversations: send all items as input";
        let unsupported = [
            ("previous_response_id", self.previous_response_id.is_some(), kept),
            ("conversation", given(&self.conversation), kept),
            ("background", self.background == Some(true), "answers are not made in the background"),
            ("prompt", given(&self.prompt), "there are no stored prompts: send input"),
            (
                "truncation",
                self.truncation.as_ref().is_some_and(|way| way != "disabled"),
                "what is too long is refused, never cut",
            ),
        ];
        match unsupported.into_iter().find(|(_, given, _)| *given) {
            Some((param, _, reason)) => {
                Err(ApiError::invalid(param, format!("{param} is not supported: {reason}")))
            }
            None => Ok(()),
        }
    }

    fn includes(&self, what: &str) -> bool {
        self.include.iter().flatten().any(|included| included == what)
    }

    fn scores(&self) -> bool {
        self.includes(LOGPROBS) || self.top_logprobs.is_some_and(|n| n > 0)
    }

    /// How the answer is made, and the body of a chat that says so.
    fn answering(&self, engine: &forebay_engine::Engine) -> Result<(Answering, openai::Body), ApiError> {
        let scores = self.scores();
        let body = openai::Body::read(json!({
            "max_completion_tokens": self.max_output_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "logprobs": scores,
            "top_logprobs": self.top_logprobs.filter(|_| scores),
            "response_format": self.format(),
            "chat_template_kwargs": self.chat_template_kwargs,
            "reasoning_effort": self.reasoning.as_ref().and_then(|reasoning| reasoning.effort.as_deref()),
        }));
        let body = body.map_err(|refusal| ApiError::from(refusal).renamed(&NAMES))?;
        let answering = answering(&body, Endpoint::Chat, engine).map_err(|error| error.renamed(&NAMES))?;
        Ok((answering, body))
    }

    /// What the answer must be, as a chat says it.
    fn format(&self) -> Option<Value> {
        let format = self.text.as_ref()?.format.as_ref()?;
        match format.get("type").and_then(Value::as_str) {
            Some("json_schema") => Some(json!({ "type": "json_schema", "json_schema": format })),
            _ => Some(format.clone()),
        }
    }

    /// The tools in a chat's shape, and whether they are called.
    fn tools(&self) -> Result<(Vec<Value>, ToolChoice), ApiError> {
        let tools = self.tools.iter().flatten().enumerate().map(|(i, tool)| read_tool(i, tool));
        let mut tools = tools.collect::<Result<Vec<_>, _>>()?;
        let choice = self.tool_choice.as_ref();
        if choice.and_then(|choice| choice.get("type")).is_some_and(|kind| kind == "allowed_tools") {
            let choice = choice.unwrap_or(&Value::Null);
            let name = |tool: &Value| tool.get("name").and_then(Value::as_str).map(str::to_owned);
            let allowed: Vec<_> = choice["tools"].as_array().into_iter().flatten().filter_map(name).collect();
            tools.retain(|tool| name(&tool["function"]).is_some_and(|name| allowed.contains(&name)));
            return Ok((tools, chat::tool_choice(choice.get("mode"))?));
        }
        Ok((tools, chat::tool_choice(choice)?))
    }

    /// The response before there is anything in it.
    fn skeleton(self, model: &str) -> Value {
        let text = self.text.unwrap_or_default();
        let reasoning = self.reasoning.unwrap_or_default();
        json!({
            "id": crate::serve::id("resp_"),
            "object": "response",
            "created_at": now(),
            "status": "in_progress",
            "background": false,
            "error": null,
            "incomplete_details": null,
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "max_tool_calls": null,
            "metadata": self.metadata.unwrap_or_else(|| json!({})),
            "model": model,
            "output": [],
            "parallel_tool_calls": self.parallel_tool_calls.unwrap_or(true),
            "previous_response_id": null,
            "prompt_cache_key": self.prompt_cache_key,
            "reasoning": { "effort": reasoning.effort, "summary": reasoning.summary },
            "safety_identifier": self.safety_identifier,
            "service_tier": "default",
            "store": false,
            "temperature": self.temperature,
            "text": {
                "format": text.format.unwrap_or_else(|| json!({ "type": "text" })),
                "verbosity": text.verbosity.unwrap_or_else(|| "medium".into()),
            },
            "tool_choice": self.tool_choice.unwrap_or_else(|| "auto".into()),
            "tools": self.tools.unwrap_or_default(),
            "top_logprobs": self.top_logprobs.unwrap_or(0),
            "top_p": self.top_p,
            "truncation": "disabled",
            "usage": null,
            "user": self.user,
        })
    }
}

/// A tool in a chat's shape.
fn read_tool(index: usize, tool: &Value) -> Result<Value, ApiError> {
    let kind = tool.get("type").and_then(Value::as_str).unwrap_or("function");
    if kind != "function" {
        let message = format!("only functions are supported, not tools of type {kind}");
        return Err(ApiError::invalid(format!("tools[{index}].type"), message));
    }
    let Some(name) = tool.get("name").and_then(Value::as_str).filter(|name| !name.is_empty()) else {
        return Err(ApiError::invalid(format!("tools[{index}].name"), "a tool has no name"));
    };
    let mut function = json!({ "name": name });
    for field in ["description", "parameters"] {
        if let Some(value) = tool.get(field).filter(|value| !value.is_null()) {
            function[field] = value.clone();
        }
    }
    Ok(json!({ "type": "function", "function": function }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn body(value: Value) -> Body {
        openai::read_fields(value).unwrap()
    }

    #[test]
    fn tools_and_choices_are_those_of_a_chat() {
        let tool = |name: &str| json!({ "type": "function", "name": name, "parameters": {}, "strict": true });
        let tools = json!([tool("a"), tool("b")]);
        let read = |choice: Value| body(json!({ "tools": tools, "tool_choice": choice })).tools().unwrap();
        let (all, choice) = read(json!("required"));
        assert_eq!(all[0], json!({ "type": "function", "function": { "name": "a", "parameters": {} } }));
        assert_eq!((all.len(), choice), (2, ToolChoice::Required));
        assert_eq!(read(json!({ "type": "function", "name": "b" })).1, ToolChoice::Named("b".into()));
        let allowed = json!({ "type": "allowed_tools", "mode": "auto", "tools": [{ "type": "function", "name": "b" }] });
        let (some, choice) = read(allowed);
        assert_eq!(
            (some[0]["function"]["name"].as_str(), some.len(), choice),
            (Some("b"), 1, ToolChoice::Auto)
        );
        for (tool, param) in
            [(json!({ "type": "web_search" }), "tools[0].type"), (json!({}), "tools[0].name")]
        {
            let error = body(json!({ "tools": [tool] })).tools().unwrap_err();
            assert_eq!(error.param.as_deref(), Some(param));
        }
    }

    #[test]
    fn what_a_server_without_memory_cannot_do_is_refused_by_name() {
        for (field, value) in [
            ("previous_response_id", json!("resp_1")),
            ("conversation", json!("conv_1")),
            ("background", json!(true)),
            ("prompt", json!({ "id": "p" })),
            ("truncation", json!("auto")),
        ] {
            let error = body(json!({ field: value })).refuse_what_is_kept().unwrap_err();
            assert_eq!((error.status.as_u16(), error.param.as_deref()), (400, Some(field)));
        }
        let usual =
            json!({ "store": true, "background": false, "truncation": "disabled", "conversation": null });
        assert!(body(usual).refuse_what_is_kept().is_ok());
    }
}
