//! Mixtures on a GPU: in which order experts are asked for, copied and computed.
//!
//! Experts are in three tiers: the GPU's slots, the store's slots in the computer's memory, and the drive. The way to the GPU is
//! the narrowest, so whatever has to go there sets out before anything else, and the GPU computes what it has meanwhile.

mod experts;
mod mixture;
mod slots;

use std::sync::Arc;

use forebay_engine::internals::backend::{Backend, Routing};
use forebay_engine::internals::experts::{
    Access, Acquisition, Assistant, BatchShape, DeviceSlots, ExecutorBuilder, ExpertExecutor, ExpertSetup,
    ExpertStore, Lease, Leases, Meanwhile, Mixture,
};
use forebay_engine::{ExpertIdx, LayerIdx, Result};
use smallvec::SmallVec;

use crate::backend::CudaBackend;
use crate::backend::choice::{Chosen, MOST_APART};
use experts::GpuExperts;
use slots::ExpertSlots;

/// Computes mixtures on a GPU.
pub struct CudaExecutor {
    gpu: GpuExperts,
    store: Arc<ExpertStore>,
    /// The processor, where it computes some of the experts that are in its memory.
    assistant: Option<Assistant>,
    prefetch: bool,
    batch: BatchShape,
    /// The choices of the layer at hand, and what the next one will probably choose. They keep their memory from layer to layer.
    routing: Routing,
    expected: Routing,
}

impl ExecutorBuilder for CudaBackend {
    fn backend(&mut self) -> &mut dyn Backend {
        self
    }

    fn build(mut self: Box<Self>, setup: ExpertSetup<'_>) -> Result<Box<dyn ExpertExecutor>> {
        let ExpertSetup { store, classes, device_slots, prefetch, assistant } = setup;
        let (slots, made) = ExpertSlots::new(&self.gpu, store.layers(), classes, device_slots)?;
        for part in slots.layers.iter().flatten().flat_map(|layer| &layer.parts) {
            self.note_kind(part.kind);
        }
        // All kinds are known. The first answer need not wait for what takes a while.
        self.kernels()?;
        store.use_device_slots(classes, &made);
        Ok(Box::new(CudaExecutor {
            gpu: GpuExperts::new(*self, slots)?,
            store,
            assistant,
            prefetch,
            batch: BatchShape { rows: 0, sequences: 0 },
            routing: Routing::default(),
            expected: Routing::default(),
        }))
    }
}

impl ExpertExecutor for CudaExecutor {
    fn backend(&mut self) -> &mut dyn Backend {
        &mut self.gpu.backend
    }

    fn upload(
        &mut self,
        experts: &mut dyn Iterator<Item = usize>,
        progress: &mut dyn FnMut(u64),
    ) -> Result<()> {
        self.store.upload(experts, &mut self.gpu, progress)
    }

    fn preload(
        &mut self,
        experts: &mut dyn Iterator<Item = usize>,
        progress: &mut dyn FnMut(u64),
    ) -> Result<()> {
        // What is on the GPU makes room for others.
        while self.gpu.let_go(true)? {}
        self.store.drop_doubles();
        self.store.preload(experts, progress)
    }

    fn lend(&mut self) -> Result<()> {
        self.store.lend_device(&mut self.gpu)
    }

    fn begin(&mut self, batch: BatchShape) -> Result<()> {
        self.batch = batch;
        if batch.is_step() {
            self.store.tick();
        }
        self.lend()?;
        self.gpu.begin(batch.rows);
        Ok(())
    }

    fn mixture(&mut self, mixture: Mixture<'_>, meanwhile: &mut Meanwhile<'_>) -> Result<()> {
        if self.store.device_holds(mixture.experts.layer) {
            self.mix_resident(mixture, meanwhile)
        } else {
            self.mix_streamed(mixture, meanwhile)
        }
    }

    fn end(&mut self) -> Result<()> {
        self.gpu.backend.submit()?;
        self.store.note_copy_wait(self.gpu.slots.copy_wait());
        Ok(())
    }

    fn count_used(&mut self) -> Result<()> {
        let store = &self.store;
        match self.batch.access() {
            Access::Token => self.gpu.tell(&mut |layer, experts| store.note_used(layer, experts)),
            _ => Ok(()),
        }
    }

    fn forget(&mut self) {
        self.store.forget_device();
    }
}

impl CudaExecutor {
    /// Computes a mixture whose experts are all on the GPU: the store is asked for nothing.
    fn mix_resident(&mut self, mut mixture: Mixture<'_>, meanwhile: &mut Meanwhile<'_>) -> Result<()> {
        let CudaExecutor { gpu, store, routing, .. } = self;
        gpu.router_logits(&mixture)?;
        if let Some(observer) = mixture.observer.take() {
            gpu.route(&mixture, routing)?;
            observer(mixture.experts.layer, routing);
        }
        // Where others of the model's experts come and go, it counts which are used.
        let noted = self.batch.access() == Access::Token && !store.device_holds_all();
        gpu.mix(&mixture, noted)?;
        meanwhile(&mut gpu.backend)
    }

    /// Computes a mixture some of whose experts have to come to the GPU first.
    ///
    /// Those that are there are computed while others come. Outputs are kept apart and added in rank order, so that the order of arrival
    /// changes no bit.
    fn mix_streamed(&mut self, mut mixture: Mixture<'_>, meanwhile: &mut Meanwhile<'_>) -> Result<()> {
        let access = self.batch.access();
        let few = access == Access::Token;
        let CudaExecutor { gpu, store, assistant, routing, expected, .. } = self;
        gpu.router_logits(&mixture)?;
        let chosen = gpu.route(&mixture, routing)?;
        let experts = mixture.experts;
        if let Some(observer) = mixture.observer.take() {
            observer(experts.layer, routing);
        }
        let mut acquisition = store.acquire(experts.layer, routing.chosen(), access);
        let helps = few && self.batch.rows <= Assistant::ROWS.min(MOST_APART);
        let mut assistant = assistant.as_mut().filter(|_| helps);
        let elsewhere = match &assistant {
            Some(assistant) => acquisition.take_coldest(assistant.share(acquisition.ready())),
            None => Leases::new(),
        };
        // The way to the GPU is the narrowest: what has to go there sets out before anything else.
        gpu.demand(acquisition.demanded())?;
        if let Some(assistant) = assistant.as_mut().filter(|_| !elsewhere.is_empty()) {
            let x = experts.buffers.x;
            gpu.backend.read(x, assistant.input(self.batch.rows * x.width()))?;
        }
        // A prompt needs nearly all experts, which the store reads far ahead as it is.
        let next = mixture.next.filter(|_| self.prefetch && few);
        let foreseen = next.map(|next| gpu.foresee(&mixture, next)).transpose()?;
        if !acquisition.on_device().is_empty() {
            gpu.compute_there(&experts, &chosen, acquisition.on_device())?;
        }
        let next_layer = LayerIdx(experts.layer.0 + 1);
        let mut likely: SmallVec<[ExpertIdx; 32]> = SmallVec::new();
        if let Some(foreseen) = &foreseen {
            gpu.hear_ahead(foreseen, expected)?;
            likely.extend(expected.likeliest());
            store.prefetch(next_layer, &likely);
        }
        // The drive is at work meanwhile.
        meanwhile(&mut gpu.backend)?;
        while acquisition.ready() > 0 {
            gpu.compute_next(&mut acquisition, &mixture, &chosen)?;
        }
        // What is there is on its way to the GPU, and the drive is at work.
        if let Some(assistant) = assistant.filter(|_| !elsewhere.is_empty()) {
            gpu.put_outputs(experts.buffers, assistant.compute(&experts, routing, elsewhere))?;
        }
        while gpu.compute_next(&mut acquisition, &mixture, &chosen)? {}
        if mixture.next.is_some() {
            // Of a prompt that asks for nearly all, any will do.
            let nearly_all = !few && 4 * routing.chosen().len() >= 3 * mixture.router.experts;
            let room = gpu.slots.room();
            let leases = match nearly_all {
                true => store.send_ahead(next_layer, store.layer_experts(next_layer), room),
                false => store.send_ahead(next_layer, likely.into_iter(), room),
            };
            // The way to the GPU would be idle until the next layer has chosen.
            if !leases.is_empty() {
                gpu.slots.send(leases)?;
            }
        }
        gpu.sum(&chosen, experts.buffers.out, mixture.out)
    }
}

impl GpuExperts {
    /// Computes the experts that have become ready next; `false` if all have been computed.
    fn compute_next(
        &mut self,
        acquisition: &mut Acquisition<'_>,
        mixture: &Mixture<'_>,
        chosen: &Chosen,
    ) -> Result<bool> {
        let leases = acquisition.next_ready_letting_go(&mut |wait| self.slots.let_go(wait))?;
        let Some(mut leases) = leases else { return Ok(false) };
        leases.sort_unstable_by_key(Lease::expert);
        self.bring(leases, Some((&mixture.experts, chosen)))?;
        Ok(true)
    }
}
