//! `/v1/chat/completions`.

use std::sync::Arc;

use axum::Extension;
use axum::extract::State;
use axum::response::Response;
use forebay_engine::internals::generate::sampler::Scored;
use forebay_engine::{Client, ReplyEvent};
use serde_json::{Value, json};

use super::{Prompts, Streamed, respond};
use crate::openai::answer::{Total, finish_reason, tell_measured};
use crate::openai::fields::Unchecked;
use crate::openai::{Body, Endpoint, logprobs};
use crate::serve::app::App;
use crate::serve::body::Json;
use crate::serve::error::ApiError;
use crate::serve::sse::Gone;
use crate::serve::turn::Turn;

/// Answers a chat.
pub async fn chat(
    State(app): State<Arc<App>>,
    Extension(client): Extension<Client>,
    Json(body): Json<Unchecked<Body>>,
) -> Result<Response, ApiError> {
    respond(app, client, Endpoint::Chat, body, stream).await
}

async fn stream(to: Streamed, mut turn: Turn) -> Result<(), Gone> {
    // The number of calls in each answer so far.
    let mut calls = vec![0_usize; turn.count()];
    // This is sent before anything is computed, so that the client knows that its request was accepted.
    for index in 0..turn.count() {
        to.delta(index, json!({ "role": "assistant", "content": null }), None).await?;
    }
    let mut prompts = Prompts::default();
    let empty = |index| to.choice(index, json!({}), None, None);
    let mut total = Total::default();
    while let Some(happened) = to.next(&mut turn, &mut prompts, empty).await? {
        let (index, event) = match happened {
            Ok(happened) => happened,
            Err(error) => return to.fail(&error).await,
        };
        match event {
            ReplyEvent::Start(meter) => {
                prompts.watch(index, meter);
                to.send_progress(&mut prompts, empty).await?;
            }
            ReplyEvent::Progress { .. } => to.send_progress(&mut prompts, empty).await?,
            ReplyEvent::Reasoning(text) => {
                to.delta(index, json!({ "reasoning_content": text }), None).await?;
            }
            ReplyEvent::Content { text, scored } => {
                to.delta(index, json!({ "content": text }), Some(scored)).await?;
            }
            ReplyEvent::Call { id, name } => {
                let call = json!({
                    "index": calls[index], "id": id, "type": "function",
                    "function": { "name": name, "arguments": "" },
                });
                calls[index] += 1;
                to.delta(index, json!({ "tool_calls": [call] }), None).await?;
            }
            ReplyEvent::Arguments(text) => {
                let call = calls[index].saturating_sub(1);
                let call = json!({ "index": call, "function": { "arguments": text } });
                to.delta(index, json!({ "tool_calls": [call] }), None).await?;
            }
            ReplyEvent::End(answer) => {
                total.add(index, calls.len(), &answer.stats);
                let finish = Some(finish_reason(answer.finish_reason));
                let mut chunk = to.chunk(to.choice(index, json!({}), None, finish));
                tell_measured(&answer.stats, &mut chunk);
                to.events.data(&chunk).await?;
            }
        }
    }
    to.finish(&total).await
}

impl Streamed {
    async fn delta(&self, index: usize, delta: Value, scored: Option<Vec<Scored>>) -> Result<(), Gone> {
        self.send(self.choice(index, delta, scored, None)).await
    }

    fn choice(&self, index: usize, delta: Value, scored: Option<Vec<Scored>>, finish: Option<&str>) -> Value {
        let likely = match (scored, self.app.loaded()) {
            (Some(scored), Ok(loaded)) if self.envelope.form.is_scored => {
                logprobs::chat(loaded.engine.tokenizer(), &scored)
            }
            _ => Value::Null,
        };
        json!({ "index": index, "delta": delta, "logprobs": likely, "finish_reason": finish })
    }
}
