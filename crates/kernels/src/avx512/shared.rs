//! Products with several tokens of all types that [`lanes`](crate::avx2::lanes) unpacks.

use super::*;
use crate::avx2::Eight;
use crate::avx2::lanes::Lanes;
use crate::avx2::shared::InOrder;

/// Sixteen rows of the blocks that share a panel of activations, unpacked so that lanes are rows.
#[repr(C, align(64))]
struct RowPanel {
    /// Four consecutive weights of every row, as unsigned bytes: signed lanes have an offset of 128, others are
    /// unchanged.
    lanes: [[u8; 64]; 64],
    /// The integer scales of every row: one vector for [`Lanes::SCALE_LANES`].
    scales: [[i32; ROWS]; 16],
    /// The integer minima: for each two sums of 16 activations a pair of words for every row.
    mins: [[i32; ROWS]; 8],
    /// The floats of every row.
    d: [[f32; ROWS]; 16],
    /// The scales of every row's minima.
    dmin: [[f32; ROWS]; 8],
}

impl RowPanel {
    fn new() -> RowPanel {
        RowPanel {
            lanes: [[0; 64]; 64],
            scales: [[0; ROWS]; 16],
            mins: [[0; ROWS]; 8],
            d: [[0.0; ROWS]; 16],
            dmin: [[0.0; ROWS]; 8],
        }
    }
}

/// As [`scalar::matmul_q8`].
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
pub(super) fn many_tokens<Q: Lanes>(w: MatRef<'_>, x: Rows<'_, Q8Panel>, out: &mut TileMut<'_, f32>) {
    let mut panels = [RowPanel::new(), RowPanel::new()];
    for chunk in (0..x.len()).step_by(TOKEN_CHUNK) {
        let tokens = chunk..x.len().min(chunk + TOKEN_CHUNK);
        let mut first = 0;
        while first < w.rows {
            // Two panels share the broadcast activations, which are most of the loads.
            first += if w.rows - first > ROWS {
                many_tokens_of_rows::<Q, 2>(w, first, x, tokens.clone(), out, &mut panels)
            } else {
                let [panel, _] = &mut panels;
                many_tokens_of_rows::<Q, 1>(w, first, x, tokens.clone(), out, std::array::from_mut(panel))
            };
        }
    }
}

/// The products of `R` times sixteen rows, starting with `first`, with some tokens. Returns the number of rows.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
fn many_tokens_of_rows<Q: Lanes, const R: usize>(
    w: MatRef<'_>,
    first: usize,
    x: Rows<'_, Q8Panel>,
    tokens: std::ops::Range<usize>,
    out: &mut TileMut<'_, f32>,
    panels: &mut [RowPanel; R],
) -> usize {
    let in_panel = Q8Panel::LEN / Q::BLOCK;
    let bytes = in_panel * Q::DTYPE.block_bytes();
    let next_rows = w.row(first).as_ptr().wrapping_add(R * ROWS * w.row(0).len());
    let rows: [Rows16; R] = std::array::from_fn(|r| Rows16::new(w, first + r * ROWS));
    for p in 0..x.width() {
        let count = in_panel.min(w.cols / Q::BLOCK - p * in_panel);
        let share = R * ROWS * bytes;
        let steps = tokens.len().div_ceil(4);
        let mut ahead = Ahead::new(next_rows.wrapping_add(p * share), share, steps);
        for (r, panel) in panels.iter_mut().enumerate() {
            // SAFETY: a row has that many blocks.
            unsafe { unpack::<Q>(&rows[r], p * bytes, count, panel) };
        }
        let mut token = tokens.start;
        while token < tokens.end {
            ahead.step();
            let at = At { first, block: p, token };
            token += match tokens.end - token {
                8.. if R == 1 => multiply::<Q, R, 8>(panels, count, x, out, at),
                4.. => multiply::<Q, R, 4>(panels, count, x, out, at),
                2.. => multiply::<Q, R, 2>(panels, count, x, out, at),
                _ => multiply::<Q, R, 1>(panels, count, x, out, at),
            };
        }
    }
    R * ROWS
}

/// Unpacks `count` blocks of sixteen rows from byte `at` on.
///
/// # Safety
/// The rows must hold this many blocks of `Q` there.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
unsafe fn unpack<Q: Lanes>(rows: &Rows16, at: usize, count: usize, panel: &mut RowPanel) {
    let bytes = Q::DTYPE.block_bytes();
    let mut in_order = InOrder([[0; Q8Panel::LEN]; ROWS]);
    let mut integers = InOrder([[0; Q8Panel::LEN]; ROWS]);
    // SAFETY: the stores stay inside the buffers, and the caller guarantees the blocks.
    unsafe {
        for (row, start) in rows.0.iter().enumerate() {
            for block in 0..count {
                let from = start.add(at + block * bytes);
                for part in 0..Q::BLOCK / 32 {
                    let to = in_order.0[row].as_mut_ptr().add(block * Q::BLOCK + 32 * part);
                    _mm256_store_si256(to.cast(), Q::part(from, part).lanes::<Q>());
                }
            }
            if Q::SCALE_LANES.is_some() {
                // Types with integer scales have one block per panel.
                let to = integers.0[row].as_mut_ptr();
                _mm256_store_si256(to.cast(), Q::scales(start.add(at)));
                if Q::HAS_MINS {
                    _mm256_store_si256(to.add(32).cast(), Q::mins(start.add(at)));
                }
            }
        }
        for block in 0..count {
            for half in 0..2 {
                let blocks = eight_blocks(rows, 8 * half, at + block * bytes);
                for float in 0..Q::FLOATS {
                    let to = panel.d[block * Q::FLOATS + float].as_mut_ptr().add(8 * half);
                    _mm256_store_ps(to, Q::d(&blocks, float));
                }
                if Q::HAS_MINS {
                    _mm256_store_ps(panel.dmin[block].as_mut_ptr().add(8 * half), Q::dmin(&blocks));
                }
            }
        }
        let sign = if Q::SIGNED { _mm512_set1_epi8(-128) } else { _mm512_setzero_si512() };
        let start = starts(&in_order);
        for quad in 0..count * Q::BLOCK / 16 {
            for (i, dwords) in four_dwords(&start, 16 * quad).into_iter().enumerate() {
                let to = panel.lanes[4 * quad + i].as_mut_ptr();
                _mm512_store_si512(to.cast(), _mm512_xor_si512(dwords, sign));
            }
        }
        if Q::SCALE_LANES.is_some() {
            let start = starts(&integers);
            for quad in 0..2 {
                for (i, pair) in four_dwords(&start, 16 * quad).into_iter().enumerate() {
                    let pairs = 4 * quad + i;
                    let (first, second) = (
                        _mm512_srai_epi32::<16>(_mm512_slli_epi32::<16>(pair)),
                        _mm512_srai_epi32::<16>(pair),
                    );
                    let mut store = |i: usize, v| _mm512_store_si512(panel.scales[i].as_mut_ptr().cast(), v);
                    if Q::SCALE_LANES == Some(32) {
                        // Both words are the same.
                        store(pairs, first);
                    } else {
                        store(2 * pairs, first);
                        store(2 * pairs + 1, second);
                    }
                }
                if Q::HAS_MINS {
                    for (i, pair) in four_dwords(&start, 32 + 16 * quad).into_iter().enumerate() {
                        _mm512_store_si512(panel.mins[4 * quad + i].as_mut_ptr().cast(), pair);
                    }
                }
            }
        }
    }
}

/// The blocks at byte `at` of eight rows from `first` on.
#[inline(always)]
fn eight_blocks(rows: &Rows16, first: usize, at: usize) -> Eight {
    let block = |i: usize| rows.0[first + i].wrapping_add(at);
    [block(0), block(1), block(2), block(3), block(4), block(5), block(6), block(7)]
}

/// The starts of the rows of a buffer.
#[inline(always)]
fn starts(buffer: &InOrder<ROWS>) -> Rows16 {
    let mut starts = [buffer.0.as_ptr().cast::<u8>(); ROWS];
    for (i, start) in starts.iter_mut().enumerate() {
        *start = start.wrapping_add(i * Q8Panel::LEN);
    }
    Rows16(starts)
}

/// What the offset of lanes adds to products with activations that share a scale, to be subtracted.
#[derive(Clone, Copy)]
#[repr(align(64))]
struct Excess([i32; 16]);

impl Excess {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
    fn new<Q: Lanes>(x: &Q8Panel, lanes: usize) -> Excess {
        let less = if Q::SIGNED { -128 } else { -Q::OFFSET };
        let mut excess = Excess([0; 16]);
        // SAFETY: a panel has 16 sums, and the registers are as long as what is stored to.
        unsafe {
            let sums = _mm256_load_si256(x.sums.as_ptr().cast());
            if lanes == 16 {
                let sums = _mm512_mullo_epi32(_mm512_cvtepi16_epi32(sums), _mm512_set1_epi32(less.into()));
                _mm512_store_si512(excess.0.as_mut_ptr().cast(), sums);
            } else {
                let sums = _mm256_madd_epi16(sums, _mm256_set1_epi16(less));
                _mm256_store_si256(excess.0.as_mut_ptr().cast(), sums);
            }
        }
        excess
    }
}

/// Adds the products of `count` blocks with `T` tokens to the output; returns `T`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
fn multiply<Q: Lanes, const R: usize, const T: usize>(
    panels: &[RowPanel; R],
    count: usize,
    x: Rows<'_, Q8Panel>,
    out: &mut TileMut<'_, f32>,
    at: At,
) -> usize {
    // Lanes that share a float, and lanes that also share an integer scale.
    let lanes = Q::BLOCK / Q::FLOATS;
    let scale_lanes = Q::SCALE_LANES.unwrap_or(lanes);
    let x: [&Q8Panel; T] = pick(x, at.token, at.block);
    let mut excess = [Excess([0; 16]); T];
    if !Q::HAS_MINS {
        for t in 0..T {
            excess[t] = Excess::new::<Q>(x[t], scale_lanes);
        }
    }
    let zero = _mm512_setzero_si512();
    let mut acc = [[_mm512_setzero_ps(); T]; R];
    if at.block > 0 {
        for t in 0..T {
            for r in 0..R {
                let out = &out.row(at.token + t)[at.first + r * ROWS..];
                // SAFETY: the mask covers the length of `out`.
                acc[r][t] = unsafe { _mm512_maskz_loadu_ps(tail_mask(out.len()), out.as_ptr()) };
            }
        }
    }
    for float in 0..count * Q::FLOATS {
        let mut products = [[zero; T]; R];
        for scale in float * lanes / scale_lanes..(float + 1) * lanes / scale_lanes {
            let mut dots = [[zero; T]; R];
            if !Q::HAS_MINS {
                for t in 0..T {
                    for r in 0..R {
                        dots[r][t] = _mm512_set1_epi32(excess[t].0[scale]);
                    }
                }
            }
            for group in scale * scale_lanes / 4..(scale + 1) * scale_lanes / 4 {
                let mut weights = [zero; R];
                for r in 0..R {
                    // SAFETY: it is one register long.
                    weights[r] = unsafe { _mm512_load_si512(panels[r].lanes[group].as_ptr().cast()) };
                }
                for t in 0..T {
                    // SAFETY: a panel of activations has 64 groups of four.
                    let four = unsafe { x[t].lanes.as_ptr().add(4 * group).cast::<i32>().read() };
                    let four = _mm512_set1_epi32(four);
                    for r in 0..R {
                        dots[r][t] = _mm512_dpbusd_epi32(dots[r][t], weights[r], four);
                    }
                }
            }
            if Q::SCALE_LANES.is_none() {
                products = dots;
                continue;
            }
            for r in 0..R {
                // SAFETY: it is one register long.
                let scales = unsafe { _mm512_load_si512(panels[r].scales[scale].as_ptr().cast()) };
                for t in 0..T {
                    products[r][t] = _mm512_add_epi32(products[r][t], _mm512_mullo_epi32(dots[r][t], scales));
                }
            }
        }
        let part = float * lanes / 32;
        for t in 0..T {
            let scale = _mm512_set1_ps(x[t].scales[part]);
            for r in 0..R {
                // SAFETY: they are one register long.
                let (d, dmin) = unsafe {
                    (
                        _mm512_load_ps(panels[r].d[float].as_ptr()),
                        _mm512_load_ps(panels[r].dmin[float % 8].as_ptr()),
                    )
                };
                let products = _mm512_cvtepi32_ps(products[r][t]);
                acc[r][t] = _mm512_fmadd_ps(_mm512_mul_ps(d, scale), products, acc[r][t]);
                if Q::HAS_MINS {
                    let mins = if Q::SCALE_LANES.is_some() {
                        minima(&panels[r], x[t])
                    } else {
                        let sums = &x[t].sums[2 * part..2 * part + 2];
                        _mm512_set1_epi32(i32::from(sums[0]) + i32::from(sums[1]))
                    };
                    acc[r][t] =
                        _mm512_fnmadd_ps(_mm512_mul_ps(dmin, scale), _mm512_cvtepi32_ps(mins), acc[r][t]);
                }
            }
        }
    }
    for t in 0..T {
        for r in 0..R {
            let out = &mut out.row(at.token + t)[at.first + r * ROWS..];
            // SAFETY: the mask covers the length of `out`.
            unsafe { _mm512_mask_storeu_ps(out.as_mut_ptr(), tail_mask(out.len()), acc[r][t]) };
        }
    }
    T
}

/// `Σ minimum · sum(activations)` of every row.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
fn minima(panel: &RowPanel, x: &Q8Panel) -> __m512i {
    let mut mins = _mm512_setzero_si512();
    for (pair, factors) in panel.mins.iter().enumerate() {
        // SAFETY: factors are one register long; a panel has eight pairs of sums, aligned to four bytes.
        let (factors, sums) = unsafe {
            let sums = x.sums.as_ptr().add(2 * pair).cast::<i32>().read();
            (_mm512_load_si512(factors.as_ptr().cast()), _mm512_set1_epi32(sums))
        };
        mins = _mm512_dpwssd_epi32(mins, factors, sums);
    }
    mins
}
