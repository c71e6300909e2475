//! The kernels for 64-bit ARM processors whose NEON has dot products of bytes (`dotprod`).
//!
//! Products have two arrangements. One token: lanes along the row, four rows at a time, reduced across rows by
//! pairwise additions. Several tokens: four rows are unpacked so that lanes are rows, and four bytes of a token
//! are multiplied with all of them. Within a block everything is integer and exact, and both then do the same
//! float operations in block order, so both give the bits of [`scalar`].
//!
//! A dot product is `sdot`, signed bytes times signed bytes added in fours to 32 bits, so lanes are what
//! [`quant`](crate::quant) says they are. Its intrinsic is not stable, nor are those of half floats: these
//! instructions are written in assembly.
//!
//! What is not worth writing by hand is the scalar kernel itself. Closures that use these instructions are called
//! from here only: a library function such as `array::from_fn` is compiled without them.

// Loops over registers go by index, so that they are unrolled.
#![allow(clippy::needless_range_loop)]

mod lanes;
mod planes;
mod shared;

use std::arch::aarch64::*;
use std::arch::{asm, is_aarch64_feature_detected};

use half::{bf16, f16};

use crate::DType;
use crate::compiled::compiled_scalar_kernels;
use crate::encoding::Encoding;
use crate::math;
use crate::quant::planes::dequantise;
use crate::quant::with_quant;
use crate::scalar::{self, AttentionStep, KEY_BLOCK, KvRef, RunningSoftmax};
use crate::tensor::{MatRef, Q8Panel, Rows, TileMut};

/// Rows that are computed together: as many as a register has 32-bit lanes.
const ROWS: usize = 4;

/// Tokens whose activations stay in the second-level cache while the rows of a matrix pass by.
const TOKEN_CHUNK: usize = 128;

/// Query heads that pass over the keys together.
const HEAD_TILE: usize = 8;

/// The longest keys for which there is room to widen four of them.
const MAX_HEAD_DIM: usize = 1024;

/// Whether this processor has all that the functions here are compiled for.
pub fn available() -> bool {
    is_aarch64_feature_detected!("neon") && is_aarch64_feature_detected!("dotprod")
}

/// As [`scalar::matmul_f32`].
#[target_feature(enable = "neon,dotprod")]
pub fn matmul_f32(w: MatRef<'_>, x: Rows<'_, f32>, out: &mut TileMut<'_, f32>) {
    match w.encoding {
        Encoding::Blocks(DType::F32) => matmul_floats::<f32>(w, x, out),
        Encoding::Blocks(DType::F16) => matmul_floats::<f16>(w, x, out),
        Encoding::Blocks(DType::BF16) => matmul_floats::<bf16>(w, x, out),
        _ => scalar::matmul_f32(w, x, out),
    }
}

/// As [`scalar::matmul_q8`].
#[target_feature(enable = "neon,dotprod")]
pub fn matmul_q8(w: MatRef<'_>, x: Rows<'_, Q8Panel>, out: &mut TileMut<'_, f32>) {
    assert_eq!((out.rows(), out.cols()), (x.len(), w.rows));
    assert_eq!(x.width(), Q8Panel::count(w.cols));
    match w.encoding {
        Encoding::Blocks(dtype) => with_quant!(dtype, Q => shared::matmul::<Q>(w, x, out)),
        _ => planes::matmul_q8(w, x, out),
    }
}

/// As [`scalar::matmul_transposed`].
#[target_feature(enable = "neon,dotprod")]
pub fn matmul_transposed(w: MatRef<'_>, x: Rows<'_, f32>, out: &mut TileMut<'_, f32>) {
    scalar::matmul_transposed(w, x, out);
}

/// As [`scalar::attend`].
#[target_feature(enable = "neon,dotprod")]
pub fn attend(step: &AttentionStep<'_>, running: &mut [RunningSoftmax], out: &mut [f32]) {
    // No model's heads end inside a register.
    let ragged = !step.head_dim.is_multiple_of(4) || !step.value_dim.is_multiple_of(4);
    if ragged || step.head_dim > MAX_HEAD_DIM {
        return scalar::attend(step, running, out);
    }
    assert_eq!(step.queries.len(), running.len() * step.head_dim);
    assert_eq!(out.len(), running.len() * step.value_dim);
    let heads = step
        .queries
        .chunks(HEAD_TILE * step.head_dim)
        .zip(running.chunks_mut(HEAD_TILE))
        .zip(out.chunks_mut(HEAD_TILE * step.value_dim));
    for ((queries, running), out) in heads {
        let step = AttentionStep { queries, ..*step };
        match (step.keys, step.values) {
            (KvRef::F16(keys), KvRef::F16(values)) => {
                let count = step.count(keys.len(), values.len());
                let (keys, values) = (keys.as_ptr().cast(), values.as_ptr().cast());
                // SAFETY: keys and values are `count` long, as `count` says.
                unsafe { attend_heads::<f16>(&step, keys, values, count, running, out) }
            }
            (KvRef::F32(keys), KvRef::F32(values)) => {
                let count = step.count(keys.len(), values.len());
                let (keys, values) = (keys.as_ptr().cast(), values.as_ptr().cast());
                // SAFETY: as above.
                unsafe { attend_heads::<f32>(&step, keys, values, count, running, out) }
            }
            _ => panic!("keys and values of different types"),
        }
    }
}

compiled_scalar_kernels!("neon,dotprod");

// ---------------------------------------------------------------------------------------------------
// Instructions

/// Adds to each of four sums the products of four bytes with four others.
#[inline]
#[target_feature(enable = "neon,dotprod")]
fn dot(mut sums: int32x4_t, a: int8x16_t, b: int8x16_t) -> int32x4_t {
    // SAFETY: it computes, and nothing else.
    unsafe {
        asm!(
            "sdot {0:v}.4s, {1:v}.16b, {2:v}.16b",
            inout(vreg) sums, in(vreg) a, in(vreg) b,
            options(pure, nomem, nostack, preserves_flags),
        );
    }
    sums
}

/// Adds to each of four sums the products of four bytes with the four of `b` that `FOUR` counts.
#[inline]
#[target_feature(enable = "neon,dotprod")]
fn dot_with_four<const FOUR: usize>(mut sums: int32x4_t, a: int8x16_t, b: int8x16_t) -> int32x4_t {
    // SAFETY: it computes, and nothing else.
    unsafe {
        asm!(
            "sdot {0:v}.4s, {1:v}.16b, {2:v}.4b[{3}]",
            inout(vreg) sums, in(vreg) a, in(vreg) b, const FOUR,
            options(pure, nomem, nostack, preserves_flags),
        );
    }
    sums
}

/// Four half floats, widened.
#[inline]
#[target_feature(enable = "neon,dotprod")]
fn widen_halves(halves: uint16x4_t) -> float32x4_t {
    let wide: float32x4_t;
    // SAFETY: it computes, and nothing else.
    unsafe {
        asm!(
            "fcvtl {0:v}.4s, {1:v}.4h",
            out(vreg) wide, in(vreg) halves,
            options(pure, nomem, nostack, preserves_flags),
        );
    }
    wide
}

/// The sums of four vectors, each in the lane of its number.
#[inline]
#[target_feature(enable = "neon,dotprod")]
fn sum_across(v: &[int32x4_t; 4]) -> int32x4_t {
    vpaddq_s32(vpaddq_s32(v[0], v[1]), vpaddq_s32(v[2], v[3]))
}

/// Four vectors of four lanes: vector `i` of the result holds lane `i` of every vector.
#[inline]
#[target_feature(enable = "neon,dotprod")]
fn transpose(v: [uint32x4_t; 4]) -> [uint32x4_t; 4] {
    let even = |a, b| vreinterpretq_u64_u32(vtrn1q_u32(a, b));
    let odd = |a, b| vreinterpretq_u64_u32(vtrn2q_u32(a, b));
    let (a, b) = (even(v[0], v[1]), even(v[2], v[3]));
    let (c, d) = (odd(v[0], v[1]), odd(v[2], v[3]));
    [
        vreinterpretq_u32_u64(vtrn1q_u64(a, b)),
        vreinterpretq_u32_u64(vtrn1q_u64(c, d)),
        vreinterpretq_u32_u64(vtrn2q_u64(a, b)),
        vreinterpretq_u32_u64(vtrn2q_u64(c, d)),
    ]
}

/// Four floats in a register.
#[inline]
#[target_feature(enable = "neon,dotprod")]
fn floats(four: &[f32; 4]) -> float32x4_t {
    // SAFETY: it is one register long.
    unsafe { vld1q_f32(four.as_ptr()) }
}

// ---------------------------------------------------------------------------------------------------
// Four rows of a matrix

/// Places in four rows. Where the matrix has fewer, its last stands in, and its result is dropped.
type Four = [*const u8; ROWS];

/// Four rows from `first` on.
#[inline(always)]
fn four_rows(w: MatRef<'_>, first: usize) -> Four {
    let row = |i: usize| w.row((first + i).min(w.rows - 1)).as_ptr();
    [row(0), row(1), row(2), row(3)]
}

/// The places at byte `at` of four rows.
#[inline(always)]
fn four_places(rows: &Four, at: usize) -> Four {
    let place = |row: usize| rows[row].wrapping_add(at);
    [place(0), place(1), place(2), place(3)]
}

/// The f16 at `offset` of four blocks.
///
/// # Safety
/// Every block must have two bytes at `offset`.
#[inline]
#[target_feature(enable = "neon,dotprod")]
unsafe fn halves_at(blocks: &Four, offset: usize) -> float32x4_t {
    let mut halves = [0u16; ROWS];
    for row in 0..ROWS {
        // SAFETY: the caller's promise.
        halves[row] = unsafe { blocks[row].add(offset).cast::<u16>().read_unaligned() };
    }
    // SAFETY: it is half a register long.
    widen_halves(unsafe { vld1_u16(halves.as_ptr()) })
}

/// 16 activations of a panel.
#[inline]
#[target_feature(enable = "neon,dotprod")]
fn activations(panel: &Q8Panel, sub: usize) -> int8x16_t {
    let lanes = &panel.lanes.as_chunks::<16>().0[sub];
    // SAFETY: they are one register long.
    unsafe { vld1q_s8(lanes.as_ptr()) }
}

/// Stores the sums of the rows that exist.
#[inline]
#[target_feature(enable = "neon,dotprod")]
fn store_four(sums: float32x4_t, out: &mut [f32]) {
    let mut four = [0.0; ROWS];
    // SAFETY: it is one register long.
    unsafe { vst1q_f32(four.as_mut_ptr(), sums) };
    match out.first_chunk_mut() {
        Some(out) => *out = four,
        None => out.copy_from_slice(&four[..out.len()]),
    }
}

/// Lanes of four rows, unpacked so that lanes are rows: four consecutive weights of every row, 64 times.
#[repr(C, align(16))]
struct RowLanes([[i8; 16]; Q8Panel::LEN / 4]);

impl RowLanes {
    fn new() -> RowLanes {
        RowLanes([[0; 16]; Q8Panel::LEN / 4])
    }

    /// Sets lanes `32 · part` and those after them, two registers from each row.
    #[inline]
    #[target_feature(enable = "neon,dotprod")]
    fn set(&mut self, part: usize, rows: [[int8x16_t; 2]; ROWS]) {
        let to = self.0.as_chunks_mut::<8>().0[part].as_flattened_mut().as_chunks_mut::<64>().0;
        for half in 0..2 {
            let row = |row: usize| vreinterpretq_u32_s8(rows[row][half]);
            let groups = transpose([row(0), row(1), row(2), row(3)]);
            for (to, group) in to[half].as_chunks_mut::<16>().0.iter_mut().zip(groups) {
                // SAFETY: it is one register long.
                unsafe { vst1q_s8(to.as_mut_ptr(), vreinterpretq_s8_u32(group)) };
            }
        }
    }

    /// Adds the products of lanes `16 · sub` and those after them with `T` tokens.
    #[inline]
    #[target_feature(enable = "neon,dotprod")]
    fn multiply<const T: usize>(&self, sub: usize, x: &[&Q8Panel; T], dots: &mut [int32x4_t; T]) {
        let groups = &self.0.as_chunks::<4>().0[sub];
        // SAFETY: a group is one register long.
        let group = |i: usize| unsafe { vld1q_s8(groups[i].as_ptr()) };
        let (a, b, c, d) = (group(0), group(1), group(2), group(3));
        for t in 0..T {
            let x = activations(x[t], sub);
            dots[t] = dot_with_four::<0>(dots[t], a, x);
            dots[t] = dot_with_four::<1>(dots[t], b, x);
            dots[t] = dot_with_four::<2>(dots[t], c, x);
            dots[t] = dot_with_four::<3>(dots[t], d, x);
        }
    }
}

/// Which part of the product is at hand.
#[derive(Clone, Copy)]
struct At {
    first: usize,
    panel: usize,
    token: usize,
}

impl At {
    /// The sums of token `t` so far.
    #[inline]
    #[target_feature(enable = "neon,dotprod")]
    fn load(&self, out: &mut TileMut<'_, f32>, t: usize) -> float32x4_t {
        let out = &out.row(self.token + t)[self.first..];
        let mut four = [0.0; ROWS];
        if self.panel > 0 {
            match out.first_chunk() {
                Some(out) => four = *out,
                None => four[..out.len()].copy_from_slice(out),
            }
        }
        floats(&four)
    }

    /// Stores the sums of token `t` for the rows that exist.
    #[inline]
    #[target_feature(enable = "neon,dotprod")]
    fn store(&self, out: &mut TileMut<'_, f32>, t: usize, sums: float32x4_t) {
        store_four(sums, &mut out.row(self.token + t)[self.first..]);
    }
}

/// Panel `panel` of `T` tokens from `first` on.
#[inline(always)]
fn pick<const T: usize>(x: Rows<'_, Q8Panel>, first: usize, panel: usize) -> [&Q8Panel; T] {
    std::array::from_fn(|t| &x.row(first + t)[panel])
}

// ---------------------------------------------------------------------------------------------------
// Floats

/// A float as it is stored.
trait Cell {
    /// Four of them from element `index` on, widened.
    ///
    /// # Safety
    /// The elements must exist, and the processor must have the instructions of this module.
    unsafe fn four(first: *const u8, index: usize) -> float32x4_t;
}

impl Cell for f32 {
    #[inline]
    #[target_feature(enable = "neon,dotprod")]
    unsafe fn four(first: *const u8, index: usize) -> float32x4_t {
        // SAFETY: the caller's promise. Loads of bytes need no alignment.
        vreinterpretq_f32_u8(unsafe { vld1q_u8(first.add(4 * index)) })
    }
}

impl Cell for f16 {
    #[inline]
    #[target_feature(enable = "neon,dotprod")]
    unsafe fn four(first: *const u8, index: usize) -> float32x4_t {
        // SAFETY: the caller's promise.
        widen_halves(vreinterpret_u16_u8(unsafe { vld1_u8(first.add(2 * index)) }))
    }
}

impl Cell for bf16 {
    #[inline]
    #[target_feature(enable = "neon,dotprod")]
    unsafe fn four(first: *const u8, index: usize) -> float32x4_t {
        // SAFETY: the caller's promise.
        let words = vreinterpret_u16_u8(unsafe { vld1_u8(first.add(2 * index)) });
        vreinterpretq_f32_u32(vshll_n_u16::<16>(words))
    }
}

#[target_feature(enable = "neon,dotprod")]
fn matmul_floats<C: Cell>(w: MatRef<'_>, x: Rows<'_, f32>, out: &mut TileMut<'_, f32>) {
    assert_eq!((out.rows(), out.cols()), (x.len(), w.rows));
    assert_eq!(x.width(), w.cols);
    for row in (0..w.rows).step_by(2) {
        for token in (0..x.len()).step_by(2) {
            match (w.rows - row, x.len() - token) {
                (1, 1) => dot_tile::<C, 1, 1>(w, x, out, row, token),
                (1, _) => dot_tile::<C, 1, 2>(w, x, out, row, token),
                (_, 1) => dot_tile::<C, 2, 1>(w, x, out, row, token),
                _ => dot_tile::<C, 2, 2>(w, x, out, row, token),
            }
        }
    }
}

/// The products of `R` rows with `T` tokens, each with the sixteen accumulators of [`scalar::dot`] in four
/// registers.
#[inline]
#[target_feature(enable = "neon,dotprod")]
fn dot_tile<C: Cell, const R: usize, const T: usize>(
    w: MatRef<'_>,
    x: Rows<'_, f32>,
    out: &mut TileMut<'_, f32>,
    row: usize,
    token: usize,
) {
    let rows: [&[u8]; R] = std::array::from_fn(|r| w.row(row + r));
    let x: [&[f32]; T] = std::array::from_fn(|t| x.row(token + t));
    let mut acc = [[[vdupq_n_f32(0.0); 4]; T]; R];
    let whole = w.cols / 16 * 16;
    for col in (0..whole).step_by(16) {
        for quarter in 0..4 {
            let at = col + 4 * quarter;
            let mut weights = [vdupq_n_f32(0.0); R];
            for r in 0..R {
                // SAFETY: a row has as many elements as the matrix has columns.
                weights[r] = unsafe { C::four(rows[r].as_ptr(), at) };
            }
            for t in 0..T {
                // SAFETY: and so has a row of activations.
                let x = unsafe { vld1q_f32(x[t].as_ptr().add(at)) };
                for r in 0..R {
                    acc[r][t][quarter] = vfmaq_f32(acc[r][t][quarter], weights[r], x);
                }
            }
        }
    }
    let mut tail = [0.0; 16];
    let tail = &mut tail[..w.cols - whole];
    for r in 0..R {
        dequantise(w, row + r, whole, tail);
        for t in 0..T {
            let mut lanes = to_lanes(acc[r][t]);
            for ((lane, w), x) in lanes.iter_mut().zip(&*tail).zip(&x[t][whole..]) {
                *lane = w.mul_add(*x, *lane);
            }
            out.row(token + t)[row + r] = scalar::sum_lanes(&lanes);
        }
    }
}

/// Sixteen accumulators, for [`scalar::sum_lanes`].
#[inline]
#[target_feature(enable = "neon,dotprod")]
fn to_lanes(acc: [float32x4_t; 4]) -> [f32; 16] {
    let mut lanes = [0.0; 16];
    for (lanes, acc) in lanes.as_chunks_mut::<4>().0.iter_mut().zip(acc) {
        // SAFETY: it is one register long.
        unsafe { vst1q_f32(lanes.as_mut_ptr(), acc) };
    }
    lanes
}

// ---------------------------------------------------------------------------------------------------
// Attention

/// Up to [`HEAD_TILE`] heads attend to `count` keys.
///
/// # Safety
/// There must be `count` keys and values of type `C`.
#[target_feature(enable = "neon,dotprod")]
unsafe fn attend_heads<C: Cell>(
    step: &AttentionStep<'_>,
    keys: *const u8,
    values: *const u8,
    count: usize,
    running: &mut [RunningSoftmax],
    out: &mut [f32],
) {
    let mut scores = [[0.0f32; KEY_BLOCK]; HEAD_TILE];
    for first in (0..count).step_by(4) {
        // SAFETY: the caller's promise.
        unsafe { score_keys::<C>(step, keys, first..count.min(first + 4), &mut scores) };
    }
    for ((running, scores), out) in
        running.iter_mut().zip(&mut scores).zip(out.chunks_exact_mut(step.value_dim))
    {
        let correction = soften(running, scores, count);
        out.iter_mut().for_each(|out| *out *= correction);
    }
    let mut head = 0;
    while head < running.len() {
        let (scores, out) = (&scores[head..], &mut out[head * step.value_dim..]);
        // SAFETY: the caller's promise; as many heads as asked for are left.
        unsafe {
            head += match running.len() - head {
                8.. => add_values::<C, 8, 2>(step, values, count, scores, out),
                4.. => add_values::<C, 4, 4>(step, values, count, scores, out),
                2.. => add_values::<C, 2, 8>(step, values, count, scores, out),
                _ => add_values::<C, 1, 8>(step, values, count, scores, out),
            }
        }
    }
}

/// The scores of up to four keys for all heads.
///
/// # Safety
/// The keys must exist.
#[target_feature(enable = "neon,dotprod")]
unsafe fn score_keys<C: Cell>(
    step: &AttentionStep<'_>,
    keys: *const u8,
    range: std::ops::Range<usize>,
    scores: &mut [[f32; KEY_BLOCK]; HEAD_TILE],
) {
    let dim = step.head_dim;
    // All heads read the keys, so they are widened once: `[dim / 4][4 keys][4 channels]`.
    let mut wide = std::mem::MaybeUninit::<[float32x4_t; MAX_HEAD_DIM]>::uninit();
    let wide = wide.as_mut_ptr().cast::<float32x4_t>();
    for chunk in 0..dim / 4 {
        for i in 0..4 {
            // Where there are fewer keys, the last stands in and its score is dropped.
            let key = (range.start + i).min(range.end - 1);
            // SAFETY: the key exists; there are 4 registers for each chunk.
            unsafe { wide.add(chunk * 4 + i).write(C::four(keys, key * dim + chunk * 4)) };
        }
    }
    for (query, scores) in step.queries.chunks_exact(dim).zip(scores) {
        // Sixteen accumulators for each key, in four registers.
        let mut acc = [[vdupq_n_f32(0.0); 4]; 4];
        for chunk in (0..dim / 4).step_by(4) {
            for quarter in 0..4 {
                if chunk + quarter < dim / 4 {
                    // SAFETY: the query is as long as a key, and the keys were written above.
                    let (q, k) = unsafe {
                        let q = vld1q_f32(query.as_ptr().add((chunk + quarter) * 4));
                        (q, wide.add((chunk + quarter) * 4))
                    };
                    for i in 0..4 {
                        // SAFETY: as above.
                        acc[quarter][i] = vfmaq_f32(acc[quarter][i], q, unsafe { k.add(i).read() });
                    }
                }
            }
        }
        // The tree of `scalar::sum_lanes`, for four keys at once.
        let mut sums = [vdupq_n_u32(0); 4];
        for i in 0..4 {
            let four = vaddq_f32(vaddq_f32(acc[0][i], acc[2][i]), vaddq_f32(acc[1][i], acc[3][i]));
            sums[i] = vreinterpretq_u32_f32(four);
        }
        let [a, b, c, d] = transpose(sums);
        let add = |a, b| vaddq_f32(vreinterpretq_f32_u32(a), vreinterpretq_f32_u32(b));
        let sums = vmulq_n_f32(vaddq_f32(add(a, c), add(b, d)), step.scale);
        // `range` starts at a multiple of four, so a block of scores has room for four.
        let scores = &mut scores[range.start..][..4];
        // SAFETY: it is one register long.
        unsafe { vst1q_f32(scores.as_mut_ptr(), sums) };
    }
}

/// Turns a head's `count` scores into weights; returns the factor that corrects what was summed up before.
#[target_feature(enable = "neon,dotprod")]
fn soften(running: &mut RunningSoftmax, scores: &mut [f32; KEY_BLOCK], count: usize) -> f32 {
    let max = scores[..count].iter().fold(running.max, |max, &score| max.max(score));
    let mut acc = [vdupq_n_f32(0.0); 4];
    for (i, scores) in scores.as_chunks_mut::<4>().0[..count.div_ceil(4)].iter_mut().enumerate() {
        let weights = exp(vsubq_f32(floats(scores), vdupq_n_f32(max)));
        // Past the end the weights are zeros, which leave the sums, never negative, as they are.
        let weights = vandq_u32(vreinterpretq_u32_f32(weights), tail_mask(count - 4 * i));
        let weights = vreinterpretq_f32_u32(weights);
        // SAFETY: the chunk is one register long.
        unsafe { vst1q_f32(scores.as_mut_ptr(), weights) };
        acc[i % 4] = vaddq_f32(acc[i % 4], weights);
    }
    let correction = math::exp(running.max - max);
    *running =
        RunningSoftmax { max, sum: running.sum.mul_add(correction, scalar::sum_lanes(&to_lanes(acc))) };
    correction
}

/// Adds the weighted values to the outputs of `H` heads, `N` chunks of four channels at a time; returns `H`.
///
/// # Safety
/// There must be `count` values as `step` says, their channels a multiple of four, and scores and outputs for `H` heads.
#[inline]
#[target_feature(enable = "neon,dotprod")]
unsafe fn add_values<C: Cell, const H: usize, const N: usize>(
    step: &AttentionStep<'_>,
    values: *const u8,
    count: usize,
    scores: &[[f32; KEY_BLOCK]],
    out: &mut [f32],
) -> usize {
    let dim = step.value_dim;
    let scores = scores.first_chunk::<H>().expect("scores for all heads");
    let out = out[..H * dim].as_mut_ptr();
    let mut first = 0;
    while first + 4 * N <= dim {
        // SAFETY: that many channels are left, by the condition above.
        unsafe { add_channels::<C, H, N>(step, first, values, count, scores, out) };
        first += 4 * N;
    }
    while first < dim {
        // SAFETY: the channels are a multiple of four.
        unsafe { add_channels::<C, H, 1>(step, first, values, count, scores, out) };
        first += 4;
    }
    H
}

/// [`add_values`] for the channels from `first` on.
///
/// # Safety
/// As there, and `4 · N` channels must be left.
#[inline]
#[target_feature(enable = "neon,dotprod")]
unsafe fn add_channels<C: Cell, const H: usize, const N: usize>(
    step: &AttentionStep<'_>,
    first: usize,
    values: *const u8,
    count: usize,
    scores: &[[f32; KEY_BLOCK]; H],
    out: *mut f32,
) {
    let dim = step.value_dim;
    let mut acc = [[vdupq_n_f32(0.0); N]; H];
    for h in 0..H {
        for c in 0..N {
            // SAFETY: the caller's promise.
            acc[h][c] = unsafe { vld1q_f32(out.add(h * dim + first + c * 4)) };
        }
    }
    for key in 0..count {
        for c in 0..N {
            // SAFETY: the caller's promise.
            let v = unsafe { C::four(values, key * step.value_stride + first + c * 4) };
            for h in 0..H {
                acc[h][c] = vfmaq_n_f32(acc[h][c], v, scores[h][key]);
            }
        }
    }
    for h in 0..H {
        for c in 0..N {
            // SAFETY: the caller's promise.
            unsafe { vst1q_f32(out.add(h * dim + first + c * 4), acc[h][c]) };
        }
    }
}

/// A mask of the first `len` of four lanes.
#[inline]
#[target_feature(enable = "neon,dotprod")]
fn tail_mask(len: usize) -> uint32x4_t {
    // SAFETY: the lanes are one register long.
    let lanes = unsafe { vld1q_u32([0, 1, 2, 3].as_ptr()) };
    vcgtq_u32(vdupq_n_u32(len.min(4) as u32), lanes)
}

/// As [`math::exp`], four at a time.
#[inline]
#[target_feature(enable = "neon,dotprod")]
fn exp(x: float32x4_t) -> float32x4_t {
    let constant = |c: f32| vdupq_n_f32(c);
    let n = vrndnq_f32(vmulq_f32(x, constant(std::f32::consts::LOG2_E)));
    let r = vfmaq_f32(x, n, constant(-math::LN2_HIGH));
    let r = vfmaq_f32(r, n, constant(-math::LN2_LOW));
    let mut p = constant(math::EXP_POLYNOMIAL[0]);
    for c in &math::EXP_POLYNOMIAL[1..] {
        p = vfmaq_f32(constant(*c), p, r);
    }
    let n = vcvtq_s32_f32(n);
    let half = vshrq_n_s32::<1>(n);
    let power = |n| vreinterpretq_f32_s32(vshlq_n_s32::<23>(vaddq_s32(n, vdupq_n_s32(127))));
    let y = vmulq_f32(vmulq_f32(p, power(half)), power(vsubq_s32(n, half)));
    let (low, high) = (vcltq_f32(x, constant(math::EXP_LOWEST)), vcgtq_f32(x, constant(math::EXP_HIGHEST)));
    vbslq_f32(high, constant(f32::INFINITY), vbslq_f32(low, constant(0.0), y))
}
