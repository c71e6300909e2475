//! Experts in slots of the GPU's memory, and on their way there.
//!
//! They come as they lie in the computer's slots: the copies have a stream of their own, beside the computing, and go to staging buffers on the
//! GPU. From there a kernel, on the stream of computing, puts them in order in their slots. So whoever had a slot before has been
//! computed with when the next one is put there, and a staging buffer is free when that kernel has run. A copy needs no slot, so it may
//! start long before it is known whose slot the expert gets, or whether it is asked for at all.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytemuck::{Pod, Zeroable};
use forebay_engine::internals::experts::tier::part_of;
use forebay_engine::internals::experts::{DevicePart, DeviceSlot, ExpertLayer, Lease, Leases, SlotClasses};
use forebay_engine::{Bytes, Error, Result};

use crate::driver::{Address, Event, Gpu, Memory, Pinned, Stream};
use crate::weights::{DeviceMatrix, LayerExperts, PlaneSource};

/// A part of a slot that a kernel puts in order, as it reads it.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub struct Plane {
    from: Address,
    to: Address,
    row_step: u64,
    rows: u32,
    units: u32,
    unit: u32,
    unit_step: u32,
}

/// An expert and the slot it came to, as a kernel reads it.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub struct Arrival {
    index: u64,
    slot: Address,
}

/// The slots of a class.
struct Arena {
    /// Bytes of a slot.
    bytes: usize,
    /// Slots of a part.
    each: usize,
    slots: usize,
    /// None where it is lent.
    parts: Vec<Option<Memory>>,
}

impl Arena {
    /// So many slots.
    fn new(gpu: &Arc<Gpu>, bytes: usize, slots: usize) -> Result<Arena> {
        let each = part_of(slots);
        let mut arena = Arena { bytes, each, slots, parts: Vec::new() };
        for part in 0..slots.div_ceil(each) {
            let memory = arena.allocate(gpu, part)?;
            arena.parts.push(Some(memory));
        }
        Ok(arena)
    }

    /// Memory for a part.
    fn allocate(&self, gpu: &Arc<Gpu>, part: usize) -> Result<Memory> {
        let slots = self.each.min(self.slots - part * self.each);
        gpu.allocate(slots * self.bytes, "experts")
    }

    fn address(&self, slot: usize) -> Address {
        assert!(slot < self.slots);
        let part = self.parts[slot / self.each].as_ref().expect("nobody is in slots that are lent");
        part.address() + (slot % self.each * self.bytes) as u64
    }
}

/// The slots of all classes, and what they hold.
pub struct ExpertSlots {
    /// By class.
    arenas: Vec<Arena>,
    /// By layer.
    pub layers: Vec<Option<LayerExperts>>,
    /// By layer: where its experts start in the table.
    starts: Vec<usize>,
    /// Where all experts are, as far as they are; where one was that has left, nobody looks.
    table: Memory,
    staging: Staging,
    /// The staging buffers of what was brought last.
    batch: Vec<usize>,
    /// What is to be put in order of it.
    planes: Vec<Plane>,
    arrivals: Vec<Arrival>,
}

/// The staging buffers through which experts come.
struct Staging {
    gpu: Arc<Gpu>,
    bytes: usize,
    memory: Memory,
    /// For experts that are where the GPU cannot copy from.
    bounce: Option<Pinned>,
    buffers: Vec<StagingBuffer>,
    /// Those that are not taken, the next one first.
    free: VecDeque<usize>,
    /// Copies that nobody has asked for yet.
    sent: Vec<Sent>,
    /// Copies that may not have ended, the oldest first, and what keeps the bytes where they come from.
    on_the_way: VecDeque<(usize, Lease)>,
    /// Counts copies.
    copies: u64,
    /// How long staging buffers were waited for, since somebody asked.
    waited: Duration,
}

struct StagingBuffer {
    /// When its content had come.
    come: Event,
    /// When that was put in order.
    arranged: Event,
    /// The number of the copy that brought it.
    copy: u64,
}

/// An expert that is in a staging buffer, or on its way there.
struct Sent {
    layer: usize,
    expert: u32,
    buffer: usize,
}

impl ExpertSlots {
    /// So many slots of each class, or as many as there is memory for, but not less than the least.
    ///
    /// # Errors
    /// If a type is not supported, or the least do not fit.
    pub fn new(
        gpu: &Arc<Gpu>,
        layers: &[Option<ExpertLayer>],
        classes: &SlotClasses,
        slots: &[usize],
    ) -> Result<(ExpertSlots, Vec<usize>)> {
        let of = |layer: &Option<ExpertLayer>| layer.as_ref().map(LayerExperts::new).transpose();
        let layers: Vec<Option<LayerExperts>> = layers.iter().map(of).collect::<Result<_>>()?;
        for (layer, class) in layers.iter().zip(&classes.of_layer) {
            if let (Some(layer), Some(class)) = (layer, class) {
                assert!(layer.slot_bytes <= classes.classes[*class].device_bytes, "slots were planned");
            }
        }
        let mut starts = vec![0];
        for layer in &layers {
            starts.push(starts[starts.len() - 1] + layer.as_ref().map_or(0, |layer| layer.count));
        }
        let table = gpu.allocate(starts[starts.len() - 1] * 8, "the table of experts")?;
        let staging = Staging::new(gpu, classes.staging())?;
        let (arenas, slots) = arenas(gpu, classes, slots)?;
        let (batch, planes, arrivals) = (Vec::new(), Vec::new(), Vec::new());
        Ok((ExpertSlots { arenas, layers, starts, table, staging, batch, planes, arrivals }, slots))
    }

    /// Where a layer's part of the table is.
    pub fn table(&self, layer: usize) -> Address {
        self.table.address() + (self.starts[layer] * 8) as u64
    }

    /// Where the whole table is.
    pub fn whole_table(&self) -> Address {
        self.table.address()
    }

    /// Where a slot is.
    pub fn address(&self, slot: DeviceSlot) -> Address {
        self.arenas[slot.class].address(slot.slot)
    }

    /// A layer's experts: gate, up and down.
    pub fn products(&self, layer: usize) -> [&DeviceMatrix; 3] {
        self.layers[layer].as_ref().expect("it has experts").parts.each_ref()
    }

    /// From now on kernels look for a layer's experts in this table.
    pub fn look_in(&mut self, layer: usize, table: Address) {
        self.layers[layer].as_mut().expect("it has experts").look_in(table);
    }

    /// As [`DeviceSlots::lend`](forebay_engine::internals::experts::DeviceSlots::lend).
    ///
    /// # Errors
    /// If the GPU fails.
    pub fn lend(&mut self, DevicePart { class, part }: DevicePart) -> Result<()> {
        // Whoever computed with the experts there has ended.
        self.staging.gpu.wait()?;
        self.arenas[class].parts[part] = None;
        Ok(())
    }

    /// As [`DeviceSlots::take_back`](forebay_engine::internals::experts::DeviceSlots::take_back).
    pub fn take_back(&mut self, DevicePart { class, part }: DevicePart) -> bool {
        let gpu = &self.staging.gpu;
        gpu.trim_pieces();
        self.arenas[class].parts[part] = self.arenas[class].allocate(gpu, part).ok();
        self.arenas[class].parts[part].is_some()
    }

    /// How many experts are best brought together: while some are put in order, others come.
    pub fn together(&self) -> usize {
        self.staging.together()
    }

    /// How many more can be sent before they are asked for.
    pub fn room(&self) -> usize {
        self.staging.room()
    }

    /// Starts copies of experts before it is known when they are asked for, as far as there is room.
    ///
    /// # Errors
    /// If the GPU refuses.
    pub fn send(&mut self, leases: Leases) -> Result<()> {
        for lease in leases {
            if self.staging.find(&lease).is_some() {
                continue;
            }
            if self.room() == 0 {
                break;
            }
            let (layer, expert) = (lease.layer().0, lease.expert().0);
            let buffer = self.staging.copy(lease)?;
            self.staging.sent.push(Sent { layer, expert, buffer });
        }
        Ok(())
    }

    /// Gives up what was sent and is none of these.
    pub fn keep_sent(&mut self, leases: &Leases) {
        let Staging { sent, free, .. } = &mut self.staging;
        sent.retain(|sent| {
            let asked = leases.iter().any(|l| l.layer().0 == sent.layer && l.expert().0 == sent.expert);
            if !asked {
                free.push_back(sent.buffer);
            }
            asked
        });
    }

    /// Starts copies of experts, unless they were sent before. Says what is to be put in order when they have
    /// [come](Self::await_copies).
    ///
    /// # Errors
    /// If the GPU refuses.
    pub fn bring(&mut self, leases: Leases) -> Result<(&[Plane], &[Arrival])> {
        assert!(leases.len() <= self.together());
        // Those of a batch that failed.
        self.staging.free.extend(self.batch.drain(..));
        self.planes.clear();
        self.arrivals.clear();
        for lease in leases {
            let slot = self.address(lease.device_slot().expect("it has been given a slot"));
            let (layer, expert, (_, starts)) = (lease.layer().0, lease.expert().0, lease.raw());
            let buffer = match self.staging.find(&lease) {
                Some(at) => self.staging.sent.swap_remove(at).buffer,
                None => self.staging.copy(lease)?,
            };
            self.batch.push(buffer);
            let from = self.staging.address(buffer);
            let experts = self.layers[layer].as_ref().expect("it has experts");
            for &PlaneSource { range, gather, rows, to } in &experts.planes {
                self.planes.push(Plane {
                    from: from + (starts[range] + gather.start) as u64,
                    to: slot + to,
                    row_step: gather.row_step as u64,
                    rows: rows as u32,
                    units: gather.units as u32,
                    unit: gather.unit as u32,
                    unit_step: gather.unit_step as u32,
                });
            }
            self.arrivals.push(Arrival { index: (self.starts[layer] + expert as usize) as u64, slot });
        }
        Ok((&self.planes, &self.arrivals))
    }

    /// What is started from now on waits until what was brought last has come.
    ///
    /// # Errors
    /// If the GPU refuses.
    pub fn await_copies(&self) -> Result<()> {
        let buffers = &self.staging.buffers;
        // Copies end in order.
        let last = self.batch.iter().max_by_key(|&&buffer| buffers[buffer].copy);
        last.map_or(Ok(()), |&last| buffers[last].come.hold_up(Stream::Compute))
    }

    /// What was brought last has been put in order when what was started so far has ended.
    ///
    /// # Errors
    /// If the GPU refuses.
    pub fn arranged(&mut self) -> Result<()> {
        let Staging { buffers, free, .. } = &mut self.staging;
        let set = self.batch.iter().try_for_each(|&buffer| buffers[buffer].arranged.set(Stream::Compute));
        free.extend(self.batch.drain(..));
        set
    }

    /// Drops leases of experts that have come; if none has, and it is told to, it waits for one. Says whether it dropped any.
    ///
    /// # Errors
    /// If the GPU fails.
    pub fn let_go(&mut self, wait: bool) -> Result<bool> {
        let Staging { on_the_way, buffers, .. } = &mut self.staging;
        let before = on_the_way.len();
        while let Some((buffer, _)) = on_the_way.front() {
            let come = &buffers[*buffer].come;
            if !come.has_passed()? {
                if !wait || on_the_way.len() < before {
                    break;
                }
                come.wait()?;
            }
            on_the_way.pop_front();
        }
        Ok(on_the_way.len() < before)
    }

    /// How long staging buffers for copies were waited for, since this was last asked.
    pub fn copy_wait(&mut self) -> Duration {
        std::mem::take(&mut self.staging.waited)
    }
}

impl Staging {
    fn new(gpu: &Arc<Gpu>, (buffers, bytes): (usize, usize)) -> Result<Staging> {
        let buffer = |_| Ok(StagingBuffer { come: Event::new(gpu)?, arranged: Event::new(gpu)?, copy: 0 });
        Ok(Staging {
            gpu: gpu.clone(),
            bytes,
            memory: gpu.allocate(buffers * bytes, "experts on their way")?,
            bounce: None,
            buffers: (0..buffers).map(buffer).collect::<Result<_>>()?,
            free: (0..buffers).collect(),
            sent: Vec::with_capacity(buffers),
            on_the_way: VecDeque::with_capacity(buffers),
            copies: 0,
            waited: Duration::ZERO,
        })
    }

    fn address(&self, buffer: usize) -> Address {
        self.memory.address() + (buffer * self.bytes) as u64
    }

    fn together(&self) -> usize {
        (self.buffers.len() / 4).max(1)
    }

    /// There is always a staging buffer for what is brought.
    fn room(&self) -> usize {
        (self.buffers.len() - self.together()).saturating_sub(self.sent.len())
    }

    /// Where it is noted that an expert was sent.
    fn find(&self, lease: &Lease) -> Option<usize> {
        let (layer, expert) = (lease.layer().0, lease.expert().0);
        self.sent.iter().position(|sent| sent.layer == layer && sent.expert == expert)
    }

    /// Starts the copy of an expert to the next free staging buffer.
    fn copy(&mut self, lease: Lease) -> Result<usize> {
        let buffer = self.free.pop_front().expect("staging buffers are left for what is brought");
        let started = self.start_copy(&lease, buffer);
        if started.is_ok() {
            self.on_the_way.push_back((buffer, lease));
        } else {
            // What was started needs its lease until it has ended, and nobody knows what has come.
            self.free.push_front(buffer);
            self.free.extend(self.sent.drain(..).map(|sent| sent.buffer));
            let _ = self.gpu.wait_for(Stream::Copies);
        }
        started.map(|()| buffer)
    }

    fn start_copy(&mut self, lease: &Lease, buffer: usize) -> Result<()> {
        let (raw, _) = lease.raw();
        assert!(raw.len() <= self.bytes);
        // What kept the last copy's bytes goes before its event is set anew.
        while self.on_the_way.iter().any(|(taken, _)| *taken == buffer) {
            let (oldest, lease) = self.on_the_way.pop_front().expect("there is one");
            let asked = Instant::now();
            self.buffers[oldest].come.wait()?;
            self.waited += asked.elapsed();
            drop(lease);
        }
        self.copies += 1;
        let to = self.address(buffer);
        let StagingBuffer { come, arranged, copy } = &mut self.buffers[buffer];
        *copy = self.copies;
        arranged.hold_up(Stream::Copies)?;
        if self.gpu.is_pinned(raw) {
            // SAFETY: the lease keeps the bytes until the copy has ended, and the buffer is nobody else's.
            unsafe { self.gpu.bring(to, raw) }?;
        } else {
            let bounce = match &mut self.bounce {
                Some(bounce) => bounce,
                none => none.insert(Pinned::new(&self.gpu, self.memory.bytes())?),
            };
            let here = &mut bounce.bytes()[buffer * self.bytes..][..raw.len()];
            here.copy_from_slice(raw);
            // SAFETY: the bytes are written to again when the copy has ended, which was waited for above.
            unsafe { self.gpu.bring(to, here) }?;
        }
        come.set(Stream::Copies)
    }
}

/// Memory for slots; where the GPU has less than was planned, because others use it, fewer of them.
fn arenas(gpu: &Arc<Gpu>, classes: &SlotClasses, slots: &[usize]) -> Result<(Vec<Arena>, Vec<usize>)> {
    let mut slots = slots.to_vec();
    // What the plan has for other purposes.
    let owed = gpu.unused().saturating_sub(classes.device_bytes(&slots));
    loop {
        let make = |(class, &count): (usize, &usize)| {
            let bytes = classes.classes[class].device_bytes;
            Arena::new(gpu, bytes, count)
        };
        let made = slots.iter().enumerate().map(make).collect::<Result<Vec<_>>>();
        match made.and_then(|arenas| gpu.has_free(owed).map(|()| arenas)) {
            Ok(arenas) => return Ok((arenas, slots)),
            Err(error) => {
                let wanted = classes.device_bytes(&slots);
                let fewer =
                    classes.divide_device(wanted / 8 * 7).filter(|_| !matches!(error, Error::Budget { .. }));
                let Some(fewer) = fewer.filter(|fewer| *fewer != slots) else { return Err(error) };
                let (wanted, fewer_bytes) = (Bytes(wanted), Bytes(classes.device_bytes(&fewer)));
                tracing::warn!(
                    "{wanted} of the GPU's memory are not free for experts, trying {fewer_bytes}: {error}"
                );
                slots = fewer;
            }
        }
    }
}
