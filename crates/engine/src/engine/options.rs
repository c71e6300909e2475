//! The options for loading a model.

use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;

use crate::backend::Precision;
use crate::blocks::Cancel;
use crate::error::{Error, Result};
use crate::experts::policy::PolicyKind;
use crate::experts::{Device, IoMethod};
use crate::memory::Machine;
use crate::plan::{DeviceWishes, ExpertMemory, Wishes};

/// Tokens for which memory is reserved by default: enough for most conversations. Longer ones take memory from expert
/// slots.
const DEFAULT_CONTEXT: usize = 8192;

/// Far larger than is useful; the limit keeps buffer sizes in range.
const MAX_CHUNK: usize = 1 << 16;

/// The options for loading a model.
///
/// # Examples
/// ```
/// use forebay_engine::{Engine, Options};
///
/// # let model = std::path::Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/tales-qwen3moe-Q4_K_M.gguf"));
/// let options = Options::new().memory(256 << 20).context(1000).threads(2);
/// let engine = Engine::open(model, &options)?;
/// assert_eq!((engine.context(), engine.threads()), (1000, 2));
/// assert_eq!(engine.plan().budget, 256 << 20);
/// # Ok::<(), forebay_engine::Error>(())
/// ```
#[derive(Clone)]
#[non_exhaustive]
pub struct Options {
    /// The layers to load, for a [stage](crate::Stage) of a model that is split over several machines. By default all.
    /// The first stage has the embeddings, too, and the last one the output matrix.
    pub layers: Option<Range<usize>>,
    /// The context length in tokens, with memory reserved for all of it. By default the model's maximum, with memory
    /// reserved for 8192 tokens; longer conversations take memory from expert slots.
    pub context: Option<usize>,
    /// Compute threads. By default one for each CPU.
    pub threads: Option<usize>,
    /// The precision of products with quantised weights.
    pub precision: Precision,
    /// Tokens of a prompt that one pass computes. By default the best size that fits memory.
    pub chunk: Option<usize>,
    /// The memory budget in bytes. By default the available memory less a margin.
    pub memory: Option<u64>,
    /// The memory of the machine, instead of asking the operating system.
    pub machine: Option<Machine>,
    /// Bytes of the budget that the caller uses itself, as a server does for its connections. At most a sixteenth of
    /// the budget counts.
    pub caller: u64,
    /// The memory for expert slots. By default all that is left of the budget.
    pub expert_memory: Option<ExpertMemory>,
    /// How experts are read.
    pub io: IoMethod,
    /// The eviction policy.
    pub policy: PolicyKind,
    /// Whether the likely experts of the next layer are read while the drive is idle, and uploaded while the link to
    /// the device is idle. On by default.
    pub prefetch: bool,
    /// Whether the CPU computes experts that are in RAM but not on the device, where that is faster than uploading
    /// them. This changes bits.
    pub cpu_experts: bool,
    /// A folder for heat files, which record how often each expert of a model was used, for the next start.
    pub heat: Option<PathBuf>,
    /// The device that computes instead of the CPU. It holds the dense weights and as many experts as fit its memory.
    pub device: Option<Arc<dyn Device>>,
    /// Called with the bytes loaded so far and the total.
    pub progress: Option<Arc<dyn Fn(u64, u64) + Send + Sync>>,
    /// Ends the loading of the model on request, with [`Error::Cancelled`].
    pub cancel: Cancel,
}

impl Default for Options {
    fn default() -> Self {
        Options {
            layers: None,
            context: None,
            threads: None,
            precision: Default::default(),
            chunk: None,
            memory: None,
            machine: None,
            caller: 0,
            expert_memory: None,
            io: Default::default(),
            policy: Default::default(),
            prefetch: true,
            cpu_experts: false,
            heat: None,
            device: None,
            progress: None,
            cancel: Cancel::default(),
        }
    }
}

impl Options {
    /// The defaults.
    pub fn new() -> Options {
        Options::default()
    }

    /// Sets [`layers`](Self::layers).
    #[must_use]
    pub fn layers(mut self, layers: impl Into<Option<Range<usize>>>) -> Options {
        self.layers = layers.into();
        self
    }

    /// Sets [`context`](Self::context).
    #[must_use]
    pub fn context(mut self, context: impl Into<Option<usize>>) -> Options {
        self.context = context.into();
        self
    }

    /// Sets [`threads`](Self::threads).
    #[must_use]
    pub fn threads(mut self, threads: impl Into<Option<usize>>) -> Options {
        self.threads = threads.into();
        self
    }

    /// Sets [`precision`](Self::precision).
    #[must_use]
    pub fn precision(mut self, precision: Precision) -> Options {
        self.precision = precision;
        self
    }

    /// Sets [`chunk`](Self::chunk).
    #[must_use]
    pub fn chunk(mut self, chunk: impl Into<Option<usize>>) -> Options {
        self.chunk = chunk.into();
        self
    }

    /// Sets [`memory`](Self::memory).
    #[must_use]
    pub fn memory(mut self, memory: impl Into<Option<u64>>) -> Options {
        self.memory = memory.into();
        self
    }

    /// Sets [`machine`](Self::machine).
    #[must_use]
    pub fn machine(mut self, machine: impl Into<Option<Machine>>) -> Options {
        self.machine = machine.into();
        self
    }

    /// Sets [`caller`](Self::caller).
    #[must_use]
    pub fn caller(mut self, caller: u64) -> Options {
        self.caller = caller;
        self
    }

    /// Sets [`expert_memory`](Self::expert_memory).
    #[must_use]
    pub fn expert_memory(mut self, expert_memory: impl Into<Option<ExpertMemory>>) -> Options {
        self.expert_memory = expert_memory.into();
        self
    }

    /// Sets [`io`](Self::io).
    #[must_use]
    pub fn io(mut self, io: IoMethod) -> Options {
        self.io = io;
        self
    }

    /// Sets [`policy`](Self::policy).
    #[must_use]
    pub fn policy(mut self, policy: PolicyKind) -> Options {
        self.policy = policy;
        self
    }

    /// Sets [`prefetch`](Self::prefetch).
    #[must_use]
    pub fn prefetch(mut self, prefetch: bool) -> Options {
        self.prefetch = prefetch;
        self
    }

    /// Sets [`cpu_experts`](Self::cpu_experts).
    #[must_use]
    pub fn cpu_experts(mut self, cpu_experts: bool) -> Options {
        self.cpu_experts = cpu_experts;
        self
    }

    /// Sets [`heat`](Self::heat).
    #[must_use]
    pub fn heat(mut self, heat: impl Into<Option<PathBuf>>) -> Options {
        self.heat = heat.into();
        self
    }

    /// Sets [`device`](Self::device).
    #[must_use]
    pub fn device(mut self, device: Option<Arc<dyn Device>>) -> Options {
        self.device = device;
        self
    }

    /// Sets [`progress`](Self::progress).
    #[must_use]
    pub fn progress(mut self, progress: Option<Arc<dyn Fn(u64, u64) + Send + Sync>>) -> Options {
        self.progress = progress;
        self
    }

    /// Sets [`cancel`](Self::cancel).
    #[must_use]
    pub fn cancel(mut self, cancel: &Cancel) -> Options {
        self.cancel = cancel.clone();
        self
    }

    pub(super) fn machine_now(&self) -> Machine {
        self.machine.unwrap_or_else(Machine::now)
    }

    pub(super) fn thread_count(&self) -> Result<usize> {
        match self.threads {
            Some(0) => Err(Error::Invalid("the number of threads is 0; use at least 1".into())),
            Some(threads) => Ok(threads),
            None => Ok(std::thread::available_parallelism().map_or(1, usize::from)),
        }
    }

    pub(super) fn wishes(&self, limit: usize) -> Result<Wishes> {
        if let Some(chunk) = self.chunk.filter(|chunk| !(1..=MAX_CHUNK).contains(chunk)) {
            return Err(Error::Invalid(format!(
                "a chunk of {chunk} tokens is impossible; use 1 to {MAX_CHUNK}"
            )));
        }
        let context = context_length(self.context, limit)?;
        Ok(Wishes {
            context,
            reserved: self.context.unwrap_or(context.min(DEFAULT_CONTEXT)),
            precision: self.precision,
            chunk: self.chunk,
            memory: self.memory,
            caller: self.caller,
            expert_memory: self.expert_memory,
            device: self.device.as_ref().map(|device| DeviceWishes {
                memory: (!device.shares_memory()).then(|| device.memory()),
                chunk: device.chunk(),
            }),
        })
    }
}

fn context_length(asked: Option<usize>, limit: usize) -> Result<usize> {
    match asked {
        None => Ok(limit),
        Some(0) => Err(Error::Invalid("Options::context is 0; use at least 1".into())),
        Some(asked) if asked > limit => Err(Error::Invalid(format!(
            "a context of {asked} tokens is longer than the model's maximum of {limit}; \
             lower Options::context"
        ))),
        Some(asked) => Ok(asked),
    }
}
