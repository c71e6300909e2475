//! Implements the backend's operations by recording GPU kernels.

mod best;
pub mod choice;
mod deferred;
pub mod products;
mod sequences;

use std::sync::Arc;

use bytemuck::{cast_slice, cast_slice_mut};
use forebay_engine::internals::backend::Batch;
use forebay_engine::internals::backend::{
    Activation, Attention, Backend, Buf, BufShape, Convolution, DeltaRule, Gate, HeadMatrices, Heads,
    KvPages, LayerState, Matrix, Precision, Ranked, Recurrent, Rope, Router, RouterWeights, Routing, RowPart,
    StateShape, Vector, Weight,
};
use forebay_engine::{Result, TokenId};
use forebay_kernels::RopePairs;

use crate::compile::{Compiled, Kernel, Kernels, cache_folder};
use crate::driver::{Address, Gpu, Memory, Stream};
use crate::program::{Args, Recorder, Shape};
use crate::state::DevicePieces;
use crate::weights::{DeviceMatrix, WeightKind};
use choice::ReportedChoice;
use deferred::{Deferred, Rotation};
use products::put_activation;
use sequences::RowParams;
pub use sequences::attends;

/// Threads that norm one row.
const NORM_THREADS: usize = 256;

/// The most floats that are written as step parameters, so that the program is not interrupted.
const MOST_RECORDED: usize = 16 << 10;

/// The number of counters of finished blocks.
const COUNTERS: usize = 16384;

/// The backend for a GPU.
pub struct CudaBackend {
    pub gpu: Arc<Gpu>,
    pub precision: Precision,
    /// Compiled when all weights are known, because their kinds determine the kernels.
    compiled: Option<Compiled>,
    kinds: u32,
    buffers: Vec<Memory>,
    matrices: Vec<DeviceMatrix>,
    vectors: Vec<(Memory, usize)>,
    reported: ReportedChoice,
    /// Scratch memory of operations, by purpose. Grows as needed.
    scratch: [Option<Memory>; SCRATCHES],
    pub recorder: Recorder,
    pub rows: usize,
    /// Whether the first layers of the current batch were started.
    started: bool,
    /// The current batch's rows, once they are among the step parameters, and the turn of those.
    row_params: Option<(u64, RowParams)>,
    /// Deferred operations, in order.
    deferred: Vec<Deferred>,
    /// Buffers that the current batch started from. Only these may be moved.
    entered: Vec<Buf>,
    /// The buffer that was moved to the spare address.
    moved: Option<usize>,
    /// Zeros that kernels count in and reset.
    counters: Memory,
}

/// The purposes of scratch memory.
#[derive(Clone, Copy)]
pub enum Scratch {
    /// Activations as f16.
    Halves,
    /// Their scales, by row.
    Scales,
    /// The same for the experts' input.
    ExpertHalves,
    ExpertScales,
    /// Partial results of attention.
    Partial,
    /// Experts of pairs, their weights, the places of pairs, the tokens of places, and tiles.
    Routing,
    /// The same for predicted choices.
    Predicted,
    /// The likeliest tokens.
    Best,
    /// Chunks of linear attention.
    Chunks,
    /// The spare address for a buffer.
    Spare,
}

const SCRATCHES: usize = 10;

impl CudaBackend {
    /// A backend with these buffers, numbered in order.
    ///
    /// # Errors
    /// If there is not enough memory.
    pub fn new(gpu: &Arc<Gpu>, precision: Precision, buffers: &[BufShape]) -> Result<CudaBackend> {
        let buffer = |shape: &BufShape| gpu.allocate(shape.rows * shape.width * 4, "buffers");
        let counters = gpu.allocate(COUNTERS * 4, "scratch")?;
        gpu.write(counters.address(), &[0; COUNTERS * 4])?;
        Ok(CudaBackend {
            gpu: gpu.clone(),
            precision,
            compiled: None,
            kinds: 0,
            buffers: buffers.iter().map(buffer).collect::<Result<_>>()?,
            matrices: Vec::new(),
            vectors: Vec::new(),
            reported: ReportedChoice::new(gpu)?,
            scratch: Default::default(),
            recorder: Recorder::new(gpu)?,
            rows: 0,
            started: false,
            row_params: None,
            deferred: Vec::new(),
            entered: Vec::new(),
            moved: None,
            counters,
        })
    }

    /// The kernels, compiled on first use.
    pub fn kernels(&mut self) -> Result<Kernels> {
        if self.compiled.is_none() {
            let compiled = Compiled::load(&self.gpu, cache_folder().as_deref(), self.kinds)?;
            self.recorder.fetch_by(compiled.kernels.fetch);
            self.compiled = Some(compiled);
        }
        Ok(self.compiled.as_ref().expect("it was just loaded").kernels)
    }

    pub fn at(&self, buf: Buf) -> Address {
        match &self.scratch[Scratch::Spare as usize] {
            Some(spare) if self.moved == Some(buf.index()) => spare.address(),
            _ => self.buffers[buf.index()].address(),
        }
    }

    fn vector(&self, w: Vector) -> Address {
        self.vectors[w.index()].0.address()
    }

    fn optional(&self, w: Option<Vector>) -> Address {
        w.map_or(0, |w| self.vector(w))
    }

    /// Scratch memory of at least this size.
    fn scratch(&mut self, purpose: Scratch, bytes: usize) -> Result<Address> {
        let there = &mut self.scratch[purpose as usize];
        if there.as_ref().is_none_or(|memory| memory.bytes() < bytes) {
            // Recorded operations use the old memory.
            self.recorder.submit()?;
            self.gpu.wait()?;
            *there = None;
            *there = Some(self.gpu.allocate(bytes.next_power_of_two(), "scratch")?);
        }
        Ok(there.as_ref().expect("it was just made").address())
    }

    /// Records a kernel, after the deferred operations.
    pub fn record(&mut self, kernel: Kernel, shape: Shape, args: Args) -> Result<()> {
        self.flush()?;
        self.recorder.record(kernel, shape, args);
        Ok(())
    }

    /// Records a kernel that touches only these buffers: before a deferred rotation that does not touch them, so that
    /// attention can still do it, and after all other deferred operations.
    fn record_beside(&mut self, touched: &[Buf], kernel: Kernel, shape: Shape, args: Args) -> Result<()> {
        if !self.leaves_rotation(touched) {
            self.flush()?;
        }
        self.recorder.record(kernel, shape, args);
        Ok(())
    }

    /// Starts everything recorded. The sequence will hardly be repeated.
    pub fn start_once(&mut self) -> Result<()> {
        self.flush()?;
        self.recorder.submit_once()
    }

    /// Records an element-wise operation on `x` and `y`, whose rows have `other` numbers. `more` adds arguments.
    fn pairwise(
        &mut self,
        kernel: Kernel,
        x: Buf,
        y: Address,
        other: usize,
        more: impl FnOnce(Args) -> Args,
    ) -> Result<()> {
        let count = self.rows * x.width();
        let args = Args::new().at(self.at(x)).at(y).long(count).int(x.width()).int(other);
        self.record(kernel, Shape::each(count), more(args))
    }

    /// Norms and rotates queries and keys.
    fn rotate(&mut self, rotation: &Rotation) -> Result<()> {
        let Rotation { q, k, q_norm, k_norm, ref heads } = *rotation;
        let kernels = self.kernels()?;
        let counts = [q, k].map(|buf| buf.width() / heads.dim);
        let args =
            Args::new().at(self.at(q)).at(self.at(k)).at(self.optional(q_norm)).at(self.optional(k_norm));
        let args = args.int(counts[0]).int(counts[1]).at(self.at(heads.angles)).int(heads.dim);
        let args =
            args.int(heads.angles.width() / 2).flag(heads.pairs == RopePairs::Interleaved).float(heads.eps);
        let blocks = (counts[0] + counts[1]).div_ceil(4);
        self.record(kernels.norm_and_rotate, Shape::new([blocks, self.rows, 1], 128), args)
    }

    /// The batch starts from this buffer, in its own memory, which has space for all rows.
    fn enter(&mut self, x: Buf) {
        self.moved = self.moved.filter(|&moved| moved != x.index());
        self.entered.push(x);
    }

    pub fn note_kind(&mut self, kind: WeightKind) {
        self.kinds |= 1 << kind as u32;
    }
}

impl Backend for CudaBackend {
    fn name(&self) -> String {
        let (major, minor) = self.gpu.capability;
        format!("{} (CUDA {major}.{minor})", self.gpu.name)
    }

    fn load(&mut self, weight: Weight) -> Result<()> {
        match weight {
            Weight::Matrix(matrix) => {
                let matrix = DeviceMatrix::dense(&self.gpu, &matrix)?;
                self.note_kind(matrix.kind);
                self.matrices.push(matrix);
            }
            Weight::Vector(values) => {
                let there = self.gpu.allocate(values.len() * 4, "dense weights")?;
                self.gpu.write(there.address(), cast_slice(&values))?;
                self.vectors.push((there, values.len()));
            }
        }
        Ok(())
    }

    fn new_state(&self, shape: StateShape) -> Box<dyn LayerState> {
        match shape {
            StateShape::Attention(shape) => {
                let kind = self.precision.kv_type();
                Box::new(KvPages::new(shape, kind, DevicePieces::new(&self.gpu, kind.page_bytes(&shape))))
            }
            StateShape::Recurrent(floats) => {
                Box::new(Recurrent::new(DevicePieces::new(&self.gpu, floats * 4)))
            }
        }
    }

    fn begin(&mut self, rows: usize) {
        // Operations of a failed batch are not computed.
        self.recorder.clear();
        self.deferred.clear();
        self.entered.clear();
        self.started = false;
        self.rows = rows;
    }

    fn embed(&mut self, table: Matrix, tokens: &[TokenId], out: Buf) -> Result<()> {
        let kernels = self.kernels()?;
        let ids: Vec<u32> = tokens.iter().map(|token| token.0).collect();
        let ids = self.recorder.params(&ids)?;
        self.enter(out);
        let table = &self.matrices[table.index()];
        let shape = Shape::new([table.cols.div_ceil(32).div_ceil(64), tokens.len(), 1], 64);
        let args = table.put(Args::new()).at(ids).at(self.at(out)).int(tokens.len());
        self.record(kernels.dequantise, shape, args)
    }

    fn rms_norm(&mut self, x: Buf, w: Vector, eps: f32, out: Buf) -> Result<()> {
        self.defer_norm(x, w, eps, out)
    }

    fn layer_norm(&mut self, x: Buf, w: Vector, eps: f32, out: Buf) -> Result<()> {
        let kernels = self.kernels()?;
        let args = Args::new().at(self.at(x)).at(self.vector(w)).at(self.at(out)).int(x.width()).float(eps);
        let threads = x.width().next_multiple_of(32).min(1024);
        self.record(kernels.layer_norm, Shape::new([self.rows, 1, 1], threads), args)
    }

    fn matmul(&mut self, x: Buf, products: &[(Matrix, Buf)]) -> Result<()> {
        self.multiply(x, products)
    }

    fn head_products(&mut self, x: Buf, w: &HeadMatrices, out: Buf) -> Result<()> {
        self.multiply_heads(x, w, out)
    }

    fn rope_angles(&mut self, rope: &Rope, positions: &[u32], out: Buf) -> Result<()> {
        let kernels = self.kernels()?;
        let frequencies = self.recorder.params(&rope.frequencies)?;
        let positions = self.recorder.params(positions)?;
        let half = rope.frequencies.len();
        let args = Args::new().at(frequencies).at(self.optional(rope.divisors)).at(positions);
        let args = args.at(self.at(out)).int(half).float(rope.scale);
        self.record(
            kernels.rope_angles,
            Shape::new([self.rows, 1, 1], half.next_multiple_of(32).min(256)),
            args,
        )
    }

    fn rope(&mut self, x: Buf, head_dim: usize, pairs: RopePairs, angles: Buf) -> Result<()> {
        let kernels = self.kernels()?;
        let half = angles.width() / 2;
        let each = x.width() / head_dim * half;
        let args = Args::new().at(self.at(x)).at(self.at(angles)).int(x.width()).int(head_dim).int(half);
        let args = args.flag(pairs == RopePairs::Interleaved);
        self.record(kernels.rope, Shape::new([each.div_ceil(128), self.rows, 1], 128), args)
    }

    fn norm_and_rotate(&mut self, buffers: [(Buf, Option<Vector>); 2], heads: &Heads) -> Result<()> {
        let by_head = |&(_, norm): &(Buf, Option<Vector>)| {
            norm.is_none_or(|w: Vector| self.vectors[w.index()].1 == heads.dim)
        };
        let [(q, q_norm), (k, k_norm)] = buffers;
        if !buffers.iter().all(by_head) {
            for (buf, norm) in buffers {
                if let Some(norm) = norm {
                    self.rms_norm(buf, norm, heads.eps, buf)?;
                }
                self.rope(buf, heads.dim, heads.pairs, heads.angles)?;
            }
            return Ok(());
        }
        self.defer_rotation(Rotation { q, k, q_norm, k_norm, heads: *heads })
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
        let kernels = self.kernels()?;
        let mut first = 0;
        for part in parts {
            let count = groups * part.width;
            let args = Args::new().at(self.at(x)).at(self.at(part.to)).int(x.width()).int(part.to.width());
            let args = args.int(x.width() / groups).int(first).int(part.width).int(part.at).int(count);
            self.record(kernels.ungroup, Shape::new([count.div_ceil(256), self.rows, 1], 256), args)?;
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
        self.choose_and_tell(logits, router, weights, routing).map(drop)
    }

    fn weigh_by_best(&mut self, x: Buf, logits: Buf, out: Buf) -> Result<()> {
        let kernels = self.kernels()?;
        let args = Args::new().at(self.at(x)).at(self.at(logits)).at(self.at(out));
        let args = args.int(x.width()).int(logits.width());
        self.record(kernels.weigh_by_best, Shape::new([self.rows, 1, 1], 256), args)
    }

    fn add(&mut self, x: Buf, y: Buf) -> Result<()> {
        self.defer_add(x, y)
    }

    fn add_bias(&mut self, x: Buf, w: Vector) -> Result<()> {
        let kernels = self.kernels()?;
        self.pairwise(kernels.add_bias, x, self.vector(w), x.width(), |args| args)
    }

    fn scale(&mut self, x: Buf, w: Vector) -> Result<()> {
        let kernels = self.kernels()?;
        let count = self.rows * x.width();
        let args = Args::new().at(self.at(x)).at(self.vector(w)).long(count);
        let args = args.int(x.width()).int(self.vectors[w.index()].1);
        self.record_beside(&[x], kernels.scale, Shape::each(count), args)
    }

    fn activate(&mut self, x: Buf, up: Option<Buf>, activation: Activation) -> Result<()> {
        let kernels = self.kernels()?;
        let more = |args| put_activation(args, activation);
        // Without a gate, the function ignores the other operand.
        let up = up.unwrap_or(x);
        self.pairwise(kernels.activate_all, x, self.at(up), up.width(), more)
    }

    fn gate(&mut self, x: Buf, gate: Buf, function: Gate) -> Result<()> {
        assert!(x.width().is_multiple_of(gate.width()));
        let kernels = self.kernels()?;
        let kind = match function {
            Gate::Sigmoid => 0,
            Gate::Softplus => 1,
            Gate::Factor => 2,
        };
        self.pairwise(kernels.gate, x, self.at(gate), gate.width(), |args| args.int(kind))
    }

    fn softcap(&mut self, x: Buf, cap: f32) -> Result<()> {
        let kernels = self.kernels()?;
        let count = self.rows * x.width();
        let args = Args::new().at(self.at(x)).long(count).float(cap);
        self.record(kernels.softcap, Shape::each(count), args)
    }

    fn pick(&mut self, x: Buf, rows: &[usize], out: Buf) -> Result<()> {
        let kernels = self.kernels()?;
        let numbers: Vec<u32> = rows.iter().map(|&row| row as u32).collect();
        let numbers = self.recorder.params(&numbers)?;
        let args = Args::new().at(self.at(x)).at(self.at(out)).at(numbers).int(x.width());
        self.record(kernels.pick, Shape::new([rows.len(), 1, 1], 256), args)?;
        self.rows = rows.len();
        Ok(())
    }

    fn submit(&mut self) -> Result<()> {
        self.flush()?;
        self.recorder.submit()
    }

    fn write(&mut self, x: Buf, values: &[f32]) -> Result<()> {
        assert_eq!(values.len(), self.rows * x.width());
        // Operations that were called before may still use the buffer.
        self.flush()?;
        self.enter(x);
        if values.len() > MOST_RECORDED {
            self.submit()?;
            return self.gpu.write(self.at(x), cast_slice(values));
        }
        let kernels = self.kernels()?;
        let args = Args::new().at(self.recorder.params(values)?).at(self.at(x)).long(values.len());
        self.record(kernels.copy, Shape::each(values.len()), args)
    }

    fn read(&mut self, x: Buf, out: &mut [f32]) -> Result<()> {
        assert_eq!(out.len(), self.rows * x.width());
        self.submit()?;
        self.gpu.read(self.at(x), cast_slice_mut(out))
    }

    fn read_row(&mut self, x: Buf, row: usize, out: &mut [f32]) -> Result<()> {
        assert!(out.len() == x.width() && row < self.rows);
        self.submit()?;
        self.gpu.read(self.at(x) + (row * x.width() * 4) as u64, cast_slice_mut(out))
    }

    fn best(&mut self, logits: Buf, k: usize, out: &mut Vec<Ranked>) -> Result<()> {
        self.rank_rows(logits, k, out)
    }
}

impl Drop for CudaBackend {
    fn drop(&mut self) {
        // Memory may be freed only when nothing uses it any more. A lost device uses nothing.
        let _ = self.gpu.wait_for(Stream::Copies);
        let _ = self.gpu.wait();
    }
}
