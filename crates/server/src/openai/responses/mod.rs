//! `/v1/responses`: the next items of a conversation. The server stores nothing, so clients send the whole conversation.

mod input;
mod output;
mod tools;

use std::sync::Arc;

use axum::Extension;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use forebay_engine::conversation::ReplyOptions;
use forebay_engine::{ChatRequest, Client};
use serde::Deserialize;
use serde_json::{Map, Value, json};
use tokio::sync::oneshot;

use self::output::Output;
use self::tools::Tools;
use crate::app::{App, Loaded, now};
use crate::body::Json;
use crate::error::ApiError;
use crate::openai::fields::{Fields, Said, Unchecked, Unsupported, integer};
use crate::openai::{self, Endpoint, unsupported};
use crate::sse::{self, Events, Gone};
use crate::turn::Turn;

/// The value of `include` that requests logprobs.
const LOGPROBS: &str = "message.output_text.logprobs";

/// The value of `include` that requests reasoning in a form that clients can send back.
const ENCRYPTED: &str = "reasoning.encrypted_content";

/// The body of a request. Fields that are neither here nor listed as unsupported are ignored, for example `store`, which clients
/// send by default.
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
    #[serde(deserialize_with = "integer")]
    max_output_tokens: Option<i64>,
    temperature: Option<f64>,
    top_p: Option<f64>,
    #[serde(deserialize_with = "integer")]
    top_logprobs: Option<usize>,
    include: Option<Vec<String>>,
    stream: Option<bool>,
    metadata: Option<Value>,
    prompt_cache_key: Option<String>,
    prompt_cache_options: Option<PromptCacheOptions>,
    safety_identifier: Option<String>,
    user: Option<String>,
    /// Fields of chats with the same name.
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

/// Fields that need stored conversations, and other unsupported fields.
const UNSUPPORTED: &[Unsupported] = &[
    Unsupported { name: "previous_response_id", harmless: &[], reason: KEEPS_NOTHING },
    Unsupported { name: "conversation", harmless: &[], reason: KEEPS_NOTHING },
    Unsupported {
        name: "background",
        harmless: &[Said::Bool(false)],
        reason: "the server does not answer in the background",
    },
    Unsupported { name: "prompt", harmless: &[], reason: "the server stores no prompts: send input" },
    Unsupported {
        name: "truncation",
        harmless: &[Said::Text("disabled")],
        reason: "a prompt that is too long is refused, never truncated",
    },
    Unsupported {
        name: "context_management",
        harmless: &[Said::Empty],
        reason: "the server removes nothing from a conversation: send only the items that the model is to see",
    },
    Unsupported { name: "moderation", harmless: &[], reason: "the server does not moderate answers" },
];

const KEEPS_NOTHING: &str = "this server stores no conversations: send all items as input";

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
    context: Option<String>,
    mode: Option<String>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct PromptCacheOptions {
    prewarm: Option<bool>,
}

/// The names of a chat's fields in this API.
const NAMES: [(&str, &str); 4] = [
    ("max_completion_tokens", "max_output_tokens"),
    ("response_format", "text.format"),
    ("messages", "input"),
    ("reasoning_effort", "reasoning.effort"),
];

/// Generates the next items of a conversation.
pub async fn responses(
    State(app): State<Arc<App>>,
    Extension(client): Extension<Client>,
    Json(body): Json<Unchecked<Body>>,
) -> Result<Response, ApiError> {
    let body = body.supported()?;
    body.refuse_unknown_ways()?;
    let streams = body.stream == Some(true);
    let carries = body.includes(ENCRYPTED);
    let scorer = if body.scores() { Some(app.loaded()?.engine.clone()) } else { None };
    let (sender, told) = oneshot::channel();
    let model = app.model.clone();
    let read = move |loaded: &Loaded| {
        let (options, chat_body) = body.options(&loaded.engine)?;
        let mut tools = Tools::read(body.tools.as_deref().unwrap_or_default())?;
        let mut request =
            ChatRequest::new(input::messages(body.instructions.as_deref(), body.input.as_ref())?);
        request.tool_choice = tools.choose(body.tool_choice.as_ref())?;
        request.tools = tools.functions;
        request.parallel_tool_calls = body.parallel_tool_calls.unwrap_or(true);
        request.kwargs = chat_body.kwargs();
        request.options = options;
        // The receiver is gone only if the client has disconnected.
        let _ = sender.send((body.skeleton(&model), tools.names));
        Ok(request)
    };
    let turn = app.turn(client, read).await.map_err(|error| error.renamed(&NAMES))?;
    let (skeleton, names) = told.await.map_err(|_| ApiError::internal("the request could not be read"))?;
    let output = Output::new(skeleton, names, carries, scorer);
    if streams {
        Ok(sse::respond(move |events| stream(events, output, turn)))
    } else {
        whole(output, turn).await.map(|response| Json(response).into_response())
    }
}

async fn whole(mut output: Output, mut turn: Turn) -> Result<Value, ApiError> {
    while let Some(happened) = turn.next().await {
        output.take(happened?.1);
    }
    Ok(output.response())
}

async fn stream(events: Events, mut output: Output, mut turn: Turn) -> Result<(), Gone> {
    // This is sent before anything is computed, so that the client knows that its request was accepted.
    for event in output.start() {
        events.typed(&event).await?;
    }
    while let Some(happened) = events.next(&mut turn).await? {
        let told = match happened {
            Ok((_, event)) => output.take(event),
            Err(error) => output.fail(&error),
        };
        for event in told {
            events.typed(&event).await?;
        }
    }
    Ok(())
}

impl Body {
    /// Refuses unsupported values of supported fields.
    fn refuse_unknown_ways(&self) -> Result<(), ApiError> {
        let is_other =
            |value: &Option<String>, usual: &str| value.as_ref().is_some_and(|value| value != usual);
        let unsupported = [
            (
                "reasoning.context",
                self.reasoning.as_ref().is_some_and(|reasoning| is_other(&reasoning.context, "auto")),
                "the chat template decides which reasoning the model sees again",
            ),
            (
                "reasoning.mode",
                self.reasoning.as_ref().is_some_and(|reasoning| is_other(&reasoning.mode, "standard")),
                "the only mode is standard",
            ),
            (
                "prompt_cache_options.prewarm",
                self.prompt_cache_options.as_ref().is_some_and(|options| options.prewarm == Some(true)),
                "the server answers every request",
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

    /// The options of the answer, and the equivalent body of a chat.
    fn options(&self, engine: &forebay_engine::Engine) -> Result<(ReplyOptions, openai::Body), ApiError> {
        let scores = self.scores();
        let mut body = json!({
            "max_completion_tokens": self.max_output_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "logprobs": scores,
            "top_logprobs": self.top_logprobs.filter(|_| scores),
            "response_format": self.format(),
            "reasoning_effort": self.reasoning.as_ref().and_then(|reasoning| reasoning.effort.as_deref()),
        });
        if let Value::Object(body) = &mut body {
            body.extend(self.from_chat.clone());
        }
        let body = openai::Body::read(body);
        let body = body.map_err(|error| ApiError::from(error).renamed(&NAMES))?;
        let options = body.options(Endpoint::Chat, engine);
        let options = options.map_err(|error| ApiError::from(error).renamed(&NAMES))?;
        Ok((options, body))
    }

    /// The format of the answer, in the form of a chat.
    fn format(&self) -> Option<Value> {
        let format = self.text.as_ref()?.format.as_ref()?;
        match format.get("type").and_then(Value::as_str) {
            Some("json_schema") => Some(json!({ "type": "json_schema", "json_schema": format })),
            _ => Some(format.clone()),
        }
    }

    /// The response without items.
    fn skeleton(self, model: &str) -> Value {
        let text = self.text.unwrap_or_default();
        let reasoning = self.reasoning.unwrap_or_default();
        json!({
            "id": crate::app::id("resp_"),
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

#[cfg(test)]
mod tests {
    use super::*;

    fn read(value: Value) -> Result<Body, ApiError> {
        let body = openai::read_fields::<Unchecked<Body>>(value)?.supported()?;
        body.refuse_unknown_ways().map(|()| body)
    }

    #[test]
    fn what_a_server_without_memory_cannot_do_is_refused_by_name() {
        for (field, value, param) in [
            ("previous_response_id", json!("resp_1"), "previous_response_id"),
            ("conversation", json!("conv_1"), "conversation"),
            ("background", json!(true), "background"),
            ("prompt", json!({ "id": "p" }), "prompt"),
            ("truncation", json!("auto"), "truncation"),
            ("context_management", json!([{ "type": "compaction" }]), "context_management"),
            ("moderation", json!({ "model": "m" }), "moderation"),
            ("grammar", json!("root ::= x"), "grammar"),
            ("reasoning", json!({ "context": "all_turns" }), "reasoning.context"),
            ("reasoning", json!({ "mode": "pro" }), "reasoning.mode"),
            ("prompt_cache_options", json!({ "prewarm": true }), "prompt_cache_options.prewarm"),
        ] {
            let error = read(json!({ field: value })).unwrap_err();
            assert_eq!((error.status.as_u16(), error.param.as_deref()), (400, Some(param)));
        }
        let usual = json!({
            "store": true, "background": false, "truncation": "disabled", "conversation": null,
            "reasoning": { "context": "auto", "summary": "auto" }, "prompt_cache_options": { "ttl": "30m" },
            "client_metadata": { "x": "y" }, "max_output_tokens": 10.0, "seed": 1, "stop": null,
        });
        let body = read(usual).unwrap();
        assert_eq!(body.max_output_tokens, Some(10));
        assert_eq!(Value::Object(body.from_chat), json!({ "seed": 1 }));
    }
}
