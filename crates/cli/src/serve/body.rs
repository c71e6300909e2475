//! Bodies of requests: JSON, no larger and no slower than allowed.

use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::extract::{FromRequest, Request};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use forebay_engine::Bytes;
use http_body_util::BodyExt;
use serde::Deserialize;
use tokio::sync::{Semaphore, SemaphorePermit};
use tokio::time::{Instant, timeout, timeout_at};

use super::app::App;
use super::error::{ApiError, json_type};
use crate::openai::read_fields;

/// A body may take so long to arrive.
const PATIENCE: Duration = Duration::from_secs(120);

/// Between two pieces of it no more than this.
const PAUSE: Duration = Duration::from_secs(20);

/// Bodies above this are read and parsed a few at a time, since what they take in memory is nobody's plan.
const LARGE: usize = 256 << 10;
static LARGE_BODIES: Semaphore = Semaphore::const_new(4);

/// Bytes of a refused request that are taken, and how long that may last.
const DISCARDED: u64 = 64 << 20;
const MOMENT: Duration = Duration::from_secs(2);

/// A request's body, read.
pub struct Json<T>(pub T);

impl<T: for<'de> Deserialize<'de> + Send + 'static> FromRequest<Arc<App>> for Json<T> {
    type Rejection = ApiError;

    async fn from_request(request: Request, app: &Arc<App>) -> Result<Json<T>, ApiError> {
        let read = read(request.into_body(), app.limits.body).await?;
        if read.bytes.len() <= LARGE {
            return parse(&read.bytes).map(Json);
        }
        // What takes a while keeps nobody else from being listened to.
        let task = tokio::task::spawn_blocking(move || parse(&read.bytes));
        task.await.unwrap_or_else(|_| Err(ApiError::internal("the body could not be read"))).map(Json)
    }
}

impl<T: serde::Serialize> IntoResponse for Json<T> {
    fn into_response(self) -> Response {
        match serde_json::to_string(&self.0) {
            Ok(text) => (json_type(), text).into_response(),
            Err(_) => ApiError::internal("the answer cannot be written").into_response(),
        }
    }
}

/// Takes what a client still sends and forgets it, for a moment: a connection that is closed before may lose the answer.
pub async fn discard(body: &mut Body) {
    let all = async {
        let mut bytes = 0;
        while let Some(Ok(frame)) = body.frame().await {
            bytes += frame.data_ref().map_or(0, |data| data.len() as u64);
            if bytes > DISCARDED {
                return;
            }
        }
    };
    let _ = timeout(MOMENT, all).await;
}

/// A body.
struct Read {
    bytes: Vec<u8>,
    /// Held by large ones.
    turn: Option<SemaphorePermit<'static>>,
}

async fn read(mut body: Body, limit: u64) -> Result<Read, ApiError> {
    let too_large = || {
        let message = format!("the body has more than {}, which is what this server takes", Bytes(limit));
        ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, "invalid_request_error", message)
    };
    if http_body::Body::size_hint(&body).lower() > limit {
        discard(&mut body).await;
        return Err(too_large());
    }
    let end = Instant::now() + PATIENCE;
    let mut read = Read { bytes: Vec::new(), turn: None };
    loop {
        let next = async {
            if read.bytes.len() > LARGE && read.turn.is_none() {
                read.turn = LARGE_BODIES.acquire().await.ok();
            }
            body.frame().await
        };
        let frame = match timeout_at(end.min(Instant::now() + PAUSE), next).await {
            Ok(None) => return Ok(read),
            Ok(Some(Ok(frame))) => frame,
            Ok(Some(Err(_))) => return Err(ApiError::bad_request("the body ended early")),
            Err(_) => {
                let message = "the body took too long to arrive";
                return Err(ApiError::new(StatusCode::REQUEST_TIMEOUT, "invalid_request_error", message));
            }
        };
        if let Ok(data) = frame.into_data() {
            if read.bytes.len() as u64 + data.len() as u64 > limit {
                discard(&mut body).await;
                return Err(too_large());
            }
            read.bytes.extend_from_slice(&data);
        }
    }
}

fn parse<T: for<'de> Deserialize<'de>>(bytes: &[u8]) -> Result<T, ApiError> {
    let text = std::str::from_utf8(bytes).map_err(|_| ApiError::bad_request("the body is not UTF-8 text"))?;
    let not_json = |error| ApiError::bad_request(format!("the body is not JSON: {error}"));
    match serde_json::from_str(text) {
        Ok(body) => Ok(body),
        // JSON it is, and a field of it is wrong.
        Err(error) if error.is_data() => Ok(read_fields(serde_json::from_str(text).map_err(not_json)?)?),
        Err(error) => Err(not_json(error)),
    }
}
