//! Products of all block types, from the lanes that [`lanes`](super::lanes) unpacks.

use super::lanes::Lanes;
use super::*;
use crate::quant::{MAX_FLOATS, SUB};

/// As [`scalar::matmul_q8`].
#[target_feature(enable = "neon,dotprod")]
pub(super) fn matmul<Q: Lanes>(w: MatRef<'_>, x: Rows<'_, Q8Panel>, out: &mut TileMut<'_, f32>) {
    if x.len() == 1 { one_token::<Q>(w, x.row(0), out.row(0)) } else { many_tokens::<Q>(w, x, out) }
}

/// The sixteen scales of a block, widened to the type of the sums.
#[inline]
#[target_feature(enable = "neon,dotprod")]
fn wide(words: [int16x8_t; 2]) -> [i32; 16] {
    let mut wide = [0; 16];
    let quarters = wide.as_chunks_mut::<4>().0;
    for half in 0..2 {
        // SAFETY: a quarter is one register long.
        unsafe {
            vst1q_s32(quarters[2 * half].as_mut_ptr(), vmovl_s16(vget_low_s16(words[half])));
            vst1q_s32(quarters[2 * half + 1].as_mut_ptr(), vmovl_high_s16(words[half]));
        }
    }
    wide
}

// ---------------------------------------------------------------------------------------------------
// One token

#[target_feature(enable = "neon,dotprod")]
fn one_token<Q: Lanes>(w: MatRef<'_>, x: &[Q8Panel], out: &mut [f32]) {
    let bytes = Q::DTYPE.block_bytes();
    let zero = vdupq_n_s32(0);
    for first in (0..w.rows).step_by(ROWS) {
        let rows = four_rows(w, first);
        let mut acc = vdupq_n_f32(0.0);
        for block in 0..w.cols / Q::BLOCK {
            let blocks = four_places(&rows, block * bytes);
            let (panel, lane) = (&x[block * Q::BLOCK / Q8Panel::LEN], block * Q::BLOCK % Q8Panel::LEN);
            let mut products = [[zero; ROWS]; MAX_FLOATS];
            let mut mins = [zero; ROWS];
            for row in 0..ROWS {
                // SAFETY: the blocks are in the matrix.
                let sums = unsafe { products_with_row::<Q>(blocks[row], panel, lane) };
                for float in 0..Q::FLOATS {
                    products[float][row] = sums[float];
                }
                if Q::HAS_MINS && Q::SCALE_LANES.is_some() {
                    // SAFETY: as above.
                    mins[row] = unsafe { minima_with_row::<Q>(blocks[row], panel) };
                }
            }
            let share = Q::BLOCK / Q::FLOATS;
            for float in 0..Q::FLOATS {
                let scale = panel.scales[(lane + float * share) / 32];
                // SAFETY: as above.
                let d = vmulq_n_f32(unsafe { Q::d(&blocks, float) }, scale);
                acc = vfmaq_f32(acc, d, vcvtq_f32_s32(sum_across(&products[float])));
                if Q::HAS_MINS {
                    let mins = if Q::SCALE_LANES.is_some() {
                        sum_across(&mins)
                    } else {
                        vdupq_n_s32(panel.sum_of(lane, share))
                    };
                    // SAFETY: as above.
                    let dmin = vmulq_n_f32(unsafe { Q::dmin(&blocks) }, scale);
                    acc = vfmsq_f32(acc, dmin, vcvtq_f32_s32(mins));
                }
            }
        }
        store_four(acc, &mut out[first..]);
    }
}

/// `Σ scale · lane · activation` of a block, in four sums for each of its floats.
///
/// # Safety
/// The block must be of `Q`.
#[inline]
#[target_feature(enable = "neon,dotprod")]
unsafe fn products_with_row<Q: Lanes>(
    block: *const u8,
    panel: &Q8Panel,
    lane: usize,
) -> [int32x4_t; MAX_FLOATS] {
    let zero = vdupq_n_s32(0);
    let mut sums = [zero; MAX_FLOATS];
    // SAFETY: the caller's promise.
    let scales = if Q::SCALE_LANES.is_some() { wide(unsafe { Q::scales(block) }) } else { [1; 16] };
    for part in 0..Q::BLOCK / 32 {
        // SAFETY: the caller's promise.
        let [a, b] = unsafe { Q::part(block, part) };
        let (low, high) = (2 * part, 2 * part + 1);
        let (x, y) = (activations(panel, lane / SUB + low), activations(panel, lane / SUB + high));
        match (Q::SCALE_LANES, Q::BLOCK / Q::FLOATS) {
            (None, SUB) => {
                sums[low] = dot(zero, a, x);
                sums[high] = dot(zero, b, y);
            }
            (None, _) => sums[0] = dot(dot(sums[0], a, x), b, y),
            (Some(32), _) => {
                sums[0] = vmlaq_s32(sums[0], dot(dot(zero, a, x), b, y), vdupq_n_s32(scales[low]));
            }
            (Some(_), _) => {
                sums[0] = vmlaq_s32(sums[0], dot(zero, a, x), vdupq_n_s32(scales[low]));
                sums[0] = vmlaq_s32(sums[0], dot(zero, b, y), vdupq_n_s32(scales[high]));
            }
        }
    }
    sums
}

/// `Σ minimum · sum(activations)` of a block that fills a panel, in four sums.
///
/// # Safety
/// The block must be of `Q`.
#[inline]
#[target_feature(enable = "neon,dotprod")]
unsafe fn minima_with_row<Q: Lanes>(block: *const u8, panel: &Q8Panel) -> int32x4_t {
    // SAFETY: the caller's promise; a panel has two registers of sums.
    let ([a, b], x, y) = unsafe {
        let sums = panel.sums.as_ptr();
        (Q::mins(block), vld1q_s16(sums), vld1q_s16(sums.add(8)))
    };
    let low = vmlal_high_s16(vmull_s16(vget_low_s16(a), vget_low_s16(x)), a, x);
    vmlal_high_s16(vmlal_s16(low, vget_low_s16(b), vget_low_s16(y)), b, y)
}

// ---------------------------------------------------------------------------------------------------
// Several tokens

/// Four rows of the blocks that share a panel of activations, unpacked so that lanes are rows.
struct RowPanel {
    lanes: RowLanes,
    /// The integer scales of every row, if there are any.
    scales: [[i32; ROWS]; Q8Panel::LEN / SUB],
    /// The integer minima of every row, if there are any.
    mins: [[i32; ROWS]; Q8Panel::LEN / SUB],
    /// The floats of every row.
    d: [[f32; ROWS]; Q8Panel::LEN / SUB],
    /// The scales of every row's minima.
    dmin: [[f32; ROWS]; Q8Panel::LEN / 32],
}

#[target_feature(enable = "neon,dotprod")]
fn many_tokens<Q: Lanes>(w: MatRef<'_>, x: Rows<'_, Q8Panel>, out: &mut TileMut<'_, f32>) {
    let bytes = Q::DTYPE.block_bytes();
    let in_panel = Q8Panel::LEN / Q::BLOCK;
    let mut panel = RowPanel {
        lanes: RowLanes::new(),
        scales: [[0; ROWS]; 16],
        mins: [[0; ROWS]; 16],
        d: [[0.0; ROWS]; 16],
        dmin: [[0.0; ROWS]; 8],
    };
    for chunk in (0..x.len()).step_by(TOKEN_CHUNK) {
        let tokens = chunk..x.len().min(chunk + TOKEN_CHUNK);
        for first in (0..w.rows).step_by(ROWS) {
            let rows = four_rows(w, first);
            for p in 0..x.width() {
                let count = in_panel.min(w.cols / Q::BLOCK - p * in_panel);
                // SAFETY: a row has that many blocks.
                unsafe { unpack::<Q>(&four_places(&rows, p * in_panel * bytes), count, &mut panel) };
                let mut t = tokens.start;
                while t < tokens.end {
                    let at = At { first, panel: p, token: t };
                    match tokens.end - t {
                        8.. => t += multiply::<Q, 8>(&panel, count, x, out, at),
                        4.. => t += multiply::<Q, 4>(&panel, count, x, out, at),
                        2.. => t += multiply::<Q, 2>(&panel, count, x, out, at),
                        _ => t += multiply::<Q, 1>(&panel, count, x, out, at),
                    }
                }
            }
        }
    }
}

/// Unpacks `count` blocks of four rows.
///
/// # Safety
/// There must be this many blocks of `Q` at each address.
#[target_feature(enable = "neon,dotprod")]
unsafe fn unpack<Q: Lanes>(rows: &Four, count: usize, panel: &mut RowPanel) {
    for block in 0..count {
        let blocks = four_places(rows, block * Q::DTYPE.block_bytes());
        // SAFETY: the blocks are where the caller says, and floats of four rows are one register long.
        unsafe {
            for part in 0..Q::BLOCK / 32 {
                let row = |row: usize| Q::part(blocks[row], part);
                panel.lanes.set(block * Q::BLOCK / 32 + part, [row(0), row(1), row(2), row(3)]);
            }
            for float in 0..Q::FLOATS {
                vst1q_f32(panel.d[block * Q::FLOATS + float].as_mut_ptr(), Q::d(&blocks, float));
            }
            if Q::HAS_MINS {
                vst1q_f32(panel.dmin[block].as_mut_ptr(), Q::dmin(&blocks));
            }
        }
    }
    if Q::SCALE_LANES.is_some() {
        // Types with integer scales have one block per panel.
        for row in 0..ROWS {
            // SAFETY: as above.
            let scales = wide(unsafe { Q::scales(rows[row]) });
            for (to, scale) in panel.scales.iter_mut().zip(scales) {
                to[row] = scale;
            }
            if Q::HAS_MINS {
                // SAFETY: as above.
                let mins = wide(unsafe { Q::mins(rows[row]) });
                for (to, min) in panel.mins.iter_mut().zip(mins) {
                    to[row] = min;
                }
            }
        }
    }
}

/// Adds the products of `count` blocks with `T` tokens to the output; returns `T`.
#[inline]
#[target_feature(enable = "neon,dotprod")]
fn multiply<Q: Lanes, const T: usize>(
    panel: &RowPanel,
    count: usize,
    x: Rows<'_, Q8Panel>,
    out: &mut TileMut<'_, f32>,
    at: At,
) -> usize {
    // Lanes that share a float, and lanes that share an integer scale.
    let share = Q::BLOCK / Q::FLOATS;
    let scale_lanes = Q::SCALE_LANES.unwrap_or(share);
    let x: [&Q8Panel; T] = pick(x, at.token, at.panel);
    let zero = vdupq_n_s32(0);
    let mut acc = [vdupq_n_f32(0.0); T];
    for t in 0..T {
        acc[t] = at.load(out, t);
    }
    for float in 0..count * Q::FLOATS {
        let mut products = [zero; T];
        let subs = float * share / SUB..(float + 1) * share / SUB;
        for first in subs.clone().step_by(scale_lanes / SUB) {
            let mut dots = [zero; T];
            for sub in first..first + scale_lanes / SUB {
                panel.lanes.multiply(sub, &x, &mut dots);
            }
            if Q::SCALE_LANES.is_some() {
                let scales = integers(&panel.scales[first]);
                for t in 0..T {
                    products[t] = vmlaq_s32(products[t], dots[t], scales);
                }
            } else {
                products = dots;
            }
        }
        let d = floats(&panel.d[float]);
        for t in 0..T {
            let scale = x[t].scales[float * share / 32];
            acc[t] = vfmaq_f32(acc[t], vmulq_n_f32(d, scale), vcvtq_f32_s32(products[t]));
            if Q::HAS_MINS {
                let mut mins = vdupq_n_s32(x[t].sum_of(float * share, share));
                if Q::SCALE_LANES.is_some() {
                    mins = zero;
                    for sub in subs.clone() {
                        mins = vmlaq_n_s32(mins, integers(&panel.mins[sub]), i32::from(x[t].sums[sub]));
                    }
                }
                let dmin = vmulq_n_f32(floats(&panel.dmin[float]), scale);
                acc[t] = vfmsq_f32(acc[t], dmin, vcvtq_f32_s32(mins));
            }
        }
    }
    for t in 0..T {
        at.store(out, t, acc[t]);
    }
    T
}

/// Four integers in a register.
#[inline]
#[target_feature(enable = "neon,dotprod")]
fn integers(four: &[i32; ROWS]) -> int32x4_t {
    // SAFETY: it is one register long.
    unsafe { vld1q_s32(four.as_ptr()) }
}
