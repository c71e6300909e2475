//! A loaded model, ready for conversations.

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

use fingerprint::fingerprint;

use crate::backend::{Kept, Precision, SequenceState};
use crate::chat::ChatTemplate;
use crate::error::{Error, Result};
use crate::experts::heat::Heat;
use crate::forecast::bound::{Speeds, read_speed};
use crate::format::ModelFile;
use crate::memory::{Hold, Ledger, MemoryEntry, Pressure, Purpose, Region};

use crate::experts::{Device, ExpertExecutor, ExpertStore, IoMethod, Meters, Picture};
use crate::forecast::probe;
use crate::forecast::trace::RoutedLayer;
use crate::models::Model;
use crate::plan::{Plan, Traffic};
use crate::tokenizer::Tokenizer;
#[cfg(feature = "grammar")]
use crate::tokenizer::lexicon::{Lexicon, Tree};

/// Long enough for a drive's own cache not to matter, short enough to wait for.
const MOMENT: Duration = Duration::from_millis(800);

/// Bytes of weights that no processor's caches hold.
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
    /// The layers.
    decoder: Box<dyn Model>,
    setup: Setup,
    experts: Experts,
    memory: Memory,
    later: MeasuredLater,
    /// Why nothing is computed any more, if so.
    lost: OnceLock<String>,
    /// A conversation's state before its first token. New ones are forks of it, so that none waits for the backend.
    blank: Mutex<SequenceState>,
    /// One batch is computed at a time.
    compute: Mutex<Compute>,
}

/// What a model's file says.
struct ModelInfo {
    file: ModelFile,
    tokenizer: Tokenizer,
    /// A template that does not compile is an error for those who want to chat, not for the others.
    template: std::result::Result<Option<ChatTemplate>, String>,
    /// What one token reads.
    traffic: Traffic,
    /// The routed experts of each layer, in numbers.
    routed: Vec<RoutedLayer>,
    /// The number of logits.
    vocab: usize,
}

/// How the model is computed.
struct Setup {
    threads: usize,
    precision: Precision,
    io: IoMethod,
    /// Whether the processor computes some experts beside a device.
    assisted: bool,
    /// What computes, for people.
    backend_name: String,
    /// What computes, if it is not the processor.
    device: Option<Arc<dyn Device>>,
}

/// Where the routed experts are. What was hot is written to a file when the model is dropped.
struct Experts {
    /// For meters, pictures and heat. Only the executor asks it for experts.
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

/// Whose memory is whose.
struct Memory {
    plan: Plan,
    ledger: Arc<Ledger>,
    /// All dense weights.
    dense: Arc<Region>,
}

/// What is found when it is first asked for.
#[derive(Default)]
struct MeasuredLater {
    speeds: OnceLock<Speeds>,
    fingerprint: OnceLock<u64>,
    /// Made when the first grammar is, with the memory that it takes.
    #[cfg(feature = "grammar")]
    lexicon: Mutex<Option<(Arc<Lexicon>, Hold)>>,
}

struct Compute {
    executor: Box<dyn ExpertExecutor>,
    pressure: Pressure,
    logits: Kept,
    /// Rows of the batch at hand whose logits are wanted.
    wanted: Vec<usize>,
}

impl Engine {
    /// Loads a model from its file or folder; any part of one will do.
    ///
    /// # Errors
    /// If the file is damaged or holds something unsupported, if memory does not suffice, if reading fails.
    /// All but the last are found before any weight is read.
    pub fn open(path: &Path, options: &Options) -> Result<Engine> {
        Prospect::new(path, options)?.load(options)
    }

    /// What the file says about itself.
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
    /// If the file's template is not a valid one.
    pub fn template(&self) -> Result<Option<&ChatTemplate>> {
        self.0
            .model
            .template
            .as_ref()
            .map(Option::as_ref)
            .map_err(|message| Error::Unsupported(message.clone()))
    }

    /// Tokens that a conversation may have.
    pub fn context(&self) -> usize {
        self.0.memory.plan.context
    }

    /// The number of logits: at least as many as the tokenizer has tokens.
    pub fn vocab_size(&self) -> usize {
        self.0.model.vocab
    }

    /// What is resident.
    pub fn plan(&self) -> &Plan {
        &self.0.memory.plan
    }

    /// What one token reads when it is computed alone.
    pub fn traffic(&self) -> Traffic {
        self.0.model.traffic
    }

    /// What the expert store has counted since the model was loaded.
    pub fn meters(&self) -> Meters {
        self.0.experts.store.meters()
    }

    /// Takes a picture of where the experts are and which were asked for since it was last taken.
    pub fn look(&self, picture: &mut Picture) {
        self.0.experts.store.look(picture);
    }

    /// Bytes of expert slots at the moment: fewer than planned while conversations or the rest of the machine need the
    /// memory.
    pub fn slot_bytes(&self) -> u64 {
        self.0.experts.store.slot_bytes()
    }

    /// Waits until all memory that was set aside has been taken from the system, which goes on in the background
    /// after loading, so that measurements are not disturbed.
    pub fn settle(&self) {
        self.0.experts.store.settle();
    }

    /// What bounds the speed of writing: the drive's speed, if experts are streamed, and the memory's, which is read
    /// where the dense weights lie, so that nothing more is taken. Measured when first asked for, in about a second; a
    /// bad moment for that is while tokens are computed.
    ///
    /// # Errors
    /// If reading fails.
    pub fn speeds(&self) -> Result<Speeds> {
        if let Some(speeds) = self.0.later.speeds.get() {
            return Ok(*speeds);
        }
        let streams = self.0.memory.plan.streams();
        let drive = |layers| probe::drive_speed(&self.0.model.file, layers, self.0.setup.io, MOMENT);
        // A device's memory is not the computer's.
        let dense = self.0.memory.dense.get(..BEYOND_CACHES).filter(|_| self.0.memory.plan.device.is_none());
        let speeds = Speeds {
            memory: dense.map(|bytes| read_speed(bytes, self.0.setup.threads)),
            drive: if streams { drive(self.0.experts.store.layers())? } else { None },
            link: match &self.0.setup.device {
                Some(device) if !self.0.memory.plan.device_holds_all_experts() => Some(device.link_speed()?),
                _ => None,
            },
        };
        Ok(*self.0.later.speeds.get_or_init(|| speeds))
    }

    /// Why nothing can be computed any more, if the device that did was lost. Conversations can be had again with a model
    /// that is opened anew, by their tokens.
    pub fn lost(&self) -> Option<&str> {
        self.0.lost.get().map(String::as_str)
    }

    /// How experts are read, for people.
    pub fn io_description(&self) -> String {
        self.0.experts.store.io_description()
    }

    /// The routed experts of each layer, in numbers.
    pub fn routed_layers(&self) -> &[RoutedLayer] {
        &self.0.model.routed
    }

    /// Threads that compute.
    pub fn threads(&self) -> usize {
        self.0.setup.threads
    }

    /// What computes, for people: the device and its instruction set.
    pub fn backend_name(&self) -> String {
        self.0.setup.backend_name.clone()
    }

    /// Memory for what a caller holds of requests, counted with all else: nothing yet.
    pub fn hold_for_requests(&self) -> Hold {
        Hold::none(self.ledger(), Purpose::Requests)
    }

    /// Bytes that requests hold which are prepared, or wait to be answered.
    pub(crate) fn held_by_requests(&self) -> u64 {
        self.0.memory.ledger.held_by_requests()
    }

    /// Refuses a text that is too long for the context whatever its tokens are, before it is encoded.
    ///
    /// # Errors
    /// [`Error::Context`], with a number of tokens that the text has at least.
    pub fn check_length(&self, text: &str) -> Result<()> {
        let tokens = self.tokenizer().fewest_tokens(text);
        if tokens > self.context() {
            return Err(Error::Context { tokens, limit: self.context() });
        }
        Ok(())
    }

    /// Holds the memory that encoding a text takes, until it is dropped.
    ///
    /// # Errors
    /// [`Error::Budget`] if there is no memory for it.
    pub fn hold_for_encoding(&self, text: &str) -> Result<Hold> {
        // The plan leaves so much to texts that are not counted.
        const UNCOUNTED: u64 = 1 << 20;
        const SHORT: usize = 4 << 10;
        let mut hold = self.hold_for_requests();
        if text.len() > SHORT {
            let bytes = self.tokenizer().encoding_bytes(text)?;
            hold.resize(if bytes > UNCOUNTED { bytes } else { 0 })?;
        }
        Ok(hold)
    }

    /// What all memory is used for at the moment.
    pub fn memory(&self) -> Vec<MemoryEntry> {
        self.0.memory.ledger.entries()
    }

    pub(crate) fn ledger(&self) -> &Arc<Ledger> {
        &self.0.memory.ledger
    }

    /// The number that tells this model, computed with this precision and by the same processors, from others. Found when first asked for.
    pub(crate) fn fingerprint(&self) -> Result<u64> {
        if let Some(number) = self.0.later.fingerprint.get() {
            return Ok(*number);
        }
        let number = fingerprint(&self.0.model.file, &self.0.memory.dense, self.0.experts.store.layers())?;
        let number = number ^ self.0.setup.precision as u64 ^ u64::from(self.0.setup.assisted) << 32;
        Ok(*self.0.later.fingerprint.get_or_init(|| number))
    }

    /// The vocabulary as grammars see it. Made when first asked for, and kept. If the plan has left no memory for it, expert slots
    /// give some, where they can.
    #[cfg(feature = "grammar")]
    pub(crate) fn lexicon(&self) -> Result<Arc<Lexicon>> {
        // Filled at once, after everything that can fail.
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

    /// Whether both are the same loaded model.
    pub(crate) fn is(&self, other: &Engine) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    pub(crate) fn chunk(&self) -> usize {
        self.0.memory.plan.chunk
    }

    pub(crate) fn model(&self) -> &dyn Model {
        &*self.0.decoder
    }

    /// A conversation's state before its first token.
    pub(crate) fn blank_state(&self) -> SequenceState {
        self.0.blank.lock().unwrap_or_else(PoisonError::into_inner).fork()
    }

    /// The executor, when it is free.
    pub(crate) fn compute(&self) -> ComputeGuard<'_> {
        // Every batch begins with whole buffers and writes what it reads, so a panic in the last one leaves
        // nothing behind.
        let held = self.0.compute.lock().unwrap_or_else(|poisoned| {
            self.0.compute.clear_poison();
            poisoned.into_inner()
        });
        ComputeGuard { inner: &self.0, held }
    }
}
