//! Implements the backend's operations by recording kernels.

mod best;
pub mod choice;
mod deferred;
pub mod products;
mod sequences;

use std::sync::Arc;

use bytemuck::{cast_slice, cast_slice_mut};
use forebay_engine::internals::backend::{
    Activation, Attention, Backend, Batch, Buf, BufShape, Convolution, DeltaRule, Gate, HeadMatrices, Heads,
    KvPages, LayerState, Matrix, Precision, Ranked, Recurrent, Rope, Router, RouterWeights, Routing, RowPart,
    StateShape, Vector, Weight,
};
use forebay_engine::{Result, TokenId};
use forebay_kernels::RopePairs;

use crate::device::{Gpu, Memory, Span};
use crate::heap::Heap;
use crate::recorder::{Args, Bound, Recorder};
use crate::shaders::{File, Name};
use crate::state::DevicePieces;
use crate::weights::{DenseMatrix, Descriptor};
use best::Candidates;
use choice::{Choices, Turn};
use deferred::{Deferred, Norm};

/// Batches of more rows are submitted before their results are read.
const FEW_ROWS: usize = 32;
use sequences::Sequences;
pub use sequences::attends;

/// The most workgroups in a row of a grid.
const ROW: usize = 65535;

/// Threads of most workgroups.
const THREADS: usize = 256;

/// The backend for a GPU.
pub struct GpuBackend {
    pub gpu: Arc<Gpu>,
    pub precision: Precision,
    pub recorder: Recorder,
    pub rows: usize,
    buffers: Vec<Memory>,
    matrices: Vec<DenseMatrix>,
    /// With their values, which the host needs for some operations.
    vectors: Vec<(Memory, Vec<f32>)>,
    /// What kernels know of matrices: first those of `matrices`, then those that were added.
    descriptors: Vec<Descriptor>,
    described: Option<Memory>,
    /// Deferred operations, in order.
    deferred: Vec<Deferred>,
    /// Buffers that the batch started from. Only these may be moved.
    entered: Vec<Buf>,
    /// The buffer that is in the spare memory.
    moved: Option<usize>,
    spare: Option<Memory>,
    /// Rows of activations as halves, and their scales.
    halves: Option<Memory>,
    choices: Choices,
    candidates: Candidates,
    sequences: Sequences,
}

impl GpuBackend {
    /// A backend with these buffers, numbered in order.
    ///
    /// # Errors
    /// If there is not enough memory.
    pub fn new(gpu: &Arc<Gpu>, precision: Precision, buffers: &[BufShape]) -> Result<GpuBackend> {
        let buffer = |shape: &BufShape| gpu.allocate((shape.rows * shape.width * 4) as u64, "buffers");
        Ok(GpuBackend {
            gpu: Arc::clone(gpu),
            precision,
            recorder: Recorder::new(gpu)?,
            rows: 0,
            buffers: buffers.iter().map(buffer).collect::<Result<_>>()?,
            matrices: Vec::new(),
            vectors: Vec::new(),
            descriptors: Vec::new(),
            described: None,
            deferred: Vec::new(),
            entered: Vec::new(),
            moved: None,
            spare: None,
            halves: None,
            choices: Choices::default(),
            candidates: Candidates::default(),
            sequences: Sequences::new(Heap::new(gpu)),
        })
    }

    /// Where a buffer is.
    pub fn at(&self, buf: Buf) -> Span {
        match &self.spare {
            Some(spare) if self.moved == Some(buf.index()) => spare.whole(),
            _ => self.buffers[buf.index()].whole(),
        }
    }

    /// Records a kernel, after the deferred operations.
    ///
    /// # Errors
    /// If a kernel cannot be compiled.
    pub fn record(&mut self, name: &Name, grid: [usize; 3], args: &Args, bound: &[Bound]) -> Result<()> {
        self.flush()?;
        self.recorder.record(name, grid, args, bound)
    }

    /// Where a vector is.
    pub fn vector(&self, w: Vector) -> Span {
        self.vectors[w.index()].0.whole()
    }

    /// Adds a matrix of experts. Returns its number for kernels.
    pub fn describe(&mut self, descriptor: Descriptor) -> usize {
        self.described = None;
        self.descriptors.push(descriptor);
        self.descriptors.len() - 1
    }

    /// All matrices, for kernels.
    ///
    /// # Errors
    /// If there is no memory.
    pub fn descriptors(&mut self) -> Result<Span> {
        if let Some(there) = &self.described {
            return Ok(there.whole());
        }
        let bytes: &[u8] = cast_slice(&self.descriptors);
        let there = self.gpu.allocate(bytes.len() as u64, "dense weights")?;
        self.gpu.queue.write_buffer(&there.whole().buffer, 0, bytes);
        Ok(self.described.insert(there).whole())
    }

    /// Records one of the kernels in rows.wgsl.
    fn on_rows(
        &mut self,
        entry: &'static str,
        grid: [usize; 3],
        args: &Args,
        [x, y, w]: [Bound; 3],
    ) -> Result<()> {
        self.record(&Name::new(File::Rows, entry), grid, args, &[x, y, w])
    }

    /// Records a kernel with a thread for each number of x's rows.
    fn each_number(&mut self, entry: &'static str, x: Buf, args: &RowArgs, y: Bound, w: Bound) -> Result<()> {
        let count = self.rows * x.width();
        let args = RowArgs { count, width: x.width(), ..*args };
        let x = self.at(x).into();
        self.on_rows(entry, grid_of(count.div_ceil(THREADS)), &args.args(), [x, y, w])
    }
}

/// The arguments of the kernels in rows.wgsl.
#[derive(Clone, Copy, Default)]
struct RowArgs {
    count: usize,
    width: usize,
    other: usize,
    first: usize,
    part: usize,
    at: usize,
    kind: usize,
    alpha: f32,
    limit: f32,
}

impl RowArgs {
    fn args(&self) -> Args {
        let args = Args::new().int(self.count).int(self.width).int(self.other).int(self.first).int(self.part);
        args.int(self.at).int(self.kind).float(self.alpha).float(self.limit)
    }
}

/// A grid of this many workgroups in rows.
fn grid_of(workgroups: usize) -> [usize; 3] {
    [workgroups.min(ROW), workgroups.div_ceil(ROW), 1]
}

/// The kernels' struct `Activation`.
pub fn activation_args(activation: Activation) -> (usize, f32, f32) {
    match activation {
        Activation::SwiGlu => (0, 0.0, 0.0),
        Activation::Clamped { alpha, limit } => (1, alpha, limit),
        Activation::ClippedBefore(limit) => (2, 0.0, limit),
        Activation::ClippedAfter(limit) => (3, 0.0, limit),
        Activation::GeGlu => (4, 0.0, 0.0),
        Activation::ReGlu => (5, 0.0, 0.0),
        Activation::ReluSquared => (6, 0.0, 0.0),
    }
}

impl Backend for GpuBackend {
    fn name(&self) -> String {
        self.gpu.name()
    }

    fn load(&mut self, weight: Weight) -> Result<()> {
        match weight {
            Weight::Matrix(matrix) => {
                let matrix = DenseMatrix::load(&self.gpu, &matrix)?;
                let number = self.describe(matrix.descriptor);
                assert_eq!(number, self.matrices.len(), "dense matrices come first");
                self.matrices.push(matrix);
            }
            Weight::Vector(values) => {
                let there = self.gpu.allocate(values.len() as u64 * 4, "dense weights")?;
                self.gpu.queue.write_buffer(&there.whole().buffer, 0, cast_slice(&values));
                self.vectors.push((there, values));
            }
        }
        self.gpu.check()
    }

    fn new_state(&self, shape: StateShape) -> Box<dyn LayerState> {
        let pieces = |bytes| DevicePieces::new(&self.sequences.heap, bytes);
        match shape {
            StateShape::Attention(shape) => {
                let kind = self.precision.kv_type();
                Box::new(KvPages::new(shape, kind, pieces(kind.page_bytes(&shape))))
            }
            StateShape::Recurrent(floats) => Box::new(Recurrent::new(pieces(floats * 4))),
        }
    }

    fn begin(&mut self, rows: usize) {
        self.recorder.begin();
        self.deferred.clear();
        self.entered.clear();
        self.rows = rows;
    }

    fn embed(&mut self, table: Matrix, tokens: &[TokenId], out: Buf) -> Result<()> {
        self.flush()?;
        self.enter(out);
        let ids: Vec<u32> = tokens.iter().map(|token| token.0).collect();
        let ids = self.recorder.params(&ids)?;
        let matrices = self.descriptors()?;
        let there = &self.matrices[table.index()];
        let name = Name::new(File::Embed, "embed").reading([there.source]);
        let mut bound: Vec<Bound> = there.spans.iter().cloned().map(Bound::from).collect();
        bound.extend([matrices.into(), ids.into(), self.at(out).into()]);
        let groups = (there.descriptor.cols as usize).div_ceil(32 * 64);
        let args = Args::new().int(table.index()).int(out.width());
        self.record(&name, [groups, tokens.len(), 1], &args, &bound)
    }

    fn rms_norm(&mut self, x: Buf, w: Vector, eps: f32, out: Buf) -> Result<()> {
        self.defer_norm(Norm { x, w, eps, out })
    }

    fn layer_norm(&mut self, x: Buf, w: Vector, eps: f32, out: Buf) -> Result<()> {
        let args = RowArgs { width: x.width(), alpha: eps, ..RowArgs::default() };
        let bound = [self.at(x).into(), self.at(out).into(), self.vector(w).into()];
        self.on_rows("layer_norm", [self.rows, 1, 1], &args.args(), bound)
    }

    fn matmul(&mut self, x: Buf, products: &[(Matrix, Buf)]) -> Result<()> {
        self.multiply(x, products)
    }

    fn head_products(&mut self, x: Buf, w: &HeadMatrices, out: Buf) -> Result<()> {
        self.multiply_heads(x, w, out)
    }

    fn rope_angles(&mut self, rope: &Rope, positions: &[u32], out: Buf) -> Result<()> {
        // GPUs have no precise sines of large angles.
        let half = rope.frequencies.len();
        let divisors = rope.divisors.map(|w| &self.vectors[w.index()].1);
        let mut angles = vec![0.0f32; positions.len() * 2 * half];
        for (row, &position) in angles.chunks_exact_mut(2 * half).zip(positions) {
            let (cosines, sines) = row.split_at_mut(half);
            for (i, &frequency) in rope.frequencies.iter().enumerate() {
                let frequency = divisors.map_or(frequency, |divisors| frequency / divisors[i]);
                // The product is rounded to f32, as in the models' training.
                let angle = f64::from(position as f32 * frequency);
                cosines[i] = angle.cos() as f32 * rope.scale;
                sines[i] = angle.sin() as f32 * rope.scale;
            }
        }
        assert_eq!(out.width(), 2 * half);
        let from = self.recorder.params(&angles)?;
        let to = self.at(out).part(0, from.bytes);
        self.flush()?;
        self.recorder.copy(&from, &to);
        Ok(())
    }

    fn rope(&mut self, x: Buf, head_dim: usize, pairs: RopePairs, angles: Buf) -> Result<()> {
        let half = angles.width() / 2;
        let kind = usize::from(pairs == RopePairs::Interleaved);
        let args =
            RowArgs { width: x.width(), other: half, part: head_dim, kind, ..RowArgs::default() }.args();
        let groups = (x.width() / head_dim * half).div_ceil(THREADS);
        let bound = [self.at(x).into(), self.at(angles).into(), Bound::None];
        self.on_rows("rope", [groups, self.rows, 1], &args, bound)
    }

    fn norm_and_rotate(&mut self, buffers: [(Buf, Option<Vector>); 2], heads: &Heads) -> Result<()> {
        self.prepare_heads(buffers, heads)
    }

    fn attention(&mut self, attention: &Attention, batch: &mut Batch<'_>) -> Result<()> {
        self.attend(attention, batch)
    }

    fn delta_rule(&mut self, rule: &DeltaRule, batch: &mut Batch<'_>) -> Result<()> {
        self.recur(rule, batch)
    }

    fn convolve(&mut self, convolution: &Convolution, batch: &mut Batch<'_>) -> Result<()> {
        self.convolve_rows(convolution, batch)
    }

    fn ungroup(&mut self, x: Buf, groups: usize, parts: &[RowPart]) -> Result<()> {
        let mut first = 0;
        for part in parts {
            let count = groups * part.width;
            let args = RowArgs {
                count,
                width: x.width(),
                other: part.to.width(),
                first,
                part: part.width,
                at: part.at,
                kind: x.width() / groups,
                ..RowArgs::default()
            };
            let bound = [self.at(x).into(), self.at(part.to).into(), Bound::None];
            self.on_rows("ungroup", [count.div_ceil(THREADS), self.rows, 1], &args.args(), bound)?;
            first += part.width;
        }
        Ok(())
    }

    fn route(
        &mut self,
        logits: Buf,
        router: &Router,
        weights: &RouterWeights,
        routing: &mut Routing,
    ) -> Result<()> {
        let chosen = self.choose(logits, router, weights, Turn::Now)?;
        self.read_choices([(&chosen, routing)])
    }

    fn weigh_by_best(&mut self, x: Buf, logits: Buf, out: Buf) -> Result<()> {
        let args = RowArgs { width: x.width(), other: logits.width(), ..RowArgs::default() };
        let bound = [self.at(x).into(), self.at(out).into(), self.at(logits).into()];
        self.on_rows("weigh_by_best", [self.rows, 1, 1], &args.args(), bound)
    }

    fn add(&mut self, x: Buf, y: Buf) -> Result<()> {
        self.defer_add(x, y)
    }

    fn add_bias(&mut self, x: Buf, w: Vector) -> Result<()> {
        let w = self.vector(w).into();
        self.each_number("add_bias", x, &RowArgs::default(), Bound::None, w)
    }

    fn scale(&mut self, x: Buf, w: Vector) -> Result<()> {
        let args = RowArgs { other: self.vectors[w.index()].1.len(), ..RowArgs::default() };
        let w = self.vector(w).into();
        self.each_number("scale", x, &args, Bound::None, w)
    }

    fn activate(&mut self, x: Buf, up: Option<Buf>, activation: Activation) -> Result<()> {
        let (kind, alpha, limit) = activation_args(activation);
        let args = RowArgs { kind, alpha, limit, ..RowArgs::default() };
        // Without a gate, the second argument is not used.
        let up = self.at(up.unwrap_or(x)).into();
        self.each_number("activate_all", x, &args, up, Bound::None)
    }

    fn gate(&mut self, x: Buf, gate: Buf, function: Gate) -> Result<()> {
        assert!(x.width().is_multiple_of(gate.width()));
        let kind = match function {
            Gate::Sigmoid => 0,
            Gate::Softplus => 1,
            Gate::Factor => 2,
        };
        let args = RowArgs { kind, other: gate.width(), ..RowArgs::default() };
        let gate = self.at(gate).into();
        self.each_number("gate", x, &args, gate, Bound::None)
    }

    fn softcap(&mut self, x: Buf, cap: f32) -> Result<()> {
        let args = RowArgs { limit: cap, ..RowArgs::default() };
        self.each_number("softcap", x, &args, Bound::None, Bound::None)
    }

    fn pick(&mut self, x: Buf, rows: &[usize], out: Buf) -> Result<()> {
        let numbers: Vec<u32> = rows.iter().map(|&row| row as u32).collect();
        let numbers = self.recorder.params(&numbers)?;
        let args = RowArgs { width: x.width(), ..RowArgs::default() };
        let bound = [self.at(x).into(), self.at(out).into(), numbers.into()];
        self.on_rows("pick", [rows.len(), 1, 1], &args.args(), bound)?;
        self.rows = rows.len();
        Ok(())
    }

    fn submit(&mut self) -> Result<()> {
        self.flush()?;
        if self.rows > FEW_ROWS {
            return self.recorder.submit().map(drop);
        }
        // The results are read at once, and that submits everything together.
        self.recorder.close();
        Ok(())
    }

    fn write(&mut self, x: Buf, values: &[f32]) -> Result<()> {
        assert_eq!(values.len(), self.rows * x.width());
        self.flush()?;
        self.enter(x);
        let to = self.at(x);
        self.recorder.write(&to, cast_slice(values))
    }

    fn read(&mut self, x: Buf, out: &mut [f32]) -> Result<()> {
        assert_eq!(out.len(), self.rows * x.width());
        self.flush()?;
        let from = self.at(x).part(0, out.len() as u64 * 4);
        self.recorder.read(&from, cast_slice_mut(out))
    }

    fn read_row(&mut self, x: Buf, row: usize, out: &mut [f32]) -> Result<()> {
        assert!(out.len() == x.width() && row < self.rows);
        self.flush()?;
        let bytes = x.width() as u64 * 4;
        let from = self.at(x).part(row as u64 * bytes, bytes);
        self.recorder.read(&from, cast_slice_mut(out))
    }

    fn best(&mut self, logits: Buf, k: usize, out: &mut Vec<Ranked>) -> Result<()> {
        self.rank_rows(logits, k, out)
    }
}
