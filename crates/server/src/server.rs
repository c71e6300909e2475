//! The server as its program sees it.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use axum::Router;
use axum::body::Body;
use axum::http::{Request, Response};
use forebay_engine::{Driver, DriverOptions, PrefixOptions, Prompter, Result};
use hyper::service::Service;
use hyper_util::service::TowerToHyperService;
use tokio::net::TcpListener;
use tokio::sync::oneshot;

use crate::app::{App, Loaded, share};
use crate::guard::Caller;
use crate::listen::{Connections, Terms};
use crate::options::ServerOptions;
use crate::{memory, prepare, router};

/// A server for one model. Clones are handles to the same server.
///
/// Until [`start`](Self::start) it refuses requests for answers with status 503.
#[derive(Clone)]
pub struct Server {
    app: Arc<App>,
    router: Router,
    /// Whether a task returns freed memory to the system.
    tidies: Arc<AtomicBool>,
}

/// A model that answers a server's requests.
pub struct Running {
    /// Computes the answers. The program may ask it too.
    pub driver: Driver,
    ended: oneshot::Receiver<()>,
}

impl Running {
    /// Completes when the driver has ended. If its device was lost, [`Engine::lost`](forebay_engine::Engine::lost) says why, and
    /// the server may [start](Server::start) again.
    pub async fn ended(&mut self) {
        let _ = (&mut self.ended).await;
    }
}

impl Server {
    /// A server whose clients know the model by this name.
    ///
    /// # Errors
    /// If a key is empty, or the system gives no random numbers to compare keys with.
    pub fn new(model: impl Into<String>, options: ServerOptions) -> Result<Server> {
        let app = Arc::new(App::new(model.into(), options)?);
        Ok(Server { router: router::router(Arc::clone(&app)), app, tidies: Arc::default() })
    }

    /// Starts to answer with the prompter's engine. `prefixes` are the options of the prefix cache, if there is to be one.
    ///
    /// # Errors
    /// If the thread that computes cannot be started.
    pub fn start(&self, prompter: Prompter, prefixes: Option<PrefixOptions>) -> Result<Running> {
        let parallel = self.app.limits.parallel;
        let mut options = DriverOptions::new(parallel);
        options.crowd.share = share(parallel);
        options.crowd.prefixes = prefixes;
        let engine = prompter.engine().clone();
        options.prompter = Some(prompter);
        options.observer = Some(self.app.meters.clone());
        let ended = self.app.meters.begin();
        let driver = Driver::start(&engine, options)?;
        self.app.load(Some(Loaded::new(driver.clone())));
        Ok(Running { driver, ended })
    }

    /// The driver that answers at present; the program may ask it, too.
    pub fn driver(&self) -> Option<Driver> {
        Some(self.app.loaded().ok()?.driver().clone())
    }

    /// Answers no more requests until the next [`start`](Self::start), for example after the loss of a device.
    pub fn unload(&self) {
        self.app.load(None);
    }

    /// Tells clients how many bytes of the model are loaded, and of how many; twice 0 before that is known.
    pub fn tell_loading(&self, done: u64, total: u64) {
        self.app.tell_loading(done, total);
    }

    /// Accepts connections from now on, and answers their requests. Call this within a tokio runtime.
    pub fn listen(&self, listener: TcpListener) -> Connections {
        self.tidy();
        Connections::accept(listener, self.router.clone(), Terms::default())
    }

    /// Answers a request that the program has received, or made itself. The response begins when its status is known, and its body
    /// streams. Dropping the body, or this future, cancels the request. Call this within a tokio [`runtime`].
    ///
    /// # Examples
    /// ```
    /// use forebay_engine::{Engine, Options, Prompter};
    /// use forebay_server::{Body, Caller, Server, ServerOptions, http};
    /// use http_body_util::BodyExt;
    ///
    /// # let model = std::path::Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/tales-qwen3moe-Q4_K_M.gguf"));
    /// let server = Server::new("tales", ServerOptions::new())?;
    /// let running = server.start(Prompter::new(&Engine::open(model, &Options::new())?), None)?;
    /// let body = r#"{"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4, "stream": true}"#;
    /// let request = http::Request::post("/v1/chat/completions").body(Body::from(body))?;
    /// forebay_server::runtime()?.block_on(async {
    ///     let mut response = server.handle(request, Caller::trusted()).await;
    ///     assert_eq!(response.status(), 200);
    ///     while let Some(Ok(frame)) = response.body_mut().frame().await {
    ///         print!("{}", String::from_utf8_lossy(&frame.into_data().unwrap_or_default()));
    ///     }
    /// });
    /// # drop(running);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub async fn handle(&self, request: Request<impl Into<Body>>, caller: Caller) -> Response<Body> {
        self.tidy();
        let mut request = request.map(Into::into);
        request.extensions_mut().insert(caller);
        let answered = TowerToHyperService::new(self.router.clone()).call(request).await;
        answered.unwrap_or_else(|never| match never {})
    }

    /// Refuses new requests from now on.
    pub fn drain(&self) {
        self.app.drain();
    }

    /// Ends the remaining requests with the error that the server shuts down.
    pub fn abandon(&self) {
        self.app.abandon();
    }

    /// Has freed memory returned to the system from now on.
    fn tidy(&self) {
        if !self.tidies.swap(true, Ordering::Relaxed) {
            tokio::spawn(memory::give_back_freed());
        }
    }
}

/// A runtime for a server. Requests need little computing; the processors are for the model.
///
/// # Errors
/// If the system allows no more threads.
pub fn runtime() -> io::Result<tokio::runtime::Runtime> {
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        // One more thread waits for the thread that computes, at the end.
        .max_blocking_threads(prepare::ASIDE_THREADS + 1)
        .enable_all()
        .build()
}
