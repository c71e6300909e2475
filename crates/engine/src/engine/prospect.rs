//! A model before it is loaded.

use std::path::Path;
use std::sync::{Arc, Mutex, OnceLock};

use super::pinning::Pinning;
use super::{Compute, Engine, Inner, Options};
use crate::backend::{CpuBackend, Kept, SequenceState};
use crate::chat::ChatTemplate;
use crate::error::{Error, Result};
use crate::experts::heat::{Heat, hottest_first};
use crate::experts::{
    Assistant, ExecutorBuilder, ExpertSetup, ExpertStore, FileSource, IoMethod, SlotClasses, StoreOptions,
};
use crate::forecast::predict::{DriveSpeed, Outlook, Skew};
use crate::forecast::rehearsal::{ComputeTime, rehearse};
use crate::forecast::trace::RoutedLayer;
use crate::forecast::{DriveProbe, preference};
use crate::format::ModelFile;
use crate::memory::{Ledger, Pressure};
use crate::models::{self, Blueprint};
use crate::plan::{Plan, Traffic};
use crate::tokenizer::Tokenizer;

/// A model that could be loaded: described and planned, but none of its weights read.
pub struct Prospect {
    file: ModelFile,
    blueprint: Blueprint,
    classes: SlotClasses,
    tokenizer: Tokenizer,
    template: std::result::Result<Option<ChatTemplate>, String>,
    plan: Plan,
    traffic: Traffic,
}

impl Prospect {
    /// Describes and plans a model.
    ///
    /// # Errors
    /// As [`Engine::open`], but for reading.
    pub fn new(path: &Path, options: &Options) -> Result<Prospect> {
        let file = ModelFile::open(path)?;
        let blueprint = models::describe(&file)?;
        if let Some(device) = &options.device {
            blueprint.check_device(&**device, file.path())?;
        }
        let traffic = Traffic::new(&blueprint, options.precision);
        let tokenizer = Tokenizer::of(&file)?;
        let vocab = blueprint.model.head().vocab();
        if tokenizer.vocab_size() > vocab {
            let tokens = tokenizer.vocab_size();
            let message = format!("the tokenizer has {tokens} tokens, but the model has only {vocab}");
            return Err(Error::format(file.path(), message));
        }
        let template = ChatTemplate::of(&file, &tokenizer).map_err(|error| error.to_string());
        let classes = SlotClasses::new(&blueprint.experts);
        // What is resident now is what the process needs besides the model.
        let plan = Plan::new(&blueprint, &classes, &options.wishes(blueprint.context)?, &options.machine())?;
        Ok(Prospect { file, blueprint, classes, tokenizer, template, plan, traffic })
    }

    /// The model's file.
    pub fn file(&self) -> &ModelFile {
        &self.file
    }

    /// Where memory would go.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// What one token would read.
    pub fn traffic(&self) -> Traffic {
        self.traffic
    }

    /// Where memory would go with other options.
    ///
    /// # Errors
    /// [`Error::Budget`] if memory does not suffice, [`Error::Unsupported`] if a device cannot compute the model.
    pub fn plan_with(&self, options: &Options) -> Result<Plan> {
        if let Some(device) = &options.device {
            self.blueprint.check_device(&**device, self.file.path())?;
        }
        let wishes = options.wishes(self.blueprint.context)?;
        Plan::new(&self.blueprint, &self.classes, &wishes, &options.machine())
    }

    /// Where memory would go if the process might use so much.
    ///
    /// # Errors
    /// [`Error::Budget`] if that is too little.
    pub fn plan_for(&self, options: &Options, memory: u64) -> Result<Plan> {
        self.plan_with(&Options { memory: Some(memory), ..options.clone() })
    }

    /// The smallest memory that the model runs in.
    ///
    /// # Errors
    /// As [`Engine::open`], where it is not the memory that is wrong.
    pub fn least_memory(&self, options: &Options) -> Result<u64> {
        // What is needed grows a little with what there is, because some of it is a share.
        let mut memory = 0;
        loop {
            match self.plan_for(options, memory) {
                Ok(_) => return Ok(memory),
                Err(Error::Budget { need, .. }) if need > memory => memory = need,
                Err(error) => return Err(error),
            }
        }
    }

    /// The memory in which nothing is streamed.
    ///
    /// # Errors
    /// As [`Engine::open`], where it is not the memory that is wrong.
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

    /// The routed experts of each layer, in numbers.
    pub fn routed_layers(&self) -> Vec<RoutedLayer> {
        self.blueprint.experts.iter().map(RoutedLayer::of).collect()
    }

    /// The model's tokenizer.
    pub fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    /// What is known of how unevenly the model uses its experts: from earlier runs, or from its routers.
    ///
    /// # Errors
    /// If the routers cannot be read.
    pub fn skew(&self, options: &Options) -> Result<Skew> {
        let heat = options.heat.as_ref().and_then(|folder| {
            let heat = Heat::of(folder, &self.file, self.traffic.experts).read();
            heat.filter(|heat| heat.len() == self.plan.expert_count)
        });
        match Skew::known(heat.unwrap_or_default()) {
            Some(skew) => Ok(skew),
            None => {
                let source = FileSource::open(&self.file)?;
                let routers = self.blueprint.router_lengths(&source, preference::LAYERS)?;
                Ok(Skew::of_routers(&routers))
            }
        }
    }

    /// Measures the drives that hold the model's experts; `None` if it has none.
    ///
    /// # Errors
    /// If they cannot be read.
    pub fn drive_probe(&self, io: IoMethod) -> Result<Option<DriveProbe>> {
        DriveProbe::of_experts(&self.file, &self.blueprint.experts, io)
    }

    /// How long a token's products would take here, tried for a moment on memory of no content.
    ///
    /// # Errors
    /// If there is no memory or no thread for it.
    pub fn compute_time(&self, options: &Options) -> Result<ComputeTime> {
        let threads = options.threads()?;
        let (dense, experts) = self.blueprint.products();
        Ok(ComputeTime {
            dense: rehearse(&dense, threads, options.precision)?,
            experts: rehearse(&experts, threads, options.precision)?,
        })
    }

    /// What is known of the model on this machine, given how fast both were found to be.
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
            expert_bytes: self.traffic.experts as f64 / used.max(1) as f64,
            skew: self.skew(options)?,
        })
    }

    /// Loads the model.
    ///
    /// # Errors
    /// If memory cannot be had or reading fails; [`Error::Budget`] if [`Options::memory`] is more than the machine has.
    pub fn load(self, options: &Options) -> Result<Engine> {
        if let Some(memory) = options.memory {
            options.machine().check_budget(memory)?;
        }
        let Prospect { file, blueprint, classes, tokenizer, template, mut plan, traffic } = self;
        let threads = options.threads()?;
        let buffers = blueprint.buffers(plan.chunk);
        // Gone after the executor, which copies from what is pinned.
        let mut pinning = None;
        let mut builder: Box<dyn ExecutorBuilder> = match &options.device {
            Some(device) => device.executor(options.precision, &buffers)?,
            None => Box::new(CpuBackend::new(threads, options.precision, &buffers)?),
        };
        // Where everything fits there is nothing to choose.
        let folder = options.heat.as_ref().filter(|_| plan.moves_experts());
        let heat = folder.map(|folder| Heat::of(folder, &file, traffic.experts));
        let remembered = heat.as_ref().and_then(Heat::read);
        let there = plan.device.as_ref().map_or(0, |there| there.slot_bytes);
        let total = plan.dense + (plan.slot_bytes + there).min(blueprint.expert_bytes());
        let mut done = 0;
        let mut progress = |bytes| {
            done += bytes;
            if let Some(report) = &options.progress {
                report(done, total);
            }
        };
        let source = FileSource::open(&file)?;
        let dense = blueprint.load_dense(&source, builder.backend(), &mut progress)?;
        source.forget();
        let mut assistant = None;
        if let Some(device) = options.device.as_ref().filter(|_| options.cpu_experts && plan.moves_experts())
        {
            let buffers = blueprint.buffers(Assistant::ROWS);
            let mut processor = CpuBackend::new(threads, options.precision, &buffers)?;
            blueprint.hand_over(&dense, &mut processor)?;
            let used: usize = blueprint.experts.iter().flatten().map(|layer| layer.used).sum();
            let bytes = traffic.experts as f64 / used.max(1) as f64;
            let here = rehearse(&blueprint.products().1, threads, options.precision)? / used.max(1) as f64;
            assistant = Some(Assistant::new(processor, bytes / device.link_speed()?, here));
        }
        let store_options = StoreOptions {
            slots: plan.slots.clone(),
            io: options.io,
            policy: options.policy,
            patience: StoreOptions::PATIENCE,
        };
        let routed = blueprint.experts.iter().map(RoutedLayer::of).collect();
        let vocab = blueprint.model.head().vocab();
        let store = Arc::new(ExpertStore::new(&file, blueprint.experts, &classes, &store_options)?);
        if let Some(device) = &options.device {
            pinning = Some(Pinning::start(Arc::clone(device), &store));
        }
        let assisted = assistant.is_some();
        let mut executor = builder.build(ExpertSetup {
            store: Arc::clone(&store),
            classes: &classes,
            device_slots: plan.device.as_ref().map_or(&[], |there| &there.slots[..]),
            // Slots of a device may be lent later, and experts move then.
            prefetch: !options.no_prefetch && (plan.moves_experts() || plan.device.is_some()),
            assistant,
        })?;
        if let (Some(slots), Some(there)) = (store.device_slots(), &mut plan.device) {
            // What others have taken is nobody's here.
            let had = std::mem::replace(&mut there.slot_bytes, classes.device_bytes(&slots));
            there.budget -= had - there.slot_bytes;
            there.slots = slots;
        }
        let remembered = remembered.filter(|heat| heat.len() == store.experts());
        if let Some(heat) = &remembered {
            store.warm(heat);
        }
        let hottest = remembered.as_deref().map(hottest_first);
        let pinned = || pinning.iter().for_each(Pinning::wait);
        if plan.device_holds_all_experts() {
            pinned();
            executor.upload(&mut (0..store.experts()), &mut progress)?;
        } else if plan.holds_all_experts() {
            executor.preload(&mut (0..store.experts()), &mut progress)?;
            pinned();
            executor.upload(&mut hottest.into_iter().flatten(), &mut |_| ())?;
        } else if let Some(hottest) = hottest {
            pinned();
            executor.upload(&mut hottest.iter().copied(), &mut progress)?;
            executor.preload(&mut hottest.into_iter(), &mut progress)?;
        }
        // From here on copies go past the buffer that is needed otherwise.
        pinned();
        let backend = executor.backend();
        let backend_name = match assisted {
            true => format!("{} and CPU (--cpu-experts: other bits)", backend.name()),
            false => backend.name(),
        };
        let blank = Mutex::new(SequenceState::new(&blueprint.model.state(), backend));
        let compute = Compute {
            executor,
            // Memory that a device copies from cannot be given back.
            pressure: Pressure::on(
                if plan.device.is_some() { 0 } else { plan.slot_bytes },
                // Whoever describes a machine has a process that is not it.
                options.machine.is_none().then_some(plan.budget),
            ),
            logits: Kept::default(),
            wanted: Vec::new(),
        };
        Ok(Engine(Arc::new(Inner {
            vocab,
            file,
            tokenizer,
            template,
            model: blueprint.model,
            store,
            ledger: Ledger::new(&plan),
            plan,
            traffic,
            routed,
            threads,
            heat,
            io: options.io,
            dense,
            device: options.device.clone(),
            speeds: OnceLock::new(),
            fingerprint: OnceLock::new(),
            lexicon: Mutex::new(None),
            precision: options.precision,
            assisted,
            lost: OnceLock::new(),
            backend_name,
            blank,
            compute: Mutex::new(compute),
            pinning,
        })))
    }
}
