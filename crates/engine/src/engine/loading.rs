//! Loading, in stages. Each stage is a type that holds only what is there by then: a [`Prospect`] is planned, [`DenseLoaded`]
//! has the dense weights, [`TiersReady`] also the experts that are resident from the start.

use std::sync::{Arc, Mutex, OnceLock};

use super::pinning::Pinning;
use super::{Compute, Engine, Experts, Inner, MeasuredLater, Memory, ModelInfo, Options, Prospect, Setup};
use crate::backend::{ASSISTED_ROWS, Assistant, Backend, CpuBackend, Kept, Routing, SequenceState};
use crate::error::Result;
use crate::experts::heat::{Heat, hottest_first};
use crate::experts::{ExpertStore, FileSource, SlotClasses, StoreOptions};
use crate::forecast::rehearsal::rehearse;
use crate::memory::{Pressure, Region};
use crate::models::Blueprint;
use crate::plan::Plan;

/// Tells the caller how far loading has come.
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

    fn add(&mut self, bytes: u64) {
        self.done += bytes;
        if let Some(report) = &self.options.progress {
            report(self.done, self.total);
        }
    }
}

/// A model whose dense weights are where they are computed.
pub(super) struct DenseLoaded {
    model: ModelInfo,
    blueprint: Blueprint,
    classes: SlotClasses,
    plan: Plan,
    threads: usize,
    backend: Box<dyn Backend>,
    dense: Arc<Region>,
    /// Computes experts beside a device, if that was asked for.
    assistant: Option<Assistant>,
}

impl DenseLoaded {
    /// Reads the dense weights.
    ///
    /// # Errors
    /// If memory cannot be had, reading fails, or the device refuses.
    pub fn load(prospect: Prospect, options: &Options, progress: &mut Progress<'_>) -> Result<DenseLoaded> {
        let Prospect { model, blueprint, classes, plan } = prospect;
        let threads = options.threads()?;
        let buffers = blueprint.buffers(plan.chunk);
        let mut backend: Box<dyn Backend> = match &options.device {
            Some(device) => device.backend(options.precision, &buffers)?,
            None => Box::new(CpuBackend::new(threads, options.precision, &buffers)?),
        };
        let source = FileSource::open(&model.file)?;
        let dense = blueprint.load_dense(&source, &mut *backend, &mut |bytes| progress.add(bytes))?;
        source.forget();
        let mut assistant = None;
        if let Some(device) = options.device.as_ref().filter(|_| options.cpu_experts && plan.moves_experts())
        {
            let buffers = blueprint.buffers(ASSISTED_ROWS);
            let mut processor = CpuBackend::new(threads, options.precision, &buffers)?;
            blueprint.hand_over(&dense, &mut processor)?;
            let used: usize = blueprint.experts.iter().flatten().map(|layer| layer.used).sum();
            let bytes = model.traffic.experts as f64 / used.max(1) as f64;
            let here = rehearse(&blueprint.products().1, threads, options.precision)? / used.max(1) as f64;
            assistant = Some(Assistant::new(processor, bytes / device.link_speed()?, here));
        }
        Ok(DenseLoaded { model, blueprint, classes, plan, threads, backend, dense, assistant })
    }
}

/// A model with its expert slots, and in them the experts that are resident from the start.
pub(super) struct TiersReady {
    loaded: DenseLoaded,
    store: Arc<ExpertStore>,
    heat: Option<Heat>,
    pinning: Option<Pinning>,
}

impl TiersReady {
    /// Makes the expert slots, and fills them with all experts if they have room, else with those that were hot when the model
    /// was last loaded.
    ///
    /// # Errors
    /// If memory cannot be had, reading fails, or the device refuses.
    pub fn fill(
        mut loaded: DenseLoaded,
        options: &Options,
        progress: &mut Progress<'_>,
    ) -> Result<TiersReady> {
        let DenseLoaded { model, blueprint, classes, plan, backend, .. } = &mut loaded;
        let store_options = StoreOptions {
            slots: plan.slots.clone(),
            io: options.io,
            policy: options.policy,
            patience: StoreOptions::PATIENCE,
        };
        let layers = std::mem::take(&mut blueprint.experts);
        let store = Arc::new(ExpertStore::new(&model.file, layers, classes, &store_options)?);
        let mut pinning = None;
        if let (Some(device), Some(there)) = (&options.device, &mut plan.device) {
            pinning = Some(Pinning::start(Arc::clone(device), &store));
            if let Some(slots) = backend.make_slots(store.layers(), classes, &there.slots)? {
                // Others may have taken memory since it was planned.
                let had = std::mem::replace(&mut there.slot_bytes, classes.device_bytes(&slots));
                there.budget -= had - there.slot_bytes;
                there.slots = slots;
                store.use_device_slots(classes, &there.slots);
            }
        }
        // Where everything fits there is nothing to choose.
        let folder = options.heat.as_ref().filter(|_| plan.moves_experts());
        let heat = folder.map(|folder| Heat::of(folder, &model.file, model.traffic.experts));
        let remembered = heat.as_ref().and_then(Heat::read).filter(|heat| heat.len() == store.experts());
        if let Some(heat) = &remembered {
            store.warm(heat);
        }
        let hottest = remembered.as_deref().map(hottest_first);
        let pinned = || pinning.iter().for_each(Pinning::wait);
        let mut report = |bytes| progress.add(bytes);
        if plan.device_holds_all_experts() {
            pinned();
            store.lift(0..store.experts(), &mut **backend, &mut report)?;
        } else if plan.holds_all_experts() {
            store.preload(0..store.experts(), &mut report)?;
            pinned();
            store.lift(hottest.into_iter().flatten(), &mut **backend, &mut |_| ())?;
        } else if let Some(hottest) = hottest {
            pinned();
            store.lift(hottest.iter().copied(), &mut **backend, &mut report)?;
            while backend.let_go(true)? {}
            store.drop_doubles();
            store.preload(hottest.into_iter(), &mut report)?;
        }
        // From here on copies go past the buffer that is needed otherwise.
        pinned();
        Ok(TiersReady { loaded, store, heat, pinning })
    }

    /// The engine.
    pub fn into_engine(self, options: &Options) -> Engine {
        let TiersReady { loaded, store, heat, pinning } = self;
        let DenseLoaded { model, blueprint, plan, threads, backend, dense, assistant, .. } = loaded;
        let backend_name = match &assistant {
            Some(_) => format!("{} and CPU (--cpu-experts: other bits)", backend.name()),
            None => backend.name(),
        };
        let setup = Setup {
            threads,
            precision: options.precision,
            io: options.io,
            // Slots of a device may be lent later, and experts move then.
            prefetch: !options.no_prefetch && (plan.moves_experts() || plan.device.is_some()),
            assisted: assistant.is_some(),
            backend_name,
            device: options.device.clone(),
        };
        let blank = SequenceState::new(&blueprint.model.state(), &*backend);
        let pressure = Pressure::on(
            // Memory that a device copies from cannot be given back.
            if plan.device.is_some() { 0 } else { plan.slot_bytes },
            // Whoever describes a machine has a process that is not it.
            options.machine.is_none().then_some(plan.budget),
        );
        let compute = Compute {
            backend,
            _pinning: pinning,
            routing: Routing::default(),
            expected: Routing::default(),
            assistant,
            pressure,
            logits: Kept::default(),
            wanted: Vec::new(),
        };
        let ledger = Arc::new(plan.ledger(Arc::clone(&store) as _));
        Engine(Arc::new(Inner {
            model,
            decoder: blueprint.model,
            setup,
            experts: Experts { store, heat },
            memory: Memory { plan, ledger, dense },
            later: MeasuredLater::default(),
            lost: OnceLock::new(),
            blank: Mutex::new(blank),
            compute: Mutex::new(compute),
        }))
    }
}
