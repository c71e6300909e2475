//! `/v1/chat/completions`.

use std::sync::Arc;

use axum::Extension;
use axum::extract::State;
use axum::response::Response;
use forebay_engine::{Client, FinishReason, ReplyEvent};
use serde_json::{Value, json};

use super::answer::finish_reason;
use super::chunks::Chunks;
use super::endpoint::respond;
use super::fields::Unchecked;
use super::{Body, Endpoint, logprobs};
use crate::app::App;
use crate::body::Json;
use crate::error::ApiError;

/// Answers a chat.
pub async fn chat(
    State(app): State<Arc<App>>,
    Extension(client): Extension<Client>,
    Json(body): Json<Unchecked<Body>>,
) -> Result<Response, ApiError> {
    respond(app, client, Endpoint::Chat, body).await
}

/// The first choice of a streamed answer.
pub fn first(index: usize) -> Value {
    choice(index, json!({ "role": "assistant", "content": null }), Value::Null, None)
}

/// A choice of a streamed answer.
pub fn choice(index: usize, delta: Value, likely: Value, finish: Option<FinishReason>) -> Value {
    json!({ "index": index, "delta": delta, "logprobs": likely, "finish_reason": finish.map(finish_reason) })
}

impl Chunks {
    /// The choice for an event, if it has one.
    pub(super) fn chat_choice(&mut self, index: usize, event: ReplyEvent) -> Option<Value> {
        let mut likely = Value::Null;
        let delta = match event {
            ReplyEvent::Reasoning(text) => json!({ "reasoning_content": text }),
            ReplyEvent::Content { text, scored } => {
                if let Some(engine) = &self.scorer {
                    likely = logprobs::chat(engine.tokenizer(), &scored);
                }
                json!({ "content": text })
            }
            ReplyEvent::Call { id, name } => {
                let call = json!({
                    "index": self.counts[index], "id": id, "type": "function",
                    "function": { "name": name, "arguments": "" },
                });
                self.counts[index] += 1;
                json!({ "tool_calls": [call] })
            }
            ReplyEvent::Arguments(text) => {
                let call = self.counts[index].saturating_sub(1);
                json!({ "tool_calls": [{ "index": call, "function": { "arguments": text } }] })
            }
            ReplyEvent::Start(_) | ReplyEvent::Progress { .. } | ReplyEvent::End(_) => return None,
        };
        Some(choice(index, delta, likely, None))
    }
}
