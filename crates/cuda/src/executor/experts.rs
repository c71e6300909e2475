//! Uploads experts while others are computed.

use std::sync::atomic::Ordering;

use forebay_engine::internals::backend::{Backend, Experts, RouterWeights, Routing};
use forebay_engine::internals::experts::{
    DevicePart, DeviceSlot, DeviceSlots, Lease, Leases, Mixture, Outputs,
};
use forebay_engine::{ExpertIdx, LayerIdx, Result};
use smallvec::SmallVec;

use super::slots::ExpertSlots;
use crate::backend::choice::{Chosen, MOST_APART, ReportedChoice, row_words};
use crate::backend::products::Halves;
use crate::backend::{CudaBackend, Scratch};
use crate::driver::{Address, Pinned};
use crate::program::{Args, Shape};

/// Experts that are uploaded together for a few rows: the first are computed while the last are uploaded.
const FEW_TOGETHER: usize = 2;

/// Blocks that rearrange a plane.
const ARRANGING: usize = 32;

/// The most numbers that are recorded per layer: the choices of a few tokens.
const NOTED: usize = 2048;

/// The routers' choices in layers that are completely on the device, reported after the batch.
#[derive(Default)]
pub struct Notes {
    /// `[layers, NOTED]`
    memory: Option<Pinned>,
    /// The layers, with rows and experts per row.
    layers: Vec<(LayerIdx, usize, usize)>,
}

impl Notes {
    /// Drops the choices of a failed batch.
    pub fn forget(&mut self) {
        self.layers.clear();
    }
}

/// A model's experts on a GPU: the slots that hold them, and the backend that computes with them.
pub struct GpuExperts {
    /// Dropped first, because it waits for all started work.
    pub backend: CudaBackend,
    pub slots: ExpertSlots,
    /// The input of the current layer's experts as f16, once converted.
    pub(super) halves: Option<Halves>,
    reported_prediction: ReportedChoice,
    notes: Notes,
}

impl GpuExperts {
    /// No expert is in the slots yet.
    ///
    /// # Errors
    /// If the driver reports an error.
    pub fn new(backend: CudaBackend, slots: ExpertSlots) -> Result<GpuExperts> {
        let reported_prediction = ReportedChoice::new(&backend.gpu)?;
        Ok(GpuExperts { backend, slots, halves: None, reported_prediction, notes: Notes::default() })
    }

    /// Begins a batch.
    pub fn begin(&mut self, rows: usize) {
        self.notes.forget();
        self.backend.begin(rows);
    }

    /// Computes the logits of a mixture's router, unless they are ready.
    pub fn router_logits(&mut self, mixture: &Mixture<'_>) -> Result<()> {
        match mixture.ready {
            true => Ok(()),
            false => mixture.weights.logits(&mut self.backend, mixture.input, mixture.logits),
        }
    }

    /// Chooses experts by the router's logits, and reports the choice to the host.
    pub fn route(&mut self, mixture: &Mixture<'_>, routing: &mut Routing) -> Result<Chosen> {
        self.halves = None;
        self.backend.choose_and_tell(mixture.logits, mixture.router, &mixture.weights, routing)
    }

    /// Starts to predict the next layer's choice. This layer's choice stays valid.
    pub fn predict(&mut self, mixture: &Mixture<'_>, next: RouterWeights) -> Result<Chosen> {
        let Mixture { router, input, logits, .. } = *mixture;
        let backend = &mut self.backend;
        next.logits(backend, input, logits)?;
        let reported = self.reported_prediction.ask(&backend.gpu, backend.rows, router.top_k)?;
        backend.choose(logits, router, &next, Scratch::Predicted, Some(reported))
    }

    /// Waits for the [prediction](Self::predict).
    pub fn await_prediction(&mut self, predicted: &Chosen, routing: &mut Routing) -> Result<()> {
        self.backend.start_once()?;
        self.reported_prediction.started()?;
        self.reported_prediction.await_choice(predicted, routing)
    }

    /// Starts to upload experts that were chosen and are in RAM, before their slots are known. Drops experts that were
    /// uploaded early and not chosen.
    pub fn demand(&mut self, leases: Leases) -> Result<()> {
        self.slots.keep_early(&leases);
        self.slots.send(leases)
    }

    /// Uploads experts to their slots and, if `with` is given, computes with them.
    pub fn upload_and_compute(
        &mut self,
        mut leases: Leases,
        with: Option<(&Experts, &Chosen)>,
    ) -> Result<()> {
        let together = match with {
            Some(_) if self.backend.rows <= MOST_APART => FEW_TOGETHER.min(self.slots.together()),
            _ => self.slots.together(),
        };
        while !leases.is_empty() {
            let some: Leases = leases.drain(..together.min(leases.len())).collect();
            self.upload_some(some, with)?;
        }
        Ok(())
    }

    fn upload_some(&mut self, leases: Leases, with: Option<(&Experts, &Chosen)>) -> Result<()> {
        let GpuExperts { backend, slots, .. } = self;
        let kernels = backend.kernels()?;
        // Earlier work need not wait for uploads.
        backend.start_once()?;
        let slot = |lease: &Lease| Some((lease.expert(), lease.device_slot()?));
        let there: SmallVec<[(ExpertIdx, DeviceSlot); 16]> = leases.iter().filter_map(slot).collect();
        let (planes, arrivals) = slots.upload(leases)?;
        let args = Args::new().at(backend.recorder.params(planes)?).at(backend.recorder.params(arrivals)?);
        let shape = Shape::new([ARRANGING, planes.len(), 1], 256);
        let args = args.at(slots.whole_table()).int(there.len());
        let table = with.map(|(experts, _)| self.table_of(experts.layer, &there)).transpose()?;
        let GpuExperts { backend, slots, .. } = self;
        // Nor do parameters.
        backend.recorder.send_params()?;
        slots.await_copies()?;
        backend.recorder.waits_for_copies();
        backend.record(kernels.arrange, shape, args)?;
        if let (Some((experts, chosen)), Some(table)) = (with, table) {
            self.compute(experts, chosen, table)?;
        }
        self.backend.recorder.submit_once()?;
        self.slots.arranged()
    }

    /// Computes experts that are in their slots.
    pub fn compute_there(
        &mut self,
        experts: &Experts,
        chosen: &Chosen,
        there: &[(ExpertIdx, DeviceSlot)],
    ) -> Result<()> {
        let table = self.table_of(experts.layer, there)?;
        self.compute(experts, chosen, table)?;
        // They are computed while others are uploaded.
        self.backend.recorder.submit_once()
    }

    /// Adds results that were computed on the CPU to those of the GPU.
    pub fn put_outputs(&mut self, experts: &Experts, outputs: &Outputs) -> Result<()> {
        let backend = &mut self.backend;
        let kernels = backend.kernels()?;
        let width = experts.x.width();
        let recorder = &mut backend.recorder;
        let args = Args::new().at(recorder.params(&outputs.values)?).at(recorder.params(&outputs.pairs)?);
        let args = args.at(backend.at(experts.block.out)).int(width);
        let shape = Shape::new([width.div_ceil(256), outputs.pairs.len(), 1], 256);
        backend.record(kernels.put_rows, shape, args)
    }

    /// A table with only these of a layer's experts, so that no others are computed.
    fn table_of(&mut self, layer: LayerIdx, there: &[(ExpertIdx, DeviceSlot)]) -> Result<Address> {
        let GpuExperts { backend, slots, .. } = self;
        let count = slots.layer(layer).count;
        let mut table: SmallVec<[Address; 256]> = SmallVec::from_elem(0, count);
        for &(expert, place) in there {
            table[expert.0 as usize] = slots.address(place);
        }
        backend.recorder.params(&table)
    }

    /// Where a layer's choices are recorded until the end of the batch.
    pub(super) fn note(&mut self, layer: LayerIdx, top_k: usize) -> Result<Address> {
        let words = self.backend.rows * row_words(top_k);
        assert!(words <= NOTED, "{words} numbers of a layer are noted");
        let layers = self.slots.layers.len();
        let memory = match &mut self.notes.memory {
            Some(memory) => memory,
            none => none.insert(Pinned::new(&self.backend.gpu, layers * NOTED * 4)?),
        };
        self.notes.layers.push((layer, self.backend.rows, top_k));
        Ok(memory.address() + (layer.0 * NOTED * 4) as u64)
    }

    /// Reports the recorded choices of the last batch: the layer, and an expert for each row and rank.
    pub fn tell(&mut self, listener: &mut dyn FnMut(LayerIdx, &[u32])) -> Result<()> {
        let noted = std::mem::take(&mut self.notes.layers);
        let Some(memory) = self.notes.memory.as_ref().filter(|_| !noted.is_empty()) else { return Ok(()) };
        self.backend.gpu.wait()?;
        let mut chosen: SmallVec<[u32; 64]> = SmallVec::new();
        for (layer, rows, top_k) in noted {
            let first = |row: usize| layer.0 * NOTED + row * row_words(top_k) + 1;
            let experts = (0..rows).flat_map(|row| first(row)..first(row) + top_k);
            chosen.clear();
            chosen.extend(experts.map(|i| memory.number(i).load(Ordering::Relaxed)));
            listener(layer, &chosen);
        }
        Ok(())
    }
}

impl DeviceSlots for GpuExperts {
    fn upload(&mut self, leases: Leases) -> Result<()> {
        self.upload_and_compute(leases, None)
    }

    fn release_leases(&mut self, wait: bool) -> Result<bool> {
        self.slots.release_leases(wait)
    }

    fn lend(&mut self, part: DevicePart) -> Result<()> {
        self.slots.lend(part)
    }

    fn take_back(&mut self, part: DevicePart) -> Result<bool> {
        Ok(self.slots.take_back(part))
    }
}
