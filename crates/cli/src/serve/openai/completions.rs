//! `/v1/completions`: continuations of texts.

use std::sync::Arc;

use axum::Extension;
use axum::extract::State;
use axum::response::Response;
use forebay_engine::{Client, ReplyEvent};
use serde_json::Value;

use super::{Prompts, Streamed, respond};
use crate::openai::answer::{Total, tell_measured, text_choice};
use crate::openai::fields::Unchecked;
use crate::openai::{Body, Endpoint, logprobs};
use crate::serve::app::App;
use crate::serve::body::Json;
use crate::serve::error::ApiError;
use crate::serve::sse::Gone;
use crate::serve::turn::Turn;

/// Continues one text or several.
pub async fn completions(
    State(app): State<Arc<App>>,
    Extension(client): Extension<Client>,
    Json(body): Json<Unchecked<Body>>,
) -> Result<Response, ApiError> {
    respond(app, client, Endpoint::Completions, body, stream).await
}

async fn stream(to: Streamed, mut turn: Turn) -> Result<(), Gone> {
    let form = &to.envelope.form;
    // The position of each answer's next token, in characters.
    let mut offsets = vec![0; turn.count()];
    for index in 0..turn.count() {
        let echoed = form.echoed(index);
        if !echoed.is_empty() {
            to.send(text_choice(index, echoed, Value::Null, None)).await?;
        }
    }
    let mut prompts = Prompts::default();
    let empty = |index| text_choice(index, "", Value::Null, None);
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
            ReplyEvent::Content { text, scored } => {
                let likely = match to.app.loaded() {
                    Ok(loaded) if form.is_scored => {
                        logprobs::completions(loaded.engine.tokenizer(), &scored, &mut offsets[index])
                    }
                    _ => Value::Null,
                };
                to.send(text_choice(index, &text, likely, None)).await?;
            }
            ReplyEvent::End(answer) => {
                total.add(index, form.each, &answer.stats);
                let mut chunk = to.chunk(text_choice(index, "", Value::Null, Some(answer.finish_reason)));
                tell_measured(&answer.stats, &mut chunk);
                to.events.data(&chunk).await?;
            }
            // A completion has only content.
            ReplyEvent::Reasoning(_) | ReplyEvent::Call { .. } | ReplyEvent::Arguments(_) => {}
        }
    }
    to.finish(&total).await
}
