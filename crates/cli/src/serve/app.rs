//! What all requests share.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use forebay_engine::chat::ChatTemplate;
use forebay_engine::driver::Ticket;
use forebay_engine::generate::sampler::SamplingOverrides;
use forebay_engine::{Driver, Engine, Error, Prompter, Question, ReplyEvent};
use tokio::sync::watch;

use super::error::ApiError;
use super::guard::{Hosts, Keys, Origins};
use super::memory::RequestMemory;
use super::meters::Meters;

/// The server: what is loaded, and what is allowed.
pub struct App {
    /// The name of the model, which clients see.
    pub model: String,
    /// When the server started, in seconds since 1970.
    pub created: u64,
    pub limits: Limits,
    pub keys: Keys,
    pub origins: Origins,
    pub hosts: Hosts,
    /// What requests leave open, where the command line says.
    pub sampling: SamplingOverrides,
    pub meters: Arc<Meters>,
    /// `None` while it is being loaded.
    loaded: RwLock<Option<Arc<Loaded>>>,
    draining: AtomicBool,
    /// Whether requests that are not answered yet will not be.
    abandoned: watch::Sender<bool>,
}

/// What a request may take.
#[derive(Clone, Debug)]
pub struct Limits {
    /// Answers that are written at once.
    pub parallel: usize,
    /// Answers that may wait besides.
    pub queue: usize,
    /// Bytes of a request.
    pub body: u64,
    /// Tokens of an answer.
    pub max_tokens: Option<usize>,
    /// Of those, the ones of reasoning.
    pub reasoning: Option<usize>,
    /// From the request to the end of its answer.
    pub timeout: Option<Duration>,
}

impl Limits {
    /// Answers that may be open at once.
    pub fn open(&self) -> usize {
        self.parallel + self.queue
    }
}

/// How many of so many places one client may have: a quarter is left to others, who find a place at once.
pub fn share(places: usize) -> usize {
    places - places / 4
}

/// The model, when it is there.
pub struct Loaded {
    pub engine: Engine,
    /// What computes, for people.
    pub compute: String,
    /// What requests hold.
    pub memory: Arc<RequestMemory>,
    driver: Driver,
}

impl Loaded {
    pub fn new(driver: Driver) -> Loaded {
        let engine = driver.engine().clone();
        let memory = Arc::new(RequestMemory::new(&engine));
        Loaded { compute: engine.backend_name(), engine, memory, driver }
    }

    /// What makes questions of conversations.
    pub fn prompter(&self) -> &Prompter {
        self.driver.prompter()
    }

    /// Finds out whether conversations can be rendered.
    ///
    /// # Errors
    /// If there is no template for that, or the model's is none.
    pub fn check_template(&self) -> Result<(), ApiError> {
        if self.template().is_some() {
            return Ok(());
        }
        let message = "the model has no chat template: continue texts with /v1/completions, or have it served with \
                       --chat-template-file";
        Err(ApiError::invalid("messages", message))
    }

    /// The template in effect, if there is one.
    pub fn template(&self) -> Option<&ChatTemplate> {
        self.prompter().template().ok().flatten()
    }

    /// Asks for an answer, and has what happens to it told on the thread that computes.
    pub fn ask(
        &self,
        question: Question,
        tell: impl FnMut(Result<ReplyEvent, Error>) + Send + 'static,
    ) -> Result<Ticket, ApiError> {
        self.driver.ask_telling(question, tell).map_err(|error| match error {
            Error::Cancelled => leaving(),
            Error::DeviceLost(_) => error.into(),
            _ => ApiError::internal("computing failed for good: the server has to be started again"),
        })
    }

    /// Lets the thread that computes end: when all is answered, or at once.
    pub fn dismiss(&self, at_once: bool) {
        if at_once { self.driver.leave() } else { self.driver.close() }
    }

    /// Waits until it has ended.
    pub fn wait(&self) {
        self.driver.join();
    }
}

impl App {
    pub fn new(
        model: String,
        limits: Limits,
        keys: Keys,
        origins: Origins,
        sampling: SamplingOverrides,
    ) -> App {
        App {
            model,
            created: now(),
            limits,
            hosts: Hosts::new(&keys, &origins),
            keys,
            origins,
            sampling,
            meters: Arc::default(),
            loaded: RwLock::default(),
            draining: AtomicBool::new(false),
            abandoned: watch::channel(false).0,
        }
    }

    /// The model.
    ///
    /// # Errors
    /// That it is not there yet.
    pub fn loaded(&self) -> Result<Arc<Loaded>, ApiError> {
        let loaded = self.loaded.read().unwrap_or_else(PoisonError::into_inner);
        loaded.clone().ok_or_else(|| ApiError::unavailable("the model is being loaded", 5))
    }

    /// The model has been loaded, or is no more.
    pub fn load(&self, loaded: Option<Loaded>) {
        *self.loaded.write().unwrap_or_else(PoisonError::into_inner) = loaded.map(Arc::new);
    }

    /// No more requests are taken.
    pub fn drain(&self) {
        self.draining.store(true, Ordering::Relaxed);
    }

    pub fn is_draining(&self) -> bool {
        self.draining.load(Ordering::Relaxed)
    }

    /// Whoever still waits for an answer is told that the server is leaving.
    pub fn abandon(&self) {
        self.abandoned.send_replace(true);
    }

    /// Comes to an end when requests are abandoned.
    pub fn abandoned(&self) -> impl Future<Output = ()> + Send + 'static {
        let mut abandoned = self.abandoned.subscribe();
        async move {
            if abandoned.wait_for(|abandoned| *abandoned).await.is_err() {
                std::future::pending::<()>().await;
            }
        }
    }

    /// Why nothing should be asked of this server now, if so.
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

/// What is said to those who come too late.
pub fn leaving() -> ApiError {
    ApiError::unavailable("the server is shutting down", 30)
}

/// Seconds since 1970.
pub fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}
