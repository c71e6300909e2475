//! How a model is loaded.

use std::path::PathBuf;
use std::sync::Arc;

use crate::backend::Precision;
use crate::error::{Error, Result};
use crate::experts::policy::PolicyKind;
use crate::experts::{Device, IoMethod};
use crate::memory::Machine;
use crate::plan::{DeviceWishes, ExpertMemory, Wishes};

/// Tokens that memory is set aside for when the caller does not say: enough for most conversations. Longer ones take
/// memory from expert slots.
const DEFAULT_CONTEXT: usize = 8192;

/// Far more than what makes a chunk faster; the limit keeps the sizes of buffers in range.
const MAX_CHUNK: usize = 1 << 16;

/// How a model is loaded.
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
    /// Tokens that a conversation may have, for which memory is set aside. By default as many as the model was made for,
    /// with memory for 8192; what is beyond takes memory from expert slots as it comes.
    pub context: Option<usize>,
    /// Threads that compute; by default one for each processor.
    pub threads: Option<usize>,
    /// How products with quantised weights are computed.
    pub precision: Precision,
    /// Tokens computed together when a prompt is read; by default as many as is good and memory allows.
    pub chunk: Option<usize>,
    /// What the process may use; by default what is available less a margin.
    pub memory: Option<u64>,
    /// What memory the machine has, if that is not to be looked up.
    pub machine: Option<Machine>,
    /// What the caller takes of it beside the engine, as a server does for its connections. At most a sixteenth of it counts.
    pub caller: u64,
    /// What expert slots may use of it; by default all that is left.
    pub expert_memory: Option<ExpertMemory>,
    /// How experts are read.
    pub io: IoMethod,
    /// Who leaves when an expert needs room.
    pub policy: PolicyKind,
    /// Whether experts that a token's next layer will probably ask for are read while the drive is idle, and uploaded to a device while
    /// the link is. By default they are.
    pub prefetch: bool,
    /// Whether the processor computes experts that are in its memory and not in the device's, where that is quicker than to bring them
    /// there. It changes bits.
    pub cpu_experts: bool,
    /// A folder where it is remembered how hot the experts of each model were, for the next start.
    pub heat: Option<PathBuf>,
    /// What computes instead of the processor, with the dense weights and as many experts as it has room for in its own memory.
    pub device: Option<Arc<dyn Device>>,
    /// Told how many bytes have been loaded, and of how many.
    pub progress: Option<Arc<dyn Fn(u64, u64) + Send + Sync>>,
}

impl Default for Options {
    fn default() -> Self {
        Options {
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
        }
    }
}

impl Options {
    /// The defaults.
    pub fn new() -> Options {
        Options::default()
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

    pub(super) fn machine_now(&self) -> Machine {
        self.machine.unwrap_or_else(Machine::now)
    }

    pub(super) fn thread_count(&self) -> Result<usize> {
        match self.threads {
            Some(0) => Err(Error::Invalid("at least one thread is needed".into())),
            Some(threads) => Ok(threads),
            None => Ok(std::thread::available_parallelism().map_or(1, usize::from)),
        }
    }

    pub(super) fn wishes(&self, limit: usize) -> Result<Wishes> {
        if let Some(chunk) = self.chunk.filter(|chunk| !(1..=MAX_CHUNK).contains(chunk)) {
            return Err(Error::Invalid(format!(
                "a chunk of {chunk} tokens was asked for; it has 1 to {MAX_CHUNK}"
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
            device: self
                .device
                .as_ref()
                .map(|device| DeviceWishes { memory: device.memory(), chunk: device.chunk() }),
        })
    }
}

fn context_length(asked: Option<usize>, limit: usize) -> Result<usize> {
    match asked {
        None => Ok(limit),
        Some(0) => Err(Error::Invalid("a context holds at least one token".into())),
        Some(asked) if asked > limit => Err(Error::Invalid(format!(
            "a context of {asked} tokens was asked for, but the model was made for at most {limit}; \
             ask for fewer with Options::context"
        ))),
        Some(asked) => Ok(asked),
    }
}
