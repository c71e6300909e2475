//! The memory that experts are read into: slots of a few sizes, allocated once.

use std::ops::Range;
use std::sync::Arc;

use smallvec::SmallVec;

use super::io::BLOCK;
use super::{ByteRange, ExpertLayer, MAX_RANGES};
use crate::error::Result;
use crate::memory::Region;

/// Experts that fit the same slots: those whose parts have the same lengths.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlotClass {
    /// Bytes of a slot.
    pub bytes: usize,
    /// Bytes of a slot in the memory of a device, where planes are apart.
    pub device_bytes: usize,
    /// Experts that use such slots, in all layers.
    pub experts: usize,
    /// The most experts of one layer that a token uses.
    pub used: usize,
}

/// Where slots and planes start in a device's memory.
pub const DEVICE_ALIGNMENT: usize = 256;

/// What a plane takes there beyond its bytes: up to the next one, and as far as kernels read beyond its end.
pub const DEVICE_PLANE: usize = DEVICE_ALIGNMENT + 128;

/// Bytes through which experts pass on their way into a device's memory: enough for copies to go on while others are put in order.
const STAGING: usize = 128 << 20;

/// Which slots the experts of a model need.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SlotClasses {
    /// The distinct ones.
    pub classes: Vec<SlotClass>,
    /// The class of each layer that has experts.
    pub of_layer: Vec<Option<usize>>,
}

impl SlotClasses {
    /// Sorts the layers of a model into classes.
    pub fn new(layers: &[Option<ExpertLayer>]) -> SlotClasses {
        let mut classes: Vec<SlotClass> = Vec::new();
        let mut lengths: Vec<Vec<usize>> = Vec::new();
        let mut of_layer = Vec::new();
        for layer in layers {
            let Some((layer, first)) = layer.as_ref().and_then(|l| Some((l, l.experts.first()?))) else {
                of_layer.push(None);
                continue;
            };
            let parts: Vec<usize> = first.iter().map(|range| range.len).collect();
            let class = lengths.iter().position(|l| *l == parts).unwrap_or_else(|| {
                lengths.push(parts);
                classes.push(SlotClass { bytes: 0, device_bytes: 0, experts: 0, used: 0 });
                classes.len() - 1
            });
            let bytes = layer.experts.iter().map(|e| Placement::new(e).bytes).max().unwrap_or(0);
            let c = &mut classes[class];
            c.bytes = c.bytes.max(bytes);
            c.device_bytes = layer.expert_bytes() as usize + MAX_RANGES * DEVICE_PLANE;
            c.device_bytes = c.device_bytes.next_multiple_of(DEVICE_ALIGNMENT);
            c.experts += layer.experts.len();
            c.used = c.used.max(layer.used);
            of_layer.push(Some(class));
        }
        SlotClasses { classes, of_layer }
    }

    /// Bytes of slots for all experts.
    pub fn all_bytes(&self) -> u64 {
        self.bytes(&self.all())
    }

    /// Slots for all experts.
    pub fn all(&self) -> Vec<usize> {
        self.classes.iter().map(|c| c.experts).collect()
    }

    /// The fewest slots with which a token can be computed: its experts of one layer.
    pub fn least(&self) -> Vec<usize> {
        self.classes.iter().map(|c| c.used).collect()
    }

    /// Bytes of this many slots of each class.
    pub fn bytes(&self, slots: &[usize]) -> u64 {
        sum(slots, |class| self.classes[class].bytes)
    }

    /// Bytes of this many slots of each class in a device's memory.
    pub fn device_bytes(&self, slots: &[usize]) -> u64 {
        sum(slots, |class| self.classes[class].device_bytes)
    }

    /// The places through which experts pass on their way into a device's memory: how many, and bytes of each.
    pub fn staging(&self) -> (usize, usize) {
        let bytes = self.classes.iter().map(|c| c.bytes).max().unwrap_or(0);
        ((STAGING / bytes.max(1)).clamp(4, 64), bytes)
    }

    /// Slots of each class in `bytes` bytes, the same share of the experts of each, but not fewer than the
    /// [least](Self::least); `None` if not even those fit.
    pub fn divide(&self, bytes: u64) -> Option<Vec<usize>> {
        self.share_out(bytes, |slots| self.bytes(slots))
    }

    /// As [`divide`](Self::divide), in a device's memory.
    pub fn divide_device(&self, bytes: u64) -> Option<Vec<usize>> {
        self.share_out(bytes, |slots| self.device_bytes(slots))
    }

    fn share_out(&self, bytes: u64, size: impl Fn(&[usize]) -> u64) -> Option<Vec<usize>> {
        let least = self.least();
        if size(&least) > bytes {
            return None;
        }
        let all = self.all();
        if size(&all) <= bytes {
            return Some(all);
        }
        // A class that keeps its least leaves less than its share to the others, so shares shrink until all fit.
        let mut share = bytes as f64 / size(&all) as f64;
        loop {
            let shares = all.iter().map(|&experts| (experts as f64 * share) as usize);
            let slots: Vec<usize> = shares.zip(&least).map(|(n, &least)| n.max(least)).collect();
            if size(&slots) <= bytes {
                return Some(slots);
            }
            share *= 0.99;
        }
    }
}

fn sum(slots: &[usize], bytes: impl Fn(usize) -> usize) -> u64 {
    slots.iter().enumerate().map(|(class, &n)| bytes(class) as u64 * n as u64).sum()
}

/// How many of a layer's experts are brought into a class of so many slots at a time. Those on their way, or computed
/// once and not worth keeping, take slots from those that are; a drive needs only a few reads at a time to be busy.
pub fn reads_at_once(slots: usize) -> usize {
    (slots / 16).max(1)
}

/// Where the parts of an expert lie in its slot, and what is read to get them there: whole blocks of the file. The
/// bytes that this adds around a part stay out of sight.
#[derive(Clone, Debug)]
pub struct Placement {
    /// By part.
    pub extents: SmallVec<[Extent; MAX_RANGES]>,
    /// Bytes used of the slot.
    pub bytes: usize,
}

/// Blocks of a file that hold one part of an expert.
#[derive(Clone, Copy, Debug)]
pub struct Extent {
    /// Where they start in the file.
    pub offset: u64,
    /// Where they go in the slot.
    pub place: usize,
    /// Their length.
    pub len: usize,
    /// Bytes before the part.
    pub lead: usize,
    /// The length of the part.
    pub part: usize,
}

impl Placement {
    /// The placement of an expert.
    pub fn new(ranges: &[ByteRange]) -> Placement {
        let mut place = 0;
        let extents = ranges.iter().map(|range| {
            let offset = range.offset / BLOCK as u64 * BLOCK as u64;
            let lead = (range.offset - offset) as usize;
            let len = (lead + range.len).next_multiple_of(BLOCK);
            place += len;
            Extent { offset, place: place - len, len, lead, part: range.len }
        });
        let extents = extents.collect();
        Placement { extents, bytes: place }
    }
}

/// The slots of one class, in one region.
pub struct Arena {
    region: Arc<Region>,
    slot_bytes: usize,
    slots: usize,
}

impl Arena {
    /// Reserves `slots` slots.
    ///
    /// # Errors
    /// If there is no address space for them.
    pub fn new(slot_bytes: usize, slots: usize) -> Result<Arena> {
        Ok(Arena { region: Arc::new(Region::new(slot_bytes * slots)?), slot_bytes, slots })
    }

    /// Bytes of a slot.
    pub fn slot_bytes(&self) -> usize {
        self.slot_bytes
    }

    /// The memory, which lives as long as anybody holds this.
    pub fn region(&self) -> &Arc<Region> {
        &self.region
    }

    /// Where a slot starts.
    pub fn slot(&self, slot: usize) -> *mut u8 {
        assert!(slot < self.slots);
        self.region.as_ptr().wrapping_add(slot * self.slot_bytes)
    }

    /// Bytes that can be given back of a slot: its whole pages.
    pub fn returnable(&self, slot: usize) -> u64 {
        self.region.whole_pages(self.range(slot)).len() as u64
    }

    /// Gives the memory of a slot back to the system. Returns how many bytes of it were in memory; `None` if the system does not
    /// take it.
    ///
    /// # Safety
    /// Nobody may read or write the slot, nor be about to.
    pub unsafe fn give_back(&self, slot: usize) -> Option<u64> {
        // SAFETY: the caller's promise.
        unsafe { self.region.give_back(self.range(slot)) }.map(|freed| freed as u64)
    }

    fn range(&self, slot: usize) -> Range<usize> {
        assert!(slot < self.slots);
        slot * self.slot_bytes..(slot + 1) * self.slot_bytes
    }

    /// The first bytes of a slot.
    ///
    /// # Safety
    /// The slot must hold an expert, and nobody may write to it while the slice lives.
    pub unsafe fn bytes(&self, slot: usize, len: usize) -> &[u8] {
        assert!(len <= self.slot_bytes);
        // SAFETY: the bytes lie inside the slot, whose memory is initialised by the system, and the caller promises that nobody
        // writes to it.
        unsafe { std::slice::from_raw_parts(self.slot(slot), len) }
    }

    /// One part of the expert in a slot.
    ///
    /// # Safety
    /// The slot must hold an expert of this placement, and nobody may write to it while the slice lives.
    pub unsafe fn part(&self, slot: usize, extent: &Extent) -> &[u8] {
        let range = extent.place + extent.lead..extent.place + extent.lead + extent.part;
        assert!(range.end <= self.slot_bytes);
        // SAFETY: the range lies inside the slot, whose memory is initialised by the system, and the caller
        // promises that nobody writes to it.
        unsafe { std::slice::from_raw_parts(self.slot(slot).add(range.start), range.len()) }
    }
}

/// The experts of all layers, numbered through.
#[derive(Clone, Debug)]
pub struct Numbering {
    /// Where each layer's experts start, and the end of the last.
    starts: Vec<usize>,
}

impl Numbering {
    /// Numbers the experts of a model.
    pub fn new(layers: &[Option<ExpertLayer>]) -> Numbering {
        let mut starts = vec![0];
        for layer in layers {
            let count = layer.as_ref().map_or(0, |l| l.experts.len());
            starts.push(starts[starts.len() - 1] + count);
        }
        Numbering { starts }
    }

    /// All experts.
    pub fn count(&self) -> usize {
        self.starts[self.starts.len() - 1]
    }

    /// The numbers of a layer's experts.
    pub fn layer(&self, layer: usize) -> Range<usize> {
        self.starts[layer]..self.starts[layer + 1]
    }

    /// The layer of an expert and its index there.
    pub fn place(&self, expert: usize) -> (usize, usize) {
        let layer = self.starts.partition_point(|&start| start <= expert) - 1;
        (layer, expert - self.starts[layer])
    }
}
