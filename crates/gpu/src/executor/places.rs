//! Where experts are, for kernels: the buffers that have slots, called arenas, and a table of the experts in them.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use bytemuck::cast_slice;
use forebay_engine::internals::backend::Parts;
use forebay_engine::internals::experts::{ExpertLayer, MAX_RANGES, PartShape};
use forebay_engine::internals::memory::SharedBytes;
use forebay_engine::{Error, ExpertIdx, LayerIdx, Result};
use smallvec::SmallVec;

use crate::adopt::Adoption;
use crate::backend::GpuBackend;
use crate::device::{Gpu, Memory, Span};
use crate::recorder::Bound;
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
struct Place {
    arena: u32,
    starts: SmallVec<[u32; MAX_RANGES]>,
}

/// Where all experts are.
pub struct Places {
    gpu: Arc<Gpu>,
    /// The table, with a part for each layer.
    table: Memory,
    layers: Vec<Option<Layer>>,
    arenas: Vec<Span>,
    numbers: HashMap<wgpu::Buffer, u32>,
    /// The parts of the store's memory that are adopted together.
    parts: Vec<SharedBytes>,
    /// Those that were adopted here, because the store's own thread had not reached them.
    adopted: Vec<Adoption>,
}

impl Places {
    /// Nothing is known of any expert yet. `parts` is all memory that experts may be in.
    ///
    /// # Errors
    /// If a type of weights is not supported, or there is no memory.
    pub fn new(
        backend: &mut GpuBackend,
        layers: &[Option<ExpertLayer>],
        parts: Vec<SharedBytes>,
    ) -> Result<Places> {
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
        let (arenas, numbers, adopted) = (Vec::new(), HashMap::new(), Vec::new());
        Ok(Places { gpu, table, layers: of_layers, arenas, numbers, parts, adopted })
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

    /// Notes that an expert is in these bytes, with its ranges at these places. They are part of the store's memory,
    /// and stay as they are until everything that is submitted from now on has ended.
    ///
    /// # Errors
    /// If the GPU cannot use the memory.
    pub fn put(
        &mut self,
        layer: LayerIdx,
        expert: ExpertIdx,
        (bytes, starts): (&[u8], &[usize]),
    ) -> Result<()> {
        let place = self.place(bytes, starts)?;
        let first = expert.0 as usize * ENTRY;
        if self.layer_mut(layer).note(expert, &place) {
            let layer = self.layer(layer);
            self.send(layer.start + (first * 4) as u64, &layer.words[first..first + ENTRY]);
        }
        Ok(())
    }

    /// Notes where all experts of a layer are, unless that is known: `raw` says it. `arrivals` is another number if an
    /// expert has moved.
    ///
    /// # Errors
    /// If the GPU cannot use the memory.
    pub fn put_all<'a>(
        &mut self,
        layer: LayerIdx,
        arrivals: u64,
        raw: impl Fn(ExpertIdx) -> (&'a [u8], SmallVec<[usize; MAX_RANGES]>),
    ) -> Result<()> {
        if self.layer(layer).arrivals == Some(arrivals) {
            return Ok(());
        }
        let mut changed = false;
        for expert in (0..self.layer(layer).count as u32).map(ExpertIdx) {
            let (bytes, starts) = raw(expert);
            let place = self.place(bytes, &starts)?;
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
    fn send(&self, start: u64, words: &[u32]) {
        self.gpu.queue.write_buffer(&self.table.whole().buffer, start, cast_slice(words));
    }

    fn place(&mut self, bytes: &[u8], starts: &[usize]) -> Result<Place> {
        let span = self.find(bytes)?;
        let next = self.arenas.len() as u32;
        let arena = *self.numbers.entry(span.buffer.clone()).or_insert(next);
        if arena == next {
            let bytes = span.buffer.size();
            self.arenas.push(Span { buffer: span.buffer.clone(), start: 0, bytes });
        }
        let starts = starts.iter().map(|&start| u32::try_from(span.start + start as u64));
        let starts = starts.collect::<std::result::Result<_, _>>().expect("arenas are small enough");
        Ok(Place { arena, starts })
    }

    /// The adopted buffer that has these bytes.
    fn find(&mut self, bytes: &[u8]) -> Result<Span> {
        if let Some(span) = self.gpu.adopted.find(bytes) {
            return Ok(span);
        }
        let contains = |part: &&SharedBytes| {
            let (part, bytes) = (part.as_ptr_range(), bytes.as_ptr_range());
            part.start <= bytes.start && bytes.end <= part.end
        };
        let part = self.parts.iter().find(contains).expect("it is the store's memory");
        self.adopted.push(self.gpu.adopt(part.clone())?);
        self.gpu.adopted.find(bytes).ok_or_else(|| {
            let message = format!("{} cannot find an expert that it has adopted", self.gpu.name());
            Error::Backend(message)
        })
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
        let some = &self.arenas[first..self.arenas.len().min(first + window)];
        match self.gpu.variants.arrays {
            true => vec![Bound::Array(some.to_vec())],
            false => (0..window).map(|i| some.get(i).cloned().into()).collect(),
        }
    }
}

impl Layer {
    /// Notes where an expert is. Returns whether that is new.
    fn note(&mut self, expert: ExpertIdx, place: &Place) -> bool {
        let words = &mut self.words[expert.0 as usize * ENTRY..][..ENTRY];
        let mut new = [0; ENTRY];
        new[0] = place.arena;
        new[1..=place.starts.len()].copy_from_slice(&place.starts);
        let changed = *words != new;
        words.copy_from_slice(&new);
        changed
    }
}
