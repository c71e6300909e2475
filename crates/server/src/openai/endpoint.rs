//! Answers bodies of OpenAI's API over HTTP, whole or streamed.

use std::sync::Arc;
use std::time::Duration;

use axum::response::{IntoResponse, Response};
use forebay_engine::conversation::Draft;
use forebay_engine::{Client, Reply};
use serde_json::Value;

use super::answer::Envelope;
use super::chunks::{Chunks, Wants};
use super::fields::Unchecked;
use super::{Body, Endpoint};
use crate::app::App;
use crate::body::Json;
use crate::error::ApiError;
use crate::sse::{self, Events, Gone};
use crate::turn::Turn;

/// How often the progress of prompts is looked at.
const LOOK: Duration = Duration::from_millis(250);

/// Answers a body.
pub async fn respond(
    app: Arc<App>,
    client: Client,
    endpoint: Endpoint,
    body: Unchecked<Body>,
) -> Result<Response, ApiError> {
    let body = body.supported()?;
    let wants = Wants::of(&body);
    let (turn, form) = app.turn_of_body(client, endpoint, body).await?;
    let envelope = Envelope::new(&app.model, form, wants.stream);
    if wants.stream {
        let chunks = Chunks::new(envelope, wants, &app.loaded()?.engine, turn.count());
        return Ok(sse::respond(move |events| stream(events, chunks, turn)));
    }
    let replies = replies(turn).await?;
    Ok(Json(envelope.measured(&replies, app.loaded()?.engine.tokenizer())).into_response())
}

async fn stream(events: Events, mut chunks: Chunks, mut turn: Turn) -> Result<(), Gone> {
    send(&events, chunks.start()).await?;
    loop {
        let happened = match chunks.has_news() {
            true => events.next_with(&mut turn, LOOK, || chunks.news()).await?,
            false => events.next(&mut turn).await?,
        };
        match happened {
            Some(Ok((index, event))) => send(&events, chunks.take(index, event)).await?,
            Some(Err(error)) => {
                events.data(&error.openai()).await?;
                break;
            }
            None => {
                send(&events, chunks.end()).await?;
                break;
            }
        }
    }
    events.done().await
}

async fn send(events: &Events, chunks: impl IntoIterator<Item = Value>) -> Result<(), Gone> {
    for chunk in chunks {
        events.data(&chunk).await?;
    }
    Ok(())
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
