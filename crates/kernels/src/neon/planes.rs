//! Products with matrices in planes: affine codes of all widths, and MXFP4.
//!
//! An encoding unpacks 32 lanes at a time to signed bytes in the order of the row ([`GroupLanes`]). All encodings share
//! the products. Codes of eight bits have an offset of −128, and the sum of the activations times 128 is added to the
//! product, which is exact.

use super::*;
use crate::encoding::{Affine, MXFP4_GROUP};
use crate::quant::fp4::{E2M1, half_of_power};
use crate::quant::planes::float_at;

/// An encoding whose lanes are unpacked 32 at a time.
trait GroupLanes {
    /// Bytes of 32 codes.
    const BYTES: usize;
    /// The number to add to a lane.
    const OFFSET: i32;
    /// Whether there are biases.
    const BIASES: bool;

    /// The 32 lanes of the codes at `codes`.
    ///
    /// # Safety
    /// There must be [`BYTES`](Self::BYTES) bytes, and the processor must have the instructions of this module.
    unsafe fn lanes(codes: *const u8) -> [int8x16_t; 2];
}

/// Codes of `BITS` bits.
struct Codes<const BITS: usize>;

impl<const BITS: usize> Codes<BITS> {
    /// The two bytes that hold each of sixteen codes: a code ends at the latest in the byte after the one in which it
    /// starts. A byte beyond the end of the codes is zero.
    const WINDOWS: [[u8; 16]; 2] = {
        let mut out = [[0; 16]; 2];
        let mut i = 0;
        while i < 16 {
            out[i / 8][i % 8 * 2] = (i * BITS / 8) as u8;
            out[i / 8][i % 8 * 2 + 1] = (i * BITS / 8) as u8 + 1;
            i += 1;
        }
        out
    };

    /// Shifts each of eight codes to the bottom of its two bytes. Negative numbers shift right.
    const SHIFTS: [i16; 8] = {
        let mut out = [0; 8];
        let mut i = 0;
        while i < 8 {
            out[i] = -((i * BITS % 8) as i16);
            i += 1;
        }
        out
    };

    /// Sixteen codes.
    ///
    /// # Safety
    /// There must be `2 · BITS` bytes.
    #[inline]
    #[target_feature(enable = "neon,dotprod")]
    unsafe fn sixteen(codes: *const u8) -> uint8x16_t {
        let mut bytes = [0u8; 16];
        // SAFETY: the caller's promise; all else is one register long.
        unsafe {
            codes.copy_to_nonoverlapping(bytes.as_mut_ptr(), 2 * BITS);
            let bytes = vld1q_u8(bytes.as_ptr());
            let words = |half: usize| {
                let words = vqtbl1q_u8(bytes, vld1q_u8(Self::WINDOWS[half].as_ptr()));
                let moved = vshlq_u16(vreinterpretq_u16_u8(words), vld1q_s16(Self::SHIFTS.as_ptr()));
                vmovn_u16(vandq_u16(moved, vdupq_n_u16((1 << BITS) - 1)))
            };
            vcombine_u8(words(0), words(1))
        }
    }
}

impl<const BITS: usize> GroupLanes for Codes<BITS> {
    const BYTES: usize = 4 * BITS;
    const OFFSET: i32 = if BITS == 8 { 128 } else { 0 };
    const BIASES: bool = true;

    #[inline]
    #[target_feature(enable = "neon,dotprod")]
    unsafe fn lanes(codes: *const u8) -> [int8x16_t; 2] {
        // SAFETY: all loads end with the `4 · BITS` bytes that the caller promises.
        unsafe {
            match BITS {
                8 => {
                    let lower = |at: usize| veorq_u8(vld1q_u8(codes.add(at)), vdupq_n_u8(0x80));
                    [vreinterpretq_s8_u8(lower(0)), vreinterpretq_s8_u8(lower(16))]
                }
                4 => {
                    let bytes = vld1q_u8(codes);
                    let (low, high) = (vandq_u8(bytes, vdupq_n_u8(15)), vshrq_n_u8::<4>(bytes));
                    [vreinterpretq_s8_u8(vzip1q_u8(low, high)), vreinterpretq_s8_u8(vzip2q_u8(low, high))]
                }
                _ => [
                    vreinterpretq_s8_u8(Self::sixteen(codes)),
                    vreinterpretq_s8_u8(Self::sixteen(codes.add(2 * BITS))),
                ],
            }
        }
    }
}

/// FP4 numbers, doubled.
struct Fp4;

impl GroupLanes for Fp4 {
    const BYTES: usize = 16;
    const OFFSET: i32 = 0;
    const BIASES: bool = false;

    #[inline]
    #[target_feature(enable = "neon,dotprod")]
    unsafe fn lanes(codes: *const u8) -> [int8x16_t; 2] {
        // SAFETY: the caller's promise; the table is one register long.
        let ([low, high], table) = unsafe { (Codes::<4>::lanes(codes), vld1q_s8(E2M1.as_ptr())) };
        let look_up = |numbers| vqtbl1q_s8(table, vreinterpretq_u8_s8(numbers));
        [look_up(low), look_up(high)]
    }
}

/// As [`scalar::matmul_q8`], for matrices in planes.
#[target_feature(enable = "neon,dotprod")]
pub(super) fn matmul_q8(w: MatRef<'_>, x: Rows<'_, Q8Panel>, out: &mut TileMut<'_, f32>) {
    match w.encoding {
        Encoding::Affine(Affine { bits: 2, group, .. }) => matmul::<Codes<2>>(w, group, x, out),
        Encoding::Affine(Affine { bits: 3, group, .. }) => matmul::<Codes<3>>(w, group, x, out),
        Encoding::Affine(Affine { bits: 4, group, .. }) => matmul::<Codes<4>>(w, group, x, out),
        Encoding::Affine(Affine { bits: 5, group, .. }) => matmul::<Codes<5>>(w, group, x, out),
        Encoding::Affine(Affine { bits: 6, group, .. }) => matmul::<Codes<6>>(w, group, x, out),
        Encoding::Affine(Affine { bits: 8, group, .. }) => matmul::<Codes<8>>(w, group, x, out),
        Encoding::Mxfp4 => matmul::<Fp4>(w, MXFP4_GROUP, x, out),
        other => panic!("{other} is not in groups"),
    }
}

#[target_feature(enable = "neon,dotprod")]
fn matmul<L: GroupLanes>(w: MatRef<'_>, group: usize, x: Rows<'_, Q8Panel>, out: &mut TileMut<'_, f32>) {
    if x.len() == 1 {
        one_token::<L>(w, group, x.row(0), out.row(0));
    } else {
        many_tokens::<L>(w, group, x, out);
    }
}

/// The scales or biases of four rows.
struct Floats<'a> {
    rows: [&'a [u8]; ROWS],
    dtype: DType,
}

impl<'a> Floats<'a> {
    fn new(w: MatRef<'a>, first: usize, plane: impl Fn(usize) -> &'a [u8]) -> Floats<'a> {
        let row = |i: usize| plane((first + i).min(w.rows - 1));
        let dtype = match w.encoding {
            Encoding::Affine(affine) => affine.scales,
            _ => DType::F8_E8M0,
        };
        Floats { rows: [row(0), row(1), row(2), row(3)], dtype }
    }

    fn scales(w: MatRef<'a>, first: usize) -> Floats<'a> {
        Floats::new(w, first, |row| w.scales(row))
    }

    fn biases(w: MatRef<'a>, first: usize) -> Floats<'a> {
        Floats::new(w, first, |row| w.biases(row))
    }

    /// The floats of group `index`.
    #[inline(always)]
    fn get(&self, index: usize) -> [f32; ROWS] {
        let mut four = [0.0; ROWS];
        for (four, row) in four.iter_mut().zip(self.rows) {
            *four = match self.dtype {
                // Lanes are doubled.
                DType::F8_E8M0 => half_of_power(row[index]),
                dtype => float_at(dtype, row, index),
            };
        }
        four
    }
}

#[target_feature(enable = "neon,dotprod")]
fn one_token<L: GroupLanes>(w: MatRef<'_>, group: usize, x: &[Q8Panel], out: &mut [f32]) {
    let parts = group / 32;
    for first in (0..w.rows).step_by(ROWS) {
        let rows = four_rows(w, first);
        let (scales, biases) = (Floats::scales(w, first), Floats::biases(w, first));
        let mut acc = vdupq_n_f32(0.0);
        for g in 0..w.cols / group {
            let (panel, lane) = (&x[g * group / Q8Panel::LEN], g * group % Q8Panel::LEN);
            let mut sums = [vdupq_n_s32(0); ROWS];
            for part in 0..parts {
                let sub = lane / 16 + 2 * part;
                let (x, y) = (activations(panel, sub), activations(panel, sub + 1));
                for row in 0..ROWS {
                    // SAFETY: a row has the codes of all its groups.
                    let [a, b] = unsafe { L::lanes(rows[row].add((g * parts + part) * L::BYTES)) };
                    sums[row] = dot(dot(sums[row], a, x), b, y);
                }
            }
            let sum = panel.sum_of(lane, group);
            let products = vaddq_s32(sum_across(&sums), vdupq_n_s32(L::OFFSET * sum));
            let scale = panel.scales[lane / 32];
            let d = vmulq_n_f32(floats(&scales.get(g)), scale);
            acc = vfmaq_f32(acc, d, vcvtq_f32_s32(products));
            if L::BIASES {
                acc = vfmaq_n_f32(acc, vmulq_n_f32(floats(&biases.get(g)), scale), sum as f32);
            }
        }
        store_four(acc, &mut out[first..]);
    }
}

/// Four rows of the groups that share a panel of activations, unpacked so that lanes are rows.
struct GroupPanel {
    lanes: RowLanes,
    /// The scales of every row, by group.
    scales: [[f32; ROWS]; Q8Panel::LEN / 32],
    /// The biases of every row, by group, if there are any.
    biases: [[f32; ROWS]; Q8Panel::LEN / 32],
}

#[target_feature(enable = "neon,dotprod")]
fn many_tokens<L: GroupLanes>(w: MatRef<'_>, group: usize, x: Rows<'_, Q8Panel>, out: &mut TileMut<'_, f32>) {
    let mut weights =
        GroupPanel { lanes: RowLanes::new(), scales: [[0.0; ROWS]; 8], biases: [[0.0; ROWS]; 8] };
    for chunk in (0..x.len()).step_by(TOKEN_CHUNK) {
        let tokens = chunk..x.len().min(chunk + TOKEN_CHUNK);
        for first in (0..w.rows).step_by(ROWS) {
            let rows = four_rows(w, first);
            let (scales, biases) = (Floats::scales(w, first), Floats::biases(w, first));
            for panel in 0..x.width() {
                let lanes = Q8Panel::LEN.min(w.cols - panel * Q8Panel::LEN);
                for part in 0..lanes / 32 {
                    let places = four_places(&rows, (panel * (Q8Panel::LEN / 32) + part) * L::BYTES);
                    // SAFETY: a row has the codes of all its lanes.
                    let row = |row: usize| unsafe { L::lanes(places[row]) };
                    weights.lanes.set(part, [row(0), row(1), row(2), row(3)]);
                }
                for g in 0..lanes / group {
                    let index = panel * (Q8Panel::LEN / group) + g;
                    weights.scales[g] = scales.get(index);
                    if L::BIASES {
                        weights.biases[g] = biases.get(index);
                    }
                }
                let mut t = tokens.start;
                while t < tokens.end {
                    let at = At { first, panel, token: t };
                    match tokens.end - t {
                        8.. => t += multiply::<L, 8>(&weights, group, lanes / group, x, out, at),
                        4.. => t += multiply::<L, 4>(&weights, group, lanes / group, x, out, at),
                        2.. => t += multiply::<L, 2>(&weights, group, lanes / group, x, out, at),
                        _ => t += multiply::<L, 1>(&weights, group, lanes / group, x, out, at),
                    }
                }
            }
        }
    }
}

/// Adds the products of `count` groups with `T` tokens to the output; returns `T`.
#[inline]
#[target_feature(enable = "neon,dotprod")]
fn multiply<L: GroupLanes, const T: usize>(
    weights: &GroupPanel,
    group: usize,
    count: usize,
    x: Rows<'_, Q8Panel>,
    out: &mut TileMut<'_, f32>,
    at: At,
) -> usize {
    let x: [&Q8Panel; T] = pick(x, at.token, at.panel);
    let mut acc = [vdupq_n_f32(0.0); T];
    for t in 0..T {
        acc[t] = at.load(out, t);
    }
    for g in 0..count {
        let mut dots = [vdupq_n_s32(0); T];
        for sub in g * group / 16..(g + 1) * group / 16 {
            weights.lanes.multiply(sub, &x, &mut dots);
        }
        let (scales, biases) = (floats(&weights.scales[g]), floats(&weights.biases[g]));
        for t in 0..T {
            let sum = x[t].sum_of(g * group, group);
            let scale = x[t].scales[g * group / 32];
            let products = vaddq_s32(dots[t], vdupq_n_s32(L::OFFSET * sum));
            acc[t] = vfmaq_f32(acc[t], vmulq_n_f32(scales, scale), vcvtq_f32_s32(products));
            if L::BIASES {
                acc[t] = vfmaq_n_f32(acc[t], vmulq_n_f32(biases, scale), sum as f32);
            }
        }
    }
    for t in 0..T {
        at.store(out, t, acc[t]);
    }
    T
}
