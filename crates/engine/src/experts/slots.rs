//! The memory that experts are read into: slots of a few sizes, allocated once.

use std::ops::Range;
use std::sync::Arc;

use smallvec::SmallVec;

use super::io::BLOCK;
use super::{ByteRange, ExpertLayer, MAX_RANGES, PLANES};
use crate::error::Result;
use crate::memory::Region;

/// A class of slots: one for all experts whose parts have the same lengths.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlotClass {
    /// Bytes of a slot.
    pub bytes: usize,
    /// Bytes of a slot in device memory, where planes are stored separately.
    pub device_bytes: usize,
    /// The number of experts that use such slots, in all layers.
    pub experts: usize,
    /// The most experts that a token uses in one layer.
    pub used: usize,
}

/// The alignment of slots and planes in device memory.
pub const DEVICE_ALIGNMENT: usize = 256;

/// The most that a plane takes in device memory beyond its bytes: alignment, and bytes that kernels read past its
/// end.
pub const DEVICE_PLANE: usize = DEVICE_ALIGNMENT + 128;

/// Bytes of staging buffers: enough to copy some experts while others are rearranged.
const STAGING: usize = 128 << 20;

/// The slot classes of a model.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SlotClasses {
    /// The classes.
    pub classes: Vec<SlotClass>,
    /// The class of each layer that has experts.
    pub of_layer: Vec<Option<usize>>,
}

impl SlotClasses {
    /// Assigns the layers of a model to classes.
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
            let planes = layer.matrices().count() * PLANES;
            c.device_bytes = layer.expert_bytes() as usize + planes * DEVICE_PLANE;
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

    /// The number of slots of each class for all experts.
    pub fn all(&self) -> Vec<usize> {
        self.classes.iter().map(|c| c.experts).collect()
    }

    /// The minimum of slots of each class: the experts that a token uses in one layer.
    pub fn least(&self) -> Vec<usize> {
        self.classes.iter().map(|c| c.used).collect()
    }

    /// Bytes of `slots` slots of each class.
    pub fn bytes(&self, slots: &[usize]) -> u64 {
        sum(slots, |class| self.classes[class].bytes)
    }

    /// Bytes of `slots` slots of each class in device memory.
    pub fn device_bytes(&self, slots: &[usize]) -> u64 {
        sum(slots, |class| self.classes[class].device_bytes)
    }

    /// The staging buffers in device memory: their number, and the bytes of each.
    pub fn staging(&self) -> (usize, usize) {
        let bytes = self.classes.iter().map(|c| c.bytes).max().unwrap_or(0);
        ((STAGING / bytes.max(1)).clamp(4, 64), bytes)
    }

    /// Divides `bytes` bytes into slots of each class, for the same share of the experts of each, but at least the
    /// [minimum](Self::least). `None` if the minimum does not fit.
    pub fn divide(&self, bytes: u64) -> Option<Vec<usize>> {
        self.share_out(bytes, |slots| self.bytes(slots))
    }

    /// Like [`divide`](Self::divide), in device memory.
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
        // A class at its minimum takes more than its share, so all shares shrink until the total fits.
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

/// How many of a layer's experts are read or uploaded at a time into a class of `slots` slots. More would evict
/// experts worth keeping for some that are needed once; a drive needs only a few reads at a time to be busy.
pub fn reads_at_once(slots: usize) -> usize {
    (slots / 16).max(1)
}

/// Where the parts of an expert are in its slot, and which whole blocks of the file are read to put them there. The
/// extra bytes around a part are ignored.
#[derive(Clone, Debug)]
pub struct Placement {
    /// One for each part.
    pub extents: SmallVec<[Extent; MAX_RANGES]>,
    /// Bytes of the slot in use.
    pub bytes: usize,
}

/// The blocks of a file that hold one part of an expert.
#[derive(Clone, Copy, Debug)]
pub struct Extent {
    /// Their offset in the file.
    pub offset: u64,
    /// Their offset in the slot.
    pub place: usize,
    /// Their length.
    pub len: usize,
    /// Bytes in them before the part.
    pub lead: usize,
    /// The length of the part.
    pub part: usize,
}

impl Placement {
    /// The placement of an expert with these ranges.
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
    /// If the address space is exhausted.
    pub fn new(slot_bytes: usize, slots: usize) -> Result<Arena> {
        Ok(Arena { region: Arc::new(Region::new(slot_bytes * slots)?), slot_bytes, slots })
    }

    /// Bytes of a slot.
    pub fn slot_bytes(&self) -> usize {
        self.slot_bytes
    }

    /// The memory. It lives as long as any reference to it.
    pub fn region(&self) -> &Arc<Region> {
        &self.region
    }

    /// The start of a slot.
    pub fn slot(&self, slot: usize) -> *mut u8 {
        assert!(slot < self.slots);
        self.region.as_ptr().wrapping_add(slot * self.slot_bytes)
    }

    /// Bytes of a slot that can be given back: its whole pages.
    pub fn returnable(&self, slot: usize) -> u64 {
        self.region.whole_pages(self.range(slot)).len() as u64
    }

    /// Gives the memory of a slot back to the operating system. Returns how many of its bytes were resident; `None`
    /// if the operating system refuses.
    ///
    /// # Safety
    /// Nobody may access the slot or start to do so.
    pub unsafe fn give_back(&self, slot: usize) -> Option<u64> {
        // SAFETY: promised by the caller.
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
        // SAFETY: the bytes are inside the slot, the operating system has initialised its memory, and the caller
        // promises that nobody writes to it.
        unsafe { std::slice::from_raw_parts(self.slot(slot), len) }
    }

    /// One part of the expert in a slot.
    ///
    /// # Safety
    /// The slot must hold an expert of this placement, and nobody may write to it while the slice lives.
    pub unsafe fn part(&self, slot: usize, extent: &Extent) -> &[u8] {
        let range = extent.place + extent.lead..extent.place + extent.lead + extent.part;
        assert!(range.end <= self.slot_bytes);
        // SAFETY: the range is inside the slot, the operating system has initialised its memory, and the caller
        // promises that nobody writes to it.
        unsafe { std::slice::from_raw_parts(self.slot(slot).add(range.start), range.len()) }
    }
}

/// Numbers the experts of all layers consecutively.
#[derive(Clone, Debug)]
pub struct Numbering {
    /// The number of each layer's first expert, and the number of all experts.
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

    /// The number of all experts.
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
