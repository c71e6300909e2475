//! The reusable layers that model files are put together from.
//!
//! A block knows its weights, its buffers and its arithmetic. It never asks which architecture it serves.

pub mod delta_net;
pub mod gqa;
pub mod head;
pub mod mla;
pub mod mlp;
pub mod moe;
mod progress;
pub mod rope;

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

pub(crate) use progress::PromptPart;
pub use progress::{PromptMeter, PromptProgress};

use crate::backend::Backend;
use crate::error::{Error, Result};
use crate::experts::{ExpertExecutor, RoutingObserver};

/// What a forward pass works with.
pub struct Context<'a> {
    /// Who computes: mixtures, and on its backend all else.
    pub executor: &'a mut dyn ExpertExecutor,
    /// Asks the pass to end early.
    pub cancel: &'a Cancel,
    /// The prompts of the batch whose meters advance with each layer.
    pub prompts: &'a [PromptPart],
    /// Told of each layer's choices, if somebody wants to know.
    pub observer: Option<&'a mut RoutingObserver<'a>>,
}

impl Context<'_> {
    /// The arithmetic of whoever computes.
    pub fn backend(&mut self) -> &mut dyn Backend {
        self.executor.backend()
    }

    /// A layer begins, after so many of `all`.
    ///
    /// # Errors
    /// [`Error::Cancelled`] if the pass is to end early.
    pub fn begin_layer(&self, before: usize, all: usize) -> Result<()> {
        self.prompts.iter().for_each(|part| part.advance(before, all));
        self.cancel.check()
    }
}

/// A request to stop, made from another thread. Clones ask the same thing.
///
/// # Examples
/// ```
/// use forebay_engine::{Event, FinishReason, Request};
///
/// # let model = std::path::Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/tales-qwen3moe-Q4_K_M.gguf"));
/// # let engine = forebay_engine::Engine::open(model, &forebay_engine::Options::new().threads(1))?;
/// # let prompt = engine.tokenizer().encode("Once upon a time", Default::default())?;
/// let mut session = engine.session();
/// let cancel = session.cancel().clone(); // may go to another thread
/// let answer = session.generate(&Request::new(&engine, prompt)?, &mut |event| {
///     if let Event::Text(_) = event {
///         cancel.cancel();
///     }
/// })?;
///
/// assert_eq!(answer.finish_reason, FinishReason::Cancelled);
/// assert_eq!(answer.tokens.len(), 1);
/// # Ok::<(), forebay_engine::Error>(())
/// ```
#[derive(Clone, Default)]
pub struct Cancel(Arc<Asked>);

#[derive(Default)]
struct Asked {
    outright: AtomicBool,
    /// Counts as asking while it holds.
    condition: Option<Box<Condition>>,
}

type Condition = dyn Fn() -> bool + Send + Sync;

impl Cancel {
    /// A request that also counts as made whenever a condition holds. A forward pass asks before each layer, while others wait for it
    /// to end: the condition must not compute anything.
    pub fn when(condition: impl Fn() -> bool + Send + Sync + 'static) -> Cancel {
        Cancel(Arc::new(Asked { condition: Some(Box::new(condition)), ..Asked::default() }))
    }

    /// Asks to stop. A forward pass ends after the layer at hand.
    pub fn cancel(&self) {
        self.0.outright.store(true, Ordering::Relaxed);
    }

    /// Takes the request back, before the next piece of work.
    pub fn reset(&self) {
        self.0.outright.store(false, Ordering::Relaxed);
    }

    /// Whether somebody asked.
    pub fn is_cancelled(&self) -> bool {
        self.0.outright.load(Ordering::Relaxed) || self.0.condition.as_ref().is_some_and(|holds| holds())
    }

    /// # Errors
    /// [`Error::Cancelled`] if somebody asked.
    pub fn check(&self) -> Result<()> {
        if self.is_cancelled() { Err(Error::Cancelled) } else { Ok(()) }
    }
}

impl fmt::Debug for Cancel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Cancel({})", self.is_cancelled())
    }
}
