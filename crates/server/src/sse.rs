//! Server-sent events, for streamed answers.

use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::http::{HeaderValue, header};
use axum::response::Response;
use forebay_engine::ReplyEvent;
use http_body::Frame;
use serde_json::Value;
use tokio::sync::mpsc::{Receiver, Sender, channel};
use tokio::time::{sleep, timeout};

use crate::error::ApiError;
use crate::turn::Turn;

/// After this time without an event a comment is sent, because proxies and clients close silent connections.
const KEEP_ALIVE: Duration = Duration::from_secs(5);

/// A client that reads nothing for so long counts as disconnected.
const STALL: Duration = Duration::from_secs(60);

/// Events that may wait for the network.
const BACKLOG: usize = 32;

/// The client has disconnected.
#[derive(Debug)]
pub struct Gone;

/// The index of an answer with its event, or the error that ends the request.
pub type Happening = Result<(usize, ReplyEvent), ApiError>;

/// The sender of events.
pub struct Events {
    sender: Sender<Bytes>,
    /// What is sent to keep the connection alive.
    filler: &'static str,
}

/// A response whose events `write` sends. `write` is dropped when the client disconnects.
pub fn respond<F, W>(write: W) -> Response
where
    W: FnOnce(Events) -> F,
    F: Future<Output = Result<(), Gone>> + Send + 'static,
{
    let (sender, receiver) = channel(BACKLOG);
    let events = Events { sender, filler: ": keep-alive\n\n" };
    tokio::spawn(write(events));
    let mut response = Response::new(Body::new(EventBody(receiver)));
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream; charset=utf-8"));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    // Some proxies buffer responses unless this header forbids it.
    headers.insert("x-accel-buffering", HeaderValue::from_static("no"));
    response
}

impl Events {
    /// Keeps the connection alive with events, as Anthropic's API does.
    pub fn pinging(self) -> Events {
        Events { filler: "event: ping\ndata: {\"type\":\"ping\"}\n\n", ..self }
    }

    /// Sends data without a name, as OpenAI's API does.
    pub async fn data(&self, data: &Value) -> Result<(), Gone> {
        self.send(format!("data: {data}\n\n")).await
    }

    /// Sends data under the name of its type.
    pub async fn typed(&self, data: &Value) -> Result<(), Gone> {
        self.named(data["type"].as_str().unwrap_or("message"), data).await
    }

    /// Sends data under a name.
    pub async fn named(&self, name: &str, data: &Value) -> Result<(), Gone> {
        self.send(format!("event: {name}\ndata: {data}\n\n")).await
    }

    /// Ends the stream, as OpenAI's API does.
    pub async fn done(&self) -> Result<(), Gone> {
        self.send("data: [DONE]\n\n".into()).await
    }

    /// The next event of a turn. The connection is kept alive until it comes.
    pub async fn next(&self, turn: &mut Turn) -> Result<Option<Happening>, Gone> {
        self.next_with(turn, KEEP_ALIVE, Vec::new).await
    }

    /// The same. Until the event comes, `news` is asked for data to send after each `pause`.
    pub async fn next_with(
        &self,
        turn: &mut Turn,
        pause: Duration,
        mut news: impl FnMut() -> Vec<Value>,
    ) -> Result<Option<Happening>, Gone> {
        let mut silent = Duration::ZERO;
        loop {
            tokio::select! {
                biased;
                () = self.sender.closed() => return Err(Gone),
                event = turn.next() => return Ok(event),
                () = sleep(pause) => silent += pause,
            }
            for data in news() {
                self.data(&data).await?;
                silent = Duration::ZERO;
            }
            if silent >= KEEP_ALIVE {
                self.send(self.filler.into()).await?;
                silent = Duration::ZERO;
            }
        }
    }

    async fn send(&self, text: String) -> Result<(), Gone> {
        match timeout(STALL, self.sender.send(text.into())).await {
            Ok(Ok(())) => Ok(()),
            _ => Err(Gone),
        }
    }
}

/// A body that is sent through a channel.
pub(super) struct EventBody(pub Receiver<Bytes>);

impl http_body::Body for EventBody {
    type Data = Bytes;
    type Error = std::convert::Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        self.0.poll_recv(cx).map(|bytes| bytes.map(|bytes| Ok(Frame::data(bytes))))
    }
}
