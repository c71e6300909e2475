//! Experts that come to the device while others are computed.

use std::hint::spin_loop;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use forebay_engine::backend::{ExpertBuffers, Experts, Outputs, Routing};
use forebay_engine::experts::{DeviceSlot, Lease, Leases};
use forebay_engine::{Error, ExpertIdx, LayerIdx, Result};
use smallvec::SmallVec;

use super::CudaBackend;
use super::mixture::{Chosen, MOST_APART};
use crate::driver::{Address, Gpu, Line, Moment, Pinned};
use crate::program::{Args, Shape};

/// Experts that are brought together for a few rows: the first of them are computed while the last are on their way.
const FEW_TOGETHER: usize = 2;

/// Blocks that put a plane in order.
const ARRANGING: usize = 32;

/// Numbers of a layer that are noted: rows that were told, of a few tokens.
const NOTED: usize = 2048;

/// Looks for what is to be told between two questions to the driver whether that ever comes.
const LOOKS: usize = 2000;

/// Choices that are told to the host: by kernels, which write to the computer's memory by themselves.
pub struct Told {
    memory: Option<Pinned>,
    /// What stands before the rows of the last choice.
    turn: u32,
    /// When everything that was started with it has ended.
    end: Moment,
}

impl Told {
    pub fn new(gpu: &Arc<Gpu>) -> Result<Told> {
        Ok(Told { memory: None, turn: 0, end: Moment::new(gpu)? })
    }

    /// Where the choice of so many rows will be told, and what will stand before each row then.
    pub fn ask(&mut self, gpu: &Arc<Gpu>, rows: usize, top_k: usize) -> Result<(Address, u32)> {
        let bytes = rows * row_words(top_k) * 4;
        if self.memory.as_ref().is_none_or(|memory| memory.len() < bytes) {
            self.memory = Some(Pinned::new(gpu, bytes.next_power_of_two())?);
        }
        // Nothing that was there before looks like an answer.
        let memory = self.memory.as_ref().expect("it was just made");
        self.turn = self.turn.wrapping_add(1).max(1);
        for row in 0..rows {
            memory.number(row * row_words(top_k)).store(0, Ordering::Relaxed);
        }
        Ok((memory.address(), self.turn))
    }

    /// The kernel that tells it has been started.
    pub fn started(&self) -> Result<()> {
        self.end.set(Line::Compute)
    }

    /// Waits until it was told, and says what.
    pub fn hear(&self, chosen: &Chosen, routing: &mut Routing) -> Result<()> {
        let (rows, top_k) = (chosen.rows(), chosen.top_k());
        let memory = self.memory.as_ref().expect("it was asked");
        let is_told = |row: usize| memory.number(row * row_words(top_k)).load(Ordering::Acquire) == self.turn;
        let mut row = 0;
        let mut ended = false;
        while row < rows {
            if (0..LOOKS).any(|_| {
                is_told(row) || {
                    spin_loop();
                    false
                }
            }) {
                row += 1;
            } else if ended {
                return Err(Error::Backend("the GPU cannot compute: a router has not chosen".into()));
            } else {
                ended = self.end.has_passed()?;
            }
        }
        let (experts, weights) = routing.prepare(rows, top_k);
        for row in 0..rows {
            let number = |i: usize| memory.number(row * row_words(top_k) + 1 + i).load(Ordering::Relaxed);
            for rank in 0..top_k {
                experts[row * top_k + rank] = number(rank);
                weights[row * top_k + rank] = f32::from_bits(number(top_k + rank));
            }
        }
        routing.sort(chosen.experts());
        Ok(())
    }
}

/// Numbers that are told of a row: whether it was, experts and weights.
fn row_words(top_k: usize) -> usize {
    1 + 2 * top_k
}

/// What routers chose, of layers that are on the device as a whole: told after the batch.
#[derive(Default)]
pub struct Notes {
    /// `[layers, NOTED]`
    memory: Option<Pinned>,
    /// The layers, and rows and experts of each.
    layers: Vec<(LayerIdx, usize, usize)>,
}

impl Notes {
    /// Those of a batch that failed are nobody's.
    pub fn forget(&mut self) {
        self.layers.clear();
    }
}

impl CudaBackend {
    /// As [`Backend::demand`](forebay_engine::backend::Backend::demand).
    pub(super) fn send_demanded(&mut self, leases: Leases) -> Result<()> {
        let slots = self.slots.as_mut().expect("slots were made");
        slots.keep_sent(&leases);
        slots.send(leases)
    }

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
        let table = experts.map(|experts| self.table_of(experts.layer, &there)).transpose()?;
        // Nor do the lists.
        self.recorder.send_facts()?;
        self.slots.as_ref().expect("slots were made").await_copies()?;
        self.recorder.waits_for_copies();
        self.record(kernels.arrange, shape, args)?;
        if let (Some(experts), Some(table)) = (experts, table) {
            let chosen = self.chosen.expect("experts were chosen");
            self.compute(experts, &chosen, table)?;
        }
        self.recorder.submit_once()?;
        self.slots.as_mut().expect("slots were made").arranged()
    }

    /// Computes experts that are in their slots.
    pub(super) fn compute_there(
        &mut self,
        experts: &Experts,
        there: &[(ExpertIdx, DeviceSlot)],
    ) -> Result<()> {
        let table = self.table_of(experts.layer, there)?;
        let chosen = self.chosen.expect("experts were chosen");
        self.compute(experts, &chosen, table)?;
        // They are computed while others come.
        self.recorder.submit_once()
    }

    /// Puts what experts gave elsewhere to what they gave here.
    pub(super) fn scatter(&mut self, buffers: ExpertBuffers, outputs: &Outputs) -> Result<()> {
        let kernels = self.kernels()?;
        let width = buffers.x.width();
        let args =
            Args::new().at(self.recorder.facts(&outputs.values)?).at(self.recorder.facts(&outputs.pairs)?);
        let args = args.at(self.at(buffers.out)).int(width);
        let shape = Shape::new([width.div_ceil(256), outputs.pairs.len(), 1], 256);
        self.record(kernels.put_rows, shape, args)
    }

    /// A table of a layer's experts that has only these, so that nothing is computed of the others.
    fn table_of(&mut self, layer: LayerIdx, there: &[(ExpertIdx, DeviceSlot)]) -> Result<Address> {
        let slots = self.slots.as_ref().expect("slots were made");
        let count = slots.layers[layer.0].as_ref().expect("it has experts").count;
        let mut table: SmallVec<[Address; 256]> = SmallVec::from_elem(0, count);
        for &(expert, place) in there {
            table[expert.0 as usize] = slots.address(place);
        }
        self.recorder.facts(&table)
    }

    /// Where the choices of a layer are told, to be looked at after the batch.
    pub(super) fn note(&mut self, layer: LayerIdx, top_k: usize) -> Result<Address> {
        let words = self.rows * row_words(top_k);
        assert!(words <= NOTED, "{words} numbers of a layer are noted");
        let layers = self.slots.as_ref().expect("slots were made").layers.len();
        let memory = match &mut self.notes.memory {
            Some(memory) => memory,
            none => none.insert(Pinned::new(&self.gpu, layers * NOTED * 4)?),
        };
        self.notes.layers.push((layer, self.rows, top_k));
        Ok(memory.address() + (layer.0 * NOTED * 4) as u64)
    }

    /// As [`Backend::tell`](forebay_engine::backend::Backend::tell).
    pub(super) fn tell_notes(&mut self, listener: &mut dyn FnMut(LayerIdx, &[u32])) -> Result<()> {
        let noted = std::mem::take(&mut self.notes.layers);
        let Some(memory) = self.notes.memory.as_ref().filter(|_| !noted.is_empty()) else { return Ok(()) };
        self.gpu.wait()?;
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
