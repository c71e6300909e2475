//! Computes mixtures on a GPU that shares the processor's memory: experts are read by kernels in the very slots that
//! the drive wrote to.

use std::sync::Arc;

use bytemuck::cast_slice_mut;
use forebay_engine::internals::backend::{Backend, Routing};
use forebay_engine::internals::experts::{
    Access, BatchShape, ExpertExecutor, ExpertStore, Held, Lease, Meanwhile, Mixture,
};
use forebay_engine::{ExpertIdx, LayerIdx, Result};
use smallvec::SmallVec;

use super::experts::GpuExperts;
use crate::backend::choice::{Chosen, Turn};
use crate::device::{Memory, Span};

/// The most numbers that are noted of a layer: the choices of a few tokens.
const NOTED: usize = 2048;

/// The choices of layers whose experts are all in memory, which the store learns of after the pass.
#[derive(Default)]
struct Notes {
    /// `[layers, NOTED]`
    memory: Option<Memory>,
    /// The layers, with the number of pairs of each.
    layers: Vec<(LayerIdx, usize)>,
}

/// The executor for a GPU that shares the processor's memory.
pub struct SharedExecutor {
    gpu: GpuExperts,
    store: Arc<ExpertStore>,
    prefetch: bool,
    access: Access,
    notes: Notes,
    /// The current layer's choices, and the prediction for the next layer. Kept to reuse their memory.
    routing: Routing,
    expected: Routing,
}

impl SharedExecutor {
    pub fn new(gpu: GpuExperts, store: Arc<ExpertStore>, prefetch: bool) -> SharedExecutor {
        SharedExecutor {
            gpu,
            store,
            prefetch,
            access: Access::Prompt,
            notes: Notes::default(),
            routing: Routing::default(),
            expected: Routing::default(),
        }
    }

    /// Computes a mixture whose experts are all in memory, without waiting for the choice.
    fn mix_resident(
        &mut self,
        mut mixture: Mixture<'_>,
        held: Held,
        meanwhile: &mut Meanwhile<'_>,
    ) -> Result<()> {
        let layer = mixture.experts.layer;
        self.gpu.places.put_all(layer, held.arrivals(), |expert| held.raw(expert))?;
        let backend = &mut self.gpu.backend;
        let chosen = backend.choose(mixture.logits, mixture.router, &mixture.weights, Turn::Now)?;
        if let Some(observer) = mixture.observer.take() {
            backend.read_choices([(&chosen, &mut self.routing)])?;
            observer(layer, &self.routing);
        }
        // If other layers' experts move, the policy needs to know which experts are used.
        if self.access == Access::Token && !self.store.holds_all() {
            self.note(layer, &chosen)?;
        }
        self.gpu.backend.recorder.keep(Box::new(held));
        self.gpu.mix(&mixture, &chosen)?;
        meanwhile(&mut self.gpu.backend)
    }

    /// Computes a mixture of which some experts may have to be read first.
    ///
    /// Experts in memory are computed while others are read. Outputs are kept apart and added in the order of ranks, so
    /// that the order of arrival changes no bit.
    fn mix_streamed(&mut self, mut mixture: Mixture<'_>, meanwhile: &mut Meanwhile<'_>) -> Result<()> {
        let SharedExecutor { gpu, store, routing, expected, .. } = self;
        let Mixture { router, weights, input, logits, experts, .. } = mixture;
        let layer = experts.layer;
        let chosen = gpu.backend.choose(logits, router, &weights, Turn::Now)?;
        // A prompt uses nearly all experts, and the store reads ahead for it anyway.
        let next = mixture.next.filter(|_| self.prefetch && self.access == Access::Token);
        match next {
            None => gpu.backend.read_choices([(&chosen, &mut *routing)])?,
            Some(next) => {
                next.router.logits(&mut gpu.backend, input, logits)?;
                let predicted = gpu.backend.choose(logits, router, &next.router, Turn::Next)?;
                gpu.backend.read_choices([(&chosen, &mut *routing), (&predicted, &mut *expected)])?;
            }
        }
        if let Some(observer) = mixture.observer.take() {
            observer(layer, routing);
        }
        let mut acquisition = store.acquire(layer, routing.chosen(), self.access);
        if let Some(next) = next {
            let likely: SmallVec<[ExpertIdx; 32]> = expected.likeliest().collect();
            store.prefetch(next.layer, &likely);
        }
        meanwhile(&mut gpu.backend)?;
        // The drive reads in the meantime.
        gpu.submit()?;
        let [tokens, places] = gpu.sorted_places(routing)?;
        loop {
            let leases = acquisition.next_ready_releasing(&mut |wait| gpu.backend.gpu.release(wait))?;
            let Some(mut leases) = leases else { break };
            leases.sort_unstable_by_key(Lease::expert);
            for lease in &leases {
                let (bytes, starts) = lease.raw();
                gpu.places.put(layer, lease.expert(), (bytes, &starts))?;
            }
            let arrived = leases.iter().map(Lease::expert);
            let jobs = gpu.jobs_of(routing, arrived.clone(), &tokens)?;
            let windows = gpu.places.windows(layer, arrived);
            gpu.compute(&experts, &jobs, &windows)?;
            gpu.backend.recorder.keep(Box::new(leases));
            gpu.submit()?;
        }
        gpu.sum(&mixture, chosen.weights, Some(places))
    }

    /// Notes a layer's choice for the store.
    fn note(&mut self, layer: LayerIdx, chosen: &Chosen) -> Result<()> {
        assert!(chosen.pairs() <= NOTED, "{} numbers of a layer are noted", chosen.pairs());
        let backend = &mut self.gpu.backend;
        let memory = match &mut self.notes.memory {
            Some(memory) => memory,
            none => {
                let bytes = self.store.layers().len() * NOTED * 4;
                none.insert(backend.gpu.allocate(bytes as u64, "scratch")?)
            }
        };
        let to = memory.whole().part((layer.0 * NOTED * 4) as u64, chosen.experts.bytes);
        backend.flush()?;
        backend.recorder.copy(&chosen.experts, &to);
        self.notes.layers.push((layer, chosen.pairs()));
        Ok(())
    }
}

impl ExpertExecutor for SharedExecutor {
    fn backend(&mut self) -> &mut dyn Backend {
        &mut self.gpu.backend
    }

    fn upload(
        &mut self,
        _: &mut dyn Iterator<Item = usize>,
        _: &mut dyn FnMut(u64) -> Result<()>,
    ) -> Result<()> {
        Ok(())
    }

    fn preload(
        &mut self,
        experts: &mut dyn Iterator<Item = usize>,
        progress: &mut dyn FnMut(u64) -> Result<()>,
    ) -> Result<()> {
        self.store.preload(experts, progress)
    }

    fn lend(&mut self) -> Result<()> {
        Ok(())
    }

    fn begin(&mut self, batch: BatchShape) -> Result<()> {
        self.access = batch.access();
        if batch.is_step() {
            self.store.tick();
        }
        self.notes.layers.clear();
        self.gpu.backend.begin(batch.rows);
        self.gpu.backend.gpu.release(false).map(drop)
    }

    fn mixture(&mut self, mixture: Mixture<'_>, meanwhile: &mut Meanwhile<'_>) -> Result<()> {
        self.gpu.router_logits(&mixture)?;
        match self.store.hold(mixture.experts.layer) {
            Some(held) => self.mix_resident(mixture, held, meanwhile),
            None => self.mix_streamed(mixture, meanwhile),
        }
    }

    fn end(&mut self) -> Result<()> {
        self.gpu.backend.submit()
    }

    fn count_used(&mut self) -> Result<()> {
        let noted = std::mem::take(&mut self.notes.layers);
        let Some(memory) = self.notes.memory.as_ref().filter(|_| !noted.is_empty()) else { return Ok(()) };
        let mut words = vec![0u32; self.store.layers().len() * NOTED];
        let from: Span = memory.whole();
        self.gpu.backend.recorder.read(&from, cast_slice_mut(&mut words))?;
        for (layer, pairs) in noted {
            self.store.note_used(layer, &words[layer.0 * NOTED..][..pairs]);
        }
        Ok(())
    }

    fn forget(&mut self) {
        self.notes.layers.clear();
    }
}

impl Drop for SharedExecutor {
    fn drop(&mut self) {
        // The store's slots are no longer read then. A lost GPU reads nothing.
        self.gpu.backend.gpu.submit_closed();
        let _ = self.gpu.backend.gpu.wait(None);
    }
}
