//! Where experts are, for kernels: the buffers that have slots, called arenas, and a table of the experts in them.

use std::collections::BTreeSet;
use std::sync::Arc;

use bytemuck::cast_slice;
use forebay_engine::internals::backend::Parts;
use forebay_engine::internals::experts::{ExpertLayer, MAX_RANGES, PartShape};
use forebay_engine::{ExpertIdx, LayerIdx, Result};
use smallvec::SmallVec;

use crate::backend::GpuBackend;
use crate::device::{Gpu, Memory, Span};
use crate::recorder::{Bound, Spans};
use crate::weights::{Descriptor, Source, WeightKind};

/// Words of an expert in the table: its arena, and where each of its ranges starts.
pub const ENTRY: usize = 1 + MAX_RANGES;

/// The arena of an expert that is nowhere.
const NOWHERE: u32 = u32::MAX;

/// A matrix of each expert of a layer.
#[derive(Clone, Copy)]
pub struct Part {
    /// Its number for kernels.
    pub matrix: usize,
    pub source: Source,
    /// The numbers of the ranges that hold its planes, a byte for each.
    pub ranges: usize,
    pub rows: usize,
    pub cols: usize,
}

impl Part {
    fn new(backend: &mut GpuBackend, layer: &ExpertLayer, shape: &PartShape) -> Result<Part> {
        let descriptor = Descriptor::of_part(shape)?;
        let first = shape.planes[0].expect("every matrix has codes");
        let aligned = descriptor.steps_are_aligned()
            && layer.experts.iter().all(|ranges| ranges[first].offset.is_multiple_of(4));
        let ranges = shape.planes.iter().rev().fold(0, |sum, plane| sum << 8 | plane.unwrap_or(0));
        let kind = WeightKind::named(shape.encoding)?;
        let source = Source { kind, aligned, experts: true };
        let matrix = backend.describe(descriptor);
        Ok(Part { matrix, source, ranges, rows: shape.rows, cols: shape.cols })
    }

    fn of_block(
        backend: &mut GpuBackend,
        layer: &ExpertLayer,
        parts: &Parts<PartShape>,
    ) -> Result<Parts<Part>> {
        let gate = parts.gate.as_ref().map(|gate| Part::new(backend, layer, gate)).transpose()?;
        let up = Part::new(backend, layer, &parts.up)?;
        Ok(Parts { gate, up, down: Part::new(backend, layer, &parts.down)? })
    }
}

/// The experts of a layer.
pub struct Layer {
    /// The matrices of an expert's block, and those of its adjugate expert.
    pub parts: Parts<Part>,
    pub adjugate: Option<Parts<Part>>,
    pub count: usize,
    /// Its part of the table.
    words: Vec<u32>,
    /// Where that begins, in bytes.
    start: u64,
    /// How often an expert had arrived when the whole table was written.
    arrivals: Option<u64>,
}

impl Layer {
    fn new(backend: &mut GpuBackend, layer: &ExpertLayer, start: u64) -> Result<Layer> {
        let parts = Part::of_block(backend, layer, &layer.parts)?;
        let adjugate =
            layer.adjugate.as_ref().map(|parts| Part::of_block(backend, layer, parts)).transpose()?;
        let count = layer.experts.len();
        let words = [NOWHERE].repeat(count * ENTRY);
        Ok(Layer { parts, adjugate, count, words, start, arrivals: None })
    }
}

/// Where an expert is: an arena, and the first byte of each range.
pub struct Place {
    pub arena: usize,
    pub starts: SmallVec<[u32; MAX_RANGES]>,
}

/// Where all experts are.
pub struct Places {
    gpu: Arc<Gpu>,
    /// The table, with a part for each layer.
    table: Memory,
    layers: Vec<Option<Layer>>,
    /// `None` for one whose memory is lent.
    arenas: Vec<Option<Span>>,
    /// The arenas of each window, as kernels' buffers.
    arrays: Vec<Arc<Spans>>,
}

impl Places {
    /// Nothing is known of any expert yet.
    ///
    /// # Errors
    /// If a type of weights is not supported, or there is no memory.
    pub fn new(backend: &mut GpuBackend, layers: &[Option<ExpertLayer>]) -> Result<Places> {
        let gpu = Arc::clone(&backend.gpu);
        let alignment = u64::from(gpu.limits.min_storage_buffer_offset_alignment);
        let mut end = 0u64;
        let mut of_layers = Vec::with_capacity(layers.len());
        for layer in layers {
            let start = end.next_multiple_of(alignment);
            end = start + layer.as_ref().map_or(0, |layer| (layer.experts.len() * ENTRY * 4) as u64);
            let layer = layer.as_ref().map(|layer| Layer::new(backend, layer, start));
            of_layers.push(layer.transpose()?);
        }
        let table = gpu.allocate(end, "expert table")?;
        Ok(Places { gpu, table, layers: of_layers, arenas: Vec::new(), arrays: Vec::new() })
    }

    /// What is known of a layer.
    pub fn layer(&self, layer: LayerIdx) -> &Layer {
        self.layers[layer.0].as_ref().expect("it has experts")
    }

    fn layer_mut(&mut self, layer: LayerIdx) -> &mut Layer {
        self.layers[layer.0].as_mut().expect("it has experts")
    }

    /// A layer's part of the table.
    pub fn table(&self, layer: LayerIdx) -> Span {
        let layer = self.layer(layer);
        self.table.whole().part(layer.start, layer.words.len() as u64 * 4)
    }

    /// Adds an arena. Returns its number.
    pub fn add_arena(&mut self, arena: Span) -> usize {
        self.arenas.push(None);
        self.set_arena(self.arenas.len() - 1, Some(arena));
        self.arenas.len() - 1
    }

    /// Changes an arena's memory. No expert is in it.
    pub fn set_arena(&mut self, number: usize, arena: Option<Span>) {
        self.arenas[number] = arena;
        let array = |some: &[Option<Span>]| Spans::new(some.to_vec());
        self.arrays = self.arenas.chunks(self.gpu.window()).map(array).collect();
    }

    /// Notes where an expert is. Returns the bytes to write to the table, and their place there, unless they are known.
    pub fn put(&mut self, layer: LayerIdx, expert: ExpertIdx, place: &Place) -> Option<(Span, &[u32])> {
        let table = self.table.whole();
        let layer = self.layer_mut(layer);
        let first = expert.0 as usize * ENTRY;
        let there = table.part(layer.start + (first * 4) as u64, (ENTRY * 4) as u64);
        layer.note(expert, place).then(|| (there, &layer.words[first..first + ENTRY]))
    }

    /// Notes where all experts of a layer are, unless that is known: `place` says it. `arrivals` is another number if an
    /// expert has moved.
    ///
    /// # Errors
    /// Those of `place`.
    pub fn put_all(
        &mut self,
        layer: LayerIdx,
        arrivals: u64,
        mut place: impl FnMut(&mut Places, ExpertIdx) -> Result<Place>,
    ) -> Result<()> {
        if self.layer(layer).arrivals == Some(arrivals) {
            return Ok(());
        }
        let mut changed = false;
        for expert in (0..self.layer(layer).count as u32).map(ExpertIdx) {
            let place = place(self, expert)?;
            changed |= self.layer_mut(layer).note(expert, &place);
        }
        self.layer_mut(layer).arrivals = Some(arrivals);
        if changed {
            let layer = self.layer(layer);
            self.send(layer.start, &layer.words);
        }
        Ok(())
    }

    /// Writes to the table, before what is submitted next.
    pub fn send(&self, start: u64, words: &[u32]) {
        self.gpu.queue.write_buffer(&self.table.whole().buffer, start, cast_slice(words));
    }

    /// The windows of arenas that have these experts of a layer: the number of the first arena of each.
    pub fn windows(&self, layer: LayerIdx, experts: impl Iterator<Item = ExpertIdx>) -> SmallVec<[usize; 4]> {
        let window = self.gpu.window();
        let words = &self.layer(layer).words;
        let arenas = experts.map(|expert| words[expert.0 as usize * ENTRY]).filter(|&arena| arena != NOWHERE);
        let firsts: BTreeSet<usize> = arenas.map(|arena| arena as usize / window * window).collect();
        firsts.into_iter().collect()
    }

    /// The arenas of a window, as a kernel's buffers.
    pub fn bound(&self, first: usize) -> Vec<Bound> {
        let window = self.gpu.window();
        let some = &self.arrays[first / window];
        match self.gpu.variants.arrays {
            true => vec![Bound::Array(Arc::clone(some))],
            false => (0..window).map(|i| some.nth(i).cloned().into()).collect(),
        }
    }
}

impl Layer {
    /// Notes where an expert is. Returns whether that is new.
    fn note(&mut self, expert: ExpertIdx, place: &Place) -> bool {
        let words = &mut self.words[expert.0 as usize * ENTRY..][..ENTRY];
        let mut new = [0; ENTRY];
        new[0] = place.arena as u32;
        new[1..=place.starts.len()].copy_from_slice(&place.starts);
        let changed = *words != new;
        words.copy_from_slice(&new);
        changed
    }
}
