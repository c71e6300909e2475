//! The CPU backend: cuts each operation into pieces for the thread pool and calls the kernels.
//!
//! One kernel call computes each output element from all of its inputs, so neither the pieces nor the number of
//! threads changes a bit.

mod experts;

use std::ops::Range;
use std::slice;

use forebay_kernels::{Encoding, Grain, Kernels, MatRef, Pool, Q8Panel, RopePairs, Rows, TileMut};

use smallvec::SmallVec;

use super::attend::{GroupedHeads, QUERY_TILE, heads_at_once};
use super::convolution::{Filters, Inputs};
use super::delta::{DeltaLayer, Stretch};
use super::kv::{CpuKv, KvType};
use super::recurrent::{CpuRecurrent, advance_batch};
use super::{
    Activation, Attention, Backend, Batch, Buf, BufShape, Convolution, DeltaRule, Gate, HeadMatrices,
    HostMatrix, LayerState, Matrix, Ranked, Rope, Router, RouterWeights, Routing, RowPart, StateShape,
    Vector, Weight, rank,
};
use crate::TokenId;
use crate::error::{Error, Result};
use experts::bucket_tiles;

pub use experts::ExpertWeights;

/// Channels of a convolution that one piece of work computes: enough for hardware prefetching, few enough to keep all
/// threads busy.
const CHANNELS_TOGETHER: usize = 256;

/// The precision of products with quantised weights.
///
/// # Examples
/// ```
/// use forebay_engine::{Options, Precision, Prospect};
///
/// # let model = std::path::Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/tales-qwen3moe-Q4_K_M.gguf"));
/// let fast = Options::new().precision(Precision::Fast);
/// let exact = Options::new().precision(Precision::Exact);
/// let prospect = Prospect::new(model, &fast)?;
///
/// // Keys and values are floats of 4 bytes instead of 2.
/// assert_eq!(prospect.plan_with(&exact)?.kv, 2 * prospect.plan_with(&fast)?.kv);
/// # Ok::<(), forebay_engine::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Precision {
    /// Quantises activations to 8-bit integers with a scale per block, and stores keys and values in f16.
    #[default]
    Fast,
    /// Dequantises weights; everything is f32.
    Exact,
}

impl Precision {
    /// The type in which keys and values are stored.
    pub fn kv_type(self) -> KvType {
        match self {
            Precision::Fast => KvType::F16,
            Precision::Exact => KvType::F32,
        }
    }
}

/// Computes on the CPU's cores.
pub struct CpuBackend {
    kernels: &'static Kernels,
    pool: Pool,
    precision: Precision,
    matrices: Vec<HostMatrix>,
    vectors: Vec<Vec<f32>>,
    shapes: Vec<BufShape>,
    /// Indexed by buffer number.
    buffers: Vec<Vec<f32>>,
    panels: Panels,
    /// The quantised input of experts. They are computed a few at a time and all have the same input.
    expert_panels: Panels,
    /// The buffer whose quantised copy is in `expert_panels`; `None` once it has been overwritten.
    expert_input: Option<usize>,
    /// The corrected scores of one token's experts, for the router.
    corrected: Vec<f32>,
    rows: usize,
}

impl CpuBackend {
    /// A backend with these buffers, numbered in order.
    ///
    /// # Errors
    /// If threads cannot be started, or the CPU does not support the requested instruction set.
    pub fn new(threads: usize, precision: Precision, buffers: &[BufShape]) -> Result<CpuBackend> {
        let kernels = Kernels::detect().map_err(Error::Unsupported)?;
        let pool = Pool::new(threads)
            .map_err(|e| Error::Backend(format!("cannot start {threads} threads: {e}; use fewer")))?;
        Ok(CpuBackend {
            kernels,
            pool,
            precision,
            matrices: Vec::new(),
            vectors: Vec::new(),
            shapes: buffers.to_vec(),
            buffers: buffers.iter().map(|b| vec![0.0; b.rows * b.width]).collect(),
            panels: Panels::default(),
            expert_panels: Panels::default(),
            expert_input: None,
            corrected: Vec::new(),
            rows: 0,
        })
    }

    /// The live rows of a buffer: those of the current batch.
    fn get(&self, buf: Buf) -> &[f32] {
        &self.buffers[buf.id][..self.rows * buf.width]
    }

    /// All rows of a buffer.
    pub(crate) fn rows_of(&self, buf: Buf) -> &[f32] {
        self.get(buf)
    }

    /// Writes the live rows of a buffer.
    pub(crate) fn fill(&mut self, buf: Buf, values: &[f32]) {
        self.buffers[buf.id][..self.rows * buf.width].copy_from_slice(values);
    }

    /// Takes a buffer out, to write to it while others are read. [`put`](Self::put) puts it back.
    fn take(&mut self, buf: Buf) -> Vec<f32> {
        if self.expert_input == Some(buf.id) {
            self.expert_input = None;
        }
        std::mem::take(&mut self.buffers[buf.id])
    }

    fn put(&mut self, buf: Buf, data: Vec<f32>) {
        self.buffers[buf.id] = data;
    }

    /// Applies `body` to every row of a buffer, with the row's number.
    fn each_row(&mut self, buf: Buf, body: impl Fn(&Self, usize, &mut [f32]) + Sync) {
        let mut data = self.take(buf);
        let rows = &mut data[..self.rows * buf.width];
        self.pool.for_rows(rows, buf.width, |row, values| body(self, row, values));
        self.put(buf, data);
    }
}

impl Backend for CpuBackend {
    fn name(&self) -> String {
        format!("CPU {}", self.kernels.isa.name())
    }

    fn load(&mut self, weight: Weight) -> Result<()> {
        match weight {
            Weight::Matrix(matrix) => self.matrices.push(matrix),
            Weight::Vector(vector) => self.vectors.push(vector),
        }
        Ok(())
    }

    fn new_state(&self, shape: StateShape) -> Box<dyn LayerState> {
        let kind = self.precision.kv_type();
        match shape {
            StateShape::Attention(shape) => Box::new(CpuKv::on_host(shape, kind)),
            StateShape::Recurrent(floats) => Box::new(CpuRecurrent::on_host(floats)),
        }
    }

    fn begin(&mut self, rows: usize) {
        self.rows = rows;
        self.expert_input = None;
        // An operation that panicked has lost the buffers that it had taken out.
        for (buffer, shape) in self.buffers.iter_mut().zip(&self.shapes) {
            buffer.resize(shape.rows * shape.width, 0.0);
        }
    }

    fn embed(&mut self, table: Matrix, tokens: &[TokenId], out: Buf) -> Result<()> {
        self.each_row(out, |this, row, values| {
            let table = &this.matrices[table.0];
            table.view().dequantise_row(tokens[row].0 as usize, values);
            scale_by(table.scale, values);
        });
        Ok(())
    }

    fn rms_norm(&mut self, x: Buf, w: Vector, eps: f32, out: Buf) -> Result<()> {
        self.each_row(out, |this, row, values| {
            if x != out {
                values.copy_from_slice(&this.get(x)[row * x.width..][..x.width]);
            }
            let w = &this.vectors[w.0];
            for part in values.chunks_exact_mut(w.len()) {
                (this.kernels.rms_norm)(part, w, eps);
            }
        });
        Ok(())
    }

    fn layer_norm(&mut self, x: Buf, w: Vector, eps: f32, out: Buf) -> Result<()> {
        self.each_row(out, |this, row, values| {
            if x != out {
                values.copy_from_slice(&this.get(x)[row * x.width..][..x.width]);
            }
            (this.kernels.layer_norm)(values, &this.vectors[w.0], eps);
        });
        Ok(())
    }

    fn matmul(&mut self, x: Buf, products: &[(Matrix, Buf)]) -> Result<()> {
        let mut taken: Few<Vec<f32>> = products.iter().map(|&(_, out)| self.take(out)).collect();
        let x = Activations { rows: &self.buffers[x.id][..self.rows * x.width], width: x.width };
        let compute = Compute { kernels: self.kernels, pool: &self.pool, precision: self.precision };
        let jobs: Few<Job<'_>> = products
            .iter()
            .map(|&(w, _)| &self.matrices[w.0])
            .map(|w| Job { w: w.view(), scale: w.scale, reads: Reads::Rows(0..self.rows) })
            .collect();
        compute.quantise(
            x,
            slice::from_ref(&(0..self.rows)),
            jobs.iter().map(|job| job.w.encoding),
            &mut self.panels,
        );
        let mut outs: Few<TileMut<'_, f32>> = taken
            .iter_mut()
            .zip(products)
            .map(|(data, (_, out))| TileMut::new(&mut data[..self.rows * out.width], out.width))
            .collect();
        compute.matmul(x, &self.panels, &jobs, &mut outs);
        drop((jobs, outs));
        for (&(_, out), data) in products.iter().zip(taken) {
            self.put(out, data);
        }
        Ok(())
    }

    fn head_products(&mut self, x: Buf, w: &HeadMatrices, out: Buf) -> Result<()> {
        let mut data = self.take(out);
        let x = Activations { rows: &self.buffers[x.id][..self.rows * x.width], width: x.width };
        let compute = Compute { kernels: self.kernels, pool: &self.pool, precision: self.precision };
        let tile = TileMut::new(&mut data[..self.rows * out.width], out.width);
        compute.head_products(&self.matrices[w.stored.0], w, x, &mut self.panels, tile);
        self.put(out, data);
        Ok(())
    }

    fn rope_angles(&mut self, rope: &Rope, positions: &[u32], out: Buf) -> Result<()> {
        self.each_row(out, |this, row, values| {
            let divisors = rope.divisors.map(|w| &this.vectors[w.0]);
            let (cos, sin) = values.split_at_mut(rope.frequencies.len());
            for (i, (cos, sin)) in cos.iter_mut().zip(sin).enumerate() {
                let frequency = rope.frequencies[i] / divisors.map_or(1.0, |divisors| divisors[i]);
                // The product is rounded to f32, as in the models' training.
                let angle = f64::from(positions[row] as f32 * frequency);
                *cos = angle.cos() as f32 * rope.scale;
                *sin = angle.sin() as f32 * rope.scale;
            }
        });
        Ok(())
    }

    fn rope(&mut self, x: Buf, head_dim: usize, pairs: RopePairs, angles: Buf) -> Result<()> {
        self.each_row(x, |this, row, values| {
            let angles = &this.get(angles)[row * angles.width..][..angles.width];
            let (cos, sin) = angles.split_at(angles.len() / 2);
            (this.kernels.rope)(values, head_dim, pairs, cos, sin);
        });
        Ok(())
    }

    fn attention(&mut self, a: &Attention, batch: &mut Batch<'_>) -> Result<()> {
        let mut data = self.take(a.out);
        let (q, k, v) = (self.get(a.q), self.get(a.k), self.get(a.v));
        let sinks = a.sinks.map(|w| &self.vectors[w.0][..]);
        for sequence in batch.sequences.iter_mut() {
            let start = sequence.state.len();
            let (kv, _) = sequence.state.layer(a.layer);
            let kv = kv.as_any_mut().downcast_mut::<CpuKv>().expect("the state was made by this backend");
            let rows = sequence.rows.clone();
            for row in rows.clone() {
                kv.push(&k[row * a.k.width..][..a.k.width], &v[row * a.v.width..][..a.v.width])?;
            }
            let shape = kv.shape();
            let q_heads = a.q.width / shape.key_dim;
            let sharing = q_heads / shape.heads;
            let pieces = shape.heads * rows.len().div_ceil(QUERY_TILE);
            let group = heads_at_once(sharing, pieces, self.pool.threads());
            let outs = &mut data[rows.start * a.out.width..rows.end * a.out.width];
            let mut outs = [TileMut::new(outs, a.out.width)];
            let grain = Grain { rows: QUERY_TILE, cols: group * shape.value_dim };
            let queries = Rows::new(&q[rows.start * a.q.width..rows.end * a.q.width], a.q.width);
            let kv = &*kv;
            self.pool.for_tiles(&mut outs, grain, |piece, mut tile| {
                let first = piece.cols.start / shape.value_dim;
                let (kernels, head, scale) = (self.kernels, first / sharing, a.scale);
                let heads = GroupedHeads { kernels, kv, head, first, group, scale, sinks };
                heads.attend(queries, piece.rows, start, &mut tile);
            });
        }
        self.put(a.out, data);
        Ok(())
    }

    fn delta_rule(&mut self, d: &DeltaRule, batch: &mut Batch<'_>) -> Result<()> {
        let [mut keep, mut correct, mut convolved, mut out] =
            [d.a, d.b, d.convolved, d.out].map(|buf| self.take(buf));
        let (rates, biases) = (&self.vectors[d.rates.0], &self.vectors[d.biases.0]);
        let gates = [(&mut keep, d.a), (&mut correct, d.b)]
            .map(|(data, buf)| TileMut::new(&mut data[..self.rows * buf.width], buf.width));
        let row = Grain { rows: 1, cols: d.a.width };
        self.pool.for_tile_pairs(gates, [row, row], |_, [mut a, mut b]| {
            (self.kernels.delta_gates)(a.row(0), b.row(0), rates, biases);
        });

        let filters = &self.vectors[d.filters.0];
        let layer = DeltaLayer { kernels: self.kernels, pool: &self.pool, shape: d.shape, filters };
        let qkv = self.get(d.qkv);
        advance_batch(batch, d.layer, |start, rows, before, after| {
            let of = |buf: Buf| rows.start * buf.width..rows.end * buf.width;
            let stretch = Stretch {
                start,
                qkv: &qkv[of(d.qkv)],
                keep: &keep[of(d.a)],
                correct: &correct[of(d.b)],
                convolved: &mut convolved[of(d.convolved)],
                out: &mut out[of(d.out)],
            };
            layer.advance(stretch, before, after);
        })?;
        for (buf, data) in [(d.a, keep), (d.b, correct), (d.convolved, convolved), (d.out, out)] {
            self.put(buf, data);
        }
        Ok(())
    }

    fn convolve(&mut self, c: &Convolution, batch: &mut Batch<'_>) -> Result<()> {
        let mut out = self.take(c.out);
        let weights = &self.vectors[c.filters.0];
        let filters =
            Filters { kernels: self.kernels, pool: &self.pool, weights, together: CHANNELS_TOGETHER };
        let x = self.get(c.x);
        advance_batch(batch, c.layer, |start, rows, before, after| {
            let of = rows.start * c.x.width..rows.end * c.x.width;
            let rows = Rows::new(&x[of.clone()], c.x.width);
            filters.convolve(&Inputs { start, rows, before }, &mut out[of], after, |_, _| {});
        })?;
        self.put(c.out, out);
        Ok(())
    }

    fn ungroup(&mut self, x: Buf, groups: usize, parts: &[RowPart]) -> Result<()> {
        let width = x.width / groups;
        let mut first = 0;
        for part in parts {
            self.each_row(part.to, |this, row, values| {
                let groups = this.get(x)[row * x.width..][..x.width].chunks_exact(width);
                let to = values[part.at..].chunks_exact_mut(part.width);
                for (to, group) in to.zip(groups) {
                    to.copy_from_slice(&group[first..][..part.width]);
                }
            });
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
        let [correction, factors] =
            [weights.correction, weights.factors].map(|w| w.map(|w| &self.vectors[w.0][..]));
        let (experts, weights) = routing.prepare(self.rows, router.top_k);
        let logits = self.buffers[logits.id][..self.rows * logits.width].chunks_exact_mut(logits.width);
        let choices = experts.chunks_exact_mut(router.top_k).zip(weights.chunks_exact_mut(router.top_k));
        for (logits, (experts, weights)) in logits.zip(choices) {
            match correction {
                None => router.choose(self.kernels, logits, experts, weights),
                Some(correction) => {
                    self.corrected.clear();
                    self.corrected.extend_from_slice(correction);
                    router.choose_corrected(self.kernels, logits, &mut self.corrected, experts, weights);
                }
            }
            if let Some(factors) = factors {
                weights.iter_mut().zip(&*experts).for_each(|(w, &expert)| *w *= factors[expert as usize]);
            }
        }
        routing.sort(router.experts);
        Ok(())
    }

    fn weigh_by_best(&mut self, x: Buf, logits: Buf, out: Buf) -> Result<()> {
        self.each_row(out, |this, row, values| {
            let logits = &this.get(logits)[row * logits.width..][..logits.width];
            let best = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            values.copy_from_slice(&this.get(x)[row * x.width..][..x.width]);
            (this.kernels.gate)(values, &[best], Gate::Sigmoid);
        });
        Ok(())
    }

    fn add(&mut self, x: Buf, y: Buf) -> Result<()> {
        self.each_row(x, |this, row, values| {
            (this.kernels.add)(values, &this.get(y)[row * y.width..][..y.width]);
        });
        Ok(())
    }

    fn add_bias(&mut self, x: Buf, w: Vector) -> Result<()> {
        self.each_row(x, |this, _, values| (this.kernels.add)(values, &this.vectors[w.0]));
        Ok(())
    }

    fn scale(&mut self, x: Buf, w: Vector) -> Result<()> {
        self.each_row(x, |this, _, values| (this.kernels.gate)(values, &this.vectors[w.0], Gate::Factor));
        Ok(())
    }

    fn activate(&mut self, x: Buf, up: Option<Buf>, activation: Activation) -> Result<()> {
        self.each_row(x, |this, row, values| {
            let up = up.map_or(&[][..], |up| &this.get(up)[row * up.width..][..up.width]);
            (this.kernels.activate)(values, up, activation);
        });
        Ok(())
    }

    fn gate(&mut self, x: Buf, gate: Buf, function: Gate) -> Result<()> {
        self.each_row(x, |this, row, values| {
            (this.kernels.gate)(values, &this.get(gate)[row * gate.width..][..gate.width], function);
        });
        Ok(())
    }

    fn softcap(&mut self, x: Buf, cap: f32) -> Result<()> {
        self.each_row(x, |this, _, values| (this.kernels.softcap)(values, cap));
        Ok(())
    }

    fn pick(&mut self, x: Buf, rows: &[usize], out: Buf) -> Result<()> {
        let mut data = self.take(out);
        for (to, &from) in data.chunks_exact_mut(out.width).zip(rows) {
            to.copy_from_slice(&self.get(x)[from * x.width..][..x.width]);
        }
        self.put(out, data);
        self.rows = rows.len();
        Ok(())
    }

    fn write(&mut self, x: Buf, values: &[f32]) -> Result<()> {
        let mut data = self.take(x);
        data[..self.rows * x.width].copy_from_slice(values);
        self.put(x, data);
        Ok(())
    }

    fn read(&mut self, x: Buf, out: &mut [f32]) -> Result<()> {
        out.copy_from_slice(self.get(x));
        Ok(())
    }

    fn read_row(&mut self, x: Buf, row: usize, out: &mut [f32]) -> Result<()> {
        out.copy_from_slice(&self.get(x)[row * x.width..][..x.width]);
        Ok(())
    }

    fn best(&mut self, logits: Buf, k: usize, out: &mut Vec<Ranked>) -> Result<()> {
        out.clear();
        out.resize(self.rows * k, Ranked { token: 0, logit: f32::NEG_INFINITY });
        self.pool.for_rows(out, k, |row, out| {
            let mut best = Vec::new();
            rank(&self.get(logits)[row * logits.width..][..logits.width], k, &mut best);
            out[..best.len()].copy_from_slice(&best);
        });
        Ok(())
    }
}

/// Multiplies values by the scale of their matrix. Most matrices have a scale of one.
pub(super) fn scale_by(scale: f32, values: &mut [f32]) {
    if scale != 1.0 {
        values.iter_mut().for_each(|value| *value *= scale);
    }
}

/// Rows of f32 activations.
#[derive(Clone, Copy)]
pub(super) struct Activations<'a> {
    pub rows: &'a [f32],
    pub width: usize,
}

/// One product: a matrix with its scale, and the rows it reads.
struct Job<'a> {
    w: MatRef<'a>,
    scale: f32,
    reads: Reads<'a>,
}

/// The rows of activations that a product reads.
enum Reads<'a> {
    Rows(Range<usize>),
    Indexed(&'a [u32]),
}

impl Reads<'_> {
    fn of<'a, T>(&'a self, data: &'a [T], width: usize) -> Rows<'a, T> {
        match self {
            Reads::Rows(rows) => Rows::new(&data[rows.start * width..rows.end * width], width),
            Reads::Indexed(index) => Rows::indexed(data, width, index),
        }
    }
}

/// A list that does not allocate when one token is computed; larger batches may allocate.
type Few<T> = SmallVec<[T; 16]>;

/// Quantised copies of the same activations, one for each block length in use.
#[derive(Default)]
pub(super) struct Panels {
    by_block: Vec<(usize, Vec<Q8Panel>)>,
}

impl Panels {
    pub fn get(&self, block: usize) -> &[Q8Panel] {
        &self.by_block.iter().find(|(b, _)| *b == block).expect("it was quantised").1
    }

    pub fn get_mut(&mut self, block: usize) -> &mut Vec<Q8Panel> {
        let at = self.by_block.iter().position(|(b, _)| *b == block).unwrap_or_else(|| {
            self.by_block.push((block, Vec::new()));
            self.by_block.len() - 1
        });
        &mut self.by_block[at].1
    }
}

/// What products need besides the buffers.
pub(super) struct Compute<'a> {
    pub kernels: &'static Kernels,
    pub pool: &'a Pool,
    precision: Precision,
}

impl Compute<'_> {
    /// The block length of the quantised activations for products with this encoding; `None` if they read f32.
    pub fn panel_block(&self, encoding: Encoding) -> Option<usize> {
        encoding.activation_block().filter(|_| self.precision == Precision::Fast)
    }

    /// Quantises some rows of the activations, in ascending order, for products with these encodings.
    fn quantise(
        &self,
        x: Activations<'_>,
        rows: &[Range<usize>],
        encodings: impl Iterator<Item = Encoding>,
        panels: &mut Panels,
    ) {
        let mut blocks: Few<usize> = encodings.filter_map(|e| self.panel_block(e)).collect();
        blocks.sort_unstable();
        blocks.dedup();
        let width = Q8Panel::count(x.width);
        for block in blocks {
            let panels = panels.get_mut(block);
            let needed = x.rows.len() / x.width * width;
            panels.resize(needed.max(panels.len()), Q8Panel::default());
            let mut tiles = bucket_tiles(&mut panels[..needed], width, rows);
            self.pool.for_tiles(&mut tiles, Grain { rows: 1, cols: width }, |piece, mut tile| {
                let row = rows[piece.matrix].start + piece.rows.start;
                (self.kernels.quantise)(&x.rows[row * x.width..][..x.width], block, tile.row(0));
            });
        }
    }

    /// Computes all products in one parallel loop; `outs[i]` receives `jobs[i]`.
    fn matmul(&self, x: Activations<'_>, panels: &Panels, jobs: &[Job<'_>], outs: &mut [TileMut<'_, f32>]) {
        // Enough pieces to keep the threads equally busy, but each large enough to be worth dispatching.
        let total: usize = jobs.iter().map(|job| job.w.rows).sum();
        let cols = (total / (self.pool.threads() * 8)).next_multiple_of(16).clamp(16, 768);
        let rows = outs.iter().map(TileMut::rows).max().unwrap_or(1);
        self.pool.for_tiles(outs, Grain { rows, cols }, |piece, mut tile| {
            let job = &jobs[piece.matrix];
            let w = job.w.rows(piece.cols);
            if let Some(block) = self.panel_block(w.encoding) {
                let panels = panels.get(block);
                (self.kernels.matmul_q8)(w, job.reads.of(panels, Q8Panel::count(x.width)), &mut tile);
            } else {
                (self.kernels.matmul_f32)(w, job.reads.of(x.rows, x.width), &mut tile);
            }
            for row in 0..tile.rows() {
                scale_by(job.scale, tile.row(row));
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use forebay_kernels::DType;

    use super::*;

    #[test]
    fn a_batch_after_a_panic_finds_its_buffers() {
        let shape = BufShape { rows: 2, width: 1 };
        let mut backend = CpuBackend::new(2, Precision::Fast, &[shape]).unwrap();
        let codes = [1.0f32, 2.0].map(f32::to_le_bytes).concat();
        let planes = [&codes[..], &[], &[]].map(Into::into);
        let encoding = DType::F32.into();
        backend.load(Weight::Matrix(HostMatrix { encoding, rows: 2, cols: 1, planes, scale: 1.0 })).unwrap();
        let (table, out) = (Matrix(0), Buf { id: 0, width: 1 });
        let mut embed = |tokens: [TokenId; 2]| {
            backend.begin(2);
            backend.embed(table, &tokens, out).unwrap();
            backend.get(out).to_vec()
        };
        let outside = [TokenId(0), TokenId(2)];
        assert!(catch_unwind(AssertUnwindSafe(|| embed(outside))).is_err());
        assert_eq!(embed([TokenId(1), TokenId(0)]), [2.0, 1.0]);
    }
}
