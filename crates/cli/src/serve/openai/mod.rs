//! OpenAI's API.

pub mod chat;
pub mod completions;
pub mod models;
pub mod responses;

use std::sync::Arc;
use std::time::Duration;

use axum::response::{IntoResponse, Response};
use forebay_engine::conversation::Draft;
use forebay_engine::{Client, PromptMeter, PromptProgress, Reply};
use serde_json::{Value, json};

use super::app::{App, now};
use super::body::Json;
use super::error::ApiError;
use super::sse::{self, Events, Gone, Happening};
use super::turn::Turn;
use crate::openai::answer::{Envelope, Total};
use crate::openai::fields::Unchecked;
use crate::openai::{Body, Endpoint};

/// Answers a body, whole or streamed.
async fn respond<F, S>(
    app: Arc<App>,
    client: Client,
    endpoint: Endpoint,
    body: Unchecked<Body>,
    stream: S,
) -> Result<Response, ApiError>
where
    F: Future<Output = Result<(), Gone>> + Send + 'static,
    S: FnOnce(Streamed, Turn) -> F + Send + 'static,
{
    let body = body.supported()?;
    let wants = Wants::of(&body);
    let (turn, form) = app.turn_of_body(client, endpoint, body).await?;
    let prefix = if endpoint == Endpoint::Chat { "chatcmpl-" } else { "cmpl-" };
    let (id, model, is_stream) = (crate::serve::id(prefix), app.model.clone(), wants.stream);
    let envelope = Envelope { id, created: now(), model, form, is_stream };
    if is_stream {
        return Ok(sse::respond(move |events| stream(Streamed { app, envelope, wants, events }, turn)));
    }
    whole(&app, &envelope, turn).await.map(|answer| Json(answer).into_response())
}

/// How the client wants the answer.
struct Wants {
    stream: bool,
    usage: bool,
    progress: bool,
}

impl Wants {
    fn of(body: &Body) -> Wants {
        Wants {
            stream: body.stream == Some(true),
            usage: body.stream_options.as_ref().is_some_and(|options| options.include_usage == Some(true)),
            progress: body.return_progress == Some(true),
        }
    }
}

/// Sends an answer when it is complete.
async fn whole(app: &App, envelope: &Envelope, turn: Turn) -> Result<Value, ApiError> {
    let replies = replies(turn).await?;
    let mut total = Total::default();
    for (index, reply) in replies.iter().enumerate() {
        total.add(index, envelope.form.each, &reply.answer.stats);
    }
    let mut answer = envelope.whole(&replies, app.loaded()?.engine.tokenizer());
    total.tell_measured(&mut answer);
    Ok(answer)
}

/// All replies, in order.
async fn replies(mut turn: Turn) -> Result<Vec<Reply>, ApiError> {
    let mut drafts: Vec<Draft> = (0..turn.count()).map(|_| Draft::default()).collect();
    let mut replies: Vec<Option<Reply>> = drafts.iter().map(|_| None).collect();
    while let Some(happened) = turn.next().await {
        let (index, event) = happened?;
        if let Some(reply) = drafts[index].take(event) {
            replies[index] = Some(reply);
        }
    }
    Ok(replies.into_iter().flatten().collect())
}

/// How often the progress of prompts is looked at.
const LOOK: Duration = Duration::from_millis(250);

/// The prompts of a turn that are being processed: the index of the answer, the meter, and the tokens that were reported last.
#[derive(Default)]
struct Prompts(Vec<(usize, PromptMeter, Option<u64>)>);

impl Prompts {
    fn watch(&mut self, index: usize, meter: PromptMeter) {
        self.0.push((index, meter, None));
    }

    /// The prompts that have advanced since the last call. Complete ones are reported for the last time.
    fn news(&mut self) -> Vec<(usize, PromptProgress)> {
        let mut news = Vec::new();
        self.0.retain_mut(|(index, meter, told)| {
            let progress = meter.read();
            let done = Some(progress.done.floor() as u64);
            // A prompt that was displaced and starts again is reported when it is as far as before.
            if done > *told {
                *told = done;
                news.push((*index, progress));
            }
            progress.done < progress.total as f64
        });
        news
    }
}

/// A streamed answer.
struct Streamed {
    app: Arc<App>,
    envelope: Envelope,
    wants: Wants,
    events: Events,
}

impl Streamed {
    /// Sends a chunk of an answer.
    async fn send(&self, choice: Value) -> Result<(), Gone> {
        self.events.data(&self.chunk(choice)).await
    }

    /// A chunk of an answer.
    fn chunk(&self, choice: Value) -> Value {
        let mut chunk = self.envelope.with(json!([choice]));
        if self.wants.usage {
            // With `include_usage`, every chunk has the field; only the last one has a value.
            chunk["usage"] = Value::Null;
        }
        chunk
    }

    /// The next event of the turn. Until it comes, the client gets the progress of its prompts, if it wants that. `choice` is an
    /// empty choice for the answer with an index.
    async fn next(
        &self,
        turn: &mut Turn,
        prompts: &mut Prompts,
        choice: impl Fn(usize) -> Value,
    ) -> Result<Option<Happening>, Gone> {
        if !self.wants.progress || prompts.0.is_empty() {
            return self.events.next(turn).await;
        }
        self.events.next_with(turn, LOOK, || self.progress(prompts, &choice)).await
    }

    /// Sends the progress of the prompts now, if the client wants it.
    async fn send_progress(
        &self,
        prompts: &mut Prompts,
        choice: impl Fn(usize) -> Value,
    ) -> Result<(), Gone> {
        if self.wants.progress {
            for chunk in self.progress(prompts, &choice) {
                self.events.data(&chunk).await?;
            }
        }
        Ok(())
    }

    fn progress(&self, prompts: &mut Prompts, choice: &impl Fn(usize) -> Value) -> Vec<Value> {
        let chunk = |(index, progress): (usize, PromptProgress)| {
            let mut chunk = self.chunk(choice(index));
            chunk["prompt_progress"] = json!({
                "processed": progress.done.floor() as u64,
                "total": progress.total,
                "seconds_left": progress.time_left().map(|left| left.as_secs_f64()),
            });
            chunk
        };
        prompts.news().into_iter().map(chunk).collect()
    }

    /// Ends the stream with an error.
    async fn fail(&self, error: &ApiError) -> Result<(), Gone> {
        self.events.data(&error.openai()).await?;
        self.events.done().await
    }

    /// Ends the stream.
    async fn finish(&self, total: &Total) -> Result<(), Gone> {
        if self.wants.usage {
            let mut chunk = self.envelope.with(json!([]));
            total.tell_usage(&mut chunk);
            total.tell_measured(&mut chunk);
            self.events.data(&chunk).await?;
        }
        self.events.done().await
    }
}
