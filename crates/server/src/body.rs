//! Bodies of requests: JSON, with limits on size and time.

use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::extract::{FromRequest, Request};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use forebay_engine::Bytes;
use http_body_util::BodyExt;
use serde::Deserialize;
use tokio::time::{Instant, timeout};

use crate::app::App;
use crate::error::{ApiError, json_type};
use crate::memory::{Account, RequestMemory, parsed_bytes};
use crate::openai::read_fields;
use crate::prepare::aside;

/// The time in which a body must arrive.
const PATIENCE: Duration = Duration::from_secs(120);

/// The longest pause between two pieces of a body.
const PAUSE: Duration = Duration::from_secs(20);

/// Larger bodies are parsed on other threads, a few at a time.
const LARGE: usize = 64 << 10;

/// Bytes of a refused request that are received and discarded, and the time for it.
const DISCARDED: u64 = 64 << 20;
const MOMENT: Duration = Duration::from_secs(2);

/// What making a prompt of a body takes: copies of its values, and of its texts in another form, since a character of the request
/// takes four bytes while a template runs, in the message and in what the template has written.
const COPIES: u64 = 2;
const TEXT_COPIES: u64 = 8;

/// A parsed request body.
pub struct Json<T>(pub T);

impl<T: for<'de> Deserialize<'de> + Send + 'static> FromRequest<Arc<App>> for Json<T> {
    type Rejection = ApiError;

    async fn from_request(request: Request, app: &Arc<App>) -> Result<Json<T>, ApiError> {
        let account = Account::current();
        let memory = Arc::clone(&app.loaded()?.memory);
        let bytes = read(request.into_body(), app.limits.body, &account, &memory).await?;
        let parsed = parsed_bytes(&bytes);
        // If a field is wrong, all are parsed again to find out which one.
        account.add_when_free(&memory, 2 * parsed).await?;
        account.set_preparing(COPIES * parsed + TEXT_COPIES * bytes.len() as u64);
        let read = growing(bytes.len());
        let value = if bytes.len() <= LARGE {
            parse(&bytes)
        } else {
            // Other requests are served meanwhile.
            let account = Arc::clone(&account);
            aside(move || account.within(|| parse(&bytes))).await
        };
        account.remove(read + parsed);
        value.map(Json)
    }
}

impl<T: serde::Serialize> IntoResponse for Json<T> {
    fn into_response(self) -> Response {
        match serde_json::to_string(&self.0) {
            Ok(text) => (json_type(), text).into_response(),
            Err(_) => ApiError::internal("the answer cannot be encoded as JSON").into_response(),
        }
    }
}

/// Receives and discards the rest of a body for a moment. If the connection were closed earlier, the client could lose the answer.
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

/// The memory of a growing list of so many bytes, which doubles its capacity.
fn growing(len: usize) -> u64 {
    2 * len as u64
}

/// Reads a body, which holds no more memory than has come of it. Only the client's own slowness counts against it, not that it
/// waits for memory.
async fn read(
    mut body: Body,
    limit: u64,
    account: &Account,
    memory: &Arc<RequestMemory>,
) -> Result<Vec<u8>, ApiError> {
    let too_large = || {
        let message = format!(
            "the body is larger than {}, the limit of this server (ServerOptions::max_body)",
            Bytes(limit)
        );
        ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, "invalid_request_error", message)
    };
    if http_body::Body::size_hint(&body).lower() > limit {
        discard(&mut body).await;
        return Err(too_large());
    }
    let mut left = PATIENCE;
    let mut bytes = Vec::new();
    loop {
        let start = Instant::now();
        let frame = match timeout(left.min(PAUSE), body.frame()).await {
            Ok(None) => return Ok(bytes),
            Ok(Some(Ok(frame))) => frame,
            Ok(Some(Err(_))) => return Err(ApiError::bad_request("the body ended early")),
            Err(_) => {
                let message = "the body did not arrive in time";
                return Err(ApiError::new(StatusCode::REQUEST_TIMEOUT, "invalid_request_error", message));
            }
        };
        left = left.saturating_sub(start.elapsed());
        if let Ok(data) = frame.into_data() {
            if bytes.len() as u64 + data.len() as u64 > limit {
                discard(&mut body).await;
                return Err(too_large());
            }
            if let Err(error) = account.add_when_free(memory, growing(data.len())).await {
                discard(&mut body).await;
                return Err(error);
            }
            bytes.extend_from_slice(&data);
        }
    }
}

fn parse<T: for<'de> Deserialize<'de>>(bytes: &[u8]) -> Result<T, ApiError> {
    let text = std::str::from_utf8(bytes).map_err(|_| ApiError::bad_request("the body is not UTF-8 text"))?;
    let not_json = |error| ApiError::bad_request(format!("the body is not JSON: {error}"));
    match serde_json::from_str(text) {
        Ok(body) => Ok(body),
        // The body is JSON, and one of its fields is wrong.
        Err(error) if error.is_data() => Ok(read_fields(serde_json::from_str(text).map_err(not_json)?)?),
        Err(error) => Err(not_json(error)),
    }
}
