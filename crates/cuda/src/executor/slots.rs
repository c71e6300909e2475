//! The GPU's expert slots, and uploads to them.
//!
//! Experts are copied in the layout of RAM, on the CUDA stream for copies, to staging buffers on the GPU. On the
//! compute stream, a kernel rearranges them into their slots. So by the time a slot is overwritten, its last expert has
//! been used, and a staging buffer is free when that kernel has run. A copy needs no slot, so it may start long before
//! the expert's slot is known, or whether the expert is needed at all.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytemuck::{Pod, Zeroable};
use forebay_engine::internals::experts::tier::part_of;
use forebay_engine::internals::experts::{DevicePart, DeviceSlot, ExpertLayer, Lease, Leases, SlotClasses};
use forebay_engine::{Bytes, Error, LayerIdx, Result};

use crate::driver::{Address, Event, Gpu, Memory, Pinned, Stream};
use crate::weights::{LayerExperts, PlaneSource};

/// The most allocations for the slots of a class.
pub const PARTS: usize = 64;

/// A part of a slot that a kernel rearranges, in the kernel's layout.
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

/// An expert and the slot that it was uploaded to, in the kernel's layout.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub struct Arrival {
    index: u64,
    slot: Address,
}

/// The slots of one size class.
struct Arena {
    /// Bytes per slot.
    bytes: usize,
    /// Slots per part.
    each: usize,
    slots: usize,
    /// `None` for parts that are lent.
    parts: Vec<Option<Memory>>,
}

impl Arena {
    /// Allocates this many slots.
    fn new(gpu: &Arc<Gpu>, bytes: usize, slots: usize) -> Result<Arena> {
        let each = part_of(slots, PARTS);
        let mut arena = Arena { bytes, each, slots, parts: Vec::new() };
        for part in 0..slots.div_ceil(each) {
            let memory = arena.allocate(gpu, part)?;
            arena.parts.push(Some(memory));
        }
        Ok(arena)
    }

    /// Allocates memory for a part.
    fn allocate(&self, gpu: &Arc<Gpu>, part: usize) -> Result<Memory> {
        let slots = self.each.min(self.slots - part * self.each);
        gpu.allocate(slots * self.bytes, "experts")
    }

    fn address(&self, slot: usize) -> Address {
        assert!(slot < self.slots);
        let part = self.parts[slot / self.each].as_ref().expect("no expert is in slots that are lent");
        part.address() + (slot % self.each * self.bytes) as u64
    }
}

/// The slots of all classes, and the experts in them.
pub struct ExpertSlots {
    /// By class.
    arenas: Vec<Arena>,
    /// By layer.
    pub layers: Vec<Option<LayerExperts>>,
    /// By layer: where its experts start in the table.
    starts: Vec<usize>,
    /// The addresses of all experts on the GPU. Entries of evicted experts are never read.
    table: Memory,
    staging: Staging,
    /// The staging buffers of the last upload.
    batch: Vec<usize>,
    /// The planes to rearrange after it.
    planes: Vec<Plane>,
    arrivals: Vec<Arrival>,
}

/// The staging buffers for uploads.
struct Staging {
    gpu: Arc<Gpu>,
    bytes: usize,
    memory: Memory,
    /// A buffer for experts in memory that is not pinned.
    bounce: Option<Pinned>,
    buffers: Vec<StagingBuffer>,
    /// Free buffers, the next one first.
    free: VecDeque<usize>,
    /// Early uploads that were not requested yet.
    sent: Vec<Sent>,
    /// Copies that may still run, oldest first, with the leases that keep their sources.
    on_the_way: VecDeque<(usize, Lease)>,
    /// Counts copies.
    copies: u64,
    /// How long the executor waited for staging buffers, since it was last asked.
    waited: Duration,
}

struct StagingBuffer {
    /// Passes when the buffer's content has arrived.
    come: Event,
    /// Passes when the content was rearranged.
    arranged: Event,
    /// The number of the copy.
    copy: u64,
}

/// An expert in a staging buffer, or being copied there.
struct Sent {
    layer: usize,
    expert: u32,
    buffer: usize,
}

impl ExpertSlots {
    /// Allocates slots of each class: as planned, or fewer if memory is short, but at least the minimum.
    ///
    /// # Errors
    /// If a type is not supported, or the minimum does not fit.
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

    /// The address of a layer's part of the table.
    pub fn table(&self, layer: usize) -> Address {
        self.table.address() + (self.starts[layer] * 8) as u64
    }

    /// The address of the whole table.
    pub fn whole_table(&self) -> Address {
        self.table.address()
    }

    /// The address of a slot.
    pub fn address(&self, slot: DeviceSlot) -> Address {
        self.arenas[slot.class].address(slot.slot)
    }

    /// The experts of a layer.
    pub fn layer(&self, layer: LayerIdx) -> &LayerExperts {
        self.layers[layer.0].as_ref().expect("it has experts")
    }

    /// Sets the table in which kernels look for a layer's experts.
    pub fn look_in(&mut self, layer: usize, table: Address) {
        self.layers[layer].as_mut().expect("it has experts").look_in(table);
    }

    /// Implements [`DeviceSlots::lend`](forebay_engine::internals::experts::DeviceSlots::lend).
    ///
    /// # Errors
    /// If the GPU fails.
    pub fn lend(&mut self, DevicePart { class, part }: DevicePart) -> Result<()> {
        // Work that uses these slots has ended then.
        self.staging.gpu.wait()?;
        self.arenas[class].parts[part] = None;
        Ok(())
    }

    /// Implements [`DeviceSlots::take_back`](forebay_engine::internals::experts::DeviceSlots::take_back).
    pub fn take_back(&mut self, DevicePart { class, part }: DevicePart) -> bool {
        let gpu = &self.staging.gpu;
        gpu.trim_pieces();
        self.arenas[class].parts[part] = self.arenas[class].allocate(gpu, part).ok();
        self.arenas[class].parts[part].is_some()
    }

    /// How many experts are best uploaded together: while some are rearranged, others are copied.
    pub fn together(&self) -> usize {
        self.staging.together()
    }

    /// How many more experts can be uploaded early.
    pub fn room(&self) -> usize {
        self.staging.room()
    }

    /// Starts early uploads, as far as there are buffers.
    ///
    /// # Errors
    /// If the GPU reports an error.
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

    /// Drops early uploads of experts that are not among these.
    pub fn keep_early(&mut self, leases: &Leases) {
        let Staging { sent, free, .. } = &mut self.staging;
        sent.retain(|sent| {
            let asked = leases.iter().any(|l| l.layer().0 == sent.layer && l.expert().0 == sent.expert);
            if !asked {
                free.push_back(sent.buffer);
            }
            asked
        });
    }

    /// Starts to upload experts, unless they were uploaded early. Returns what must be rearranged after
    /// [`await_copies`](Self::await_copies).
    ///
    /// # Errors
    /// If the GPU reports an error.
    pub fn upload(&mut self, leases: Leases) -> Result<(&[Plane], &[Arrival])> {
        assert!(leases.len() <= self.together());
        // Left over from a failed batch.
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

    /// Makes later work wait for the last upload.
    ///
    /// # Errors
    /// If the GPU reports an error.
    pub fn await_copies(&self) -> Result<()> {
        let buffers = &self.staging.buffers;
        // Copies end in order.
        let last = self.batch.iter().max_by_key(|&&buffer| buffers[buffer].copy);
        last.map_or(Ok(()), |&last| buffers[last].come.block(Stream::Compute))
    }

    /// Called after the kernel that rearranges the last upload was started.
    ///
    /// # Errors
    /// If the GPU reports an error.
    pub fn arranged(&mut self) -> Result<()> {
        let Staging { buffers, free, .. } = &mut self.staging;
        let set = self.batch.iter().try_for_each(|&buffer| buffers[buffer].arranged.set(Stream::Compute));
        free.extend(self.batch.drain(..));
        set
    }

    /// Drops leases of experts whose copy has ended. If none has and `wait` is set, waits for one. Returns whether it
    /// dropped any.
    ///
    /// # Errors
    /// If the GPU fails.
    pub fn release_leases(&mut self, wait: bool) -> Result<bool> {
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

    /// How long the executor waited for staging buffers, since this was last called.
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
            memory: gpu.allocate(buffers * bytes, "staging buffers")?,
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

    /// One staging buffer is always reserved for requested experts.
    fn room(&self) -> usize {
        (self.buffers.len() - self.together()).saturating_sub(self.sent.len())
    }

    /// The index of an expert's early upload.
    fn find(&self, lease: &Lease) -> Option<usize> {
        let (layer, expert) = (lease.layer().0, lease.expert().0);
        self.sent.iter().position(|sent| sent.layer == layer && sent.expert == expert)
    }

    /// Starts copying an expert to the next free staging buffer.
    fn copy(&mut self, lease: Lease) -> Result<usize> {
        let buffer = self.free.pop_front().expect("staging buffers are left for what is brought");
        let started = self.start_copy(&lease, buffer);
        if started.is_ok() {
            self.on_the_way.push_back((buffer, lease));
        } else {
            // The started copies need the lease until they have ended, and their content is unknown.
            self.free.push_front(buffer);
            self.free.extend(self.sent.drain(..).map(|sent| sent.buffer));
            let _ = self.gpu.wait_for(Stream::Copies);
        }
        started.map(|()| buffer)
    }

    fn start_copy(&mut self, lease: &Lease, buffer: usize) -> Result<()> {
        let (raw, _) = lease.raw();
        assert!(raw.len() <= self.bytes);
        // The lease of the buffer's last copy is dropped before its event is set again.
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
        arranged.block(Stream::Copies)?;
        if self.gpu.is_pinned(raw) {
            // SAFETY: the lease keeps the bytes until the copy has ended, and no other copy uses the buffer.
            unsafe { self.gpu.upload(to, raw) }?;
        } else {
            let bounce = match &mut self.bounce {
                Some(bounce) => bounce,
                none => none.insert(Pinned::new(&self.gpu, self.memory.bytes())?),
            };
            let here = &mut bounce.bytes()[buffer * self.bytes..][..raw.len()];
            here.copy_from_slice(raw);
            // SAFETY: the bytes are next written to after the copy has ended, which was waited for above.
            unsafe { self.gpu.upload(to, here) }?;
        }
        come.set(Stream::Copies)
    }
}

/// Allocates slots. If other programs use the GPU's memory, allocates fewer than planned.
fn arenas(gpu: &Arc<Gpu>, classes: &SlotClasses, slots: &[usize]) -> Result<(Vec<Arena>, Vec<usize>)> {
    let mut slots = slots.to_vec();
    // What the plan reserves for other purposes.
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
                    "cannot allocate {wanted} of the GPU's memory for experts, trying {fewer_bytes}: {error}"
                );
                slots = fewer;
            }
        }
    }
}
