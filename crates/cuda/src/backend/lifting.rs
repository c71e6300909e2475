//! Experts that come to the device while others are computed.

use std::sync::Arc;

use forebay_engine::backend::Experts;
use forebay_engine::store::{DeviceSlot, Lease, Leases};
use forebay_engine::{ExpertIdx, LayerIdx, Result};
use smallvec::SmallVec;

use super::CudaBackend;
use super::mixture::MOST_APART;
use crate::driver::{Address, Gpu, Memory, Pinned};
use crate::program::{Args, Shape};

/// Experts that are brought together for a few rows: the first of them are computed while the last are on their way.
const FEW_TOGETHER: usize = 2;

/// Blocks that put a plane in order.
const ARRANGING: usize = 32;

/// The most pairs of a layer that are noted.
const NOTED_PAIRS: usize = 1024;

/// What routers chose, of layers that are on the device as a whole: told after the batch.
#[derive(Default)]
pub struct Notes {
    memory: Option<Memory>,
    layers: Vec<(LayerIdx, usize)>,
}

/// Where the host reads what was chosen: memory that the GPU writes to by itself.
#[derive(Default)]
pub struct Told(Option<Pinned>);

impl Told {
    /// So many bytes, which hold anything.
    pub fn bytes_for(&mut self, gpu: &Arc<Gpu>, bytes: usize) -> Result<&mut [u8]> {
        if self.0.as_ref().is_none_or(|pinned| pinned.len() < bytes) {
            self.0 = Some(Pinned::new(gpu, bytes.next_power_of_two())?);
        }
        Ok(&mut self.0.as_mut().expect("it was just made").bytes()[..bytes])
    }
}

impl Notes {
    /// Those of a batch that failed are nobody's.
    pub fn forget(&mut self) {
        self.layers.clear();
    }
}

impl CudaBackend {
    /// Brings experts to their slots, and computes with them, if that is wanted.
    pub(super) fn bring(&mut self, mut leases: Leases, experts: Option<&Experts>) -> Result<()> {
        let slots = self.slots.as_ref().expect("slots were made");
        let together = match experts {
            Some(_) if self.rows <= MOST_APART => FEW_TOGETHER.min(slots.together()),
            _ => slots.together(),
        };
        while !leases.is_empty() {
            let some: Leases = leases.drain(..together.min(leases.len())).collect();
            self.bring_some(some, experts)?;
        }
        Ok(())
    }

    fn bring_some(&mut self, leases: Leases, experts: Option<&Experts>) -> Result<()> {
        let kernels = self.kernels()?;
        // What was recorded before need not wait for copies.
        self.flush()?;
        self.recorder.submit_once()?;
        let place = |lease: &Lease| Some((lease.expert(), lease.place()?));
        let there: SmallVec<[(ExpertIdx, DeviceSlot); 16]> = leases.iter().filter_map(place).collect();
        let slots = self.slots.as_mut().expect("slots were made");
        let (planes, arrivals) = slots.bring(leases)?;
        let args = Args::new().at(self.recorder.facts(planes)?).at(self.recorder.facts(arrivals)?);
        let shape = Shape::new([ARRANGING, planes.len(), 1], 256);
        let args = args.at(slots.whole_table()).int(there.len());
        self.record(kernels.arrange, shape, args)?;
        if let Some(experts) = experts {
            self.compute_some(experts, &there)?;
        }
        self.recorder.submit_once()?;
        self.slots.as_ref().expect("slots were made").arranged()
    }

    /// Computes experts that are in their slots, or will be when it comes to that.
    pub(super) fn compute_some(
        &mut self,
        experts: &Experts,
        there: &[(ExpertIdx, DeviceSlot)],
    ) -> Result<()> {
        let slots = self.slots.as_ref().expect("slots were made");
        let count = slots.layers[experts.layer.0].as_ref().expect("it has experts").count;
        // The others have none in this table, so that nothing is computed of them.
        let mut table: SmallVec<[Address; 256]> = SmallVec::from_elem(0, count);
        for &(expert, place) in there {
            table[expert.0 as usize] = slots.address(place);
        }
        let table = self.recorder.facts(&table)?;
        let chosen = self.chosen.expect("experts were chosen");
        self.compute(experts, &chosen, table)
    }

    /// Where the choices of a layer go, so many, to be told after the batch.
    pub(super) fn note(&mut self, layer: LayerIdx, pairs: usize) -> Result<Address> {
        assert!(pairs <= NOTED_PAIRS, "the choices of {pairs} pairs are noted");
        let layers = self.slots.as_ref().expect("slots were made").layers.len();
        let memory = match &mut self.notes.memory {
            Some(memory) => memory,
            none => none.insert(self.gpu.allocate(layers * NOTED_PAIRS * 4, "notes of choices")?),
        };
        self.notes.layers.push((layer, pairs));
        Ok(memory.address() + (layer.0 * NOTED_PAIRS * 4) as u64)
    }

    /// As [`Backend::tell`](forebay_engine::backend::Backend::tell).
    pub(super) fn tell_notes(&mut self, listener: &mut dyn FnMut(LayerIdx, &[u32])) -> Result<()> {
        let noted = std::mem::take(&mut self.notes.layers);
        let Some(memory) = self.notes.memory.as_ref().filter(|_| !noted.is_empty()) else { return Ok(()) };
        let mut all = vec![0u32; memory.bytes() / 4];
        self.gpu.read(memory.address(), bytemuck::cast_slice_mut(&mut all))?;
        for (layer, pairs) in noted {
            listener(layer, &all[layer.0 * NOTED_PAIRS..][..pairs]);
        }
        Ok(())
    }
}
