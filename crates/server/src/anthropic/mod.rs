//! Anthropic's API: `/v1/messages` and `/v1/messages/count_tokens`.

mod answer;
mod request;

use std::sync::Arc;

use axum::Extension;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use forebay_engine::Client;
use forebay_engine::conversation::ReplyOptions;
use serde_json::{Value, json};

use self::answer::Answer;
use self::request::Body;
use crate::app::{App, Loaded};
use crate::body::Json;
use crate::error::ApiError;
use crate::openai::fields::Unchecked;
use crate::sse::{self, Events, Gone};
use crate::turn::Turn;

/// Generates the next message of a conversation.
pub async fn messages(
    State(app): State<Arc<App>>,
    Extension(client): Extension<Client>,
    Json(body): Json<Unchecked<Body>>,
) -> Result<Response, ApiError> {
    let body = request::supported(body)?;
    let (streams, shows_thinking) = (body.streams(), body.shows_thinking()?);
    let read = move |loaded: &Loaded| {
        let options = body.options(&loaded.engine)?;
        body.chat(options, loaded.prompter().think())
    };
    let turn = app.turn(client, read).await.map_err(request::in_own_words)?;
    let answer = Answer::new(&app.model, turn.prompt_tokens, shows_thinking);
    if streams {
        Ok(sse::respond(move |events| stream(events.pinging(), answer, turn)))
    } else {
        whole(answer, turn).await.map(|message| Json(message).into_response())
    }
}

/// Counts the tokens of a conversation.
pub async fn count_tokens(
    State(app): State<Arc<App>>,
    Json(body): Json<Unchecked<Body>>,
) -> Result<Json<Value>, ApiError> {
    let body = request::supported(body)?;
    let read = move |loaded: &Loaded| body.chat(ReplyOptions::default(), loaded.prompter().think());
    let tokens = app.count_tokens(read).await.map_err(request::in_own_words)?;
    Ok(Json(json!({ "input_tokens": tokens })))
}

async fn whole(mut answer: Answer, mut turn: Turn) -> Result<Value, ApiError> {
    while let Some(happened) = turn.next().await {
        answer.take(happened?.1);
    }
    Ok(answer.message())
}

async fn stream(events: Events, mut answer: Answer, mut turn: Turn) -> Result<(), Gone> {
    // This is sent before anything is computed, so that the client knows that its request was accepted.
    events.typed(&answer.start()).await?;
    while let Some(happened) = events.next(&mut turn).await? {
        let told = match happened {
            Ok((_, event)) => answer.take(event),
            Err(error) => vec![error.anthropic()],
        };
        for event in told {
            events.typed(&event).await?;
        }
    }
    Ok(())
}
