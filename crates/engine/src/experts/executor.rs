//! Who computes the mixtures of a model: an executor, which owns the experts, wherever they are.

use std::sync::Arc;

use forebay_kernels::Encoding;

use super::assistant::Assistant;
use super::{ExpertStore, SlotClasses};
use crate::LayerIdx;
use crate::backend::{Backend, Buf, BufShape, Experts, Precision, Router, RouterWeights, Routing};
use crate::error::Result;
use crate::memory::SharedBytes;

/// The mixture of one layer: `out = Σ weight · expert(x)` over the experts that the router chooses for each row of `x`.
pub struct Mixture<'a> {
    /// How experts are chosen.
    pub router: &'a Router,
    /// This layer's router.
    pub weights: RouterWeights,
    /// The next layer's, if it has one. Applied to what this layer's experts read, it tells which experts the next layer will
    /// probably ask for.
    pub next: Option<RouterWeights>,
    /// `[rows, experts]` The router's scratch.
    pub logits: Buf,
    /// The experts. Their buffers say where `x` is.
    pub experts: Experts,
    /// `[rows, hidden]`
    pub out: Buf,
    /// Told of the choice, if somebody wants to know.
    pub observer: Option<&'a mut RoutingObserver<'a>>,
}

/// Takes a layer and what its router chose.
pub type RoutingObserver<'a> = dyn FnMut(LayerIdx, &Routing) + 'a;

/// Work on the backend that does not wait for experts.
pub type Meanwhile<'a> = dyn FnMut(&mut dyn Backend) -> Result<()> + 'a;

/// A batch, as far as its experts are concerned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BatchShape {
    /// Tokens.
    pub rows: usize,
    /// Conversations that they belong to.
    pub sequences: usize,
}

/// So many tokens of different conversations choose experts like one does: few, and mostly those they chose before.
const FEW_TOKENS: usize = 8;

impl BatchShape {
    /// Whether it is one token of each conversation.
    pub fn is_step(self) -> bool {
        self.rows == self.sequences
    }

    /// How it asks for experts. Many tokens together need nearly all, whether they are a prompt or the next ones of many answers.
    pub fn access(self) -> Access {
        if self.is_step() && self.rows <= FEW_TOKENS { Access::Token } else { Access::Prompt }
    }
}

/// How experts are asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// By a token, or one each of several conversations: what they use is worth keeping.
    Token,
    /// By a chunk of a prompt, which needs nearly all experts once: it passes through without changing what is kept.
    Prompt,
    /// To have them there.
    Preload,
}

/// Computes mixtures, and owns what they need: the backend, the expert store, and the memory of a device that has slots for experts.
///
/// A pass is [`begin`](Self::begin), operations on the backend and one [`mixture`](Self::mixture) for each layer that has experts, then
/// [`end`](Self::end). After an error the next pass begins as usual, once it was told to [`forget`](Self::forget) where that is needed.
/// How an executor orders reads, copies and products is its own affair. It must not show in the bits.
#[allow(clippy::missing_errors_doc)]
pub trait ExpertExecutor: Send {
    /// The arithmetic of the device.
    fn backend(&mut self) -> &mut dyn Backend;

    /// Brings experts to the device's own memory before the first pass, in the order given, as long as there is room. `progress` is
    /// told of the bytes of each. Where the device has no memory of its own nothing is done.
    fn upload(
        &mut self,
        experts: &mut dyn Iterator<Item = usize>,
        progress: &mut dyn FnMut(u64),
    ) -> Result<()>;

    /// Reads experts into the computer's memory before the first pass, in the order given, as long as there is room: those that are
    /// not on the device. `progress` is told of the bytes of each.
    fn preload(
        &mut self,
        experts: &mut dyn Iterator<Item = usize>,
        progress: &mut dyn FnMut(u64),
    ) -> Result<()>;

    /// Lends conversations the memory of the device's slots that the ledger has asked the store for, and takes back what they no longer
    /// need. [`begin`](Self::begin) does the same.
    fn lend(&mut self) -> Result<()>;

    /// A pass begins.
    fn begin(&mut self, batch: BatchShape) -> Result<()>;

    /// Computes a mixture, and `meanwhile` what need not wait for it.
    fn mixture(&mut self, mixture: Mixture<'_>, meanwhile: &mut Meanwhile<'_>) -> Result<()>;

    /// All layers have been asked for: their operations are on their way, and all experts that they used have come to where they are
    /// computed.
    fn end(&mut self) -> Result<()>;

    /// The results of the last pass have been read: counts the experts that it used without telling the store.
    fn count_used(&mut self) -> Result<()>;

    /// A pass failed, and nobody knows what came to the device: nothing counts as being there.
    fn forget(&mut self);
}

/// An executor in the making. The dense weights come first, so that it is known how much memory is left for experts.
pub trait ExecutorBuilder: Send {
    /// Takes the dense weights.
    fn backend(&mut self) -> &mut dyn Backend;

    /// The executor of a model with these experts.
    ///
    /// # Errors
    /// If the device has no memory for the least of slots, or fails.
    fn build(self: Box<Self>, experts: ExpertSetup<'_>) -> Result<Box<dyn ExpertExecutor>>;
}

/// The experts of a model, and how they are handled.
pub struct ExpertSetup<'a> {
    /// Hands them out.
    pub store: Arc<ExpertStore>,
    /// How large slots are.
    pub classes: &'a SlotClasses,
    /// Slots of each class in the device's own memory. Where it has no memory for so many, it makes fewer, and
    /// [tells the store](ExpertStore::use_device_slots).
    pub device_slots: &'a [usize],
    /// Whether experts that will probably be asked for are read, and sent to a device, before they are.
    pub prefetch: bool,
    /// Computes experts beside the device, if that was asked for.
    pub assistant: Option<Assistant>,
}

/// A device besides the processor.
///
/// # Examples
/// ```
/// use std::sync::Arc;
///
/// use forebay_engine::{Device, Options};
///
/// /// Options for a device, such as `forebay_cuda::Cuda`, or for the processor.
/// fn options(device: Option<Arc<dyn Device>>) -> Options {
///     Options::new().device(device)
/// }
/// # assert!(options(None).device.is_none());
/// ```
pub trait Device: Send + Sync {
    /// An executor there, whose backend has these buffers, numbered in order.
    ///
    /// # Errors
    /// If it has no memory for them, or fails.
    fn executor(&self, precision: Precision, buffers: &[BufShape]) -> Result<Box<dyn ExecutorBuilder>>;

    /// Whether it has a way to compute with matrices that are stored so.
    fn computes(&self, encoding: Encoding) -> bool;

    /// Bytes that models may use there.
    fn memory(&self) -> u64;

    /// Tokens of a prompt that are best computed together there.
    fn chunk(&self) -> usize;

    /// Bytes a second that are copied there from memory of the computer, tried for a moment.
    ///
    /// # Errors
    /// If it has no memory for that, or fails.
    fn link_speed(&self) -> Result<f64>;

    /// Lets the device copy from memory of the computer by itself, as long as what is returned lives. A copy is from one such part.
    ///
    /// # Errors
    /// If the system does not allow it. Copies are slower then.
    fn pin(&self, memory: SharedBytes) -> Result<Box<dyn Send>>;
}
