//! Many conversations at once: who computes next, and what is kept for later prompts.
//!
//! A [`Driver`] owns the [`Crowd`] on a thread of its own. Any thread asks, by a handle that is cloned freely, and reads the
//! answer as a [`ReplyStream`], which cancels it when it is dropped.
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

/// With nothing to do for so long, what is worth keeping is written. People think between two turns for less than that, and
/// each of their turns makes what was written of the last one worthless.
const IDLE: Duration = Duration::from_secs(30);

/// How a driver works.
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
    /// How many are answered at once, and what is kept for later prompts.
    pub crowd: CrowdOptions,
    /// With nothing to do for so long, the conversations that are kept are written to disk, if they are to be.
    pub idle: Duration,
    /// How conversations are put to the model; by default as its file says.
    pub prompter: Option<Prompter>,
    /// Ends everything, as [`Driver::leave`] does.
    pub leave: Cancel,
    /// Told what the driver does.
    pub observer: Option<Arc<dyn Observer>>,
}

impl DriverOptions {
    /// So many answers at once, and nothing kept.
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

/// Told what a driver does, on the driver's thread, and never while a batch is computed.
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
    /// How many are served, and what is kept, before a step and after it.
    fn looks(&self, _crowd: &Crowd) {}

    /// There is nothing to do.
    fn rests(&self) {}

    /// A step begins.
    fn begins_step(&self) {}

    /// A step has ended after this time, in which so many tokens were written.
    fn ends_step(&self, _took: Duration, _tokens: usize) {}

    /// A step has ended in which nothing could be computed, because all wait for files or memory.
    fn idles(&self) {}

    /// The thread has ended and has let go of the model. The last thing that is told.
    fn ends(&self, _ending: Ending) {}
}

/// Why a driver's thread has ended.
///
/// [`Observer`] has an example.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// It was asked to.
    Asked,
    /// The device that computes is [lost](Engine::lost).
    DeviceLost,
    /// Something on it panicked: a bug, of the engine's or of who listens.
    Panicked,
}

/// Answers many conversations at once, on a thread of its own. Clones are handles of the same driver; when the last one is
/// dropped, all that is not answered ends as [cancelled](Error::Cancelled).
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
    /// `None` when nothing more is taken.
    jobs: Mutex<Option<Sender<Job>>>,
    fate: Fate,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Driver {
    /// Starts the thread.
    ///
    /// # Errors
    /// If the system has no thread for it, or the prompter is another model's.
    pub fn start(engine: &Engine, options: DriverOptions) -> Result<Driver> {
        if options.prompter.as_ref().is_some_and(|prompter| !prompter.engine().is(engine)) {
            return Err(Error::Invalid("the driver's prompter is another model's".into()));
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

    /// What makes questions of conversations.
    pub fn prompter(&self) -> &Prompter {
        &self.0.prompter
    }

    /// The model.
    pub fn engine(&self) -> &Engine {
        self.0.prompter.engine()
    }

    /// Asks for the next message of a conversation. What takes time before that, from rendering to compiling a grammar, is
    /// done on the caller's thread, and everything that can be wrong with the request is known when this returns.
    ///
    /// # Errors
    /// As [`Prompter::chat`] and [`submit`](Self::submit).
    pub fn chat(&self, request: ChatRequest) -> Result<ReplyStream> {
        self.ask(self.prompter().chat(request)?)
    }

    /// Asks for the continuation of a text as it is, without a chat template. Control tokens in the text are encoded as such.
    ///
    /// # Errors
    /// As [`Prompter::encode`], [`Prompter::text`] and [`submit`](Self::submit).
    pub fn complete(&self, text: &str, options: ReplyOptions) -> Result<ReplyStream> {
        let special = EncodeOptions { special: true, bos: Bos::AsFileSays };
        let tokens = self.prompter().encode(text, special)?;
        self.ask(self.prompter().text(tokens, options)?)
    }

    /// Asks a question that was prepared.
    ///
    /// # Errors
    /// As [`submit`](Self::submit).
    pub fn ask(&self, question: Question) -> Result<ReplyStream> {
        ReplyStream::of(self, question)
    }

    /// The same, and has a function told what happens: on the driver's thread, which must not wait there. The last thing that it
    /// is told is [`ReplyEvent::End`] or an error; if the thread panics it is dropped without. The answer is cancelled when the
    /// ticket is dropped.
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

    /// Has a request answered. The listener is told on the driver's thread, which must not wait there.
    ///
    /// # Errors
    /// [`Error::Cancelled`] if the driver takes nothing more; else why it cannot go on.
    pub fn submit(&self, request: Request, cancel: Cancel, listener: Box<dyn Listener>) -> Result<()> {
        let jobs = self.0.jobs.lock().unwrap_or_else(PoisonError::into_inner);
        let jobs = jobs.as_ref().ok_or(Error::Cancelled)?;
        jobs.send(Job { request, cancel, listener }).map_err(|_| self.0.fate.error())
    }

    /// Takes nothing more. The thread ends when all that was asked for is answered.
    pub fn close(&self) {
        self.0.jobs.lock().unwrap_or_else(PoisonError::into_inner).take();
    }

    /// Takes nothing more and ends what is being computed, within a layer. All that is not answered ends as
    /// [cancelled](Error::Cancelled).
    pub fn leave(&self) {
        self.0.fate.leave();
        self.close();
    }

    /// Waits until the thread has ended, which takes a [`close`](Self::close) or [`leave`](Self::leave). What was to be kept on
    /// disk is there then.
    pub fn join(&self) {
        let thread = self.0.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        // Its panics are told to the observer.
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
