//! Products of several tokens with matrices in planes. [`avx2::planes`] unpacks the lanes.

// Loops over registers use indices, so that they are unrolled.
#![allow(clippy::needless_range_loop)]

use super::*;
use crate::avx2::planes::{GroupLanes, floats_of_row, with_group_lanes};

/// As [`scalar::matmul_q8`], for matrices in planes.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
pub fn many_tokens(w: MatRef<'_>, x: Rows<'_, Q8Panel>, out: &mut TileMut<'_, f32>) {
    with_group_lanes!(w.encoding, L, group => in_groups::<L>(w, group, x, out));
}

/// Sixteen rows of the groups that share a panel of activations, unpacked so that lanes are rows.
#[repr(C, align(64))]
struct GroupPanel {
    /// Four consecutive lanes of every row.
    lanes: [[u8; 64]; 64],
    /// The scales of every row, by group.
    scales: [[f32; ROWS]; 8],
    /// The biases of every row, by group.
    biases: [[f32; ROWS]; 8],
}

impl GroupPanel {
    fn new() -> GroupPanel {
        GroupPanel { lanes: [[0; 64]; 64], scales: [[0.0; ROWS]; 8], biases: [[0.0; ROWS]; 8] }
    }

    /// Unpacks `lanes` lanes of sixteen rows, from the start of a panel on.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
    fn unpack<L: GroupLanes>(
        &mut self,
        w: MatRef<'_>,
        group: usize,
        first: usize,
        panel: usize,
        lanes: usize,
    ) {
        let rows = Rows16::new(w, first);
        let mut plain = [[0u8; 32]; ROWS];
        let mut blocks = Rows16(rows.0);
        for part in 0..lanes / 32 {
            for (row, plain) in rows.0.iter().zip(&mut plain) {
                // SAFETY: the row has the codes of all its lanes.
                unsafe {
                    let lanes = L::lanes(row.add((panel * 8 + part) * L::BYTES));
                    _mm256_storeu_si256(plain.as_mut_ptr().cast(), lanes);
                }
            }
            for (block, plain) in blocks.0.iter_mut().zip(&plain) {
                *block = plain.as_ptr();
            }
            for half in 0..2 {
                // SAFETY: every row of `plain` has 32 bytes, and the panel room for eight vectors in each part.
                unsafe {
                    let dwords = four_dwords(&blocks, 16 * half);
                    for i in 0..4 {
                        let place = self.lanes[part * 8 + half * 4 + i].as_mut_ptr();
                        _mm512_store_si512(place.cast(), dwords[i]);
                    }
                }
            }
        }
        let (groups, index) = (lanes / group, panel * (Q8Panel::LEN / group));
        for lane in 0..ROWS {
            let row = (first + lane).min(w.rows - 1);
            floats_of_row(w, row, index, lane, &mut self.scales[..groups], &mut self.biases[..groups]);
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
fn in_groups<L: GroupLanes>(w: MatRef<'_>, group: usize, x: Rows<'_, Q8Panel>, out: &mut TileMut<'_, f32>) {
    let mut weights = GroupPanel::new();
    for chunk in (0..x.len()).step_by(TOKEN_CHUNK) {
        let tokens = chunk..x.len().min(chunk + TOKEN_CHUNK);
        for first in (0..w.rows).step_by(ROWS) {
            let next_rows = w.row(first).as_ptr().wrapping_add(ROWS * w.row(0).len());
            for panel in 0..x.width() {
                let lanes = Q8Panel::LEN.min(w.cols - panel * Q8Panel::LEN);
                let share = ROWS * 8 * L::BYTES;
                let steps = tokens.len().div_ceil(8);
                let mut ahead = Ahead::new(next_rows.wrapping_add(panel * share), share, steps);
                weights.unpack::<L>(w, group, first, panel, lanes);
                let mut token = tokens.start;
                while token < tokens.end {
                    ahead.step();
                    let at = At { first, block: panel, token };
                    token += match tokens.end - token {
                        8.. => multiply::<L, 8>(&weights, group, lanes / group, x, out, at),
                        4.. => multiply::<L, 4>(&weights, group, lanes / group, x, out, at),
                        2.. => multiply::<L, 2>(&weights, group, lanes / group, x, out, at),
                        _ => multiply::<L, 1>(&weights, group, lanes / group, x, out, at),
                    };
                }
            }
        }
    }
}

/// Adds the products of `count` groups with `T` tokens to the output; returns `T`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
fn multiply<L: GroupLanes, const T: usize>(
    weights: &GroupPanel,
    group: usize,
    count: usize,
    x: Rows<'_, Q8Panel>,
    out: &mut TileMut<'_, f32>,
    at: At,
) -> usize {
    let x: [&Q8Panel; T] = pick(x, at.token, at.block);
    let mask = tail_mask(out.cols() - at.first);
    let mut acc = [_mm512_setzero_ps(); T];
    if at.block > 0 {
        for t in 0..T {
            // SAFETY: the mask covers the row's length.
            acc[t] = unsafe { _mm512_maskz_loadu_ps(mask, out.row(at.token + t)[at.first..].as_ptr()) };
        }
    }
    for g in 0..count {
        let (mut sums, mut dots) = ([0; T], [_mm512_setzero_si512(); T]);
        for t in 0..T {
            sums[t] = x[t].sum_of(g * group, group);
            dots[t] = _mm512_set1_epi32(L::OFFSET * sums[t]);
        }
        for four in g * group / 4..(g + 1) * group / 4 {
            // SAFETY: it is one register long.
            let lanes = unsafe { _mm512_load_si512(weights.lanes[four].as_ptr().cast()) };
            for t in 0..T {
                // SAFETY: a panel of activations has 64 groups of four.
                let four = unsafe { x[t].lanes.as_ptr().add(4 * four).cast::<i32>().read() };
                dots[t] = _mm512_dpbusd_epi32(dots[t], lanes, _mm512_set1_epi32(four));
            }
        }
        // SAFETY: they are one register long.
        let (scales, biases) = unsafe {
            (_mm512_loadu_ps(weights.scales[g].as_ptr()), _mm512_loadu_ps(weights.biases[g].as_ptr()))
        };
        for t in 0..T {
            let x_scale = _mm512_set1_ps(x[t].scales[g * group / 32]);
            acc[t] = _mm512_fmadd_ps(_mm512_mul_ps(scales, x_scale), _mm512_cvtepi32_ps(dots[t]), acc[t]);
            if L::BIASES {
                let sum = _mm512_set1_ps(sums[t] as f32);
                acc[t] = _mm512_fmadd_ps(_mm512_mul_ps(biases, x_scale), sum, acc[t]);
            }
        }
    }
    for t in 0..T {
        // SAFETY: the mask covers the row's length.
        unsafe { _mm512_mask_storeu_ps(out.row(at.token + t)[at.first..].as_mut_ptr(), mask, acc[t]) };
    }
    T
}
