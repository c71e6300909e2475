//! `/v1/completions`: continuations of texts.

use std::sync::Arc;

use axum::Extension;
use axum::extract::State;
use axum::response::Response;
use forebay_engine::{Client, FinishReason, ReplyEvent};
use serde_json::{Value, json};

use super::answer::{Form, finish_reason};
use super::chunks::Chunks;
use super::endpoint::respond;
use super::fields::Unchecked;
use super::{Body, Endpoint, logprobs};
use crate::app::App;
use crate::body::Json;
use crate::error::ApiError;

/// Continues one text or several.
pub async fn completions(
    State(app): State<Arc<App>>,
    Extension(client): Extension<Client>,
    Json(body): Json<Unchecked<Body>>,
) -> Result<Response, ApiError> {
    respond(app, client, Endpoint::Completions, body).await
}

/// The first choice of a streamed answer, if the prompt is part of it.
pub fn first(index: usize, form: &Form) -> Option<Value> {
    let echoed = form.echoed(index);
    (!echoed.is_empty()).then(|| choice(index, echoed, Value::Null, None))
}

/// A choice.
pub fn choice(index: usize, text: &str, likely: Value, finish: Option<FinishReason>) -> Value {
    json!({ "index": index, "text": text, "logprobs": likely, "finish_reason": finish.map(finish_reason) })
}

impl Chunks {
    /// The choice for an event. A completion has only content.
    pub(super) fn text_choice(&mut self, index: usize, event: ReplyEvent) -> Option<Value> {
        let ReplyEvent::Content { text, scored } = event else { return None };
        let likely = match &self.scorer {
            Some(engine) => logprobs::completions(engine.tokenizer(), &scored, &mut self.counts[index]),
            None => Value::Null,
        };
        Some(choice(index, &text, likely, None))
    }
}
