//! A loaded model, and what all conversations share: weights, experts, memory, and the lock on the computation.

mod fingerprint;
mod loading;
mod options;
mod pass;
mod prospect;

use std::path::Path;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

pub use options::Options;
pub(crate) use pass::{ComputeGuard, Computed, Pass};
pub use prospect::Prospect;

use fingerprint::{fingerprint, settings_hash};

use crate::backend::{Kept, Precision, SequenceState};
use crate::blocks::head::Head;
use crate::chain::{Chain, Transport};
use crate::chat::ChatTemplate;
use crate::error::{Error, Result};
use crate::experts::heat::Heat;
use crate::forecast::bound::{Speeds, read_speed};
use crate::format::ModelFile;
use crate::memory::{Hold, Ledger, MemoryEntry, Pressure, Purpose, Region};

use crate::experts::{Device, ExpertExecutor, ExpertStore, IoMethod, Meters, Picture};
use crate::forecast::probe;
use crate::forecast::trace::RoutedLayer;
use crate::models::{Model, Span};
use crate::plan::{Plan, Traffic};
use crate::tokenizer::Tokenizer;
#[cfg(feature = "grammar")]
use crate::tokenizer::lexicon::{Lexicon, Tree};

/// Long enough that a drive's own cache does not matter, short enough to wait for.
const MOMENT: Duration = Duration::from_millis(800);

/// More bytes of weights than any CPU cache holds.
const BEYOND_CACHES: usize = 512 << 20;

/// A loaded model. Clones share it.
///
/// # Examples
/// ```
/// use forebay_engine::{Engine, Options, Request};
///
/// # let model = std::path::Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/tales-qwen3moe-Q4_K_M.gguf"));
/// let engine = Engine::open(model, &Options::new().threads(1))?;
/// let prompt = engine.tokenizer().encode("Once upon a time", Default::default())?;
/// let request = Request::new(&engine, prompt)?.max_tokens(8);
/// let answer = engine.session().generate(&request, &mut |_| ())?;
/// assert_eq!(answer.tokens.len(), 8);
/// # Ok::<(), forebay_engine::Error>(())
/// ```
#[derive(Clone)]
pub struct Engine(Arc<Inner>);

struct Inner {
    model: ModelInfo,
    decoder: Box<dyn Model>,
    setup: Setup,
    experts: Experts,
    /// Computes the layers before those of this engine, in other stages of the model.
    chain: Option<Arc<Chain>>,
    memory: Memory,
    later: MeasuredLater,
    /// Set when the device is lost: why nothing can be computed any more.
    lost: OnceLock<String>,
    /// The state of an empty conversation. New conversations fork it, so that they need not wait for the backend.
    blank: Mutex<SequenceState>,
    /// Locked for the duration of a batch: one batch is computed at a time.
    compute: Mutex<Compute>,
}

impl Inner {
    /// Computes logits. Only the last stage of a model is asked for them.
    fn head(&self) -> &Head {
        self.decoder.head().expect("only the last stage computes logits")
    }
}

/// What a model's file says.
struct ModelInfo {
    file: ModelFile,
    tokenizer: Tokenizer,
    /// A template that does not compile is an error only for callers that want to chat.
    template: std::result::Result<Option<ChatTemplate>, String>,
    /// Bytes that one token reads.
    traffic: Traffic,
    /// Number and size of the routed experts of each layer.
    routed: Vec<RoutedLayer>,
    /// The number of logits.
    vocab: usize,
    /// The layers that are here.
    span: Span,
}

impl ModelInfo {
    /// The heat file of the layers that are here.
    fn heat(&self, folder: &Path) -> Heat {
        Heat::of(folder, &self.file, self.traffic.experts, self.span.part())
    }

    /// Identifies the model at a precision. It is the same in all stages.
    fn identity(&self, precision: Precision) -> Result<u64> {
        Ok(settings_hash(&self.file)?.0 ^ precision as u64)
    }
}

/// How the model is computed.
struct Setup {
    threads: usize,
    precision: Precision,
    io: IoMethod,
    /// Whether the CPU computes some experts beside a device.
    assisted: bool,
    /// What computes, in words.
    backend_name: String,
    /// What computes, unless it is the CPU.
    device: Option<Arc<dyn Device>>,
}

/// The routed experts. When the model is dropped, their usage is written to the heat file.
struct Experts {
    /// Used for meters, pictures and heat. Only the executor acquires experts from it.
    store: Arc<ExpertStore>,
    heat: Option<Heat>,
}

impl Drop for Experts {
    fn drop(&mut self) {
        if let Some(heat) = &self.heat {
            heat.write(&self.store.heat());
        }
    }
}

/// How memory is divided, and how much of it is in use.
struct Memory {
    plan: Plan,
    ledger: Arc<Ledger>,
    /// All dense weights.
    dense: Arc<Region>,
}

/// Values that are computed on first use.
#[derive(Default)]
struct MeasuredLater {
    speeds: OnceLock<Speeds>,
    fingerprint: OnceLock<u64>,
    /// The vocabulary for grammars, with the memory that it uses.
    #[cfg(feature = "grammar")]
    lexicon: Mutex<Option<(Arc<Lexicon>, Hold)>>,
}

struct Compute {
    executor: Box<dyn ExpertExecutor>,
    pressure: Pressure,
    logits: Kept,
    /// Rows of the current batch whose logits are wanted.
    wanted: Vec<usize>,
}

impl Engine {
    /// Loads a model from its file or folder. Any part of a split file will do.
    ///
    /// # Errors
    /// If the file is damaged or contains something unsupported, if memory does not suffice, or if reading fails. All
    /// but read errors are found before any weight is read.
    pub fn open(path: &Path, options: &Options) -> Result<Engine> {
        Prospect::new(path, options)?.load(options)
    }

    /// Loads the last stage of a model whose other layers are in `stages`, which are usually on other machines. The
    /// engine is used like one that has all layers, and gives the same bits. Its plan and its meters describe the last
    /// stage.
    ///
    /// # Errors
    /// As [`open`](Self::open); if the stages do not have the layers before the last stage, in order and of the same
    /// model at the same precision, or a stage cannot be reached.
    ///
    /// # Examples
    /// ```
    /// use forebay_engine::{Engine, Options, Request, Stage};
    ///
    /// # let model = std::path::Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/tales-qwen3moe-Q4_K_M.gguf"));
    /// let options = Options::new().threads(1);
    /// let first = Stage::open(model, &options.clone().layers(0..2))?;
    /// let engine = Engine::after(vec![Box::new(first.host())], model, &options)?;
    ///
    /// let prompt = engine.tokenizer().encode("Once upon a time", Default::default())?;
    /// let answer = engine.session().generate(&Request::new(&engine, prompt)?.max_tokens(8), &mut |_| ())?;
    /// assert_eq!(answer.tokens.len(), 8);
    /// # Ok::<(), forebay_engine::Error>(())
    /// ```
    pub fn after(stages: Vec<Box<dyn Transport>>, path: &Path, options: &Options) -> Result<Engine> {
        let chain = Chain::new(stages)?;
        let span = chain.rest();
        if let Some(asked) = options.layers.as_ref().filter(|asked| **asked != span.layers()) {
            return Err(Error::Invalid(format!(
                "Options::layers is {}..{}, but the stages leave {span}",
                asked.start, asked.end
            )));
        }
        let options = Options { layers: Some(span.layers()), ..options.clone() };
        let prospect = Prospect::new(path, &options)?;
        chain.check(prospect.model.identity(options.precision)?, prospect.plan.context)?;
        prospect.load_layers(&options, Some(chain))
    }

    /// The model's file: its metadata and tensor table.
    pub fn file(&self) -> &ModelFile {
        &self.0.model.file
    }

    /// The model's tokenizer.
    pub fn tokenizer(&self) -> &Tokenizer {
        &self.0.model.tokenizer
    }

    /// The model's chat template, if its file has one.
    ///
    /// # Errors
    /// If the template does not compile.
    pub fn template(&self) -> Result<Option<&ChatTemplate>> {
        self.0
            .model
            .template
            .as_ref()
            .map(Option::as_ref)
            .map_err(|message| Error::Unsupported(message.clone()))
    }

    /// The context length in tokens.
    pub fn context(&self) -> usize {
        self.0.memory.plan.context
    }

    /// The number of logits per token. The tokenizer may have fewer tokens.
    pub fn vocab_size(&self) -> usize {
        self.0.model.vocab
    }

    /// How memory is divided.
    pub fn plan(&self) -> &Plan {
        &self.0.memory.plan
    }

    /// Bytes that one token reads when it is computed alone.
    pub fn traffic(&self) -> Traffic {
        self.0.model.traffic
    }

    /// What the expert store has counted since the model was loaded.
    pub fn meters(&self) -> Meters {
        self.0.experts.store.meters()
    }

    /// Updates a picture of where the experts are, and which of them were used since the last call.
    pub fn look(&self, picture: &mut Picture) {
        self.0.experts.store.look(picture);
    }

    /// The current size of all expert slots in bytes. It is smaller than planned while conversations or other processes
    /// need the memory.
    pub fn slot_bytes(&self) -> u64 {
        self.0.experts.store.slot_bytes()
    }

    /// Waits until the operating system has provided all reserved memory. That happens in the background after loading;
    /// measurements wait for it.
    pub fn settle(&self) {
        self.0.experts.store.settle();
    }

    /// Measures the speeds that limit generation: the drive's, if experts are streamed, the RAM's, and the link's to a
    /// device. The RAM's is measured on the dense weights, so that it needs no further memory, or by a device that
    /// computes from RAM. The first call takes
    /// about a second and disturbs answers in progress; later calls return the same values.
    ///
    /// # Errors
    /// If reading fails.
    pub fn speeds(&self) -> Result<Speeds> {
        if let Some(speeds) = self.0.later.speeds.get() {
            return Ok(*speeds);
        }
        let streams = self.0.memory.plan.streams();
        let drive = |layers| probe::drive_speed(&self.0.model.file, layers, self.0.setup.io, MOMENT);
        let dense = self.0.memory.dense.get(..BEYOND_CACHES);
        let (memory, link) = match &self.0.setup.device {
            None => (dense.map(|bytes| read_speed(bytes, self.0.setup.threads)), None),
            Some(device) if device.shares_memory() => (Some(device.memory_speed()?), None),
            // The dense weights are not in RAM.
            Some(_) if self.0.memory.plan.device_holds_all_experts() => (None, None),
            Some(device) => (None, Some(device.link_speed()?)),
        };
        let drive = if streams { drive(self.0.experts.store.layers())? } else { None };
        let speeds = Speeds { memory, drive, link };
        Ok(*self.0.later.speeds.get_or_init(|| speeds))
    }

    /// Why nothing can be computed any more, if the device was lost. To go on, open the model again and extend new
    /// sessions by the old ones' tokens.
    pub fn lost(&self) -> Option<&str> {
        self.0.lost.get().map(String::as_str)
    }

    /// How experts are read, in words.
    pub fn io_description(&self) -> String {
        self.0.experts.store.io_description()
    }

    /// Number and size of the routed experts of each layer.
    pub fn routed_layers(&self) -> &[RoutedLayer] {
        &self.0.model.routed
    }

    /// Whether a device computes, in its own memory or the computer's, and not the CPU.
    pub fn is_on_device(&self) -> bool {
        self.0.setup.device.is_some()
    }

    /// The number of compute threads of the CPU.
    pub fn threads(&self) -> usize {
        self.0.setup.threads
    }

    /// What computes, in words: the device and its instruction set.
    pub fn backend_name(&self) -> String {
        self.0.setup.backend_name.clone()
    }

    /// An empty hold, with which a caller counts the memory of its requests against the budget.
    pub fn hold_for_requests(&self) -> Hold {
        Hold::none(self.ledger(), Purpose::Requests)
    }

    /// Bytes held by requests that are being prepared or wait to be answered.
    pub(crate) fn held_by_requests(&self) -> u64 {
        self.0.memory.ledger.held_by_requests()
    }

    /// Refuses a text that cannot fit the context, before it is encoded.
    ///
    /// # Errors
    /// [`Error::Context`], with a lower bound of the text's tokens.
    pub fn check_length(&self, text: &str) -> Result<()> {
        let tokens = self.tokenizer().fewest_tokens(text);
        if tokens > self.context() {
            return Err(Error::Context { tokens, limit: self.context() });
        }
        Ok(())
    }

    /// Reserves the memory that encoding a text needs. Dropping the hold returns it.
    ///
    /// # Errors
    /// [`Error::Budget`] if there is not enough memory.
    pub fn hold_for_encoding(&self, text: &str) -> Result<Hold> {
        // The plan reserves this much for texts that are not counted.
        const UNCOUNTED: u64 = 1 << 20;
        const SHORT: usize = 4 << 10;
        let mut hold = self.hold_for_requests();
        if text.len() > SHORT {
            let bytes = self.tokenizer().encoding_bytes(text)?;
            hold.resize(if bytes > UNCOUNTED { bytes } else { 0 })?;
        }
        Ok(hold)
    }

    /// How much memory is in use, by tier and purpose.
    pub fn memory(&self) -> Vec<MemoryEntry> {
        self.0.memory.ledger.entries()
    }

    pub(crate) fn ledger(&self) -> &Arc<Ledger> {
        &self.0.memory.ledger
    }

    /// Identifies this model with this precision and these processors. Computed on first use.
    pub(crate) fn fingerprint(&self) -> Result<u64> {
        if let Some(number) = self.0.later.fingerprint.get() {
            return Ok(*number);
        }
        let Inner { model, memory, experts, .. } = &*self.0;
        let number = fingerprint(&model.file, model.span, &memory.dense, experts.store.layers())?;
        let number = number ^ self.0.setup.precision as u64 ^ u64::from(self.0.setup.assisted) << 32;
        Ok(*self.0.later.fingerprint.get_or_init(|| number))
    }

    /// The vocabulary in the form that grammars need, made on first use. If the plan reserved no memory for it, expert
    /// slots give some.
    #[cfg(feature = "grammar")]
    pub(crate) fn lexicon(&self) -> Result<Arc<Lexicon>> {
        // Set only after everything that can fail.
        let mut lexicon = self.0.later.lexicon.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((lexicon, _)) = &*lexicon {
            return Ok(Arc::clone(lexicon));
        }
        let tree = Tree::new(self.tokenizer(), self.vocab_size())?;
        let bytes = tree.all_bytes();
        let mut hold = Hold::none(self.ledger(), Purpose::Vocabulary);
        hold.resize(bytes)?;
        let made = Lexicon::new(tree)?;
        Ok(Arc::clone(&lexicon.insert((Arc::new(made), hold)).0))
    }

    /// Whether both are handles to the same loaded model.
    pub(crate) fn is(&self, other: &Engine) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// The most tokens that a pass computes.
    pub(crate) fn chunk(&self) -> usize {
        let here = self.0.memory.plan.chunk;
        self.chain().map_or(here, |chain| here.min(chain.chunk()))
    }

    /// Identifies the model at this precision. It is the same in all stages.
    pub(crate) fn identity(&self) -> Result<u64> {
        self.0.model.identity(self.0.setup.precision)
    }

    /// What computes the layers before those of this engine.
    pub(crate) fn chain(&self) -> Option<&Arc<Chain>> {
        self.0.chain.as_ref()
    }

    /// The number of stages of the model, this engine included.
    pub(crate) fn stages(&self) -> usize {
        self.chain().map_or(1, |chain| chain.stages() + 1)
    }

    /// The layers that are here, and how many the model has.
    pub fn span(&self) -> Span {
        self.0.model.span
    }

    pub(crate) fn model(&self) -> &dyn Model {
        &*self.0.decoder
    }

    /// The state of an empty conversation.
    pub(crate) fn blank_state(&self) -> SequenceState {
        self.0.blank.lock().unwrap_or_else(PoisonError::into_inner).fork()
    }

    /// Waits until the executor is free, and locks it.
    pub(crate) fn compute(&self) -> ComputeGuard<'_> {
        // Every batch overwrites the buffers that it reads, so a panic in the last batch leaves nothing behind.
        let held = self.0.compute.lock().unwrap_or_else(|poisoned| {
            self.0.compute.clear_poison();
            poisoned.into_inner()
        });
        ComputeGuard { inner: &self.0, held }
    }
}
