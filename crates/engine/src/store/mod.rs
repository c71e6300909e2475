//! The expert store: hands out the weights of experts, wherever they are.
//!
//! Only the MoE block asks it for anything. It [acquires](ExpertStore::acquire) the experts that the router
//! chose and computes with each batch of leases as it becomes ready; a lease keeps its expert in place until
//! it is dropped. All experts are resident at present, so the first batch holds everything.

mod io;
pub mod policy;
pub mod simulate;
pub mod trace;

use std::sync::Arc;

use forebay_kernels::{DType, MatRef};
use smallvec::SmallVec;

pub use io::{ByteSource, FileSource};

use crate::error::Result;
use crate::format::FileIdx;
use crate::memory::{ALIGNMENT, Region, SharedBytes};
use crate::{ExpertIdx, LayerIdx};

/// One stored matrix of an expert: what it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PartShape {
    /// The type of its weights.
    pub dtype: DType,
    /// Output features.
    pub rows: usize,
    /// Input features.
    pub cols: usize,
}

/// One stored matrix of an expert: where it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ByteRange {
    /// The file.
    pub file: FileIdx,
    /// The first byte.
    pub offset: u64,
    /// The number of bytes.
    pub len: usize,
}

/// The matrices that make up an expert, in the order of [`ExpertLayer::parts`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExpertPart {
    /// `W_g`
    Gate,
    /// `W_u`
    Up,
    /// `W_d`
    Down,
}

/// The routed experts of one layer: what they are made of and where their bytes are.
#[derive(Clone, Debug)]
pub struct ExpertLayer {
    /// Gate, up and down, alike for all experts of the layer.
    pub parts: [PartShape; 3],
    /// For each expert the place of each part.
    pub experts: Vec<[ByteRange; 3]>,
    /// How many of them a token uses.
    pub used: usize,
}

impl ExpertLayer {
    /// Bytes of one expert.
    pub fn expert_bytes(&self) -> u64 {
        self.experts.first().map_or(0, |ranges| ranges.iter().map(|r| r.len as u64).sum())
    }
}

impl ExpertLayer {
    /// Reads all experts into one region.
    fn load(&self, source: &dyn ByteSource, progress: &mut dyn FnMut(u64)) -> Result<Vec<Arc<Slot>>> {
        let stride = (self.expert_bytes() as usize).next_multiple_of(ALIGNMENT);
        let mut region = Region::new(stride * self.experts.len())?;
        let mut places = Vec::new();
        for (i, ranges) in self.experts.iter().enumerate() {
            let mut starts = [i * stride; 4];
            for (part, range) in ranges.iter().enumerate() {
                starts[part + 1] = starts[part] + range.len;
                let to = &mut region[starts[part]..starts[part + 1]];
                source.read_exact_at(range.file, range.offset, to)?;
            }
            progress(self.expert_bytes());
            places.push(starts);
        }
        let region = Arc::new(region);
        let part = |starts: &[usize; 4], part: usize| region.share(starts[part]..starts[part + 1]);
        let slot = |s: &[usize; 4]| Slot { parts: self.parts, bytes: [part(s, 0), part(s, 1), part(s, 2)] };
        Ok(places.iter().map(slot).map(Arc::new).collect())
    }
}

/// Holds experts and hands them out.
pub struct ExpertStore {
    /// By layer; a layer without routed experts has none.
    layers: Vec<Vec<Arc<Slot>>>,
}

impl ExpertStore {
    /// Reads all experts of all layers. `progress` is told of the bytes of each expert as it is read.
    ///
    /// # Errors
    /// If reading fails.
    pub fn load(
        layers: &[Option<ExpertLayer>],
        source: &dyn ByteSource,
        progress: &mut dyn FnMut(u64),
    ) -> Result<ExpertStore> {
        let load = |layer: &Option<ExpertLayer>| match layer {
            Some(layer) => layer.load(source, progress),
            None => Ok(Vec::new()),
        };
        Ok(ExpertStore { layers: layers.iter().map(load).collect::<Result<_>>()? })
    }

    /// Asks for experts of a layer. Reading what is missing starts at once.
    pub fn acquire(&self, layer: LayerIdx, experts: &[ExpertIdx]) -> Acquisition {
        let slots = &self.layers[layer.0];
        let lease = |&expert: &ExpertIdx| Lease { expert, slot: Arc::clone(&slots[expert.0 as usize]) };
        Acquisition { ready: experts.iter().map(lease).collect() }
    }
}

/// Some leases. One token's fit without an allocation.
pub type Leases = SmallVec<[Lease; 16]>;

/// Experts that were asked for and not yet taken.
pub struct Acquisition {
    ready: Leases,
}

impl Acquisition {
    /// The experts that have become available since the last call, at least one; waits if there is none
    /// yet. `None` when all have been handed out.
    ///
    /// The order in which experts come is not fixed: a result must not depend on it.
    ///
    /// # Errors
    /// If reading one of them failed.
    pub fn next_ready(&mut self) -> Result<Option<Leases>> {
        let ready = std::mem::take(&mut self.ready);
        Ok((!ready.is_empty()).then_some(ready))
    }
}

/// An expert that stays in place while the lease lives.
pub struct Lease {
    expert: ExpertIdx,
    slot: Arc<Slot>,
}

impl Lease {
    /// Which expert of the layer it is.
    pub fn expert(&self) -> ExpertIdx {
        self.expert
    }

    /// One matrix of the expert.
    pub fn part(&self, part: ExpertPart) -> MatRef<'_> {
        let part = part as usize;
        let PartShape { dtype, rows, cols } = self.slot.parts[part];
        MatRef::new(dtype, rows, cols, &self.slot.bytes[part])
    }
}

/// The memory of one expert.
struct Slot {
    parts: [PartShape; 3],
    bytes: [SharedBytes; 3],
}
