//! Computes mixtures on a card with memory of its own: experts are copied from the store's slots in RAM to slots there.
//!
//! The GPU does everything in the order in which it is submitted. So an expert is copied straight to its slot, after all
//! work that still uses what was in the slot before.

use std::sync::Arc;

use bytemuck::cast_slice_mut;
use forebay_engine::internals::backend::{Backend, Routing};
use forebay_engine::internals::experts::tier::part_of;
use forebay_engine::internals::experts::{
    Access, Acquisition, Assistant, BatchShape, DevicePart, DeviceSlot, DeviceSlots, ExpertExecutor,
    ExpertStore, Lease, Leases, Meanwhile, Mixture, Outputs, SlotClasses,
};
use forebay_engine::{Bytes, Error, ExpertIdx, LayerIdx, Result};
use smallvec::SmallVec;

use super::experts::GpuExperts;
use super::notes::Notes;
use super::places::Place;
use crate::backend::choice::Turn;
use crate::device::{Gpu, Memory, Span};

/// Parts that the slots of a class are in at least, so that some can be lent.
const PARTS: usize = 16;

/// The alignment of ranges in a slot: kernels read whole words.
const RANGE_ALIGNMENT: u64 = 16;

/// The slots of a class.
struct ClassSlots {
    bytes: u64,
    slots: usize,
    /// Slots of each part.
    each: usize,
    /// `None` for those that are lent.
    parts: Vec<Option<Memory>>,
    /// The number of the first part's arena.
    arena: usize,
}

impl ClassSlots {
    fn new(gpu: &Arc<Gpu>, bytes: usize, slots: usize, parts: usize) -> Result<ClassSlots> {
        let each = part_of(slots, parts);
        let mut class = ClassSlots { bytes: bytes as u64, slots, each, parts: Vec::new(), arena: 0 };
        for part in 0..slots.div_ceil(each) {
            let memory = class.allocate(gpu, part)?;
            class.parts.push(Some(memory));
        }
        Ok(class)
    }

    /// Allocates the memory of a part.
    fn allocate(&self, gpu: &Arc<Gpu>, part: usize) -> Result<Memory> {
        let slots = self.each.min(self.slots - part * self.each);
        gpu.allocate(slots as u64 * self.bytes, "experts")
    }
}

/// The slots of all classes.
struct CardSlots(Vec<ClassSlots>);

/// How many parts the slots of each class are in at most.
fn parts_of(gpu: &Gpu, classes: &SlotClasses, slots: &[usize]) -> usize {
    let of_class = |(class, &slots): (usize, &usize)| {
        let most = gpu.largest_arena() / classes.classes[class].device_bytes.max(1);
        slots.div_ceil(most.max(1))
    };
    slots.iter().enumerate().map(of_class).fold(PARTS, usize::max)
}

impl CardSlots {
    /// Allocates slots: as planned, or fewer if memory is short, but at least the minimum.
    fn new(gpu: &Arc<Gpu>, classes: &SlotClasses, slots: &[usize]) -> Result<(CardSlots, Vec<usize>)> {
        let mut slots = slots.to_vec();
        loop {
            let parts = parts_of(gpu, classes, &slots);
            let make = |(class, &count): (usize, &usize)| {
                ClassSlots::new(gpu, classes.classes[class].device_bytes, count, parts)
            };
            let error = match slots.iter().enumerate().map(make).collect::<Result<Vec<_>>>() {
                Ok(made) => return Ok((CardSlots(made), slots)),
                Err(error) => error,
            };
            let wanted = classes.device_bytes(&slots);
            let fewer =
                classes.divide_device(wanted / 8 * 7).filter(|_| !matches!(error, Error::Budget { .. }));
            let Some(fewer) = fewer.filter(|fewer| *fewer != slots) else { return Err(error) };
            let (wanted, left) = (Bytes(wanted), Bytes(classes.device_bytes(&fewer)));
            tracing::warn!(
                "cannot allocate {wanted} of the GPU's memory for experts, trying {left}: {error}"
            );
            slots = fewer;
        }
    }

    /// A slot, and the number of its arena.
    fn span(&self, DeviceSlot { class, slot }: DeviceSlot) -> (Span, usize) {
        let class = &self.0[class];
        let part = slot / class.each;
        let memory = class.parts[part].as_ref().expect("no expert is in slots that are lent");
        let start = (slot % class.each) as u64 * class.bytes;
        (memory.whole().part(start, class.bytes), class.arena + part)
    }
}

/// Memory for experts that were sent before they were asked for, and have no slot yet.
struct Staging {
    memory: Memory,
    bytes: u64,
    /// By buffer: the expert in it.
    sent: Vec<Option<(LayerIdx, ExpertIdx)>>,
}

impl Staging {
    fn new(gpu: &Arc<Gpu>, (buffers, bytes): (usize, usize)) -> Result<Staging> {
        let buffers = buffers.min(gpu.largest_arena() / bytes.max(1));
        let memory = gpu.allocate((buffers * bytes) as u64, "staging buffers")?;
        Ok(Staging { memory, bytes: bytes as u64, sent: vec![None; buffers] })
    }

    /// How many experts can be sent.
    fn room(&self) -> usize {
        self.sent.iter().filter(|sent| sent.is_none()).count()
    }

    /// A free buffer, which this expert is sent to.
    fn take(&mut self, layer: LayerIdx, expert: ExpertIdx) -> Option<Span> {
        let free = self.sent.iter().position(Option::is_none)?;
        self.sent[free] = Some((layer, expert));
        Some(self.memory.whole().part(free as u64 * self.bytes, self.bytes))
    }

    /// Where an expert was sent to. The buffer is free as soon as copies from it are recorded.
    fn give(&mut self, layer: LayerIdx, expert: ExpertIdx) -> Option<Span> {
        let there = self.sent.iter().position(|sent| *sent == Some((layer, expert)))?;
        self.sent[there] = None;
        Some(self.memory.whole().part(there as u64 * self.bytes, self.bytes))
    }

    /// Drops all experts except those of a layer that were chosen.
    fn keep(&mut self, layer: LayerIdx, chosen: &[ExpertIdx]) {
        for sent in &mut self.sent {
            *sent = sent.filter(|(of, expert)| *of == layer && chosen.contains(expert));
        }
    }
}

/// The experts on a card, and the backend that computes with them.
struct CardExperts {
    gpu: GpuExperts,
    slots: CardSlots,
    staging: Staging,
    store: Arc<ExpertStore>,
}

impl CardExperts {
    /// Records copies of an expert's ranges to its slot, and its place.
    fn bring(&mut self, lease: &Lease) -> Result<()> {
        let CardExperts { gpu, slots, staging, store } = self;
        let (layer, expert) = (lease.layer(), lease.expert());
        let (slot, arena) = slots.span(lease.device_slot().expect("it has been given a slot"));
        let (bytes, starts) = lease.raw();
        let there = staging.give(layer, expert).or_else(|| gpu.backend.gpu.adopted.find(bytes));
        let ranges = &store.layers()[layer.0].as_ref().expect("it has experts").experts[expert.0 as usize];
        let mut place = Place { arena, starts: SmallVec::new() };
        let mut free = 0;
        for (&start, range) in starts.iter().zip(ranges.iter()) {
            // Copies begin and end at multiples of four bytes, in RAM and in the slot.
            let lead = start % 4;
            let count = (lead + range.len).next_multiple_of(4) as u64;
            let to = slot.part(free, count);
            match &there {
                Some(span) => gpu.backend.recorder.copy(&span.part((start - lead) as u64, count), &to),
                None => {
                    gpu.backend.recorder.write(&to, &bytes[start - lead..][..count as usize])?;
                }
            }
            place.starts.push((to.start + lead as u64) as u32);
            free = (free + count).next_multiple_of(RANGE_ALIGNMENT);
            gpu.backend.gpu.counts.add_upload(count);
        }
        if let Some((there, words)) = gpu.places.put(layer, expert, &place) {
            let words = gpu.backend.recorder.params(words)?;
            gpu.backend.recorder.copy(&words, &there);
        }
        Ok(())
    }

    /// Sends experts before they are asked for, as far as there are buffers.
    fn send(&mut self, leases: Leases) -> Result<()> {
        let CardExperts { gpu, staging, .. } = self;
        gpu.backend.flush()?;
        for lease in &leases {
            let Some(to) = staging.take(lease.layer(), lease.expert()) else { break };
            let (bytes, _) = lease.raw();
            let to = to.part(0, bytes.len() as u64);
            match gpu.backend.gpu.adopted.find(bytes) {
                Some(span) => gpu.backend.recorder.copy(&span, &to),
                None => gpu.backend.recorder.write(&to, bytes)?,
            }
        }
        gpu.backend.recorder.keep(Box::new(leases));
        gpu.submit()
    }

    /// Copies experts to their slots.
    fn bring_all(&mut self, mut leases: Leases) -> Result<SmallVec<[ExpertIdx; 16]>> {
        leases.sort_unstable_by_key(Lease::expert);
        self.gpu.backend.flush()?;
        leases.iter().try_for_each(|lease| self.bring(lease))?;
        let brought = leases.iter().map(Lease::expert).collect();
        self.gpu.backend.recorder.keep(Box::new(leases));
        Ok(brought)
    }

    /// Adds what the CPU has computed to the outputs of experts.
    fn put_outputs(&mut self, mixture: &Mixture<'_>, routing: &Routing, outputs: &Outputs) -> Result<()> {
        let (width, top_k) = (mixture.out.width(), routing.top_k());
        let backend = &mut self.gpu.backend;
        backend.flush()?;
        let (values, all) =
            (backend.recorder.params(&outputs.values)?, backend.at(mixture.experts.block.out));
        let bytes = width as u64 * 4;
        for (i, &pair) in outputs.pairs.iter().enumerate() {
            let (row, rank) = (pair as usize / top_k, pair as usize % top_k);
            let (place, _) = routing.ranks(row).nth(rank).expect("every pair has a place");
            let to = all.part(place as u64 * bytes, bytes);
            backend.recorder.copy(&values.part(i as u64 * bytes, bytes), &to);
        }
        Ok(())
    }
}

impl DeviceSlots for CardExperts {
    fn upload(&mut self, leases: Leases) -> Result<()> {
        self.bring_all(leases)?;
        self.gpu.submit()
    }

    fn release_leases(&mut self, wait: bool) -> Result<bool> {
        self.gpu.backend.gpu.release(wait)
    }

    fn lend(&mut self, DevicePart { class, part }: DevicePart) -> Result<()> {
        // Work that uses these slots has ended then.
        self.gpu.submit()?;
        self.gpu.backend.gpu.wait(None)?;
        let class = &mut self.slots.0[class];
        class.parts[part] = None;
        self.gpu.places.set_arena(class.arena + part, None);
        Ok(())
    }

    fn take_back(&mut self, DevicePart { class, part }: DevicePart) -> Result<bool> {
        let class = &mut self.slots.0[class];
        class.parts[part] = class.allocate(&self.gpu.backend.gpu, part).ok();
        let arena = class.parts[part].as_ref().map(Memory::whole);
        self.gpu.places.set_arena(class.arena + part, arena);
        Ok(class.parts[part].is_some())
    }
}

/// The executor for a card.
pub struct CardExecutor {
    card: CardExperts,
    /// The CPU, if it computes some of the experts in RAM.
    assistant: Option<Assistant>,
    prefetch: bool,
    batch: BatchShape,
    notes: Notes,
    /// The current layer's choices, and the prediction for the next layer. Kept to reuse their memory.
    routing: Routing,
    expected: Routing,
}

/// What an executor for a card is made of.
pub struct CardSetup<'a> {
    pub gpu: GpuExperts,
    pub store: Arc<ExpertStore>,
    pub classes: &'a SlotClasses,
    pub device_slots: &'a [usize],
    pub prefetch: bool,
    pub assistant: Option<Assistant>,
}

impl CardExecutor {
    /// Allocates slots, and tells the store how many there are.
    ///
    /// # Errors
    /// If there is no memory for the minimum.
    pub fn new(setup: CardSetup<'_>) -> Result<CardExecutor> {
        let CardSetup { mut gpu, store, classes, device_slots, prefetch, assistant } = setup;
        let device = Arc::clone(&gpu.backend.gpu);
        let (mut slots, made) = CardSlots::new(&device, classes, device_slots)?;
        for class in &mut slots.0 {
            let parts = class.parts.iter().flatten().map(Memory::whole);
            let numbers: Vec<usize> = parts.map(|part| gpu.places.add_arena(part)).collect();
            class.arena = numbers.first().copied().unwrap_or(0);
        }
        let staging = Staging::new(&device, classes.staging())?;
        store.use_device_slots(classes, &made, parts_of(&device, classes, &made));
        Ok(CardExecutor {
            card: CardExperts { gpu, slots, staging, store },
            assistant,
            prefetch,
            batch: BatchShape { rows: 0, sequences: 0 },
            notes: Notes::default(),
            routing: Routing::default(),
            expected: Routing::default(),
        })
    }

    /// Computes a mixture whose experts are all on the card, without asking the store.
    fn mix_resident(&mut self, mut mixture: Mixture<'_>, meanwhile: &mut Meanwhile<'_>) -> Result<()> {
        let CardExperts { gpu, store, .. } = &mut self.card;
        let layer = mixture.experts.layer;
        let chosen = gpu.backend.choose(mixture.logits, mixture.router, &mixture.weights, Turn::Now)?;
        if let Some(observer) = mixture.observer.take() {
            gpu.backend.read_choices([(&chosen, &mut self.routing)])?;
            observer(layer, &self.routing);
        }
        // If other layers' experts move, the policy needs to know which experts are used.
        if self.batch.access() == Access::Token && !store.device_holds_all() {
            self.notes.add(&mut gpu.backend, store.layers().len(), (layer, &chosen))?;
        }
        gpu.mix(&mixture, &chosen)?;
        meanwhile(&mut gpu.backend)
    }

    /// Computes a mixture of which some experts must be copied first.
    ///
    /// Experts on the card are computed while others are read or copied. Outputs are kept apart and added in the order of
    /// ranks, so that the order of arrival changes no bit.
    fn mix_streamed(&mut self, mut mixture: Mixture<'_>, meanwhile: &mut Meanwhile<'_>) -> Result<()> {
        let CardExecutor { card, routing, expected, .. } = self;
        let store = Arc::clone(&card.store);
        let Mixture { router, weights, input, logits, experts, .. } = mixture;
        let layer = experts.layer;
        let access = self.batch.access();
        let gpu = &mut card.gpu;
        let chosen = gpu.backend.choose(logits, router, &weights, Turn::Now)?;
        // A prompt uses nearly all experts, and the store reads ahead for it anyway.
        let next = mixture.next.filter(|_| self.prefetch && access == Access::Token);
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
        let mut acquisition = store.acquire(layer, routing.chosen(), access);
        card.staging.keep(layer, routing.chosen());
        let helps = access == Access::Token && self.batch.rows <= Assistant::ROWS;
        let mut assistant = self.assistant.as_mut().filter(|_| helps);
        let elsewhere = match &assistant {
            Some(assistant) => acquisition.take_coldest(assistant.share(acquisition.ready())),
            None => Leases::new(),
        };
        let mut likely: SmallVec<[ExpertIdx; 32]> = SmallVec::new();
        if let Some(next) = next {
            likely.extend(expected.likeliest());
            store.prefetch(next.layer, &likely);
        }
        let [tokens, places] = gpu.sorted_places(routing)?;
        let on_card: SmallVec<[ExpertIdx; 16]> =
            acquisition.on_device().iter().map(|&(expert, _)| expert).collect();
        card.compute_some(&mixture, &on_card, (routing, &tokens))?;
        if let Some(assistant) = assistant.as_mut().filter(|_| !elsewhere.is_empty()) {
            let x = experts.x;
            card.gpu.backend.flush()?;
            let from = card.gpu.backend.at(x);
            let input = assistant.input(self.batch.rows * x.width());
            card.gpu.backend.recorder.read(&from, cast_slice_mut(input))?;
        }
        // The drive reads in the meantime.
        meanwhile(&mut card.gpu.backend)?;
        card.gpu.submit()?;
        while acquisition.ready() > 0 {
            card.compute_next(&mut acquisition, &mixture, (routing, &tokens))?;
        }
        if let Some(assistant) = assistant.filter(|_| !elsewhere.is_empty()) {
            let outputs = assistant.compute(&experts, routing, elsewhere);
            card.put_outputs(&mixture, routing, outputs)?;
        }
        while card.compute_next(&mut acquisition, &mixture, (routing, &tokens))? {}
        if let Some(next) = mixture.next {
            // If a prompt asks for nearly all experts, no prediction is needed.
            let nearly_all =
                access == Access::Prompt && 4 * routing.chosen().len() >= 3 * mixture.router.experts;
            let room = card.staging.room();
            let leases = match nearly_all {
                true => store.prefetch_to_device(next.layer, store.layer_experts(next.layer), room),
                false => store.prefetch_to_device(next.layer, likely.into_iter(), room),
            };
            // Otherwise the link would be idle until the next layer has chosen.
            if !leases.is_empty() {
                card.send(leases)?;
            }
        }
        card.gpu.sum(&mixture, chosen.weights, Some(places))
    }
}

impl CardExperts {
    /// Computes some of the chosen experts, which are on the card.
    fn compute_some(
        &mut self,
        mixture: &Mixture<'_>,
        some: &[ExpertIdx],
        (routing, tokens): (&Routing, &Span),
    ) -> Result<()> {
        if some.is_empty() {
            return Ok(());
        }
        let some = some.iter().copied();
        let jobs = self.gpu.jobs_of((mixture.experts.layer, routing), some.clone(), tokens)?;
        let windows = self.gpu.places.windows(mixture.experts.layer, some);
        self.gpu.compute(&mixture.experts, &jobs, &windows)
    }

    /// Copies and computes the experts that become ready next. Returns `false` if all have been computed.
    fn compute_next(
        &mut self,
        acquisition: &mut Acquisition<'_>,
        mixture: &Mixture<'_>,
        listed: (&Routing, &Span),
    ) -> Result<bool> {
        let leases = acquisition.next_ready_releasing(&mut |wait| self.gpu.backend.gpu.release(wait))?;
        let Some(leases) = leases else { return Ok(false) };
        let brought = self.bring_all(leases)?;
        self.compute_some(mixture, &brought, listed)?;
        self.gpu.submit()?;
        Ok(true)
    }
}

impl ExpertExecutor for CardExecutor {
    fn backend(&mut self) -> &mut dyn Backend {
        &mut self.card.gpu.backend
    }

    fn upload(
        &mut self,
        experts: &mut dyn Iterator<Item = usize>,
        progress: &mut dyn FnMut(u64) -> Result<()>,
    ) -> Result<()> {
        let store = Arc::clone(&self.card.store);
        store.upload(experts, &mut self.card, progress)
    }

    fn preload(
        &mut self,
        experts: &mut dyn Iterator<Item = usize>,
        progress: &mut dyn FnMut(u64) -> Result<()>,
    ) -> Result<()> {
        // Leases end with their copies.
        while self.card.release_leases(true)? {}
        self.card.store.drop_duplicates();
        self.card.store.preload(experts, progress)
    }

    fn lend(&mut self) -> Result<()> {
        let store = Arc::clone(&self.card.store);
        store.lend_device(&mut self.card)
    }

    fn begin(&mut self, batch: BatchShape) -> Result<()> {
        self.batch = batch;
        if batch.is_step() {
            self.card.store.tick();
        }
        self.lend()?;
        self.notes.forget();
        self.card.gpu.backend.begin(batch.rows);
        self.card.release_leases(false).map(drop)
    }

    fn mixture(&mut self, mixture: Mixture<'_>, meanwhile: &mut Meanwhile<'_>) -> Result<()> {
        self.card.gpu.router_logits(&mixture)?;
        match self.card.store.device_holds(mixture.experts.layer) {
            true => self.mix_resident(mixture, meanwhile),
            false => self.mix_streamed(mixture, meanwhile),
        }
    }

    fn end(&mut self) -> Result<()> {
        self.card.gpu.backend.submit()
    }

    fn count_used(&mut self) -> Result<()> {
        self.notes.tell(&mut self.card.gpu.backend, &self.card.store)
    }

    fn forget(&mut self) {
        self.notes.forget();
        self.card.staging.sent.fill(None);
        self.card.store.forget_device();
    }
}

impl Drop for CardExecutor {
    fn drop(&mut self) {
        // The store's slots are no longer read then. A lost GPU reads nothing.
        let device = &self.card.gpu.backend.gpu;
        device.submit_closed();
        let _ = device.wait(None);
    }
}
