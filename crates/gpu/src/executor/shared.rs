//! Computes mixtures on a GPU that shares the processor's memory: experts are read by kernels in the very slots that
//! the drive wrote to.

use std::collections::HashMap;
use std::sync::Arc;

use bytemuck::cast_slice;
use forebay_engine::internals::backend::{Backend, Routing};
use forebay_engine::internals::experts::{
    Access, BatchShape, ExpertExecutor, ExpertStore, Held, Lease, Meanwhile, Mixture,
};
use forebay_engine::internals::memory::SharedBytes;
use forebay_engine::{Error, ExpertIdx, Result};
use smallvec::SmallVec;

use super::experts::GpuExperts;
use super::notes::Notes;
use super::places::{Place, Places};
use crate::adopt::Adoption;
use crate::backend::choice::Turn;
use crate::device::{Gpu, Span};

/// The store's slots as buffers of the GPU.
struct AdoptedSlots {
    /// The number of each buffer among the arenas.
    numbers: HashMap<wgpu::Buffer, usize>,
    /// The parts of the store's memory that are adopted together.
    parts: Vec<SharedBytes>,
    /// Those that were adopted here, because the store's own thread had not reached them.
    adopted: Vec<Adoption>,
}

impl AdoptedSlots {
    /// Where an expert is that is in these bytes, with its ranges at these places. They stay as they are until everything
    /// that is submitted from now on has ended.
    fn place(
        &mut self,
        gpu: &Arc<Gpu>,
        places: &mut Places,
        (bytes, starts): (&[u8], &[usize]),
    ) -> Result<Place> {
        let span = self.find(gpu, bytes)?;
        let arena = *self.numbers.entry(span.buffer.clone()).or_insert_with(|| {
            let bytes = span.buffer.size();
            places.add_arena(Span { buffer: span.buffer.clone(), start: 0, bytes })
        });
        let starts = starts.iter().map(|&start| u32::try_from(span.start + start as u64));
        let starts = starts.collect::<std::result::Result<_, _>>().expect("arenas are small enough");
        Ok(Place { arena, starts })
    }

    /// The adopted buffer that has these bytes.
    fn find(&mut self, gpu: &Arc<Gpu>, bytes: &[u8]) -> Result<Span> {
        if let Some(span) = gpu.adopted.find(bytes) {
            return Ok(span);
        }
        let contains = |part: &&SharedBytes| {
            let (part, bytes) = (part.as_ptr_range(), bytes.as_ptr_range());
            part.start <= bytes.start && bytes.end <= part.end
        };
        let part = self.parts.iter().find(contains).expect("it is the store's memory");
        self.adopted.push(gpu.adopt(part.clone())?);
        gpu.adopted.find(bytes).ok_or_else(|| {
            Error::Backend(format!("{} cannot find an expert that it has adopted", gpu.name()))
        })
    }
}

/// The executor for a GPU that shares the processor's memory.
pub struct SharedExecutor {
    gpu: GpuExperts,
    slots: AdoptedSlots,
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
        let parts = store.slot_memory(gpu.backend.gpu.largest_arena());
        SharedExecutor {
            gpu,
            slots: AdoptedSlots { numbers: HashMap::new(), parts, adopted: Vec::new() },
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
        let (device, slots) = (Arc::clone(&self.gpu.backend.gpu), &mut self.slots);
        self.gpu.places.put_all(layer, held.arrivals(), |places, expert| {
            let (bytes, starts) = held.raw(expert);
            slots.place(&device, places, (bytes, &starts))
        })?;
        let backend = &mut self.gpu.backend;
        let chosen = backend.choose(mixture.logits, mixture.router, &mixture.weights, Turn::Now)?;
        if let Some(observer) = mixture.observer.take() {
            backend.read_choices([(&chosen, &mut self.routing)])?;
            observer(layer, &self.routing);
        }
        // If other layers' experts move, the policy needs to know which experts are used.
        if self.access == Access::Token && !self.store.holds_all() {
            self.notes.add(&mut self.gpu.backend, self.store.layers().len(), (layer, &chosen))?;
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
        let SharedExecutor { gpu, slots, store, routing, expected, .. } = self;
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
                let place = slots.place(&gpu.backend.gpu, &mut gpu.places, (bytes, &starts))?;
                if let Some((there, words)) = gpu.places.put(layer, lease.expert(), &place) {
                    // What was recorded before has been submitted.
                    gpu.backend.gpu.queue.write_buffer(&there.buffer, there.start, cast_slice(words));
                }
            }
            let arrived = leases.iter().map(Lease::expert);
            let jobs = gpu.jobs_of((layer, routing), arrived.clone(), &tokens)?;
            let windows = gpu.places.windows(layer, arrived);
            gpu.compute(&experts, &jobs, &windows)?;
            gpu.backend.recorder.keep(Box::new(leases));
            gpu.submit()?;
        }
        gpu.sum(&mixture, chosen.weights, Some(places))
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
        self.notes.forget();
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
        self.notes.tell(&mut self.gpu.backend, &self.store)
    }

    fn forget(&mut self) {
        self.notes.forget();
    }
}

impl Drop for SharedExecutor {
    fn drop(&mut self) {
        // The store's slots are no longer read then. A lost GPU reads nothing.
        self.gpu.backend.gpu.submit_closed();
        let _ = self.gpu.backend.gpu.wait(None);
    }
}
