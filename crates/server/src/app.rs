//! The state that all requests share.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::{SystemTime, UNIX_EPOCH};

use forebay_engine::chat::ChatTemplate;
use forebay_engine::driver::Ticket;
use forebay_engine::{Driver, Engine, Error, Prompter, Question, ReplyEvent};
use ring::rand::{SecureRandom, SystemRandom};
use tokio::sync::watch;

use crate::error::{ApiError, MODEL_LOADING};
use crate::guard::{Hosts, Keys, Origins};
use crate::memory::RequestMemory;
use crate::meters::Meters;
use crate::options::{Limits, ServerOptions, Words};

/// The server: its model, its limits and its access rules.
pub struct App {
    /// The name of the model for clients.
    pub model: String,
    /// When the server started, in seconds since 1970.
    pub created: u64,
    pub limits: Limits,
    pub keys: Keys,
    pub origins: Origins,
    pub hosts: Hosts,
    /// How messages name options.
    pub words: Words,
    pub meters: Arc<Meters>,
    /// `None` while the model loads.
    loaded: RwLock<Option<Arc<Loaded>>>,
    /// Bytes that are loaded so far, and bytes in total; both 0 before they are known.
    loading: [AtomicU64; 2],
    draining: AtomicBool,
    /// Whether the remaining requests are abandoned.
    abandoned: watch::Sender<bool>,
}

/// How many of `places` one client may have. A quarter stays free for other clients.
pub fn share(places: usize) -> usize {
    places - places / 4
}

/// The loaded model.
pub struct Loaded {
    pub engine: Engine,
    /// A description of the CPU or GPU that computes.
    pub compute: String,
    /// The memory of requests.
    pub memory: Arc<RequestMemory>,
    driver: Driver,
}

impl Loaded {
    pub fn new(driver: Driver) -> Loaded {
        let engine = driver.engine().clone();
        let memory = Arc::new(RequestMemory::new(&engine));
        Loaded { compute: engine.backend_name(), engine, memory, driver }
    }

    pub fn driver(&self) -> &Driver {
        &self.driver
    }

    /// Converts conversations to questions.
    pub fn prompter(&self) -> &Prompter {
        self.driver.prompter()
    }

    /// Checks that conversations can be rendered.
    ///
    /// # Errors
    /// If the model has no valid chat template.
    pub fn check_template(&self) -> Result<(), ApiError> {
        if self.template().is_some() {
            return Ok(());
        }
        let message = "the model has no chat template: continue texts with /v1/completions, or have it served with \
                       Prompter::with_template";
        Err(ApiError::invalid("messages", message))
    }

    /// The chat template in effect.
    pub fn template(&self) -> Option<&ChatTemplate> {
        self.prompter().template().ok().flatten()
    }

    /// Requests an answer. The compute thread calls `tell` with each of its events.
    pub fn ask(
        &self,
        question: Question,
        tell: impl FnMut(Result<ReplyEvent, Error>) + Send + 'static,
    ) -> Result<Ticket, ApiError> {
        self.driver.ask_telling(question, tell).map_err(|error| match error {
            Error::Cancelled => leaving(),
            Error::DeviceLost(_) => error.into(),
            _ => ApiError::internal("the compute thread has ended: the server must be restarted"),
        })
    }
}

impl App {
    pub fn new(model: String, options: ServerOptions) -> Result<App, Error> {
        let ServerOptions { limits, keys, origins, words } = options;
        let (keys, origins) = (Keys::new(&keys)?, Origins::new(&origins));
        Ok(App {
            model,
            created: now(),
            limits,
            hosts: Hosts::new(&keys, &origins),
            keys,
            origins,
            words,
            meters: Arc::default(),
            loaded: RwLock::default(),
            loading: Default::default(),
            draining: AtomicBool::new(false),
            abandoned: watch::channel(false).0,
        })
    }

    /// The model.
    ///
    /// # Errors
    /// If it is not loaded yet.
    pub fn loaded(&self) -> Result<Arc<Loaded>, ApiError> {
        let loaded = self.loaded.read().unwrap_or_else(PoisonError::into_inner);
        loaded.clone().ok_or_else(|| ApiError {
            code: Some(MODEL_LOADING),
            ..ApiError::unavailable("the model is loading: try again in a few seconds", 5)
        })
    }

    /// Records how many bytes of the model are loaded, and of how many.
    pub fn tell_loading(&self, done: u64, total: u64) {
        self.loading[0].store(done, Ordering::Relaxed);
        self.loading[1].store(total, Ordering::Relaxed);
    }

    /// The loaded share of the model, from 0 to 1, if it is known.
    pub fn loaded_share(&self) -> Option<f64> {
        let [done, total] = [0, 1].map(|i| self.loading[i].load(Ordering::Relaxed) as f64);
        (total > 0.0).then(|| (done / total).min(1.0))
    }

    /// Sets the model after loading, or removes it.
    pub fn load(&self, loaded: Option<Loaded>) {
        *self.loaded.write().unwrap_or_else(PoisonError::into_inner) = loaded.map(Arc::new);
    }

    /// Stops accepting requests.
    pub fn drain(&self) {
        self.draining.store(true, Ordering::Relaxed);
    }

    pub fn is_draining(&self) -> bool {
        self.draining.load(Ordering::Relaxed)
    }

    /// Ends the remaining requests with the error that the server shuts down.
    pub fn abandon(&self) {
        self.abandoned.send_replace(true);
    }

    /// Completes when requests are abandoned.
    pub fn abandoned(&self) -> impl Future<Output = ()> + Send + 'static {
        let mut abandoned = self.abandoned.subscribe();
        async move {
            if abandoned.wait_for(|abandoned| *abandoned).await.is_err() {
                std::future::pending::<()>().await;
            }
        }
    }

    /// Why the server cannot answer requests at the moment, if so.
    pub fn unready(&self) -> Option<ApiError> {
        if self.is_draining() {
            return Some(leaving());
        }
        if let Err(error) = self.loaded() {
            return Some(error);
        }
        self.meters.ailment().map(|message| ApiError::unavailable(message, 30))
    }
}

/// The error for requests during shutdown.
pub fn leaving() -> ApiError {
    ApiError::unavailable("the server is shutting down", 30)
}

/// Seconds since 1970.
pub fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// A unique id.
pub fn id(prefix: &str) -> String {
    const LETTERS: &[u8; 32] = b"abcdefghijklmnopqrstuvwxyz234567";
    let mut bytes = [0; 24];
    // Without random numbers ids are not unique, which clients hardly notice.
    let _ = SystemRandom::new().fill(&mut bytes);
    let letters = bytes.iter().map(|byte| char::from(LETTERS[usize::from(byte % 32)]));
    prefix.chars().chain(letters).collect()
}
