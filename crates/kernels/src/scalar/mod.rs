//! Every kernel in plain Rust: the specification, which the other instruction sets follow to the bit.
//!
//! Three rules make that possible. Integer sums are exact, so their order is free. Float sums over a row use sixteen
//! accumulators (element `i` goes to lane `i % 16`), fused multiply-adds, and the reduction tree of [`sum_lanes`].
//! Everything else is a fixed sequence of IEEE operations.
//!
//! Kernels are always inlined, so that an instruction set's module can compile them with its instructions.

mod activation;
mod delta;

use half::f16;

pub use activation::{Activation, Gate, activate, gate, softcap};
pub use delta::{DeltaStep, STATE_COLUMNS, Tap, activate_silu, convolve, delta_gates, delta_step, l2_norm};

use crate::encoding::{Encoding, MXFP4_GROUP};
use crate::math::exp;
use crate::quant::planes::{Group, dequantise};
use crate::quant::{MAX_BLOCK, Quant, SUB, Unpacked, with_quant};
use crate::tensor::{MatRef, Q8Panel, Rows, TileMut};

/// Accumulators of a float sum.
pub const LANES: usize = 16;

/// Keys that one step of attention computes together.
pub const KEY_BLOCK: usize = 64;

/// Tokens that share one unpacked block.
const TOKEN_TILE: usize = 16;

/// `out[t][r] = Σ w[r][c] · x[t][c]` with dequantised weights and f32 activations, for any type.
#[inline(always)]
pub fn matmul_f32(w: MatRef<'_>, x: Rows<'_, f32>, out: &mut TileMut<'_, f32>) {
    check_shapes(w, x.len(), out);
    assert_eq!(x.width(), w.cols);
    let mut weights = [0.0; MAX_BLOCK];
    for r in 0..w.rows {
        for first in (0..x.len()).step_by(TOKEN_TILE) {
            let tokens = TOKEN_TILE.min(x.len() - first);
            let mut acc = [[0.0f32; LANES]; TOKEN_TILE];
            for col in (0..w.cols).step_by(MAX_BLOCK) {
                let cols = MAX_BLOCK.min(w.cols - col);
                dequantise(w, r, col, &mut weights[..cols]);
                for (t, acc) in acc[..tokens].iter_mut().enumerate() {
                    multiply_add_lanes(&weights[..cols], &x.row(first + t)[col..col + cols], acc);
                }
            }
            for (t, acc) in acc[..tokens].iter().enumerate() {
                out.row(first + t)[r] = sum_lanes(acc);
            }
        }
    }
}

/// `out[t][r] = Σ w[r][c] · x[t][c]` with quantised weights and activations quantised by [`quantise`].
///
/// One fused multiply-add per block or group of the weights (or per float, if a block has several), two if they have
/// minima or biases.
pub fn matmul_q8(w: MatRef<'_>, x: Rows<'_, Q8Panel>, out: &mut TileMut<'_, f32>) {
    check_shapes(w, x.len(), out);
    assert_eq!(x.width(), Q8Panel::count(w.cols));
    match w.encoding {
        Encoding::Blocks(dtype) => with_quant!(dtype, Q => matmul_blocks::<Q>(w, x, out)),
        Encoding::Affine(affine) => matmul_groups::<true>(w, affine.group, x, out),
        Encoding::Mxfp4 => matmul_groups::<false>(w, MXFP4_GROUP, x, out),
        other => panic!("{other} is multiplied with f32 activations"),
    }
}

fn matmul_blocks<Q: Quant>(w: MatRef<'_>, x: Rows<'_, Q8Panel>, out: &mut TileMut<'_, f32>) {
    let mut block = Unpacked::default();
    for r in 0..w.rows {
        for first in (0..x.len()).step_by(TOKEN_TILE) {
            let tokens = TOKEN_TILE.min(x.len() - first);
            let mut acc = [0.0f32; TOKEN_TILE];
            for (b, bytes) in w.row(r).chunks_exact(Q::DTYPE.block_bytes()).enumerate() {
                Q::unpack(bytes, &mut block);
                let (panel, lane) = (b * Q::BLOCK / Q8Panel::LEN, b * Q::BLOCK % Q8Panel::LEN);
                for (t, acc) in acc[..tokens].iter_mut().enumerate() {
                    *acc = dot_block::<Q>(&block, &x.row(first + t)[panel], lane, *acc);
                }
            }
            for (t, acc) in acc[..tokens].iter().enumerate() {
                out.row(first + t)[r] = *acc;
            }
        }
    }
}

/// Adds the product of a weight block with the activations at `lane` of a panel to `acc`.
fn dot_block<Q: Quant>(w: &Unpacked, x: &Q8Panel, lane: usize, mut acc: f32) -> f32 {
    let subs = Q::BLOCK / Q::FLOATS / SUB;
    for (part, d) in w.d[..Q::FLOATS].iter().enumerate() {
        let (mut products, mut mins) = (0i32, 0i32);
        for sub in part * subs..(part + 1) * subs {
            let activations = &x.lanes[lane + sub * SUB..][..SUB];
            let weights = &w.lanes[sub * SUB..][..SUB];
            let dot: i32 = weights.iter().zip(activations).map(|(a, b)| i32::from(*a) * i32::from(*b)).sum();
            products += i32::from(w.scales[sub]) * dot;
            if Q::HAS_MINS {
                mins += i32::from(w.mins[sub]) * i32::from(x.sums[lane / SUB + sub]);
            }
        }
        let scale = x.scales[(lane + part * subs * SUB) / 32];
        acc = (d * scale).mul_add(products as f32, acc);
        if Q::HAS_MINS {
            acc = (w.dmin * scale).mul_add(-(mins as f32), acc);
        }
    }
    acc
}

/// Products with weights in groups of `group` lanes: `lane · scale`, and `+ bias` if they have biases.
fn matmul_groups<const BIASES: bool>(
    w: MatRef<'_>,
    group: usize,
    x: Rows<'_, Q8Panel>,
    out: &mut TileMut<'_, f32>,
) {
    let mut weights = Group::new();
    for r in 0..w.rows {
        for first in (0..x.len()).step_by(TOKEN_TILE) {
            let tokens = TOKEN_TILE.min(x.len() - first);
            let mut acc = [0.0f32; TOKEN_TILE];
            for g in 0..w.cols / group {
                weights.unpack(w, r, g);
                let (panel, lane) = (g * group / Q8Panel::LEN, g * group % Q8Panel::LEN);
                for (t, acc) in acc[..tokens].iter_mut().enumerate() {
                    let x = &x.row(first + t)[panel];
                    let lanes = weights.lanes[..group].iter().zip(&x.lanes[lane..]);
                    let products: i32 = lanes.map(|(w, x)| i32::from(*w) * i32::from(*x)).sum();
                    let scale = x.scales[lane / 32];
                    *acc = (weights.scale * scale).mul_add(products as f32, *acc);
                    if BIASES {
                        *acc = (weights.bias * scale).mul_add(x.sum_of(lane, group) as f32, *acc);
                    }
                }
            }
            for (t, acc) in acc[..tokens].iter().enumerate() {
                out.row(first + t)[r] = *acc;
            }
        }
    }
}

/// `out[t][c] = Σ w[r][c] · x[t][r]` for any type: the product with the transposed matrix, as a sum over its rows from
/// the first to the last.
#[inline(always)]
pub fn matmul_transposed(w: MatRef<'_>, x: Rows<'_, f32>, out: &mut TileMut<'_, f32>) {
    matmul_transposed_by(w, x, out, dequantise);
}

/// Like [`matmul_transposed`]. `weights` reads the weights of a row, starting at a column.
#[inline(always)]
pub(crate) fn matmul_transposed_by(
    w: MatRef<'_>,
    x: Rows<'_, f32>,
    out: &mut TileMut<'_, f32>,
    widen: impl Fn(MatRef<'_>, usize, usize, &mut [f32]),
) {
    assert_eq!((x.width(), out.rows(), out.cols()), (w.rows, x.len(), w.cols));
    let mut weights = [0.0; MAX_BLOCK];
    for t in 0..x.len() {
        out.row(t).fill(0.0);
    }
    for r in 0..w.rows {
        for col in (0..w.cols).step_by(MAX_BLOCK) {
            let cols = MAX_BLOCK.min(w.cols - col);
            widen(w, r, col, &mut weights[..cols]);
            for t in 0..x.len() {
                add_scaled(&mut out.row(t)[col..col + cols], x.row(t)[r], &weights[..cols]);
            }
        }
    }
}

/// A float whose last bit has the value one. Adding a small number rounds that number, ties to even, and the lowest
/// byte of the sum is the result. A conversion would have to handle values that do not fit; this is one instruction for
/// many lanes.
const ROUNDING: f32 = 12_582_912.0;

/// Quantises a row of activations to bytes, with one scale for every `block` of them.
///
/// A value that is not finite makes its block's scale not finite, and so every product with it. A block that is so
/// close to zero that its scale has no inverse becomes zero.
#[inline(always)]
pub fn quantise(x: &[f32], block: usize, out: &mut [Q8Panel]) {
    assert_eq!(out.len(), Q8Panel::count(x.len()));
    assert!(block.is_multiple_of(32) && Q8Panel::LEN.is_multiple_of(block));
    for (x, panel) in x.chunks(Q8Panel::LEN).zip(out) {
        *panel = Q8Panel::default();
        for (b, x) in x.chunks(block).enumerate() {
            // The bits of non-negative floats sort like the floats, with NaN above all.
            let mut largest = 0;
            for v in x {
                largest = v.abs().to_bits().max(largest);
            }
            let largest = f32::from_bits(largest);
            let inverse = 127.0 / largest;
            panel.scales[b * block / 32..(b + 1) * block / 32].fill(largest / 127.0);
            if largest.is_finite() && inverse.is_finite() {
                for (lane, v) in panel.lanes[b * block..].iter_mut().zip(x) {
                    *lane = (v * inverse + ROUNDING).to_bits() as i8;
                }
            }
        }
        for (sum, lanes) in panel.sums.iter_mut().zip(panel.lanes.as_chunks::<16>().0) {
            *sum = lanes.iter().map(|&lane| i16::from(lane)).sum();
        }
    }
}

/// Root-mean-square normalisation in place: `x / sqrt(mean(x²) + eps) · w`.
#[inline(always)]
pub fn rms_norm(x: &mut [f32], w: &[f32], eps: f32) {
    assert_eq!(x.len(), w.len());
    let mean = dot(x, x) / x.len() as f32;
    let scale = 1.0 / (mean + eps).sqrt();
    for (x, w) in x.iter_mut().zip(w) {
        *x = *x * scale * w;
    }
}

/// `x ← (x − mean) / √(variance + eps) · w`
#[inline(always)]
pub fn layer_norm(x: &mut [f32], w: &[f32], eps: f32) {
    assert_eq!(x.len(), w.len());
    let mut acc = [0.0; LANES];
    for x in x.chunks(LANES) {
        for (acc, x) in acc.iter_mut().zip(x) {
            *acc += x;
        }
    }
    let mean = sum_lanes(&acc) / x.len() as f32;
    for x in x.iter_mut() {
        *x -= mean;
    }
    rms_norm(x, w, eps);
}

/// Which channels of a head are rotated together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RopePairs {
    /// Channel `i` with channel `i + n/2` of the `n` rotated ones.
    HalfSplit,
    /// Channel `2i` with channel `2i + 1`.
    Interleaved,
}

/// Rotates the first `2 · cos.len()` channels of every head of a row by the angles of its position.
#[inline(always)]
pub fn rope(x: &mut [f32], head_dim: usize, pairs: RopePairs, cos: &[f32], sin: &[f32]) {
    let half = cos.len();
    assert!(half == sin.len() && 2 * half <= head_dim && x.len().is_multiple_of(head_dim));
    for head in x.chunks_exact_mut(head_dim) {
        for i in 0..half {
            let (a, b) = match pairs {
                RopePairs::HalfSplit => (i, i + half),
                RopePairs::Interleaved => (2 * i, 2 * i + 1),
            };
            let (x, y) = (head[a], head[b]);
            head[a] = x * cos[i] - y * sin[i];
            head[b] = y * cos[i] + x * sin[i];
        }
    }
}

/// Softmax in place.
#[inline(always)]
pub fn softmax(x: &mut [f32]) {
    let max = x.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let mut acc = [0.0; LANES];
    for (i, x) in x.iter_mut().enumerate() {
        *x = exp(*x - max);
        acc[i % LANES] += *x;
    }
    let sum = sum_lanes(&acc);
    for x in x {
        *x /= sum;
    }
}

/// Keys or values as the cache stores them.
#[derive(Clone, Copy, Debug)]
pub enum KvRef<'a> {
    /// Half precision.
    F16(&'a [f16]),
    /// Single precision.
    F32(&'a [f32]),
}

/// The softmax of one query head while the keys are processed.
#[derive(Clone, Copy, Debug)]
pub struct RunningSoftmax {
    /// The largest score so far.
    pub max: f32,
    /// The sum of `e^(score − max)` so far.
    pub sum: f32,
}

impl RunningSoftmax {
    /// The state before the first key.
    pub const START: RunningSoftmax = RunningSoftmax { max: f32::NEG_INFINITY, sum: 0.0 };
}

/// One step of attention: the query heads that share a key head process up to [`KEY_BLOCK`] keys.
pub struct AttentionStep<'a> {
    /// `[heads, head_dim]`
    pub queries: &'a [f32],
    /// `[keys, head_dim]`
    pub keys: KvRef<'a>,
    /// `[keys, value_dim]`, at a distance of `value_stride`. They may be inside the keys.
    pub values: KvRef<'a>,
    /// Channels of a key.
    pub head_dim: usize,
    /// Channels of a value.
    pub value_dim: usize,
    /// The distance between the starts of two values, in channels.
    pub value_stride: usize,
    /// Multiplies every score.
    pub scale: f32,
}

impl AttentionStep<'_> {
    /// The number of keys, given the total lengths of keys and values.
    pub(crate) fn count(&self, keys: usize, values: usize) -> usize {
        let count = keys / self.head_dim;
        assert!(count <= KEY_BLOCK && keys == count * self.head_dim && self.value_dim <= self.value_stride);
        // The last value need not be followed by a gap.
        assert!(count == 0 || values >= (count - 1) * self.value_stride + self.value_dim);
        count
    }
}

/// Computes one [`AttentionStep`]: updates each head's softmax and its unnormalised output `[heads, value_dim]`.
#[inline(always)]
pub fn attend(step: &AttentionStep<'_>, running: &mut [RunningSoftmax], out: &mut [f32]) {
    assert_eq!(step.queries.len(), running.len() * step.head_dim);
    assert_eq!(out.len(), running.len() * step.value_dim);
    match (step.keys, step.values) {
        (KvRef::F16(keys), KvRef::F16(values)) => attend_typed(step, keys, values, running, out),
        (KvRef::F32(keys), KvRef::F32(values)) => attend_typed(step, keys, values, running, out),
        _ => panic!("keys and values of different types"),
    }
}

#[inline(always)]
fn attend_typed<T: Copy + Into<f32>>(
    step: &AttentionStep<'_>,
    keys: &[T],
    values: &[T],
    running: &mut [RunningSoftmax],
    out: &mut [f32],
) {
    let count = step.count(keys.len(), values.len());
    let heads =
        step.queries.chunks_exact(step.head_dim).zip(running).zip(out.chunks_exact_mut(step.value_dim));
    for ((query, running), out) in heads {
        let mut scores = [0.0f32; KEY_BLOCK];
        let mut max = running.max;
        for (score, key) in scores.iter_mut().zip(keys.chunks_exact(step.head_dim)) {
            let mut acc = [0.0; LANES];
            for (i, (q, k)) in query.iter().zip(key).enumerate() {
                acc[i % LANES] = q.mul_add((*k).into(), acc[i % LANES]);
            }
            *score = sum_lanes(&acc) * step.scale;
            max = max.max(*score);
        }
        let correction = exp(running.max - max);
        let mut acc = [0.0; LANES];
        for (i, score) in scores[..count].iter_mut().enumerate() {
            *score = exp(*score - max);
            acc[i % LANES] += *score;
        }
        *running = RunningSoftmax { max, sum: running.sum.mul_add(correction, sum_lanes(&acc)) };
        for out in out.iter_mut() {
            *out *= correction;
        }
        for (p, value) in scores[..count].iter().zip(values.chunks(step.value_stride)) {
            for (out, v) in out.iter_mut().zip(value) {
                *out = p.mul_add((*v).into(), *out);
            }
        }
    }
}

/// The last step of attention: divides each head's output `[heads, value_dim]` by its softmax's sum.
#[inline(always)]
pub fn attend_finish(running: &[RunningSoftmax], out: &mut [f32]) {
    let value_dim = out.len() / running.len();
    for (running, out) in running.iter().zip(out.chunks_exact_mut(value_dim)) {
        for out in out {
            *out /= running.sum;
        }
    }
}

/// `x ← x + y`
#[inline(always)]
pub fn add(x: &mut [f32], y: &[f32]) {
    assert_eq!(x.len(), y.len());
    for (x, y) in x.iter_mut().zip(y) {
        *x += y;
    }
}

/// `out ← out + weight · y`, fused.
#[inline(always)]
pub fn add_scaled(out: &mut [f32], weight: f32, y: &[f32]) {
    assert_eq!(out.len(), y.len());
    for (out, y) in out.iter_mut().zip(y) {
        *out = weight.mul_add(*y, *out);
    }
}

/// The indices of the `out.len()` largest scores, largest first, ties to the lower index. NaN counts as
/// the smallest.
pub fn top_k(scores: &[f32], out: &mut [u32]) {
    assert!(out.len() <= scores.len());
    let value = |i: u32| {
        let v = scores[i as usize];
        if v.is_nan() { f32::NEG_INFINITY } else { v }
    };
    let mut found = 0;
    for i in 0..scores.len() as u32 {
        // Only a strictly larger score is placed before an earlier index.
        let rank = out[..found].iter().position(|&held| value(i) > value(held)).unwrap_or(found);
        if rank < out.len() {
            found = (found + 1).min(out.len());
            out[rank..found].rotate_right(1);
            out[rank] = i;
        }
    }
}

/// `Σ a[i] · b[i]` by the rule for float sums.
#[inline(always)]
pub fn dot(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    let mut acc = [0.0; LANES];
    multiply_add_lanes(a, b, &mut acc);
    sum_lanes(&acc)
}

#[inline(always)]
fn multiply_add_lanes(a: &[f32], b: &[f32], acc: &mut [f32; LANES]) {
    for (a, b) in a.chunks(LANES).zip(b.chunks(LANES)) {
        for ((acc, a), b) in acc.iter_mut().zip(a).zip(b) {
            *acc = a.mul_add(*b, *acc);
        }
    }
}

/// The sum of sixteen accumulators: halves are added until one value is left.
#[inline(always)]
pub fn sum_lanes(acc: &[f32; LANES]) -> f32 {
    let mut acc = *acc;
    let mut half = LANES / 2;
    while half > 0 {
        for i in 0..half {
            acc[i] += acc[i + half];
        }
        half /= 2;
    }
    acc[0]
}

fn check_shapes(w: MatRef<'_>, tokens: usize, out: &TileMut<'_, f32>) {
    assert_eq!((out.rows(), out.cols()), (tokens, w.rows), "output of a [{}, {}] matrix", w.rows, w.cols);
}
