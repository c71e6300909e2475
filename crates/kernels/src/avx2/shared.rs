//! Products of all types that [`lanes`](super::lanes) unpacks.

use super::lanes::Lanes;
use super::*;

/// As [`scalar::matmul_q8`].
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn matmul<Q: Lanes>(w: MatRef<'_>, x: Rows<'_, Q8Panel>, out: &mut TileMut<'_, f32>) {
    match (x.len(), Q::BLOCK / Q::FLOATS) {
        (1, Q8Panel::LEN) => one_token_panels::<Q>(w, x.row(0), out.row(0)),
        (1, 32) => one_token_blocks::<Q>(w, x.row(0), out.row(0)),
        (1, _) => one_token_halves::<Q>(w, x.row(0), out.row(0)),
        _ => many_tokens::<Q>(w, x, out),
    }
}

/// A part of a panel of activations.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn activations(panel: &Q8Panel, part: usize) -> __m256i {
    assert!(part < Q8Panel::LEN / 32);
    // SAFETY: the assertion.
    unsafe { _mm256_load_si256(panel.lanes.as_ptr().add(32 * part).cast()) }
}

/// The sums of a panel of activations.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn sums(panel: &Q8Panel) -> __m256i {
    // SAFETY: a panel has sixteen.
    unsafe { _mm256_load_si256(panel.sums.as_ptr().cast()) }
}

// ---------------------------------------------------------------------------------------------------
// One token

/// For types with one block per panel.
#[target_feature(enable = "avx2,fma,f16c")]
fn one_token_panels<Q: Lanes>(w: MatRef<'_>, x: &[Q8Panel], out: &mut [f32]) {
    let bytes = Q::DTYPE.block_bytes();
    let mut ahead = Ahead::new(w, 4);
    for first in (0..w.rows).step_by(4) {
        let rows = four_rows(w, first);
        let mut acc = _mm_setzero_ps();
        for (i, panels) in x.chunks(2).enumerate() {
            let blocks = two_blocks(rows, 2 * i, panels.len(), bytes);
            let (mut products, mut mins) = ([_mm256_setzero_si256(); 8], [_mm256_setzero_si256(); 8]);
            for lane in 0..4 * panels.len() {
                ahead.advance(bytes);
                // SAFETY: the matrix has a block for every panel.
                unsafe {
                    products[lane] = products_with_panel::<Q>(blocks[lane], &panels[lane / 4]);
                    if Q::HAS_MINS {
                        mins[lane] = _mm256_madd_epi16(Q::mins(blocks[lane]), sums(&panels[lane / 4]));
                    }
                }
            }
            let products = _mm256_cvtepi32_ps(sum_across_i32(&products));
            let scales = [panels[0].scales[0], panels[panels.len() - 1].scales[0]];
            let scales = _mm256_set_m128(_mm_set1_ps(scales[1]), _mm_set1_ps(scales[0]));
            // SAFETY: as above.
            let d = _mm256_mul_ps(unsafe { Q::d(&blocks, 0) }, scales);
            if Q::HAS_MINS {
                // SAFETY: as above.
                let dmin = _mm256_mul_ps(unsafe { Q::dmin(&blocks) }, scales);
                let mins = _mm256_cvtepi32_ps(sum_across_i32(&mins));
                for b in 0..panels.len() {
                    acc = _mm_fmadd_ps(half(d, b), half(products, b), acc);
                    acc = _mm_fnmadd_ps(half(dmin, b), half(mins, b), acc);
                }
            } else {
                for b in 0..panels.len() {
                    acc = _mm_fmadd_ps(half(d, b), half(products, b), acc);
                }
            }
        }
        store_four(acc, &mut out[first..]);
    }
}

/// `Σ scale · lane · activation` of a block, in eight sums.
///
/// # Safety
/// The block must be of `Q`.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn products_with_panel<Q: Lanes>(block: *const u8, x: &Q8Panel) -> __m256i {
    // SAFETY: the caller's promise.
    let scales = unsafe { Q::scales(block) };
    let mut acc = _mm256_setzero_si256();
    if Q::OFFSET != 0 {
        acc = _mm256_madd_epi16(_mm256_mullo_epi16(scales, _mm256_set1_epi16(-Q::OFFSET)), sums(x));
    }
    let scales = [
        _mm256_permute2x128_si256::<0x00>(scales, scales),
        _mm256_permute2x128_si256::<0x11>(scales, scales),
    ];
    // Written out, because the compiler would not unroll a loop of this size.
    macro_rules! add {
        ($($part:literal)*) => {$(
            // SAFETY: the caller's promise.
            let pairs = unsafe { Q::part(block, $part) }.pairs::<Q>(activations(x, $part));
            // Each half of the register holds the sixteen lanes of one scale.
            let word = |i: i16| _mm_set1_epi16(2 * i | (2 * i + 1) << 8);
            let index = _mm256_set_m128i(word($part % 4 * 2 + 1), word($part % 4 * 2));
            let scale = _mm256_shuffle_epi8(scales[$part / 4], index);
            acc = _mm256_add_epi32(acc, _mm256_madd_epi16(pairs, scale));
        )*};
    }
    add!(0 1 2 3 4 5 6 7);
    acc
}

/// For types with a float for 32 lanes.
#[target_feature(enable = "avx2,fma,f16c")]
fn one_token_blocks<Q: Lanes>(w: MatRef<'_>, x: &[Q8Panel], out: &mut [f32]) {
    let (count, bytes) = (w.cols / 32, Q::DTYPE.block_bytes());
    let mut ahead = Ahead::new(w, 4);
    for first in (0..w.rows).step_by(4) {
        let rows = four_rows(w, first);
        let mut acc = _mm_setzero_ps();
        for block in (0..count).step_by(2) {
            let here = 2.min(count - block);
            let blocks = two_blocks(rows, block, here, bytes);
            ahead.advance(4 * here * bytes);
            // Two consecutive blocks are in the same panel, which is padded with zeros.
            let (panel, part) = (&x[block / 8], block % 8);
            // SAFETY: the blocks are in the matrix.
            let products = unsafe { products_with_two_parts::<Q>(&blocks, panel, part) };
            let products = _mm256_cvtepi32_ps(products);
            let scales =
                _mm256_set_m128(_mm_set1_ps(panel.scales[part + 1]), _mm_set1_ps(panel.scales[part]));
            // SAFETY: the blocks are in the matrix.
            let d = _mm256_mul_ps(unsafe { Q::d(&blocks, 0) }, scales);
            if Q::HAS_MINS {
                // SAFETY: as above.
                let dmin = _mm256_mul_ps(unsafe { Q::dmin(&blocks) }, scales);
                for b in 0..here {
                    let sum = _mm_set1_ps(sum_of_32(panel, part + b) as f32);
                    acc = _mm_fmadd_ps(half(d, b), half(products, b), acc);
                    acc = _mm_fnmadd_ps(half(dmin, b), sum, acc);
                }
            } else {
                for b in 0..here {
                    acc = _mm_fmadd_ps(half(d, b), half(products, b), acc);
                }
            }
        }
        store_four(acc, &mut out[first..]);
    }
}

/// `Σ lane · activation` of two blocks of four rows: lane `4 · block + row`.
///
/// # Safety
/// The blocks must be of `Q`.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn products_with_two_parts<Q: Lanes>(blocks: &Eight, panel: &Q8Panel, part: usize) -> __m256i {
    let (a, b) = (activations(panel, part), activations(panel, part + 1));
    let x = [_mm256_permute2x128_si256::<0x20>(a, b), _mm256_permute2x128_si256::<0x31>(a, b)];
    let one = _mm256_set1_epi16(1);
    let mut products = [_mm256_setzero_si256(); 4];
    for row in 0..4 {
        // SAFETY: the caller's promise.
        let halves = unsafe { Q::halves(blocks[row], blocks[row + 4]) };
        let (low, high) = (halves[0].pairs::<Q>(x[0]), halves[1].pairs::<Q>(x[1]));
        products[row] = if 4 * 127 * Q::LARGEST <= i16::MAX as usize {
            _mm256_madd_epi16(_mm256_add_epi16(low, high), one)
        } else {
            _mm256_add_epi32(_mm256_madd_epi16(low, one), _mm256_madd_epi16(high, one))
        };
    }
    let products = sum_halves(products);
    if Q::OFFSET == 0 {
        return products;
    }
    let excess = |part: usize| _mm_set1_epi32(i32::from(Q::OFFSET) * sum_of_32(panel, part));
    _mm256_sub_epi32(products, _mm256_set_m128i(excess(part + 1), excess(part)))
}

/// The sums of the halves of four vectors: first those of the first halves, then those of the second.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn sum_halves(v: [__m256i; 4]) -> __m256i {
    let two = |a, b| _mm256_add_epi32(_mm256_unpacklo_epi64(a, b), _mm256_unpackhi_epi64(a, b));
    let (a, b) = (_mm256_castsi256_ps(two(v[0], v[1])), _mm256_castsi256_ps(two(v[2], v[3])));
    let even = _mm256_shuffle_ps::<0b10_00_10_00>(a, b);
    let odd = _mm256_shuffle_ps::<0b11_01_11_01>(a, b);
    _mm256_add_epi32(_mm256_castps_si256(even), _mm256_castps_si256(odd))
}

/// The sum of the activations of a part of a panel.
#[inline(always)]
fn sum_of_32(panel: &Q8Panel, part: usize) -> i32 {
    i32::from(panel.sums[2 * part]) + i32::from(panel.sums[2 * part + 1])
}

/// For types with a float for 16 lanes.
#[target_feature(enable = "avx2,fma,f16c")]
fn one_token_halves<Q: Lanes>(w: MatRef<'_>, x: &[Q8Panel], out: &mut [f32]) {
    let bytes = Q::DTYPE.block_bytes();
    let one = _mm256_set1_epi16(1);
    let mut ahead = Ahead::new(w, 4);
    for first in (0..w.rows).step_by(4) {
        let rows = four_rows(w, first);
        let mut acc = _mm_setzero_ps();
        for block in 0..w.cols / Q::BLOCK {
            ahead.advance(4 * bytes);
            // Two blocks at the same position: each part has two floats.
            let blocks = two_blocks(rows, block, 1, bytes);
            for part in 0..Q::BLOCK / 32 {
                let at = block * Q::BLOCK / 32 + part;
                let (panel, at) = (&x[at / 8], at % 8);
                let mut products = [_mm256_setzero_si256(); 4];
                for row in 0..4 {
                    // SAFETY: the blocks are in the matrix.
                    let weights = unsafe { Q::part(blocks[row], part) };
                    products[row] = _mm256_madd_epi16(weights.pairs::<Q>(activations(panel, at)), one);
                }
                let products = sum_halves(products);
                let excess = |sum: usize| _mm_set1_epi32(i32::from(Q::OFFSET) * i32::from(panel.sums[sum]));
                let excess = _mm256_set_m128i(excess(2 * at + 1), excess(2 * at));
                let products = _mm256_cvtepi32_ps(_mm256_sub_epi32(products, excess));
                // SAFETY: as above.
                let d = unsafe {
                    let (low, high) = (Q::d(&blocks, 2 * part), Q::d(&blocks, 2 * part + 1));
                    _mm256_blend_ps::<0b1111_0000>(low, high)
                };
                let d = _mm256_mul_ps(d, _mm256_set1_ps(panel.scales[at]));
                for b in 0..2 {
                    acc = _mm_fmadd_ps(half(d, b), half(products, b), acc);
                }
            }
        }
        store_four(acc, &mut out[first..]);
    }
}

// ---------------------------------------------------------------------------------------------------
// Several tokens

/// Eight rows of the blocks that share a panel of activations, unpacked so that lanes are rows.
#[repr(C, align(32))]
struct RowPanel {
    /// Four consecutive weights of every row.
    lanes: [[u8; 32]; 64],
    /// The integer scales of every row, each as a pair of words: one vector for [`Lanes::SCALE_LANES`].
    scales: [[i32; ROWS]; 16],
    /// The integer factors of the sums of activations: minima, or the effect of an offset. For each two sums of 16, a
    /// pair for every row.
    mins: [[i32; ROWS]; 8],
    /// The floats of every row.
    d: [[f32; ROWS]; 16],
    /// The scales of every row's minima.
    dmin: [[f32; ROWS]; 8],
}

/// The unpacked lanes of some rows, row by row.
#[repr(C, align(64))]
pub(crate) struct InOrder<const ROWS: usize>(pub(crate) [[u8; Q8Panel::LEN]; ROWS]);

#[target_feature(enable = "avx2,fma,f16c")]
fn many_tokens<Q: Lanes>(w: MatRef<'_>, x: Rows<'_, Q8Panel>, out: &mut TileMut<'_, f32>) {
    let bytes = Q::DTYPE.block_bytes();
    let in_panel = Q8Panel::LEN / Q::BLOCK;
    let mut panel = RowPanel {
        lanes: [[0; 32]; 64],
        scales: [[0; ROWS]; 16],
        mins: [[0; ROWS]; 8],
        d: [[0.0; ROWS]; 16],
        dmin: [[0.0; ROWS]; 8],
    };
    for chunk in (0..x.len()).step_by(TOKEN_CHUNK) {
        let tokens = chunk..x.len().min(chunk + TOKEN_CHUNK);
        let mut ahead = Ahead::new(w, ROWS);
        for first in (0..w.rows).step_by(ROWS) {
            let rows = eight_rows(w, first);
            for p in 0..x.width() {
                let count = in_panel.min(w.cols / Q::BLOCK - p * in_panel);
                ahead.advance(ROWS * count * bytes);
                // SAFETY: a row has that many blocks.
                unsafe { unpack::<Q>(&eight_blocks(&rows, p * in_panel * bytes), count, &mut panel) };
                let mut t = tokens.start;
                while t < tokens.end {
                    let at = At { first, panel: p, token: t };
                    match tokens.end - t {
                        4.. => t += multiply::<Q, 4>(&panel, count, x, out, at),
                        2.. => t += multiply::<Q, 2>(&panel, count, x, out, at),
                        _ => t += multiply::<Q, 1>(&panel, count, x, out, at),
                    }
                }
            }
        }
    }
}

/// Unpacks `count` blocks of eight rows.
///
/// # Safety
/// There must be this many blocks of `Q` at each address.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn unpack<Q: Lanes>(rows: &Eight, count: usize, panel: &mut RowPanel) {
    let bytes = Q::DTYPE.block_bytes();
    let mut in_order = InOrder([[0; Q8Panel::LEN]; ROWS]);
    let mut integers = InOrder([[0; Q8Panel::LEN]; ROWS]);
    // SAFETY: the stores stay inside the buffers, and the caller guarantees the blocks.
    unsafe {
        for block in 0..count {
            let blocks = eight_blocks(rows, block * bytes);
            for row in 0..ROWS {
                for part in 0..Q::BLOCK / 32 {
                    let to = in_order.0[row].as_mut_ptr().add(block * Q::BLOCK + 32 * part);
                    _mm256_store_si256(to.cast(), Q::part(blocks[row], part).lanes::<Q>());
                }
            }
            for float in 0..Q::FLOATS {
                _mm256_store_ps(panel.d[block * Q::FLOATS + float].as_mut_ptr(), Q::d(&blocks, float));
            }
            if Q::HAS_MINS {
                _mm256_store_ps(panel.dmin[block].as_mut_ptr(), Q::dmin(&blocks));
            }
        }
        let start = eight_starts(&mut in_order);
        for quad in 0..count * Q::BLOCK / 16 {
            for (i, dwords) in four_dwords(&start, 16 * quad).into_iter().enumerate() {
                _mm256_store_si256(panel.lanes[4 * quad + i].as_mut_ptr().cast(), dwords);
            }
        }
        if Q::SCALE_LANES.is_some() {
            // Types with integer scales have one block per panel.
            for row in 0..ROWS {
                let to = integers.0[row].as_mut_ptr();
                _mm256_store_si256(to.cast(), Q::scales(rows[row]));
                _mm256_store_si256(to.add(32).cast(), factors::<Q>(rows[row]));
            }
            let start = eight_starts(&mut integers);
            for quad in 0..2 {
                for (i, pair) in four_dwords(&start, 16 * quad).into_iter().enumerate() {
                    let pairs = 4 * quad + i;
                    let mut store = |i: usize, v| _mm256_store_si256(panel.scales[i].as_mut_ptr().cast(), v);
                    if Q::SCALE_LANES == Some(32) {
                        // Both words are the same.
                        store(pairs, pair);
                    } else {
                        let (up, down) = (_mm256_slli_epi32::<16>(pair), _mm256_srli_epi32::<16>(pair));
                        store(2 * pairs, _mm256_blend_epi16::<0b1010_1010>(pair, up));
                        store(2 * pairs + 1, _mm256_blend_epi16::<0b1010_1010>(down, pair));
                    }
                }
                if Q::HAS_MINS || Q::OFFSET != 0 {
                    for (i, pair) in four_dwords(&start, 32 + 16 * quad).into_iter().enumerate() {
                        _mm256_store_si256(panel.mins[4 * quad + i].as_mut_ptr().cast(), pair);
                    }
                }
            }
        }
    }
}

/// The factors of the sums of activations of a type with integer scales: the minima, or the effect of the offset.
///
/// # Safety
/// The block must be of `Q`.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn factors<Q: Lanes>(block: *const u8) -> __m256i {
    // SAFETY: the caller's promise.
    unsafe {
        if Q::HAS_MINS {
            Q::mins(block)
        } else {
            _mm256_mullo_epi16(Q::scales(block), _mm256_set1_epi16(Q::OFFSET))
        }
    }
}

/// The starts of eight rows of a buffer.
#[inline(always)]
fn eight_starts(buffer: &mut InOrder<ROWS>) -> Eight {
    let start = buffer.0.as_ptr().cast::<u8>();
    let row = |i: usize| start.wrapping_add(i * Q8Panel::LEN);
    [row(0), row(1), row(2), row(3), row(4), row(5), row(6), row(7)]
}

/// Adds the products of `count` blocks with `T` tokens to the output; returns `T`.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn multiply<Q: Lanes, const T: usize>(
    panel: &RowPanel,
    count: usize,
    x: Rows<'_, Q8Panel>,
    out: &mut TileMut<'_, f32>,
    at: At,
) -> usize {
    // Groups of four weights that share a float and groups that share an integer scale, and how many of the latter have
    // products whose sum fits 16 bits.
    let groups = Q::BLOCK / Q::FLOATS / 4;
    let scale_lanes = Q::SCALE_LANES.unwrap_or(4 * groups);
    let run = 1 << (32767 / (2 * 127 * Q::LARGEST)).min(scale_lanes / 4).ilog2();
    let x: [&Q8Panel; T] = pick(x, at.token, at.panel);
    let zero = _mm256_setzero_si256();
    let mut acc = [_mm256_setzero_ps(); T];
    for t in 0..T {
        acc[t] = at.load(out, t);
    }
    for float in 0..count * Q::FLOATS {
        let mut products = [zero; T];
        for first in (float * groups..(float + 1) * groups).step_by(run) {
            let mut dots = [zero; T];
            for group in first..first + run {
                // SAFETY: it is one register long.
                let weights = unsafe { _mm256_load_si256(panel.lanes[group].as_ptr().cast()) };
                let magnitudes = if Q::SIGNED { _mm256_abs_epi8(weights) } else { weights };
                for t in 0..T {
                    // SAFETY: a panel of activations has 64 groups of four.
                    let four = unsafe { x[t].lanes.as_ptr().add(4 * group).cast::<i32>().read() };
                    let four = _mm256_set1_epi32(four);
                    let signed = if Q::SIGNED { _mm256_sign_epi8(four, weights) } else { four };
                    dots[t] = _mm256_add_epi16(dots[t], _mm256_maddubs_epi16(magnitudes, signed));
                }
            }
            let scales = if Q::SCALE_LANES.is_some() {
                // SAFETY: it is one register long.
                unsafe { _mm256_load_si256(panel.scales[4 * first / scale_lanes].as_ptr().cast()) }
            } else {
                _mm256_set1_epi16(1)
            };
            for t in 0..T {
                products[t] = _mm256_add_epi32(products[t], _mm256_madd_epi16(dots[t], scales));
            }
        }
        let lane = 4 * groups * float;
        for t in 0..T {
            let mut mins = zero;
            if Q::HAS_MINS || Q::OFFSET != 0 {
                mins = if Q::SCALE_LANES.is_some() {
                    sum_products(panel, x[t])
                } else {
                    let factor = if Q::HAS_MINS { 1 } else { i32::from(Q::OFFSET) };
                    let sums = &x[t].sums[lane / 16..][..groups / 4];
                    _mm256_set1_epi32(factor * sums.iter().map(|&sum| i32::from(sum)).sum::<i32>())
                };
            }
            let scale = _mm256_set1_ps(x[t].scales[lane / 32]);
            // SAFETY: they are one register long.
            let (d, dmin) = unsafe {
                (_mm256_load_ps(panel.d[float].as_ptr()), _mm256_load_ps(panel.dmin[float % 8].as_ptr()))
            };
            let d = _mm256_mul_ps(d, scale);
            if Q::HAS_MINS {
                acc[t] = _mm256_fmadd_ps(d, _mm256_cvtepi32_ps(products[t]), acc[t]);
                acc[t] = _mm256_fnmadd_ps(_mm256_mul_ps(dmin, scale), _mm256_cvtepi32_ps(mins), acc[t]);
            } else {
                let products = _mm256_sub_epi32(products[t], mins);
                acc[t] = _mm256_fmadd_ps(d, _mm256_cvtepi32_ps(products), acc[t]);
            }
        }
    }
    for t in 0..T {
        at.store(out, t, acc[t]);
    }
    T
}

/// `Σ factor · sum(activations)` of every row.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn sum_products(panel: &RowPanel, x: &Q8Panel) -> __m256i {
    let mut mins = _mm256_setzero_si256();
    for (pair, factors) in panel.mins.iter().enumerate() {
        // SAFETY: factors are one register long; a panel has eight pairs of sums, aligned to four bytes.
        let (factors, sums) = unsafe {
            let sums = x.sums.as_ptr().add(2 * pair).cast::<i32>().read();
            (_mm256_load_si256(factors.as_ptr().cast()), _mm256_set1_epi32(sums))
        };
        mins = _mm256_add_epi32(mins, _mm256_madd_epi16(factors, sums));
    }
    mins
}
