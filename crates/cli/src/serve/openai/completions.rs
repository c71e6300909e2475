//! `/v1/completions`: texts continued as they are.

use std::sync::Arc;

use axum::Extension;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use forebay_engine::Client;
use forebay_engine::generate::sampler::Scored;
use serde_json::{Value, json};

use super::chat::Wants;
use super::{Envelope, Total, about_schema, finish_reason, logprobs};
use crate::openai::Body;
use crate::openai::fields::Unchecked;
use crate::serve::app::{App, now};
use crate::serve::body::Json;
use crate::serve::error::ApiError;
use crate::serve::prepare::Continuation;
use crate::serve::sse::{self, Events, Gone};
use crate::serve::turn::{Finish, Turn, TurnEvent};

/// Continues one text or several.
pub async fn completions(
    State(app): State<Arc<App>>,
    Extension(client): Extension<Client>,
    Json(body): Json<Unchecked<Body>>,
) -> Result<Response, ApiError> {
    let body = body.supported()?;
    let about_schema = about_schema(body.json_schema.is_some());
    let wants = Wants::of(&body);
    let echo = body.echo == Some(true);
    let continuation = app.continuation(client, body, echo).await.map_err(about_schema)?;
    let Continuation { turn, prompts, each, scored } = continuation;
    let envelope = Envelope {
        id: crate::serve::id("cmpl-"),
        object: "text_completion",
        created: now(),
        model: app.model.clone(),
    };
    let writer = Writer { app, envelope, wants, scored, each, prompts };
    if writer.wants.stream {
        Ok(sse::respond(move |events| writer.stream(events, turn)))
    } else {
        writer.whole(turn).await.map(|answer| Json(answer).into_response())
    }
}

struct Writer {
    app: Arc<App>,
    envelope: Envelope,
    wants: Wants,
    scored: bool,
    /// Answers to each text.
    each: usize,
    /// The texts, where they are to be part of the answers.
    prompts: Option<Vec<String>>,
}

/// One of the answers.
#[derive(Default)]
struct Draft {
    text: String,
    scored: Vec<Scored>,
    pending: Vec<Scored>,
    /// Where the text of the next token begins.
    offset: usize,
    finish: Option<Finish>,
}

impl Writer {
    async fn whole(self, mut turn: Turn) -> Result<Value, ApiError> {
        let mut drafts: Vec<Draft> = (0..turn.count()).map(|_| Draft::default()).collect();
        let mut total = Total::default();
        for (index, draft) in drafts.iter_mut().enumerate() {
            draft.text.push_str(self.echoed(index));
        }
        while let Some((index, event)) = turn.next().await {
            let draft = &mut drafts[index];
            match event {
                TurnEvent::Scored(scored) => draft.pending.push(scored),
                TurnEvent::Content(text) => {
                    draft.scored.append(&mut draft.pending);
                    draft.text.push_str(&text);
                }
                TurnEvent::End(end) => {
                    draft.finish = Some(end.finish);
                    total.add(index, self.each, &end);
                }
                TurnEvent::Failed(error) => return Err(error),
                TurnEvent::Progress { .. }
                | TurnEvent::Reasoning(_)
                | TurnEvent::Call { .. }
                | TurnEvent::Arguments(_) => {}
            }
        }
        let choices = drafts.iter_mut().enumerate().map(|(index, draft)| {
            let scored = std::mem::take(&mut draft.scored);
            let likely = self.logprobs(&scored, &mut draft.offset);
            choice(index, &draft.text, likely, draft.finish)
        });
        let mut answer = self.envelope.with(choices.collect());
        answer["usage"] = total.usage();
        total.extend(&mut answer);
        Ok(answer)
    }

    async fn stream(self, events: Events, mut turn: Turn) -> Result<(), Gone> {
        let mut drafts: Vec<Draft> = (0..turn.count()).map(|_| Draft::default()).collect();
        let mut total = Total::default();
        for index in 0..drafts.len() {
            let echoed = self.echoed(index);
            if !echoed.is_empty() {
                events.data(&self.chunk(choice(index, echoed, Value::Null, None))).await?;
            }
        }
        while let Some((index, event)) = events.next(&mut turn).await? {
            let draft = &mut drafts[index];
            match event {
                TurnEvent::Progress { done, total } => {
                    if self.wants.progress {
                        let mut chunk = self.chunk(choice(index, "", Value::Null, None));
                        chunk["prompt_progress"] = json!({ "processed": done, "total": total });
                        events.data(&chunk).await?;
                    }
                }
                TurnEvent::Scored(scored) => draft.pending.push(scored),
                TurnEvent::Content(text) => {
                    let scored = std::mem::take(&mut draft.pending);
                    let likely = self.logprobs(&scored, &mut draft.offset);
                    events.data(&self.chunk(choice(index, &text, likely, None))).await?;
                }
                TurnEvent::End(end) => {
                    total.add(index, self.each, &end);
                    let mut chunk = self.chunk(choice(index, "", Value::Null, Some(end.finish)));
                    let mut own = Total::default();
                    own.add(0, 1, &end);
                    own.extend(&mut chunk);
                    events.data(&chunk).await?;
                }
                TurnEvent::Failed(error) => {
                    events.data(&error.openai()).await?;
                    return events.done().await;
                }
                TurnEvent::Reasoning(_) | TurnEvent::Call { .. } | TurnEvent::Arguments(_) => {}
            }
        }
        if self.wants.usage {
            let mut chunk = self.envelope.with(json!([]));
            chunk["usage"] = total.usage();
            total.extend(&mut chunk);
            events.data(&chunk).await?;
        }
        events.done().await
    }

    fn echoed(&self, index: usize) -> &str {
        self.prompts.as_ref().map_or("", |prompts| &prompts[index / self.each])
    }

    fn logprobs(&self, scored: &[Scored], offset: &mut usize) -> Value {
        match self.app.loaded() {
            Ok(loaded) if self.scored => logprobs::completions(loaded.engine.tokenizer(), scored, offset),
            _ => Value::Null,
        }
    }

    fn chunk(&self, choice: Value) -> Value {
        let mut chunk = self.envelope.with(json!([choice]));
        if self.wants.usage {
            chunk["usage"] = Value::Null;
        }
        chunk
    }
}

fn choice(index: usize, text: &str, likely: Value, finish: Option<Finish>) -> Value {
    json!({ "index": index, "text": text, "logprobs": likely, "finish_reason": finish.map(finish_reason) })
}
