//! A server for HTTP requests that Python has received.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use forebay_engine::{Cancel, Error, PrefixOptions, Prompter, Result};
use forebay_server::{Body, Bytes, Caller, Running, ServerOptions, http};
use http_body::{Frame, SizeHint};
use http_body_util::BodyExt;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList, PyTuple};
use tokio::runtime::Runtime;
use tokio::sync::mpsc::{Receiver, Sender, channel, error::TryRecvError, error::TrySendError};
use tokio::task::AbortHandle;

use crate::errors::{check_process, exception, failure, in_arguments};
use crate::loading::Size;
use crate::stream::{Messenger, Waker};
use crate::waiting::wait;

/// Pieces of a request or a response that may wait for the other side.
const WAITING: usize = 16;

/// The arguments of `Model.asgi`, in a dictionary.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub struct ServerArguments {
    name: String,
    queue: usize,
    max_body: Size,
    max_tokens: Option<usize>,
    max_reasoning: Option<usize>,
    timeout: Option<f64>,
    keys: Vec<String>,
    origins: Vec<String>,
}

/// What a server answers with.
pub struct Means {
    pub prompter: Prompter,
    /// Answers at once.
    pub parallel: usize,
    pub prefix_cache: bool,
    pub messenger: Messenger,
}

/// A server: it answers requests, but has no connections.
#[pyclass(frozen, module = "forebay._native")]
pub struct Server(Arc<Serving>);

/// The server itself, which its model ends.
pub struct Serving {
    /// The process that started the server. A fork of it has none of the threads that answer.
    process: u32,
    messenger: Messenger,
    /// `None` after the server was closed.
    open: Mutex<Option<Open>>,
}

struct Open {
    server: forebay_server::Server,
    runtime: Runtime,
    running: Running,
}

impl Server {
    /// Starts a server.
    ///
    /// # Errors
    /// If an argument has a value that is not possible; the error names it. If a thread cannot be started.
    pub fn start(arguments: ServerArguments, means: Means) -> Result<(Server, Arc<Serving>)> {
        let max_body = arguments.max_body.bytes().map_err(|error| Error::about("max_body", error))?;
        let timeout = arguments.timeout.map(Duration::try_from_secs_f64).transpose();
        let timeout = timeout.map_err(|error| Error::field("timeout", error.to_string()))?;
        let options = ServerOptions::new()
            .parallel(means.parallel)
            .queue(arguments.queue)
            .max_body(max_body)
            .max_tokens(arguments.max_tokens)
            .max_reasoning(arguments.max_reasoning)
            .timeout(timeout)
            .keys(arguments.keys)
            .origins(arguments.origins)
            .words(in_arguments);
        let server = forebay_server::Server::new(arguments.name, options)?;
        let runtime = forebay_server::runtime()
            .map_err(|error| Error::Backend(format!("cannot start the server's threads: {error}")))?;
        let engine = means.prompter.engine();
        let prefixes = means.prefix_cache.then(|| PrefixOptions::new(engine, None));
        let running = server.start(means.prompter, prefixes)?;
        let open = Mutex::new(Some(Open { server, runtime, running }));
        let serving = Arc::new(Serving { process: std::process::id(), messenger: means.messenger, open });
        Ok((Server(Arc::clone(&serving)), serving))
    }
}

impl Serving {
    fn lock(&self) -> MutexGuard<'_, Option<Open>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends all answers, and gives the memory back.
    pub fn close(&self) {
        let Some(Open { server, runtime, running }) = self.lock().take() else { return };
        server.drain();
        server.abandon();
        running.driver.leave();
        running.driver.join();
        runtime.shutdown_background();
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        if self.process == std::process::id() {
            self.close();
        } else {
            // A fork's handles refer to threads that it does not have.
            std::mem::forget(self.lock().take());
        }
    }
}

#[pymethods]
impl Server {
    /// Begins to answer a request: its method, its path with the query, its headers as pairs of bytes. `peer` is the other
    /// end of its connection, as for requests that come from other programs; `trusted` requests are the program's own. `ready`
    /// is called on another thread each time when there is something to poll or room to feed.
    #[pyo3(signature = (method, target, headers, *, peer, trusted, ready))]
    fn request(
        &self,
        method: &str,
        target: &str,
        headers: Vec<(Vec<u8>, Vec<u8>)>,
        peer: Option<(String, u16)>,
        trusted: bool,
        ready: Py<PyAny>,
    ) -> PyResult<Exchange> {
        check_process(self.0.process)?;
        let waker = Waker::new(ready, &self.0.messenger);
        let (feed, fed) = channel(WAITING);
        let (tell, told) = channel(WAITING);
        let request = request(method, target, headers, |size| Upload { fed, size, waker: waker.clone() })
            .map_err(|error| exception(Error::Invalid(format!("the request is not HTTP: {error}"))))?;
        let open = self.0.lock();
        let open = open.as_ref().ok_or_else(|| failure("the model is closed: load it again"))?;
        let outlet = Outlet { tell: Some(tell), waker };
        let answer = answer(open.server.clone(), request, caller(peer, trusted), outlet);
        let task = open.runtime.spawn(answer).abort_handle();
        Ok(Exchange { feed: Mutex::new(Some(feed)), told: Mutex::new(told), task })
    }

    /// Ends all answers, and gives the memory back.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        if self.0.process != std::process::id() {
            return Ok(());
        }
        let serving = Arc::clone(&self.0);
        wait(py, &Cancel::default(), move || serving.close())
    }
}

/// The checks that a request has to pass.
fn caller(peer: Option<(String, u16)>, trusted: bool) -> Caller {
    if trusted {
        return Caller::trusted();
    }
    // A server at a socket of the file system knows no address.
    let address = peer.and_then(|(host, port)| Some(SocketAddr::new(host.parse().ok()?, port)));
    match address {
        Some(address) => Caller::connection(address),
        None => Caller::trusted().check_keys().check_names(),
    }
}

fn request(
    method: &str,
    target: &str,
    headers: Vec<(Vec<u8>, Vec<u8>)>,
    body: impl FnOnce(Option<u64>) -> Upload,
) -> http::Result<http::Request<Body>> {
    let mut builder = http::Request::builder().method(method).uri(target);
    let mut size = None;
    for (name, value) in headers {
        if name.eq_ignore_ascii_case(http::header::CONTENT_LENGTH.as_str().as_bytes()) {
            size = std::str::from_utf8(&value).ok().and_then(|value| value.trim().parse().ok());
        }
        builder = builder.header(name, value);
    }
    builder.body(Body::new(body(size)))
}

/// Sends a response piece by piece.
async fn answer(
    server: forebay_server::Server,
    request: http::Request<Body>,
    caller: Caller,
    outlet: Outlet,
) {
    let response = server.handle(request, caller).await;
    let (head, mut body) = response.into_parts();
    let mut headers: Vec<_> =
        head.headers.iter().map(|(name, value)| (name.as_str().into(), value.as_bytes().into())).collect();
    let length = http::header::CONTENT_LENGTH;
    if let Some(size) =
        http_body::Body::size_hint(&body).exact().filter(|_| !head.headers.contains_key(&length))
    {
        headers.push((length.as_str().into(), size.to_string().into_bytes()));
    }
    outlet.tell(Told::Start(head.status.as_u16(), headers)).await;
    while let Some(frame) = body.frame().await {
        match frame.map(Frame::into_data) {
            Ok(Ok(data)) => outlet.tell(Told::Body(data)).await,
            // There are no trailers in HTTP/1.1 that a client has not asked for.
            Ok(Err(_)) => {}
            Err(error) => return outlet.tell(Told::Broken(error.to_string())).await,
        }
    }
    outlet.tell(Told::End).await;
}

/// A part of a response.
enum Told {
    Start(u16, Vec<(String, Vec<u8>)>),
    Body(Bytes),
    /// The response ends early.
    Broken(String),
    End,
}

/// Where a response goes. When it is dropped, its reader learns that nothing more comes.
struct Outlet {
    tell: Option<Sender<Told>>,
    waker: Waker,
}

impl Outlet {
    async fn tell(&self, told: Told) {
        if let Some(tell) = &self.tell {
            // An exchange that is dropped ends this task.
            let _ = tell.send(told).await;
            self.waker.wake();
        }
    }
}

impl Drop for Outlet {
    fn drop(&mut self) {
        self.tell = None;
        self.waker.wake();
    }
}

/// The body of a request, as it comes in.
struct Upload {
    fed: Receiver<Bytes>,
    /// The bytes that its sender has announced.
    size: Option<u64>,
    waker: Waker,
}

impl http_body::Body for Upload {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<std::result::Result<Frame<Bytes>, Infallible>>> {
        let data = ready!(self.fed.poll_recv(context));
        self.waker.wake();
        Poll::Ready(data.map(|data| Ok(Frame::data(data))))
    }

    fn size_hint(&self) -> SizeHint {
        let mut hint = SizeHint::new();
        hint.set_lower(self.size.unwrap_or(0));
        hint
    }
}

/// A request and its response. Dropping it cancels the request.
#[pyclass(frozen, module = "forebay._native")]
pub struct Exchange {
    /// `None` after the end of the request's body.
    feed: Mutex<Option<Sender<Bytes>>>,
    told: Mutex<Receiver<Told>>,
    task: AbortHandle,
}

#[pymethods]
impl Exchange {
    /// Passes a piece of the request's body on; False if there is no room for it yet.
    fn feed(&self, data: Vec<u8>, more: bool) -> bool {
        let mut feed = self.feed.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(feed) = feed.as_ref().filter(|_| !data.is_empty())
            && let Err(TrySendError::Full(_)) = feed.try_send(data.into())
        {
            return false;
        }
        if !more {
            *feed = None;
        }
        true
    }

    /// The next part of the response, if it has come: a tuple that begins with its kind.
    fn poll<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyTuple>>> {
        let told = self.told.lock().unwrap_or_else(PoisonError::into_inner).try_recv();
        match told {
            Ok(Told::Start(status, headers)) => {
                let headers = headers
                    .iter()
                    .map(|(name, value)| (PyBytes::new(py, name.as_bytes()), PyBytes::new(py, value)));
                Some(("start", status, PyList::new(py, headers)?).into_pyobject(py)).transpose()
            }
            Ok(Told::Body(data)) => Some(("body", PyBytes::new(py, &data)).into_pyobject(py)).transpose(),
            Ok(Told::End) => Some(("end",).into_pyobject(py)).transpose(),
            Ok(Told::Broken(why)) => Err(failure(&format!("the answer ended early: {why}"))),
            Err(TryRecvError::Empty) => Ok(None),
            Err(TryRecvError::Disconnected) => Some(("closed",).into_pyobject(py)).transpose(),
        }
    }

    /// Cancels the request.
    fn close(&self) {
        self.task.abort();
    }
}

impl Drop for Exchange {
    fn drop(&mut self) {
        self.close();
    }
}
