//! The interface of an executor, which computes the mixtures of a model and owns its experts, and of a device that
//! provides one.

use std::sync::Arc;

use forebay_kernels::Encoding;

use super::assistant::Assistant;
use super::{ExpertStore, SlotClasses};
use crate::LayerIdx;
use crate::backend::{Backend, Buf, BufShape, Experts, KvShape, Precision, Router, RouterWeights, Routing};
use crate::error::Result;
use crate::memory::SharedBytes;

/// The mixture of one layer: `out = Σ weight · expert(x)` over the experts that the router chooses for each row of `x`.
pub struct Mixture<'a> {
    /// The settings of the router.
    pub router: &'a Router,
    /// The router's weights in this layer.
    pub weights: RouterWeights,
    /// The next mixture, if there is one soon.
    pub next: Option<NextMixture>,
    /// `[rows, hidden]` The router's input.
    pub input: Buf,
    /// `[rows, experts]` The router's logits, if they are [ready](Self::ready), otherwise a scratch buffer for them.
    pub logits: Buf,
    /// Whether the logits were computed before.
    pub ready: bool,
    /// The experts and their buffers, among them the input `x`.
    pub experts: Experts,
    /// `[rows, width]` The result, as wide as the experts' input.
    pub out: Buf,
    /// Receives the router's choice, if set.
    pub observer: Option<&'a mut RoutingObserver<'a>>,
}

/// The next mixture. Its router, applied to this one's input, predicts which experts it will use.
#[derive(Clone, Copy, Debug)]
pub struct NextMixture {
    /// The layer.
    pub layer: LayerIdx,
    /// The router's weights in that layer.
    pub router: RouterWeights,
}

/// Receives a layer and its router's choice.
pub type RoutingObserver<'a> = dyn FnMut(LayerIdx, &Routing) + 'a;

/// Work on the backend that does not depend on the routed experts, such as the shared expert.
pub type Meanwhile<'a> = dyn FnMut(&mut dyn Backend) -> Result<()> + 'a;

/// The size of a batch, as far as it matters for experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BatchShape {
    /// The number of tokens.
    pub rows: usize,
    /// The number of conversations that the tokens belong to.
    pub sequences: usize,
}

/// Up to this many tokens of different conversations use experts as one token does: few, and mostly those that they
/// used before.
const FEW_TOKENS: usize = 8;

impl BatchShape {
    /// Whether the batch has one token from each conversation.
    pub fn is_step(self) -> bool {
        self.rows == self.sequences
    }

    /// How the batch uses experts. A large batch uses nearly all of them, whether it is a prompt or one token from
    /// each of many answers.
    pub fn access(self) -> Access {
        if self.is_step() && self.rows <= FEW_TOKENS { Access::Token } else { Access::Prompt }
    }
}

/// What experts are requested for. It decides whether the request changes the eviction policy's statistics.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// For generation: a token, or one token from each of a few conversations. These uses count.
    Token,
    /// For a chunk of a prompt or a large batch, which uses nearly all experts once. These uses do not count.
    Prompt,
    /// For filling slots before the first pass.
    Preload,
}

/// Computes mixtures, and owns what this needs: the backend, the expert store, and the expert slots in device memory.
///
/// A pass calls [`begin`](Self::begin), operations of the backend with one [`mixture`](Self::mixture) per layer that
/// has experts, and [`end`](Self::end). After an error, call [`forget`](Self::forget) before the next pass. An
/// executor may order reads, copies and products as it likes, as long as the order does not change the result's bits.
#[allow(clippy::missing_errors_doc)]
pub trait ExpertExecutor: Send {
    /// The backend that the executor computes with.
    fn backend(&mut self) -> &mut dyn Backend;

    /// Uploads experts to device memory before the first pass, in the given order, while slots are free. `progress`
    /// receives the bytes of each batch of experts. Does nothing on a device without memory of its own.
    fn upload(
        &mut self,
        experts: &mut dyn Iterator<Item = usize>,
        progress: &mut dyn FnMut(u64) -> Result<()>,
    ) -> Result<()>;

    /// Reads experts into RAM before the first pass, in the given order, while slots are free. Skips experts that are
    /// in device memory. `progress` receives the bytes of each expert.
    fn preload(
        &mut self,
        experts: &mut dyn Iterator<Item = usize>,
        progress: &mut dyn FnMut(u64) -> Result<()>,
    ) -> Result<()>;

    /// Lends slots in device memory to conversations as the ledger requested, and takes back those no longer needed.
    /// [`begin`](Self::begin) calls it too.
    fn lend(&mut self) -> Result<()>;

    /// Begins a pass.
    fn begin(&mut self, batch: BatchShape) -> Result<()>;

    /// Computes a layer's mixture, and `meanwhile` while the experts are on their way.
    fn mixture(&mut self, mixture: Mixture<'_>, meanwhile: &mut Meanwhile<'_>) -> Result<()>;

    /// Ends a pass: all operations have been issued, and all experts that they use are in place.
    fn end(&mut self) -> Result<()>;

    /// Counts the experts that the last pass used without telling the store. Call it when the results of the pass
    /// have been read.
    fn count_used(&mut self) -> Result<()>;

    /// Forgets which experts are in device memory. Call it after a pass failed, when their state is unknown.
    fn forget(&mut self);
}

/// Builds an executor in two steps: the dense weights first, so that the memory left for experts is known.
pub trait ExecutorBuilder: Send {
    /// The backend, which takes the dense weights.
    fn backend(&mut self) -> &mut dyn Backend;

    /// The executor for a model with these experts.
    ///
    /// # Errors
    /// If the device has no memory for the minimum of slots, or fails.
    fn build(self: Box<Self>, experts: ExpertSetup<'_>) -> Result<Box<dyn ExpertExecutor>>;
}

/// The experts of a model and how to handle them.
pub struct ExpertSetup<'a> {
    /// The store.
    pub store: Arc<ExpertStore>,
    /// The sizes of slots.
    pub classes: &'a SlotClasses,
    /// The number of slots of each class in device memory. A device without enough memory makes fewer and [tells the
    /// store](ExpertStore::use_device_slots).
    pub device_slots: &'a [usize],
    /// Whether to read and upload experts that will probably be used, before the router asks for them.
    pub prefetch: bool,
    /// Computes some experts on the CPU, if requested.
    pub assistant: Option<Assistant>,
}

/// A device that computes models instead of the CPU, such as an NVIDIA GPU.
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
    /// Starts building an executor whose backend has these buffers, numbered in order.
    ///
    /// # Errors
    /// If the device has not enough memory, or fails.
    fn executor(&self, precision: Precision, buffers: &[BufShape]) -> Result<Box<dyn ExecutorBuilder>>;

    /// Whether the device can multiply with matrices in this encoding.
    fn computes(&self, encoding: Encoding) -> bool;

    /// Whether the device can compute attention over keys and values of this shape.
    fn attends(&self, shape: &KvShape) -> bool {
        let _ = shape;
        true
    }

    /// Whether the device computes from the process's memory. Then it has no memory of its own: experts are computed in
    /// the store's slots, and the process's budget counts everything.
    fn shares_memory(&self) -> bool {
        false
    }

    /// Bytes of device memory that models may use.
    fn memory(&self) -> u64;

    /// The best number of prompt tokens to compute in one pass on this device.
    fn chunk(&self) -> usize;

    /// The bytes per second that the device reads and writes when it copies within its memory, from a short measurement.
    ///
    /// # Errors
    /// If the device has not enough memory for the measurement, or fails.
    fn memory_speed(&self) -> Result<f64>;

    /// The upload speed in bytes per second, from a short measurement. Not asked of a device that
    /// [shares memory](Self::shares_memory).
    ///
    /// # Errors
    /// If the device has not enough memory for the measurement, or fails.
    fn link_speed(&self) -> Result<f64>;

    /// Bytes that one call of [`pin`](Self::pin) pins: large enough to be worth a call, small enough to stop soon.
    fn pins_at_once(&self) -> usize {
        64 << 20
    }

    /// Pins `memory`, so that the device copies from it directly while the returned value lives. Each copy must lie
    /// within one pinned part. A device that [shares the process's memory](Self::shares_memory) computes from it.
    ///
    /// # Errors
    /// If the operating system refuses. Copies then take a slower path.
    fn pin(&self, memory: SharedBytes) -> Result<Box<dyn Send>>;
}
