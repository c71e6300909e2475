//! Computes mixtures on a GPU, and decides in which order experts are acquired, uploaded and computed.
//!
//! Experts are in three tiers: the GPU's slots, the store's slots in RAM, and the drive. The link to the GPU is the
//! bottleneck. So uploads start before anything else, and the GPU computes the experts that it has meanwhile.

mod experts;
mod mixture;
mod slots;

use std::sync::Arc;

use forebay_engine::internals::backend::{Backend, Routing};
use forebay_engine::internals::experts::{
    Access, Acquisition, Assistant, BatchShape, DeviceSlots, ExecutorBuilder, ExpertExecutor, ExpertSetup,
    ExpertStore, Lease, Leases, Meanwhile, Mixture,
};
use forebay_engine::{ExpertIdx, Result};
use smallvec::SmallVec;

use crate::backend::CudaBackend;
use crate::backend::choice::{Chosen, MOST_APART};
use experts::GpuExperts;
use slots::ExpertSlots;

/// The executor for a GPU.
pub struct CudaExecutor {
    gpu: GpuExperts,
    store: Arc<ExpertStore>,
    /// The CPU, if it computes some of the experts in RAM.
    assistant: Option<Assistant>,
    prefetch: bool,
    batch: BatchShape,
    /// The current layer's choices, and the prediction for the next layer. Kept to reuse their memory.
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
        for part in slots.layers.iter().flatten().flat_map(|layer| layer.matrices()) {
            self.note_kind(part.kind);
        }
        // All kinds of weights are known now. Compiling here keeps the first answer fast.
        self.kernels()?;
        store.use_device_slots(classes, &made, slots::PARTS);
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
        progress: &mut dyn FnMut(u64) -> Result<()>,
    ) -> Result<()> {
        self.store.upload(experts, &mut self.gpu, progress)
    }

    fn preload(
        &mut self,
        experts: &mut dyn Iterator<Item = usize>,
        progress: &mut dyn FnMut(u64) -> Result<()>,
    ) -> Result<()> {
        // Waits until uploads end, to free staging buffers.
        while self.gpu.release_leases(true)? {}
        self.store.drop_duplicates();
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
    /// Computes a mixture whose experts are all on the GPU, without asking the store.
    fn mix_resident(&mut self, mut mixture: Mixture<'_>, meanwhile: &mut Meanwhile<'_>) -> Result<()> {
        let CudaExecutor { gpu, store, routing, .. } = self;
        gpu.router_logits(&mixture)?;
        if let Some(observer) = mixture.observer.take() {
            gpu.route(&mixture, routing)?;
            observer(mixture.experts.layer, routing);
        }
        // If other layers' experts move, the policy needs to know which experts are used.
        let noted = self.batch.access() == Access::Token && !store.device_holds_all();
        gpu.mix(&mixture, noted)?;
        meanwhile(&mut gpu.backend)
    }

    /// Computes a mixture of which some experts must be uploaded first.
    ///
    /// Experts on the GPU are computed while others are uploaded. Outputs are stored separately and added in rank
    /// order, so that the order of arrival changes no bit.
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
        // The link to the GPU is the bottleneck, so uploads start before anything else.
        gpu.demand(acquisition.demanded())?;
        if let Some(assistant) = assistant.as_mut().filter(|_| !elsewhere.is_empty()) {
            let x = experts.x;
            gpu.backend.read(x, assistant.input(self.batch.rows * x.width()))?;
        }
        // A prompt needs nearly all experts, and the store reads ahead for it anyway.
        let next = mixture.next.filter(|_| self.prefetch && few);
        let predicted = next.map(|next| gpu.predict(&mixture, next.router)).transpose()?;
        if !acquisition.on_device().is_empty() {
            gpu.compute_there(&experts, &chosen, acquisition.on_device())?;
        }
        let mut likely: SmallVec<[ExpertIdx; 32]> = SmallVec::new();
        if let Some((predicted, next)) = predicted.as_ref().zip(next) {
            gpu.await_prediction(predicted, expected)?;
            likely.extend(expected.likeliest());
            store.prefetch(next.layer, &likely);
        }
        // The drive is busy meanwhile.
        meanwhile(&mut gpu.backend)?;
        while acquisition.ready() > 0 {
            gpu.compute_next(&mut acquisition, &mixture, &chosen)?;
        }
        // The experts in RAM are being uploaded, and the drive is busy.
        if let Some(assistant) = assistant.filter(|_| !elsewhere.is_empty()) {
            gpu.put_outputs(&experts, assistant.compute(&experts, routing, elsewhere))?;
        }
        while gpu.compute_next(&mut acquisition, &mixture, &chosen)? {}
        if let Some(next) = mixture.next {
            // If a prompt asks for nearly all experts, no prediction is needed.
            let nearly_all = !few && 4 * routing.chosen().len() >= 3 * mixture.router.experts;
            let room = gpu.slots.room();
            let leases = match nearly_all {
                true => store.prefetch_to_device(next.layer, store.layer_experts(next.layer), room),
                false => store.prefetch_to_device(next.layer, likely.into_iter(), room),
            };
            // Otherwise the link would be idle until the next layer has chosen.
            if !leases.is_empty() {
                gpu.slots.send(leases)?;
            }
        }
        gpu.sum(&chosen, experts.block.out, mixture.out)
    }
}

impl GpuExperts {
    /// Computes the experts that become ready next. Returns `false` if all have been computed.
    fn compute_next(
        &mut self,
        acquisition: &mut Acquisition<'_>,
        mixture: &Mixture<'_>,
        chosen: &Chosen,
    ) -> Result<bool> {
        let leases = acquisition.next_ready_releasing(&mut |wait| self.slots.release_leases(wait))?;
        let Some(mut leases) = leases else { return Ok(false) };
        leases.sort_unstable_by_key(Lease::expert);
        self.upload_and_compute(leases, Some((&mixture.experts, chosen)))?;
        Ok(true)
    }
}
