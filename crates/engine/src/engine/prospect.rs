//! A model that is described and planned, but not loaded.

use std::ops::Range;
use std::path::Path;

use super::loading::{DenseLoaded, Progress, TiersReady};
use super::{Engine, ModelInfo, Options};
use crate::chain::Chain;
use crate::chat::ChatTemplate;
use crate::error::{Error, Result};
use crate::experts::{FileSource, IoMethod, SlotClasses};
use crate::forecast::predict::{DriveSpeed, Outlook, Skew};
use crate::forecast::rehearsal::{ComputeTime, Computer, rehearse};
use crate::forecast::trace::RoutedLayer;
use crate::forecast::{DriveProbe, preference};
use crate::format::ModelFile;
use crate::memory::Machine;
use crate::models::{self, Blueprint, Span};
use crate::plan::{Plan, Traffic};
use crate::tokenizer::Tokenizer;

/// A model that is described and planned, but whose weights have not been read.
///
/// # Examples
/// ```
/// use forebay_engine::{Bytes, Options, Prospect};
///
/// # let model = std::path::Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/tales-qwen3moe-Q4_K_M.gguf"));
/// let options = Options::new().threads(1);
/// let prospect = Prospect::new(model, &options)?;
/// let (least, all) = (prospect.least_memory(&options)?, prospect.memory_for_all(&options)?);
/// println!("runs in {}; with {} no expert is streamed", Bytes(least), Bytes(all));
/// assert!(least < all);
///
/// let engine = prospect.load(&options)?;
/// # assert_eq!(engine.threads(), 1);
/// # Ok::<(), forebay_engine::Error>(())
/// ```
pub struct Prospect {
    pub(super) model: ModelInfo,
    pub(super) blueprint: Blueprint,
    pub(super) classes: SlotClasses,
    pub(super) plan: Plan,
    /// The machine as it was when the model was described, so that all plans use the same figures.
    machine: Machine,
}

impl Prospect {
    /// Describes and plans a model.
    ///
    /// # Errors
    /// As [`Engine::open`], except for errors in reading weights.
    pub fn new(path: &Path, options: &Options) -> Result<Prospect> {
        let file = ModelFile::open(path)?;
        let blueprint = models::describe_layers(&file, options.layers.clone())?;
        if let Some(device) = &options.device {
            blueprint.check_device(&**device, file.path())?;
        }
        let traffic = Traffic::new(&blueprint, options.precision);
        let tokenizer = Tokenizer::of(&file)?;
        let vocab = blueprint.model.vocab();
        if tokenizer.vocab_size() > vocab {
            let tokens = tokenizer.vocab_size();
            let message = format!("the tokenizer has {tokens} tokens, but the model has only {vocab}");
            return Err(Error::format(file.path(), message));
        }
        let template = ChatTemplate::of(&file, &tokenizer).map_err(|error| error.to_string());
        let classes = SlotClasses::new(&blueprint.experts);
        // The memory that the process uses now is what it needs besides the model.
        let machine = options.machine_now();
        let plan = Plan::new(&blueprint, &classes, &options.wishes(blueprint.context)?, &machine)?;
        let routed = blueprint.experts.iter().map(RoutedLayer::of).collect();
        let span = blueprint.span;
        let model = ModelInfo { file, tokenizer, template, traffic, routed, vocab, span };
        Ok(Prospect { model, blueprint, classes, plan, machine })
    }

    /// The layers that would be loaded, and how many the model has.
    pub fn span(&self) -> Span {
        self.blueprint.span
    }

    /// The layers of each of so many stages, whose weights take about the same memory.
    ///
    /// # Errors
    /// If there are no stages, or more than layers.
    pub fn split(&self, stages: usize) -> Result<Vec<Range<usize>>> {
        self.blueprint.split(stages)
    }

    /// The model's file.
    pub fn file(&self) -> &ModelFile {
        &self.model.file
    }

    /// How memory would be divided.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// Bytes that one token would read.
    pub fn traffic(&self) -> Traffic {
        self.model.traffic
    }

    /// How memory would be divided with other options.
    ///
    /// # Errors
    /// [`Error::Budget`] if memory does not suffice, [`Error::Unsupported`] if a device cannot compute the model.
    pub fn plan_with(&self, options: &Options) -> Result<Plan> {
        if let Some(device) = &options.device {
            self.blueprint.check_device(&**device, self.model.file.path())?;
        }
        let wishes = options.wishes(self.blueprint.context)?;
        Plan::new(&self.blueprint, &self.classes, &wishes, &options.machine.unwrap_or(self.machine))
    }

    /// How memory would be divided with this budget.
    ///
    /// # Errors
    /// [`Error::Budget`] if the budget is too small.
    pub fn plan_for(&self, options: &Options, memory: u64) -> Result<Plan> {
        self.plan_with(&Options { memory: Some(memory), ..options.clone() })
    }

    /// The smallest budget with which the model runs.
    ///
    /// # Errors
    /// As [`Engine::open`], except for errors about memory.
    pub fn least_memory(&self, options: &Options) -> Result<u64> {
        // The need grows a little with the budget, because parts of it are a share of the budget.
        let mut memory = 0;
        loop {
            match self.plan_for(options, memory) {
                Ok(_) => return Ok(memory),
                Err(Error::Budget { need, .. }) if need > memory => memory = need,
                Err(error) => return Err(error),
            }
        }
    }

    /// The smallest budget with which no expert is streamed.
    ///
    /// # Errors
    /// As [`Engine::open`], except for errors about memory.
    pub fn memory_for_all(&self, options: &Options) -> Result<u64> {
        let options = Options { expert_memory: None, ..options.clone() };
        let mut memory = self.least_memory(&options)?;
        loop {
            let plan = self.plan_for(&options, memory)?;
            if plan.holds_all_experts() {
                return Ok(memory);
            }
            let need = plan.fixed().saturating_add(plan.experts);
            memory = need.max(memory.saturating_add(memory / 256 + 1));
        }
    }

    /// Number and size of the routed experts of each layer.
    pub fn routed_layers(&self) -> &[RoutedLayer] {
        &self.model.routed
    }

    /// The model's tokenizer.
    pub fn tokenizer(&self) -> &Tokenizer {
        &self.model.tokenizer
    }

    /// How unevenly the model uses its experts: measured in earlier runs, or estimated from its routers.
    ///
    /// # Errors
    /// If the routers cannot be read.
    pub fn skew(&self, options: &Options) -> Result<Skew> {
        let heat = options.heat.as_ref().and_then(|folder| {
            let heat = self.model.heat(folder).read();
            heat.filter(|heat| heat.len() == self.plan.expert_count)
        });
        match Skew::known(heat.unwrap_or_default()) {
            Some(skew) => Ok(skew),
            None => {
                let source = FileSource::open(&self.model.file)?;
                let routers = self.blueprint.router_lengths(&source, preference::LAYERS)?;
                Ok(Skew::of_routers(&routers))
            }
        }
    }

    /// Measures the drives that hold the model's experts; `None` if it has none.
    ///
    /// # Errors
    /// If a drive cannot be read.
    pub fn drive_probe(&self, io: IoMethod) -> Result<Option<DriveProbe>> {
        DriveProbe::of_experts(&self.model.file, &self.blueprint.experts, io)
    }

    /// Measures how long the products of one token take on this machine, on memory without weights: on the CPU, or on the
    /// device if that shares the computer's memory.
    ///
    /// # Errors
    /// If there is not enough memory, no thread can be started, or the device fails.
    pub fn compute_time(&self, options: &Options) -> Result<ComputeTime> {
        let device = options.device.as_deref().filter(|device| device.shares_memory());
        let computer = Computer { device, threads: options.thread_count()?, precision: options.precision };
        let (dense, experts) = self.blueprint.products();
        Ok(ComputeTime { dense: rehearse(&dense, computer)?, experts: rehearse(&experts, computer)? })
    }

    /// Everything that is known about the model on this machine, from which its speed is predicted.
    ///
    /// # Errors
    /// If the model's routers cannot be read.
    pub fn outlook(
        &self,
        options: &Options,
        compute: ComputeTime,
        drive: Option<DriveSpeed>,
    ) -> Result<Outlook> {
        let layers: Vec<_> = self.blueprint.experts.iter().flatten().collect();
        let used: usize = layers.iter().map(|layer| layer.used).sum();
        Ok(Outlook {
            compute,
            drive,
            layers: layers.len(),
            used: used as f64 / layers.len().max(1) as f64,
            expert_bytes: self.model.traffic.experts as f64 / used.max(1) as f64,
            skew: self.skew(options)?,
        })
    }

    /// Loads the model.
    ///
    /// # Errors
    /// If memory cannot be allocated or reading fails; [`Error::Budget`] if [`Options::memory`] is more than the
    /// machine has; [`Error::Invalid`] if [`Options::layers`] leaves out layers; [`Error::Cancelled`] if
    /// [`Options::cancel`] was requested.
    pub fn load(self, options: &Options) -> Result<Engine> {
        let span = self.blueprint.span;
        if !span.is_whole() {
            return Err(Error::Invalid(format!(
                "Options::layers selects {span}, which is only a stage of the model; \
                 open the last stage with Engine::after and the others with Stage::open"
            )));
        }
        self.load_layers(options, None)
    }

    /// Loads the layers that were described. `chain` computes those before them.
    pub(crate) fn load_layers(self, options: &Options, chain: Option<Chain>) -> Result<Engine> {
        if let Some(memory) = options.memory {
            options.machine_now().check_budget(memory)?;
        }
        let mut progress = Progress::of(&self, options);
        let dense = DenseLoaded::load(self, options, &mut progress)?;
        let ready = TiersReady::fill(dense, options, &mut progress)?;
        Ok(ready.into_engine(options, chain))
    }
}
