//! Loading a model, in stages. Each stage is a type that holds only what exists at that point: a [`Prospect`] is
//! planned, [`DenseLoaded`] has the dense weights, [`TiersReady`] also has the experts that are loaded at start.

use std::sync::{Arc, Mutex, OnceLock};

use super::{Compute, Engine, Experts, Inner, MeasuredLater, Memory, ModelInfo, Options, Prospect, Setup};
use crate::backend::{CpuBackend, Kept, SequenceState};
use crate::chain::Chain;
use crate::error::Result;
use crate::experts::heat::{Heat, hottest_first};
use crate::experts::{
    Assistant, ExecutorBuilder, ExpertExecutor, ExpertSetup, ExpertStore, FileSource, SlotClasses,
    StoreOptions,
};
use crate::forecast::rehearsal::{Computer, rehearse};
use crate::memory::{Pressure, Region};
use crate::models::{Blueprint, Model};
use crate::plan::Plan;

/// Reports to the caller how many bytes are loaded, and ends loading if the caller cancels it.
pub(super) struct Progress<'a> {
    done: u64,
    total: u64,
    options: &'a Options,
}

impl Progress<'_> {
    pub fn of<'a>(prospect: &Prospect, options: &'a Options) -> Progress<'a> {
        let plan = &prospect.plan;
        let on_device = plan.device.as_ref().map_or(0, |there| there.slot_bytes);
        let experts = (plan.slot_bytes + on_device).min(prospect.blueprint.expert_bytes());
        Progress { done: 0, total: plan.dense + experts, options }
    }

    fn add(&mut self, bytes: u64) -> Result<()> {
        self.done += bytes;
        if let Some(report) = &self.options.progress {
            report(self.done, self.total);
        }
        self.options.cancel.check()
    }
}

/// A model whose dense weights are loaded, in RAM or on the device.
pub(super) struct DenseLoaded {
    model: ModelInfo,
    blueprint: Blueprint,
    classes: SlotClasses,
    plan: Plan,
    threads: usize,
    builder: Box<dyn ExecutorBuilder>,
    dense: Arc<Region>,
    /// Computes some experts on the CPU beside a device (`Options::cpu_experts`).
    assistant: Option<Assistant>,
}

impl DenseLoaded {
    /// Reads the dense weights.
    ///
    /// # Errors
    /// If memory cannot be allocated, reading fails, the device reports an error, or loading is cancelled.
    pub fn load(prospect: Prospect, options: &Options, progress: &mut Progress<'_>) -> Result<DenseLoaded> {
        let Prospect { model, blueprint, classes, plan, .. } = prospect;
        let threads = options.thread_count()?;
        let buffers = blueprint.buffers(plan.chunk);
        let mut builder: Box<dyn ExecutorBuilder> = match &options.device {
            Some(device) => device.executor(options.precision, &buffers)?,
            None => Box::new(CpuBackend::new(threads, options.precision, &buffers)?),
        };
        let source = FileSource::open(&model.file)?;
        let dense = blueprint.load_dense(&source, builder.backend(), &mut |bytes| progress.add(bytes))?;
        source.forget();
        let mut assistant = None;
        let assists = options.cpu_experts && plan.device.is_some() && plan.moves_experts();
        if let Some(device) = options.device.as_ref().filter(|_| assists) {
            let buffers = blueprint.buffers(Assistant::ROWS);
            let mut processor = CpuBackend::new(threads, options.precision, &buffers)?;
            blueprint.hand_over(&dense, &mut processor)?;
            let used: usize = blueprint.experts.iter().flatten().map(|layer| layer.used).sum();
            let bytes = model.traffic.experts as f64 / used.max(1) as f64;
            let here = rehearse(
                &blueprint.products().1,
                Computer { device: None, threads, precision: options.precision },
            )? / used.max(1) as f64;
            assistant = Some(Assistant::new(processor, bytes / device.link_speed()?, here));
        }
        Ok(DenseLoaded { model, blueprint, classes, plan, threads, builder, dense, assistant })
    }
}

/// A model with its expert slots, filled with the experts that are loaded at start.
pub(super) struct TiersReady {
    model: ModelInfo,
    decoder: Box<dyn Model>,
    plan: Plan,
    threads: usize,
    executor: Box<dyn ExpertExecutor>,
    /// Whether the CPU computes some experts beside a device.
    assisted: bool,
    dense: Arc<Region>,
    store: Arc<ExpertStore>,
    heat: Option<Heat>,
}

impl TiersReady {
    /// Allocates the expert slots and fills them: with all experts if they fit, otherwise with the hottest experts of
    /// the last run.
    ///
    /// # Errors
    /// If memory cannot be allocated, reading fails, the device reports an error, or loading is cancelled.
    pub fn fill(loaded: DenseLoaded, options: &Options, progress: &mut Progress<'_>) -> Result<TiersReady> {
        let DenseLoaded { model, blueprint, classes, mut plan, threads, builder, dense, assistant } = loaded;
        let store_options = StoreOptions {
            slots: plan.slots.clone(),
            io: options.io,
            policy: options.policy,
            patience: StoreOptions::PATIENCE,
        };
        let store = Arc::new(ExpertStore::new(&model.file, blueprint.experts, &classes, &store_options)?);
        options.device.iter().for_each(|device| store.pin(device));
        let assisted = assistant.is_some();
        let mut executor = builder.build(ExpertSetup {
            store: Arc::clone(&store),
            classes: &classes,
            device_slots: plan.device.as_ref().map_or(&[], |there| &there.slots[..]),
            // A device's slots may be lent to conversations later, and then experts have to be uploaded.
            prefetch: options.prefetch && (plan.moves_experts() || plan.device.is_some()),
            assistant,
        })?;
        if let (Some(slots), Some(there)) = (store.device_slots(), &mut plan.device) {
            // Other processes may have taken GPU memory since the plan was made.
            let had = std::mem::replace(&mut there.slot_bytes, classes.device_bytes(&slots));
            there.budget -= had - there.slot_bytes;
            there.slots = slots;
        }
        // Where all experts fit, their usage need not be recorded.
        let folder = options.heat.as_ref().filter(|_| plan.moves_experts());
        let heat = folder.map(|folder| model.heat(folder));
        let remembered = heat.as_ref().and_then(Heat::read).filter(|heat| heat.len() == store.experts());
        if let Some(heat) = &remembered {
            store.warm(heat);
        }
        let hottest = remembered.as_deref().map(hottest_first);
        let mut report = |bytes| progress.add(bytes);
        if plan.device_holds_all_experts() {
            store.wait_for_pins();
            executor.upload(&mut (0..store.experts()), &mut report)?;
        } else if plan.holds_all_experts() {
            executor.preload(&mut (0..store.experts()), &mut report)?;
            store.wait_for_pins();
            executor.upload(&mut hottest.into_iter().flatten(), &mut |_| options.cancel.check())?;
        } else if let Some(hottest) = hottest {
            store.wait_for_pins();
            executor.upload(&mut hottest.iter().copied(), &mut report)?;
            executor.preload(&mut hottest.into_iter(), &mut report)?;
        }
        // From now on uploads read pinned slots directly instead of going through a buffer.
        store.wait_for_pins();
        let decoder = blueprint.model;
        Ok(TiersReady { model, decoder, plan, threads, executor, assisted, dense, store, heat })
    }

    /// The engine. `chain` computes the layers before those that are loaded.
    pub fn into_engine(self, options: &Options, chain: Option<Chain>) -> Engine {
        let TiersReady { model, decoder, plan, threads, mut executor, assisted, dense, store, heat } = self;
        let backend = executor.backend();
        let backend_name = match assisted {
            true => format!("{} and CPU (--cpu-experts: other bits)", backend.name()),
            false => backend.name(),
        };
        let blank = SequenceState::new(model.span.first, &decoder.state(), backend);
        let setup = Setup {
            threads,
            precision: options.precision,
            io: options.io,
            assisted,
            backend_name,
            device: options.device.clone(),
        };
        let pressure = Pressure::on(
            // Pinned memory cannot be returned to the system.
            if plan.device.is_some() { 0 } else { plan.slot_bytes },
            // A caller that describes the machine may describe another one; then this process's memory says nothing.
            options.machine.is_none().then_some(plan.budget),
        );
        let compute = Compute { executor, pressure, logits: Kept::default(), wanted: Vec::new() };
        let ledger = Arc::new(plan.ledger(Arc::clone(&store) as _));
        Engine(Arc::new(Inner {
            model,
            decoder,
            setup,
            experts: Experts { store, heat },
            chain: chain.map(|chain| Arc::new(chain.beside(plan.kv))),
            memory: Memory { plan, ledger, dense },
            later: MeasuredLater::default(),
            lost: OnceLock::new(),
            blank: Mutex::new(blank),
            compute: Mutex::new(compute),
        }))
    }
}
