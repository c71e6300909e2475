//! Blocks: the reusable layers that model files are composed of.
//!
//! A block knows its weights, its buffers and its arithmetic. It never asks which architecture it is part of.

pub mod delta_net;
pub mod gqa;
pub mod head;
pub mod mla;
pub mod mlp;
pub mod moe;
pub mod norm;
pub mod positions;
mod progress;
pub mod rope;
pub mod short_conv;

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

pub(crate) use progress::PromptPart;
pub use progress::{PromptMeter, PromptProgress};

use crate::backend::Backend;
use crate::error::{Error, Result};
use crate::experts::{ExpertExecutor, RoutingObserver};

/// What the blocks of a forward pass share.
pub struct Context<'a> {
    /// Computes mixtures; its backend computes everything else.
    pub executor: &'a mut dyn ExpertExecutor,
    /// Stops the pass early on request.
    pub cancel: &'a Cancel,
    /// The prompts of the batch; each layer advances their progress.
    pub prompts: &'a [PromptPart],
    /// Receives each layer's routing, if set.
    pub observer: Option<&'a mut RoutingObserver<'a>>,
}

impl Context<'_> {
    /// The executor's backend.
    pub fn backend(&mut self) -> &mut dyn Backend {
        self.executor.backend()
    }

    /// Begins a layer: `before` of `all` layers are done. Advances the progress of the prompts.
    ///
    /// # Errors
    /// [`Error::Cancelled`] if a stop is requested.
    pub fn begin_layer(&self, before: usize, all: usize) -> Result<()> {
        self.prompts.iter().for_each(|part| part.advance(before, all));
        self.cancel.check()
    }
}

/// A request to stop, made from another thread. All clones share the request.
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
    /// Counts as a request while it returns true.
    condition: Option<Box<Condition>>,
}

type Condition = dyn Fn() -> bool + Send + Sync;

impl Cancel {
    /// Like a new `Cancel` that also counts as requested while `condition` returns true. A forward pass calls it
    /// before each layer, while other conversations may wait for the pass: it must be quick.
    pub fn when(condition: impl Fn() -> bool + Send + Sync + 'static) -> Cancel {
        Cancel(Arc::new(Asked { condition: Some(Box::new(condition)), ..Asked::default() }))
    }

    /// Requests the stop. A forward pass ends after the current layer.
    pub fn cancel(&self) {
        self.0.outright.store(true, Ordering::Relaxed);
    }

    /// Withdraws the request, before the next piece of work.
    pub fn reset(&self) {
        self.0.outright.store(false, Ordering::Relaxed);
    }

    /// Whether a stop was requested.
    pub fn is_cancelled(&self) -> bool {
        self.0.outright.load(Ordering::Relaxed) || self.0.condition.as_ref().is_some_and(|holds| holds())
    }

    /// Fails if a stop was requested.
    ///
    /// # Errors
    /// [`Error::Cancelled`] if a stop was requested.
    pub fn check(&self) -> Result<()> {
        if self.is_cancelled() { Err(Error::Cancelled) } else { Ok(()) }
    }
}

impl fmt::Debug for Cancel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Cancel({})", self.is_cancelled())
    }
}
