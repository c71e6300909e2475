//! Answering many conversations at once.
//!
//! A [`Driver`] owns the [`Crowd`] of conversations, on its own thread. Any thread may send requests through a clone of
//! the driver, and reads each answer from a [`ReplyStream`]. Dropping the stream cancels the answer.
//!
//! # Examples
//! ```
//! use forebay_engine::{ChatRequest, Driver, DriverOptions, ReplyEvent};
//!
//! # let model = std::path::Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/tales-qwen3moe-Q4_K_M.gguf"));
//! # let engine = forebay_engine::Engine::open(model, &forebay_engine::Options::new().threads(1))?;
//! let driver = Driver::start(&engine, DriverOptions::new(8))?;
//! for event in driver.chat(ChatRequest::user("Tell me a story.").max_tokens(8))? {
//!     if let ReplyEvent::Content { text, .. } = event? {
//!         print!("{text}");
//!     }
//! }
//! # Ok::<(), forebay_engine::Error>(())
//! ```

pub(crate) mod crowd;
pub(crate) mod prefix;
mod stream;
mod work;

use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

pub use self::stream::{ReplyStream, Ticket};
use self::work::{Fate, Job, Work};
use crate::blocks::Cancel;
use crate::conversation::{ChatRequest, Prompter, Question, ReplyEvent, ReplyOptions};
use crate::driver::crowd::{Crowd, CrowdOptions, Listener};
use crate::engine::Engine;
use crate::error::{Error, Result};
use crate::generate::Request;
use crate::tokenizer::{Bos, EncodeOptions};

/// After this much idle time, the driver writes kept conversations to disk. People usually pause less between two
/// turns, and each turn makes the file of the last one worthless.
const IDLE: Duration = Duration::from_secs(30);

/// Options of a driver.
///
/// # Examples
/// ```
/// use forebay_engine::{Driver, DriverOptions, PrefixOptions};
///
/// # let model = std::path::Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/tales-qwen3moe-Q4_K_M.gguf"));
/// # let engine = forebay_engine::Engine::open(model, &forebay_engine::Options::new().threads(1))?;
/// let mut options = DriverOptions::new(8);
/// // A prompt that begins like an earlier one is not computed from its start again.
/// options.crowd.prefixes = Some(PrefixOptions::new(&engine, None));
/// let driver = Driver::start(&engine, options)?;
/// # driver.close();
/// # Ok::<(), forebay_engine::Error>(())
/// ```
#[derive(Clone)]
#[non_exhaustive]
pub struct DriverOptions {
    /// How many requests are answered at once, and what is kept for later prompts.
    pub crowd: CrowdOptions,
    /// After this much idle time, kept conversations are written to disk, if a folder is set.
    pub idle: Duration,
    /// Converts requests to prompts. By default as the model's file says.
    pub prompter: Option<Prompter>,
    /// Cancelling it ends everything, as [`Driver::leave`] does.
    pub leave: Cancel,
    /// Called when the driver starts and ends steps.
    pub observer: Option<Arc<dyn Observer>>,
}

impl DriverOptions {
    /// Options for this many answers at once, without a prefix cache.
    pub fn new(most: usize) -> DriverOptions {
        DriverOptions {
            crowd: CrowdOptions::new(most),
            idle: IDLE,
            prompter: None,
            leave: Cancel::default(),
            observer: None,
        }
    }
}

/// Callbacks about a driver's work. They run on the driver's thread, and never while a batch is computed.
///
/// # Examples
/// ```
/// use std::sync::{Arc, mpsc};
///
/// use forebay_engine::driver::{Ending, Observer};
/// use forebay_engine::{Driver, DriverOptions};
///
/// struct Watch(mpsc::Sender<Ending>);
///
/// impl Observer for Watch {
///     fn ends(&self, ending: Ending) {
///         let _ = self.0.send(ending);
///     }
/// }
///
/// # let model = std::path::Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/tales-qwen3moe-Q4_K_M.gguf"));
/// # let engine = forebay_engine::Engine::open(model, &forebay_engine::Options::new().threads(1))?;
/// let (sender, endings) = mpsc::channel();
/// let mut options = DriverOptions::new(1);
/// options.observer = Some(Arc::new(Watch(sender)));
/// let driver = Driver::start(&engine, options)?;
/// driver.close();
/// assert_eq!(endings.recv(), Ok(Ending::Asked));
/// # Ok::<(), forebay_engine::Error>(())
/// ```
pub trait Observer: Send + Sync {
    /// Called before and after a step, with the state of all requests and of the prefix cache.
    fn looks(&self, _crowd: &Crowd) {}

    /// Called when there is nothing to do.
    fn rests(&self) {}

    /// Called before a step.
    fn begins_step(&self) {}

    /// Called after a step, with its time and the number of tokens generated.
    fn ends_step(&self, _took: Duration, _tokens: usize) {}

    /// Called after a step that could compute nothing, because all requests wait for files or memory.
    fn idles(&self) {}

    /// Called last, when the thread has ended and no longer uses the model.
    fn ends(&self, _ending: Ending) {}
}

/// Why a driver's thread has ended.
///
/// [`Observer`] has an example.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// It was closed or cancelled.
    Asked,
    /// The device that computes is [lost](Engine::lost).
    DeviceLost,
    /// Something on the thread panicked. This is a bug in the engine or in a callback.
    Panicked,
}

/// Answers many conversations at once, on its own thread. Clones are handles to the same driver. When the last one is
/// dropped, all unfinished answers end as [cancelled](Error::Cancelled).
///
/// # Examples
/// ```
/// use std::thread;
///
/// use forebay_engine::{ChatRequest, Driver, DriverOptions};
///
/// # let model = std::path::Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/tales-qwen3moe-Q4_K_M.gguf"));
/// # let engine = forebay_engine::Engine::open(model, &forebay_engine::Options::new().threads(1))?;
/// let driver = Driver::start(&engine, DriverOptions::new(2))?;
/// let other = driver.clone();
/// let cat = ChatRequest::user("Tell me a story about a cat.").max_tokens(4);
/// let cat = thread::spawn(move || other.chat(cat)?.whole());
/// let dog = driver.chat(ChatRequest::user("Tell me a story about a dog.").max_tokens(4))?.whole()?;
/// let cat = cat.join().expect("it does not panic")?;
/// assert!(!cat.content.is_empty() && !dog.content.is_empty());
///
/// driver.close();
/// driver.join();
/// # Ok::<(), forebay_engine::Error>(())
/// ```
#[derive(Clone)]
pub struct Driver(Arc<Shared>);

struct Shared {
    prompter: Prompter,
    /// `None` after the driver is closed.
    jobs: Mutex<Option<Sender<Job>>>,
    fate: Fate,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Driver {
    /// Starts the driver's thread.
    ///
    /// # Errors
    /// If the thread cannot be started, or the prompter belongs to another engine.
    pub fn start(engine: &Engine, options: DriverOptions) -> Result<Driver> {
        if options.prompter.as_ref().is_some_and(|prompter| !prompter.engine().is(engine)) {
            return Err(Error::Invalid("the driver's prompter belongs to another engine".into()));
        }
        let (jobs, receiver) = channel();
        let DriverOptions { crowd, idle, prompter, leave, observer } = options;
        let fate = Fate::new(engine, leave);
        let work = Work {
            engine: engine.clone(),
            options: crowd,
            idle,
            jobs: receiver,
            fate: fate.clone(),
            observer,
        };
        let thread = std::thread::Builder::new().name("driver".into()).spawn(move || work.run());
        let thread = thread
            .map_err(|error| Error::Backend(format!("cannot start a thread that computes: {error}")))?;
        Ok(Driver(Arc::new(Shared {
            prompter: prompter.unwrap_or_else(|| Prompter::new(engine)),
            jobs: Mutex::new(Some(jobs)),
            fate,
            thread: Mutex::new(Some(thread)),
        })))
    }

    /// Converts requests to prompts.
    pub fn prompter(&self) -> &Prompter {
        &self.0.prompter
    }

    /// The engine that computes.
    pub fn engine(&self) -> &Engine {
        self.0.prompter.engine()
    }

    /// Asks for the next message of a conversation. Rendering, encoding and compiling grammars run on the caller's
    /// thread, so every error in the request is known when this function returns.
    ///
    /// # Errors
    /// As [`Prompter::chat`] and [`submit`](Self::submit).
    pub fn chat(&self, request: ChatRequest) -> Result<ReplyStream> {
        self.ask(self.prompter().chat(request)?)
    }

    /// Asks for the continuation of a text, without a chat template. Control tokens in the text are encoded as control
    /// tokens.
    ///
    /// # Errors
    /// As [`Prompter::encode`], [`Prompter::text`] and [`submit`](Self::submit).
    pub fn complete(&self, text: &str, options: ReplyOptions) -> Result<ReplyStream> {
        let special = EncodeOptions { special: true, bos: Bos::AsFileSays };
        let tokens = self.prompter().encode(text, special)?;
        self.ask(self.prompter().text(tokens, options)?)
    }

    /// Asks a prepared question.
    ///
    /// # Errors
    /// As [`submit`](Self::submit).
    pub fn ask(&self, question: Question) -> Result<ReplyStream> {
        ReplyStream::of(self, question)
    }

    /// Asks a prepared question and calls a function with each event. The function runs on the driver's thread and must
    /// not block. Its last call has [`ReplyEvent::End`] or an error; if the thread panics, the function is dropped
    /// without it. Dropping the ticket cancels the answer.
    ///
    /// # Errors
    /// As [`submit`](Self::submit).
    pub fn ask_telling(
        &self,
        question: Question,
        tell: impl FnMut(Result<ReplyEvent>) + Send + 'static,
    ) -> Result<Ticket> {
        stream::ask(self, question, Box::new(tell))
    }

    /// Submits a request of tokens. The listener runs on the driver's thread and must not block.
    ///
    /// # Errors
    /// [`Error::Cancelled`] if the driver is closed; another error if it failed.
    pub fn submit(&self, request: Request, cancel: Cancel, listener: Box<dyn Listener>) -> Result<()> {
        let jobs = self.0.jobs.lock().unwrap_or_else(PoisonError::into_inner);
        let jobs = jobs.as_ref().ok_or(Error::Cancelled)?;
        jobs.send(Job { request, cancel, listener }).map_err(|_| self.0.fate.error())
    }

    /// Accepts no more requests. The thread ends when all accepted requests are answered.
    pub fn close(&self) {
        self.0.jobs.lock().unwrap_or_else(PoisonError::into_inner).take();
    }

    /// Accepts no more requests and stops the computation at the next layer. All unfinished answers end as
    /// [cancelled](Error::Cancelled).
    pub fn leave(&self) {
        self.0.fate.leave();
        self.close();
    }

    /// Waits until the thread has ended, after a [`close`](Self::close) or [`leave`](Self::leave). By then, the prefix
    /// cache has been written to disk.
    pub fn join(&self) {
        let thread = self.0.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        // The observer was already told of a panic.
        thread.map(JoinHandle::join);
    }

    fn fate(&self) -> Fate {
        self.0.fate.clone()
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        self.fate.leave();
    }
}
