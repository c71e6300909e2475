//! Addresses about the server itself, and about tokens.

use std::sync::Arc;

use axum::extract::State;
use axum::http::header;
use axum::response::{IntoResponse, Response};
use forebay_engine::chat::{ChatTemplate, Message};
use forebay_engine::conversation::Prompt;
use forebay_engine::tokenizer::{Bos, EncodeOptions};
use forebay_engine::{ChatRequest, TokenId};
use serde::Deserialize;
use serde_json::{Map, Value, json};

use crate::app::{App, Loaded};
use crate::body::Json;
use crate::error::{ApiError, MODEL_LOADING};
use crate::memory::Account;
use crate::openai::drop_volatile_lines;
use crate::openai::fields::{Fields, Unchecked, Unsupported, integers, or_default};

/// Reports that the process is alive, and its state. The page uses this before it has a key.
pub async fn health(State(app): State<Arc<App>>) -> Json<Value> {
    let mut health = json!({ "status": "ok", "needs_key": !app.keys.is_empty() });
    health["state"] = match app.unready() {
        None => json!("ready"),
        Some(_) if app.is_draining() => json!("leaving"),
        Some(error) if error.code == Some(MODEL_LOADING) => {
            health["loaded"] = json!(app.loaded_share());
            json!("loading")
        }
        Some(_) => json!("failing"),
    };
    Json(health)
}

/// Reports whether the server can answer requests.
pub async fn ready(State(app): State<Arc<App>>) -> Result<Json<Value>, ApiError> {
    app.unready().map_or_else(|| Ok(Json(json!({ "status": "ready" }))), Err)
}

/// Metrics for Prometheus.
pub async fn metrics(State(app): State<Arc<App>>) -> Response {
    let engine = app.loaded().ok().map(|loaded| loaded.engine.clone());
    let text = app.meters.prometheus(engine.as_ref());
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], (app.words)(&text)).into_response()
}

/// Describes the model, the limits and the memory.
pub async fn props(State(app): State<Arc<App>>) -> Result<Json<Value>, ApiError> {
    let loaded = app.loaded()?;
    let engine = &loaded.engine;
    let plan = engine.plan();
    Ok(Json(json!({
        "model": app.model,
        "build": concat!("forebay ", env!("CARGO_PKG_VERSION")),
        "n_ctx": engine.context(),
        "context_reserved": plan.reserved,
        "vocabulary": engine.vocab_size(),
        "total_slots": app.limits.parallel,
        "queue": app.limits.queue,
        "max_tokens": app.limits.max_tokens,
        "max_body_bytes": app.limits.body,
        "chat_template": loaded.template().map(ChatTemplate::source),
        "modalities": { "vision": false, "audio": false },
        "memory": {
            "budget": (plan.budget < u64::MAX).then_some(plan.budget),
            "planned": plan.total(),
            "expert_slots": engine.slot_bytes(),
            "experts": plan.experts,
            "streams": plan.streams(),
        },
        "device_memory": plan.device.as_ref().map(|device| json!({
            "budget": device.budget,
            "planned": device.total(),
            "weights": device.dense + device.slot_bytes,
            "expert_slots": device.slot_bytes,
            "scratch": device.scratch,
            "context": device.kv,
        })),
        "backend": engine.backend_name(),
        "threads": engine.threads(),
    })))
}

/// Limits of a text to tokenise: so many bytes for each token of the context, or this many bytes if that is more. This is more than a
/// prompt can have, because clients use the count to shorten a text.
const LONG_TOKEN: usize = 16;
const MOST_TOKENIZED: usize = 1 << 20;

/// Bytes of memory for each token in the answer.
const TOLD: u64 = 100;
const TOLD_WITH_PIECE: u64 = 800;

/// A text or a conversation to tokenise.
#[derive(Default, Deserialize)]
#[serde(default)]
pub struct Text {
    #[serde(alias = "prompt")]
    content: Option<String>,
    messages: Option<Vec<Message>>,
    #[serde(deserialize_with = "or_default")]
    tools: Vec<Value>,
    #[serde(deserialize_with = "or_default")]
    chat_template_kwargs: Map<String, Value>,
    /// Whether the beginning-of-sequence token is added.
    #[serde(alias = "add_special_tokens", deserialize_with = "or_default")]
    add_special: bool,
    /// Whether the text of a control token becomes that token.
    parse_special: Option<bool>,
    #[serde(deserialize_with = "or_default")]
    with_pieces: bool,
}

impl Fields for Text {
    const UNSUPPORTED: &'static [&'static [Unsupported]] = &[&[Unsupported {
        name: "chat_template",
        harmless: &[],
        reason: "the server has one template: set it with Prompter::with_template",
    }]];
}

impl Text {
    /// The prompt of a conversation.
    fn conversation(&mut self, loaded: &Loaded, mut messages: Vec<Message>) -> Result<Prompt, ApiError> {
        loaded.check_template()?;
        drop_volatile_lines(&mut messages)?;
        let mut request = ChatRequest::new(messages).tools(std::mem::take(&mut self.tools));
        request.kwargs = std::mem::take(&mut self.chat_template_kwargs);
        Ok(loaded.prompter().prompt(&request)?)
    }
}

/// Tokenises a text or a conversation.
pub async fn tokenize(
    State(app): State<Arc<App>>,
    Json(text): Json<Unchecked<Text>>,
) -> Result<Json<Value>, ApiError> {
    let mut text = text.supported()?;
    app.prepare(move |_, loaded| {
        let engine = &loaded.engine;
        let tokens = match (&text.content, text.messages.take()) {
            (Some(content), _) => {
                let most = (engine.context() * LONG_TOKEN).max(MOST_TOKENIZED);
                if content.len() > most {
                    let message =
                        format!("the text has {} bytes, but at most {most} are supported", content.len());
                    return Err(ApiError::invalid("content", message));
                }
                let _memory = engine.hold_for_encoding(content)?;
                let bos = if text.add_special { Bos::AsFileSays } else { Bos::Never };
                let options = EncodeOptions { special: text.parse_special.unwrap_or(true), bos };
                engine.tokenizer().encode(content, options)?
            }
            (None, Some(messages)) => text.conversation(loaded, messages)?.tokens,
            (None, None) => {
                return Err(ApiError::invalid(
                    "content",
                    "the request has no text: send content or messages",
                ));
            }
        };
        let each = if text.with_pieces { TOLD_WITH_PIECE } else { TOLD };
        Account::current().add(&loaded.memory, tokens.len() as u64 * each)?;
        let mut answer = json!({ "count": tokens.len(), "max_model_len": engine.context() });
        answer["tokens"] = if text.with_pieces {
            let piece = |id: &TokenId| {
                let bytes = engine.tokenizer().token_bytes(*id);
                // A token that is only a part of a character is not valid UTF-8.
                let piece = std::str::from_utf8(bytes).map_or_else(|_| json!(bytes), |text| json!(text));
                json!({ "id": id, "piece": piece })
            };
            tokens.iter().map(piece).collect()
        } else {
            json!(tokens)
        };
        Ok(Json(answer))
    })
    .await
}

/// Tokens to convert to text.
#[derive(Default, Deserialize)]
#[serde(default)]
pub struct Tokens {
    #[serde(deserialize_with = "integers")]
    tokens: Vec<u32>,
}

/// Converts tokens to text.
pub async fn detokenize(
    State(app): State<Arc<App>>,
    Json(asked): Json<Tokens>,
) -> Result<Json<Value>, ApiError> {
    app.prepare(move |_, loaded| {
        let engine = &loaded.engine;
        if let Some(wrong) = asked.tokens.iter().find(|token| **token as usize >= engine.vocab_size()) {
            return Err(ApiError::invalid("tokens", format!("{wrong} is not a token of this model")));
        }
        let tokens: Vec<_> = asked.tokens.into_iter().map(TokenId).collect();
        let bytes: usize = tokens.iter().map(|token| engine.tokenizer().token_bytes(*token).len()).sum();
        // The answer contains the text twice, and encoding copies both.
        Account::current().add(&loaded.memory, 5 * bytes as u64)?;
        let text = engine.tokenizer().decode(&tokens, true);
        Ok(Json(json!({ "content": text, "prompt": text })))
    })
    .await
}

/// Renders a conversation with the chat template.
pub async fn apply_template(
    State(app): State<Arc<App>>,
    Json(text): Json<Unchecked<Text>>,
) -> Result<Json<Value>, ApiError> {
    let mut text = text.supported()?;
    app.prepare(move |_, loaded| {
        let messages = text.messages.take().filter(|messages| !messages.is_empty());
        let messages = messages
            .ok_or_else(|| ApiError::invalid("messages", "the field messages is missing or empty"))?;
        let prompt = text.conversation(loaded, messages)?;
        Account::current().add(&loaded.memory, 3 * prompt.text.len() as u64)?;
        Ok(Json(json!({ "prompt": prompt.text })))
    })
    .await
}
