//! The expert store, which keeps experts in memory and reads them from the drive, and the executors, which compute
//! with them.
//!
//! Only an [executor](ExpertExecutor) uses the store. It [acquires](ExpertStore::acquire) the experts that the router
//! chose and computes with each batch of leases as it becomes ready: first the experts in memory, then the others as
//! they arrive from the drive. A lease keeps its expert in its slot until it is dropped. Slots are allocated once. If
//! none is free, a [`Policy`] chooses which expert is evicted. If there are slots for all experts, they are all read
//! at the start and none is ever evicted.

mod assistant;
mod cpu;
mod device;
mod executor;
mod giving;
pub(crate) mod heat;
mod held;
pub mod io;
mod lease;
mod meters;
mod picture;
mod pinning;
pub mod policy;
mod populate;
pub(crate) mod slots;
pub mod tier;

use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use forebay_kernels::Encoding;
use smallvec::SmallVec;

pub use assistant::{Assistant, Outputs};
pub use cpu::CpuExecutor;
pub use device::DeviceSlots;
pub use executor::{
    Access, BatchShape, Device, ExecutorBuilder, ExpertExecutor, ExpertSetup, Meanwhile, Mixture,
    NextMixture, RoutingObserver,
};
pub use giving::Given;
pub use held::Held;
pub use io::{ByteSource, FileSource, IoMethod};
pub use lease::{Acquisition, Lease, Leases};
pub use meters::Meters;
pub use picture::{Asked, Picture, Residency, Sight};
pub use slots::{SlotClass, SlotClasses};
pub use tier::{DevicePart, DeviceSlot};

use crate::backend::Parts;
use crate::error::{Error, Result};
use crate::format::{FileIdx, ModelFile};
use crate::{ExpertIdx, LayerIdx};
use io::{OnDone, Priority, Read, ReadId, Reader};
use picture::LastAsked;
use pinning::Pinning;
use policy::{Policy, PolicyKind};
use populate::Populating;
use slots::{Arena, Numbering, Placement, reads_at_once};
use tier::Tier;

/// One matrix of an expert: its shape, its encoding, and which of the expert's byte ranges hold it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PartShape {
    /// The encoding of the weights.
    pub encoding: Encoding,
    /// Output features.
    pub rows: usize,
    /// Input features.
    pub cols: usize,
    /// The indices of the ranges that hold its codes, scales and biases; `None` for a plane that the encoding does
    /// not have.
    pub planes: [Option<usize>; 3],
    /// Which of the stored rows belong to the matrix.
    pub pick: RowPick,
}

/// A selection of stored rows. Two matrices may share their ranges.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowPick {
    /// The first row.
    pub first: usize,
    /// The distance from each row to the next.
    pub step: usize,
    /// How many rows are stored for each that is selected.
    pub of: usize,
}

impl RowPick {
    /// All rows.
    pub const ALL: RowPick = RowPick { first: 0, step: 1, of: 1 };
}

/// Bytes of a file that hold a part of an expert.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ByteRange {
    /// The file.
    pub file: FileIdx,
    /// The first byte.
    pub offset: u64,
    /// The number of bytes.
    pub len: usize,
}

/// The byte ranges of an expert: three if it has three matrices of one plane, at most [`MAX_RANGES`].
pub type Ranges = SmallVec<[ByteRange; 3]>;

/// The largest number of planes of a matrix.
const PLANES: usize = 3;

/// The largest number of ranges of an expert: two blocks of three matrices.
pub const MAX_RANGES: usize = 6 * PLANES;

/// The routed experts of one layer: their form and where their bytes are.
#[derive(Clone, Debug)]
pub struct ExpertLayer {
    /// The matrices of an expert's block, the same for all experts of the layer.
    pub parts: Parts<PartShape>,
    /// Those of a second, smaller block, which neighbouring experts share (GroveMoE's adjugate experts), if there is
    /// one. It is read with each of them, so all bytes that an expert needs are in its slot.
    pub adjugate: Option<Parts<PartShape>>,
    /// The byte ranges of each expert. Their number and lengths are the same for all.
    pub experts: Vec<Ranges>,
    /// How many experts a token uses.
    pub used: usize,
}

impl ExpertLayer {
    /// The matrices of an expert, in both blocks.
    pub fn matrices(&self) -> impl Iterator<Item = &PartShape> {
        self.parts.iter().chain(self.adjugate.iter().flat_map(Parts::iter))
    }

    /// Bytes of one expert.
    pub fn expert_bytes(&self) -> u64 {
        self.experts.first().map_or(0, |ranges| ranges.iter().map(|r| r.len as u64).sum())
    }
}

/// The settings of a store.
#[derive(Clone, Debug)]
pub struct StoreOptions {
    /// The number of slots of each class, in the order of [`SlotClasses::classes`].
    pub slots: Vec<usize>,
    /// How experts are read.
    pub io: IoMethod,
    /// The eviction policy.
    pub policy: PolicyKind,
    /// How long a request waits for a drive that does not answer before it fails.
    pub patience: Duration,
}

impl StoreOptions {
    /// The default: drives that sleep need a few seconds to wake up.
    pub const PATIENCE: Duration = Duration::from_secs(15);
}

/// Keeps experts in slots, reads them from the drive, and hands out leases.
pub struct ExpertStore {
    shared: Arc<Shared>,
    reader: Box<dyn Reader>,
    populating: Populating,
    /// Slots that a device copies from directly. Executors share the store, so this lives as long as any of them.
    pinning: OnceLock<Pinning>,
}

/// What leases, acquisitions and the reader's threads share.
struct Shared {
    layers: Vec<Option<ExpertLayer>>,
    /// The model's files, for messages.
    paths: Vec<PathBuf>,
    numbering: Numbering,
    /// The slot class of each layer that has experts.
    class_of_layer: Vec<Option<usize>>,
    /// One per class.
    arenas: Vec<Arena>,
    state: Mutex<StoreState>,
    patience: Duration,
    /// Notified when an expert has arrived, a read has failed or a slot has become free.
    changed: Condvar,
}

struct StoreState {
    /// By expert number.
    experts: Vec<Residence>,
    /// By class and slot.
    slots: Vec<Vec<Slot>>,
    /// By expert number: whether it was prefetched and not requested since.
    prefetched: Vec<bool>,
    /// Experts that were prefetched to the device and not requested since.
    sent: Vec<usize>,
    /// By expert number: the last hit and miss, for [`Picture`]s.
    asked: Vec<LastAsked>,
    /// The number of pictures taken.
    pictures: u32,
    /// By layer: how many keep all of its experts in their slots, and how often an expert has arrived in a slot.
    held: Vec<usize>,
    arrivals: Vec<u64>,
    /// By class: slots without an expert.
    free: Vec<Vec<usize>>,
    /// Which experts are in device memory, if the device has slots.
    tier: Option<Tier>,
    /// Bytes of device memory that conversations need from the slots.
    device_bytes_requested: u64,
    policy: Box<dyn Policy>,
    /// Failed reads by expert, until an acquisition reports them.
    failures: Vec<(usize, Error)>,
    /// Reads under way.
    in_flight: usize,
    /// When the last read ended or, before that, when the first one began.
    last_progress: Instant,
    /// Since when at least one read has been under way.
    busy_since: Instant,
    meters: Meters,
}

impl StoreState {
    /// The slot of an expert in device memory, if it is there.
    fn on_device(&self, expert: usize) -> Option<usize> {
        self.tier.as_ref()?.find(expert)
    }

    /// Drops from the list of experts prefetched to the device all that this request does not ask for.
    fn forget_sent(&mut self, asked: impl Iterator<Item = usize> + Clone) {
        self.sent.retain(|&sent| asked.clone().any(|expert| expert == sent));
        self.meters.sent_used += self.sent.len() as u64;
    }

    /// Counts reads that are about to start.
    fn reading(&mut self, reads: usize) {
        if self.in_flight == 0 {
            self.busy_since = Instant::now();
            self.last_progress = self.busy_since;
        }
        self.in_flight += reads;
    }

    /// Counts a read that has ended.
    fn ended(&mut self) {
        self.last_progress = Instant::now();
        self.in_flight -= 1;
        if self.in_flight == 0 {
            self.meters.read_seconds += self.busy_since.elapsed().as_secs_f64();
        }
    }
}

/// Where an expert is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Residence {
    Drive,
    /// Being read into a slot; `left` of its parts have not arrived.
    Reading {
        slot: usize,
        left: usize,
    },
    Memory {
        slot: usize,
    },
}

/// The state of a slot.
#[derive(Clone, Copy, Debug, Default)]
struct Slot {
    expert: Option<usize>,
    /// The number of leases and acquisitions that keep the expert there.
    pins: usize,
    /// Whether its memory was given back to the operating system.
    given_back: bool,
}

impl ExpertStore {
    /// Reserves the slots and opens the files. Reads nothing yet.
    ///
    /// # Errors
    /// If the memory cannot be reserved, or the I/O method cannot open the files.
    pub fn new(
        model: &ModelFile,
        layers: Vec<Option<ExpertLayer>>,
        classes: &SlotClasses,
        options: &StoreOptions,
    ) -> Result<ExpertStore> {
        let paths = model.files.iter().map(|part| part.path.clone()).collect();
        ExpertStore::with_reader(layers, paths, classes, options, |on_done| {
            // The slots are not registered with io_uring: that would make all their pages resident at once and forbid
            // giving them back.
            io::open(model, options.io, &[], on_done)
        })
    }

    /// A store over any source of bytes, read by a pool of threads.
    ///
    /// # Errors
    /// If the memory cannot be reserved or threads cannot be started.
    pub fn over(
        source: Arc<dyn ByteSource>,
        layers: Vec<Option<ExpertLayer>>,
        classes: &SlotClasses,
        options: &StoreOptions,
    ) -> Result<ExpertStore> {
        let ranges = layers.iter().flatten().flat_map(|layer| layer.experts.iter().flatten());
        let files = ranges.map(|range| range.file.0 + 1).max().unwrap_or(0);
        let paths = (0..files).map(|file| source.path(FileIdx(file)).to_owned()).collect();
        ExpertStore::with_reader(layers, paths, classes, options, |on_done| io::pool(source, 4, on_done))
    }

    /// A store that uses the reader that `open` returns.
    fn with_reader(
        layers: Vec<Option<ExpertLayer>>,
        paths: Vec<PathBuf>,
        classes: &SlotClasses,
        options: &StoreOptions,
        open: impl FnOnce(OnDone) -> Result<Box<dyn Reader>>,
    ) -> Result<ExpertStore> {
        let arenas = classes.classes.iter().zip(&options.slots).map(|(c, &n)| Arena::new(c.bytes, n));
        let numbering = Numbering::new(&layers);
        let state = StoreState {
            experts: vec![Residence::Drive; numbering.count()],
            prefetched: vec![false; numbering.count()],
            sent: Vec::new(),
            asked: vec![LastAsked::default(); numbering.count()],
            pictures: 0,
            held: vec![0; layers.len()],
            arrivals: vec![0; layers.len()],
            slots: options.slots.iter().map(|&n| vec![Slot::default(); n]).collect(),
            free: options.slots.iter().map(|&n| (0..n).rev().collect()).collect(),
            tier: None,
            device_bytes_requested: 0,
            policy: policy::make(options.policy, numbering.count()),
            failures: Vec::new(),
            in_flight: 0,
            last_progress: Instant::now(),
            busy_since: Instant::now(),
            meters: Meters::default(),
        };
        let shared = Arc::new(Shared {
            numbering,
            layers,
            paths,
            class_of_layer: classes.of_layer.clone(),
            arenas: arenas.collect::<Result<_>>()?,
            state: Mutex::new(state),
            patience: options.patience,
            changed: Condvar::new(),
        });
        // If a drive does not answer, its reader outlives the store. The reader's callback therefore keeps the memory
        // that it writes to.
        let weak = Arc::downgrade(&shared);
        let populating = Populating::start(shared.arenas.iter().map(|arena| Arc::clone(arena.region())));
        let memory: Vec<_> = shared.arenas.iter().map(|arena| Arc::clone(arena.region())).collect();
        let reader = open(Arc::new(move |id, result| {
            let _ = &memory;
            if let Some(shared) = weak.upgrade() {
                shared.arrived(id, result);
            }
        }))?;
        Ok(ExpertStore { shared, reader, populating, pinning: OnceLock::new() })
    }

    /// Reads experts into free slots, in the given order, while slots are free. `progress` receives the bytes of each
    /// expert.
    ///
    /// # Errors
    /// If reading fails.
    pub fn preload(
        &self,
        experts: impl Iterator<Item = usize>,
        progress: &mut dyn FnMut(u64) -> Result<()>,
    ) -> Result<()> {
        /// Experts requested at a time: enough to keep the drive busy while `progress` runs.
        const AHEAD: usize = 32;
        let mut wanted: Vec<usize> = experts.collect();
        wanted.retain({
            let state = self.shared.lock();
            let mut free: Vec<usize> = state.free.iter().map(Vec::len).collect();
            let on_drive = |(number, &place)| place == Residence::Drive && state.on_device(number).is_none();
            let mut absent: Vec<bool> = state.experts.iter().enumerate().map(on_drive).collect();
            move |&expert| {
                let class = self.shared.class(expert);
                let fits = free[class] > 0 && std::mem::take(&mut absent[expert]);
                free[class] -= usize::from(fits);
                fits
            }
        });
        for some in wanted.chunks(AHEAD) {
            let mut acquisition = self.acquire_numbered(some.iter().copied(), Access::Preload);
            acquisition.uploads = false;
            while let Some(leases) = acquisition.next_ready()? {
                for lease in leases {
                    progress(self.shared.expert_bytes(lease.number))?;
                }
            }
        }
        Ok(())
    }

    /// The experts of each layer; `None` for layers without experts.
    pub fn layers(&self) -> &[Option<ExpertLayer>] {
        &self.shared.layers
    }

    /// The number of experts in all layers.
    pub fn experts(&self) -> usize {
        self.shared.numbering.count()
    }

    /// Waits until the pages of all slots are resident, so that filling them does not disturb a measurement.
    pub fn settle(&self) {
        self.populating.wait();
    }

    /// Pins the slots in the background, as far as the operating system allows, so that `device` copies from them
    /// directly.
    pub fn pin(&self, device: &Arc<dyn Device>) {
        let parts = || self.slot_memory(device.pins_at_once());
        self.pinning.get_or_init(|| Pinning::start(Arc::clone(device), parts()));
    }

    /// Waits until [`pin`](Self::pin) has finished.
    pub fn wait_for_pins(&self) {
        self.pinning.get().into_iter().for_each(Pinning::wait);
    }

    /// Adds to the time spent waiting for uploads.
    pub fn note_copy_wait(&self, waited: Duration) {
        if !waited.is_zero() {
            self.shared.lock().meters.copy_wait_seconds += waited.as_secs_f64();
        }
    }

    /// Tells the eviction policy that a new token begins.
    pub fn tick(&self) {
        self.shared.lock().policy.tick();
    }

    /// Requests experts of a layer. Reads of those not in memory start at once.
    pub fn acquire(&self, layer: LayerIdx, experts: &[ExpertIdx], access: Access) -> Acquisition<'_> {
        let first = self.shared.numbering.layer(layer.0).start;
        let numbers = experts.iter().map(|e| first + e.0 as usize);
        self.shared.lock().forget_sent(numbers.clone());
        self.acquire_numbered(numbers, access)
    }

    /// Reads experts that a layer will probably request, while the drive is otherwise idle.
    pub fn prefetch(&self, layer: LayerIdx, experts: &[ExpertIdx]) {
        let first = self.shared.numbering.layer(layer.0).start;
        let mut reads: SmallVec<[Read; 96]> = SmallVec::new();
        let mut state = self.shared.lock();
        for expert in experts.iter().map(|e| first + e.0 as usize) {
            if state.experts[expert] == Residence::Drive && state.on_device(expert).is_none() {
                let Some(slot) = self.shared.take_slot(&mut state, expert) else { break };
                // No acquisition waits for it, so it holds no pin. A slot being read into is not evicted anyway.
                self.shared.unpin(&mut state, expert);
                state.prefetched[expert] = true;
                state.meters.prefetches += 1;
                reads.extend(self.reads(expert, slot));
            }
        }
        drop(state);
        if !reads.is_empty() {
            // SAFETY: a slot belongs to its expert until the reads have ended, and the arenas outlive the reader.
            unsafe { self.reader.submit(&reads, Priority::Prefetch) };
        }
    }

    /// The counters so far.
    pub fn meters(&self) -> Meters {
        self.shared.lock().meters
    }

    /// How often each expert is used, by number.
    pub fn heat(&self) -> Vec<f32> {
        self.shared.lock().policy.heat()
    }

    /// Sets how often experts are used, from an earlier run.
    pub fn warm(&self, heat: &[f32]) {
        self.shared.lock().policy.warm(heat);
    }

    /// How experts are read, for people.
    pub fn io_description(&self) -> String {
        self.reader.describe()
    }

    fn acquire_numbered(&self, experts: impl Iterator<Item = usize>, access: Access) -> Acquisition<'_> {
        let mut acquisition = Acquisition {
            store: self,
            ready: Leases::new(),
            on_device: SmallVec::new(),
            uploads: false,
            reading: SmallVec::new(),
            waiting: SmallVec::new(),
            at_once: usize::MAX,
            start: Instant::now(),
        };
        // Prefetches under way that this request now waits for.
        let mut promoted: SmallVec<[ReadId; 96]> = SmallVec::new();
        {
            let mut state = self.shared.lock();
            acquisition.uploads = state.tier.is_some();
            for expert in experts {
                let uploaded = state.on_device(expert);
                let hit = uploaded.is_some() || matches!(state.experts[expert], Residence::Memory { .. });
                if access == Access::Token {
                    state.policy.used(expert);
                    acquisition.at_once = reads_at_once(state.slots[self.shared.class(expert)].len());
                }
                if access != Access::Preload {
                    state.meters.count(hit, self.shared.expert_bytes(expert));
                    state.meters.device_hits += u64::from(uploaded.is_some());
                    let pictures = state.pictures;
                    state.asked[expert].note(pictures, hit);
                }
                if let Some(slot) = uploaded {
                    let (_, index) = self.shared.numbering.place(expert);
                    let place = DeviceSlot { class: self.shared.class(expert), slot };
                    acquisition.on_device.push((ExpertIdx(index as u32), place));
                    continue;
                }
                match state.experts[expert] {
                    Residence::Memory { slot } => {
                        state.slots[self.shared.class(expert)][slot].pins += 1;
                        acquisition.ready.push(self.shared.lease(expert, slot));
                    }
                    Residence::Reading { slot, .. } => {
                        state.slots[self.shared.class(expert)][slot].pins += 1;
                        acquisition.reading.push(expert);
                        promoted
                            .extend((0..self.shared.ranges(expert).len()).map(|part| read_id(expert, part)));
                    }
                    Residence::Drive => acquisition.waiting.push(expert),
                }
                if std::mem::take(&mut state.prefetched[expert]) && state.experts[expert] != Residence::Drive
                {
                    state.meters.prefetch_used += 1;
                }
            }
            // Experts are taken from the end of the list.
            acquisition.waiting.reverse();
        }
        if !promoted.is_empty() {
            self.reader.promote(&promoted);
        }
        acquisition.start_reads();
        acquisition
    }
}

/// The id of the read of one part of an expert.
pub(crate) fn read_id(expert: usize, part: usize) -> ReadId {
    ReadId((expert * MAX_RANGES + part) as u64)
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, StoreState> {
        // No panic can leave the state inconsistent.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn class(&self, expert: usize) -> usize {
        let (layer, _) = self.numbering.place(expert);
        self.class_of_layer[layer].expect("a layer with experts has a class")
    }

    fn ranges(&self, expert: usize) -> &[ByteRange] {
        let (layer, index) = self.numbering.place(expert);
        &self.layers[layer].as_ref().expect("a layer with experts").experts[index]
    }

    fn expert_bytes(&self, expert: usize) -> u64 {
        self.ranges(expert).iter().map(|r| r.len as u64).sum()
    }

    fn lease(self: &Arc<Self>, expert: usize, slot: usize) -> Lease {
        Lease { shared: Arc::clone(self), number: expert, slot, device_slot: None }
    }

    /// A slot for an expert: a free one, or the slot of an evicted expert. The slot is pinned once.
    fn take_slot(&self, state: &mut StoreState, expert: usize) -> Option<usize> {
        let class = self.class(expert);
        let slot = match state.free[class].pop() {
            Some(slot) => slot,
            None => {
                let StoreState { slots, experts, policy, tier, held, .. } = state;
                let resident = |slot: &Slot| {
                    let expert = slot.expert.filter(|_| slot.pins == 0)?;
                    if held[self.numbering.place(expert).0] > 0 {
                        return None;
                    }
                    matches!(experts[expert], Residence::Memory { .. }).then_some(expert)
                };
                let candidates = || slots[class].iter().filter_map(resident);
                candidates().next()?;
                // Prefer to evict an expert that is in device memory too.
                let victim = match tier {
                    Some(tier) => tier.victim(class, &mut candidates(), &**policy),
                    None => policy.victim(&mut candidates()),
                };
                let Residence::Memory { slot } = experts[victim] else { unreachable!("it was a candidate") };
                experts[victim] = Residence::Drive;
                slot
            }
        };
        state.slots[class][slot] = Slot { expert: Some(expert), pins: 1, given_back: false };
        let reads = self.ranges(expert).len();
        state.experts[expert] = Residence::Reading { slot, left: reads };
        // The error of an earlier read that no acquisition took does not concern this read.
        state.failures.retain(|(failed, _)| *failed != expert);
        state.reading(reads);
        Some(slot)
    }

    /// Records a read that has ended.
    fn arrived(&self, id: ReadId, result: Result<()>) {
        let (expert, part) = (id.0 as usize / MAX_RANGES, id.0 as usize % MAX_RANGES);
        let mut state = self.lock();
        state.ended();
        let Residence::Reading { slot, left } = state.experts[expert] else {
            unreachable!("an expert is read until all its parts have arrived")
        };
        match result {
            Ok(()) => state.meters.bytes_read += self.ranges(expert)[part].len as u64,
            Err(error) => state.failures.push((expert, error)),
        }
        state.experts[expert] = match left {
            1 if state.failures.iter().any(|(failed, _)| *failed == expert) => {
                // The slot is freed below. The acquisitions that wait for the expert get the error.
                Residence::Drive
            }
            1 => Residence::Memory { slot },
            _ => Residence::Reading { slot, left: left - 1 },
        };
        if left == 1 {
            state.arrivals[self.numbering.place(expert).0] += 1;
            if state.experts[expert] == Residence::Drive {
                let class = self.class(expert);
                state.slots[class][slot] = Slot::default();
                state.free[class].push(slot);
            }
            drop(state);
            self.changed.notify_all();
        }
    }

    /// Removes one pin from a slot.
    fn unpin(&self, state: &mut StoreState, expert: usize) {
        let (Residence::Memory { slot } | Residence::Reading { slot, .. }) = state.experts[expert] else {
            // Its read failed, and the slot was freed.
            return;
        };
        state.slots[self.class(expert)][slot].pins -= 1;
    }
}

impl ExpertStore {
    /// The reads that fill a slot with an expert.
    fn reads(&self, expert: usize, slot: usize) -> impl Iterator<Item = Read> {
        let ranges = self.shared.ranges(expert);
        let start = self.shared.arenas[self.shared.class(expert)].slot(slot);
        Placement::new(ranges).extents.into_iter().enumerate().map(move |(part, extent)| Read {
            id: read_id(expert, part),
            file: ranges[part].file,
            offset: extent.offset,
            to: start.wrapping_add(extent.place),
            len: extent.len,
            needed: extent.lead + extent.part,
        })
    }
}
