//! The kernels for 64-bit ARM CPUs whose NEON has dot products of bytes (`dotprod`).
//!
//! Products have two arrangements. For one token, lanes run along the row, four rows at a time, reduced across rows by
//! pairwise additions. For several tokens, four rows are unpacked so that lanes are rows, and four bytes of a token are
//! multiplied with all of them. Within a block all arithmetic is integer and exact. Both arrangements then do the same
//! float operations in block order, so both give the bits of [`scalar`].
//!
//! A dot product is `sdot`: signed bytes times signed bytes, added in fours to 32 bits. So lanes are those that
//! [`quant`](crate::quant) defines. The intrinsics of `sdot` and of half floats are not stable, so these instructions
//! are written in assembly.
//!
//! Attention and products with floats are those of [`generic`](crate::generic), over a register of four floats. Kernels
//! that are not worth writing by hand are the scalar ones. Closures with these instructions are called only from here:
//! a library function such as `array::from_fn` is compiled without them.

// Loops over registers use indices, so that they are unrolled.
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
use crate::generic::{Vector, attention, operations, products};
use crate::quant::planes::dequantise;
use crate::quant::with_quant;
use crate::scalar::{self, AttentionStep, LANES, RunningSoftmax};
use crate::tensor::{MatRef, Q8Panel, Rows, TileMut};

/// Rows that are computed together: the number of 32-bit lanes of a register.
const ROWS: usize = 4;

/// Tokens whose activations stay in the second-level cache while all rows of a matrix are processed.
const TOKEN_CHUNK: usize = 128;

/// Whether this CPU has all instructions of this module.
pub fn available() -> bool {
    is_aarch64_feature_detected!("neon") && is_aarch64_feature_detected!("dotprod")
}

/// As [`scalar::matmul_f32`].
#[target_feature(enable = "neon,dotprod")]
pub fn matmul_f32(w: MatRef<'_>, x: Rows<'_, f32>, out: &mut TileMut<'_, f32>) {
    // SAFETY: a CPU that runs this function has its instructions.
    unsafe {
        match w.encoding {
            Encoding::Blocks(DType::F32) => products::matmul_floats::<float32x4_t, f32>(w, x, out, |_| ()),
            Encoding::Blocks(DType::F16) => products::matmul_floats::<float32x4_t, f16>(w, x, out, |_| ()),
            Encoding::Blocks(DType::BF16) => products::matmul_floats::<float32x4_t, bf16>(w, x, out, |_| ()),
            _ => products::matmul_widened::<float32x4_t>(w, x, out, |row, col, out| widen(&w, row, col, out)),
        }
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
    scalar::matmul_transposed_by(w, x, out, |w, row, col, out| widen(&w, row, col, out));
}

/// As [`scalar::attend`].
#[target_feature(enable = "neon,dotprod")]
pub fn attend(step: &AttentionStep<'_>, running: &mut [RunningSoftmax], out: &mut [f32]) {
    if !attention::fits::<float32x4_t>(step) {
        return scalar::attend(step, running, out);
    }
    // SAFETY: a CPU that runs this function has its instructions.
    unsafe { attention::attend::<float32x4_t>(step, running, out) }
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

/// Adds to each of four sums the products of four bytes with the four of `b` that `FOUR` selects.
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

/// The sums of four vectors, one per lane.
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

/// Addresses in four rows. Missing rows are replaced by the last one, whose result is dropped.
type Four = [*const u8; ROWS];

/// Four rows from `first` on.
#[inline(always)]
fn four_rows(w: MatRef<'_>, first: usize) -> Four {
    let row = |i: usize| w.row((first + i).min(w.rows - 1)).as_ptr();
    [row(0), row(1), row(2), row(3)]
}

/// The addresses at byte `at` of four rows.
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

    /// Sets 32 lanes from lane `32 · part` on, two registers per row.
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

    /// Adds the products of the 16 lanes from `16 · sub` on with `T` tokens.
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

/// The position within the product.
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

/// A piece of a row, from column `col` on, as floats.
#[inline]
#[target_feature(enable = "neon,dotprod")]
fn widen(w: &MatRef<'_>, row: usize, col: usize, out: &mut [f32]) {
    match w.encoding {
        Encoding::Blocks(DType::F16) => {
            let halves = &w.row(row)[2 * col..2 * (col + out.len())];
            // SAFETY: a CPU that runs this function has its instructions.
            unsafe { products::widen_cells::<float32x4_t, f16>(halves, out) }
        }
        _ => dequantise(*w, row, col, out),
    }
}

impl Vector for float32x4_t {
    const LANES: usize = 4;
    const SUMS: usize = 16;

    operations! {
        add(self, y) => vaddq_f32(self, y);
        sub(self, y) => vsubq_f32(self, y);
        mul(self, y) => vmulq_f32(self, y);
        mul_add(self, y, z) => vfmaq_f32(z, self, y);
        round(self) => vrndnq_f32(self);
        scale_by_power(self, n) => scale_by_power(self, n);
        select_less(self, y, yes, no) => vbslq_f32(vcltq_f32(self, y), yes, no);
    }

    #[inline]
    #[target_feature(enable = "neon,dotprod")]
    unsafe fn splat(value: f32) -> float32x4_t {
        vdupq_n_f32(value)
    }

    #[inline]
    #[target_feature(enable = "neon,dotprod")]
    unsafe fn load(from: *const f32) -> float32x4_t {
        // SAFETY: the caller's promise. Loads of bytes need no alignment.
        vreinterpretq_f32_u8(unsafe { vld1q_u8(from.cast()) })
    }

    #[inline]
    #[target_feature(enable = "neon,dotprod")]
    unsafe fn load_f16(from: *const f16) -> float32x4_t {
        // SAFETY: the caller's promise.
        widen_halves(vreinterpret_u16_u8(unsafe { vld1_u8(from.cast()) }))
    }

    #[inline]
    #[target_feature(enable = "neon,dotprod")]
    unsafe fn load_bf16(from: *const bf16) -> float32x4_t {
        // SAFETY: the caller's promise.
        let words = vreinterpret_u16_u8(unsafe { vld1_u8(from.cast()) });
        vreinterpretq_f32_u32(vshll_n_u16::<16>(words))
    }

    #[inline]
    #[target_feature(enable = "neon,dotprod")]
    unsafe fn store(self, to: *mut f32) {
        // SAFETY: the caller's promise.
        unsafe { vst1q_u8(to.cast(), vreinterpretq_u8_f32(self)) }
    }

    #[inline(always)]
    fn sum_across(v: &[float32x4_t; LANES]) -> float32x4_t {
        // SAFETY: a register exists only where the processor has its instructions.
        unsafe { sum_across_f32(v.first_chunk().expect("four vectors")) }
    }
}

/// As [`sum_across`]. Lanes are added in the order of [`scalar::sum_lanes`].
#[inline]
#[target_feature(enable = "neon,dotprod")]
fn sum_across_f32(v: &[float32x4_t; 4]) -> float32x4_t {
    let bits = |i: usize| vreinterpretq_u32_f32(v[i]);
    let [a, b, c, d] = transpose([bits(0), bits(1), bits(2), bits(3)]);
    let add = |a, b| vaddq_f32(vreinterpretq_f32_u32(a), vreinterpretq_f32_u32(b));
    vaddq_f32(add(a, c), add(b, d))
}

/// As [`Vector::scale_by_power`].
#[inline]
#[target_feature(enable = "neon,dotprod")]
fn scale_by_power(x: float32x4_t, n: float32x4_t) -> float32x4_t {
    let n = vcvtq_s32_f32(n);
    let half = vshrq_n_s32::<1>(n);
    let power = |n| vreinterpretq_f32_s32(vshlq_n_s32::<23>(vaddq_s32(n, vdupq_n_s32(127))));
    vmulq_f32(vmulq_f32(x, power(half)), power(vsubq_s32(n, half)))
}
