//! Products with f32 activations of weights that are not plain floats: FP8 in tiles, and any type if activations must
//! stay exact. FP8 with one token, which is the case in generation, goes from registers to registers. All other cases
//! convert weights to f32 in memory first.

// Loops over registers use indices, so that they are unrolled.
#![allow(clippy::needless_range_loop)]

use super::*;
use crate::encoding::Tiles;
use crate::generic::to_lanes;
use crate::quant::planes::{dequantise, float_at};

/// As [`scalar::matmul_f32`].
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn matmul(w: MatRef<'_>, x: Rows<'_, f32>, out: &mut TileMut<'_, f32>) {
    assert_eq!((out.rows(), out.cols()), (x.len(), w.rows));
    assert_eq!(x.width(), w.cols);
    match (x.len(), w.encoding) {
        (1, Encoding::Tiles(tiles)) if one_token(w, tiles, x.row(0), out.row(0)) => {}
        // SAFETY: a CPU that runs this function has its instructions.
        _ => unsafe {
            products::matmul_widened::<__m256>(w, x, out, |row, col, out| widen(&w, row, col, out))
        },
    }
}

/// A piece of a row, from column `col` on, as floats.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn widen(w: &MatRef<'_>, row: usize, col: usize, out: &mut [f32]) {
    match w.encoding {
        Encoding::Blocks(DType::F16) => {
            let halves = &w.row(row)[2 * col..2 * (col + out.len())];
            // SAFETY: a CPU that runs this function has its instructions.
            unsafe { products::widen_cells::<__m256, f16>(halves, out) }
        }
        Encoding::Tiles(tiles) => widen_tiles(w, tiles, row, col, out),
        _ => dequantise(*w, row, col, out),
    }
}

// ---------------------------------------------------------------------------------------------------
// FP8

/// FP8 codes placed at the exponent and mantissa of a half float: their values are 2⁸ times too small, including those
/// without an implicit leading one. A tile's scale is multiplied by 2⁸, which is exact. So the product with it is
/// rounded only once, as it should be.
///
/// The scalar kernel handles two exceptions: the code for NaN, and a scale that overflows when multiplied by 2⁸.
struct Fp8 {
    /// The largest code so far, without signs.
    largest: __m128i,
}

impl Fp8 {
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    fn new() -> Fp8 {
        Fp8 { largest: _mm_setzero_si128() }
    }

    /// The factor of a tile's numbers.
    #[inline(always)]
    fn factor(tiles: Tiles, scales: &[u8], tile: usize) -> f32 {
        float_at(tiles.scales, scales, tile) * 256.0
    }

    /// Sixteen numbers, 2⁸ times too small.
    ///
    /// # Safety
    /// There must be sixteen codes.
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn sixteen(&mut self, codes: *const u8) -> [__m256; 2] {
        // SAFETY: the caller's promise.
        let codes = unsafe { _mm_loadu_si128(codes.cast()) };
        self.largest = _mm_max_epu8(self.largest, _mm_and_si128(codes, _mm_set1_epi8(0x7f)));
        // The sign appears twice, and the second one is removed.
        let words = _mm256_slli_epi16::<7>(_mm256_cvtepi8_epi16(codes));
        let halves = _mm256_and_si256(words, _mm256_set1_epi16(0xbf80_u16 as i16));
        [
            _mm256_cvtph_ps(_mm256_castsi256_si128(halves)),
            _mm256_cvtph_ps(_mm256_extracti128_si256::<1>(halves)),
        ]
    }

    /// Adds the products of a token with a tile's codes in two rows, a multiple of sixteen, lane by lane.
    ///
    /// A separate function, because its loop needs all registers.
    #[inline(never)]
    #[target_feature(enable = "avx2,fma,f16c")]
    fn add_tile(&mut self, codes: [&[u8]; 2], factors: [f32; 2], x: &[f32], acc: &mut [[__m256; 2]; 2]) {
        assert!(codes[0].len() == x.len() && codes[1].len() == x.len() && x.len().is_multiple_of(16));
        let factors = [_mm256_set1_ps(factors[0]), _mm256_set1_ps(factors[1])];
        let (mut numbers, mut sums) = (Fp8 { ..*self }, *acc);
        for col in (0..x.len()).step_by(16) {
            // SAFETY: there are sixteen columns.
            let x = unsafe {
                let x = x.as_ptr().add(col);
                [_mm256_loadu_ps(x), _mm256_loadu_ps(x.add(8))]
            };
            for row in 0..2 {
                // SAFETY: as above.
                let weights = unsafe { numbers.sixteen(codes[row].as_ptr().add(col)) };
                for half in 0..2 {
                    let weights = _mm256_mul_ps(weights[half], factors[row]);
                    sums[row][half] = _mm256_fmadd_ps(weights, x[half], sums[row][half]);
                }
            }
        }
        (*self, *acc) = (numbers, sums);
    }

    /// Whether no code was NaN.
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    fn all_numbers(&self) -> bool {
        _mm_movemask_epi8(_mm_cmpeq_epi8(self.largest, _mm_set1_epi8(0x7f))) == 0
    }
}

/// As [`widen`], for tiles of FP8 numbers.
#[target_feature(enable = "avx2,fma,f16c")]
pub(crate) fn widen_tiles(w: &MatRef<'_>, tiles: Tiles, row: usize, col: usize, out: &mut [f32]) {
    let (codes, scales) = (&w.row(row)[col..col + out.len()], w.scales(row));
    let mut numbers = Fp8::new();
    let mut done = 0;
    while done < out.len() {
        let tile = (col + done) / tiles.cols;
        let end = out.len().min((tile + 1) * tiles.cols - col);
        let factor = Fp8::factor(tiles, scales, tile);
        if !factor.is_finite() || !(end - done).is_multiple_of(16) {
            return dequantise(*w, row, col, out);
        }
        for at in (done..end).step_by(16) {
            // SAFETY: there are sixteen codes, and there is room for sixteen numbers.
            unsafe {
                let [low, high] = numbers.sixteen(codes.as_ptr().add(at));
                let out = out.as_mut_ptr().add(at);
                _mm256_storeu_ps(out, _mm256_mul_ps(low, _mm256_set1_ps(factor)));
                _mm256_storeu_ps(out.add(8), _mm256_mul_ps(high, _mm256_set1_ps(factor)));
            }
        }
        done = end;
    }
    if !numbers.all_numbers() {
        dequantise(*w, row, col, out);
    }
}

/// The products of one token with tiles of FP8 numbers. Returns false for the exceptions of [`Fp8`].
#[target_feature(enable = "avx2,fma,f16c")]
fn one_token(w: MatRef<'_>, tiles: Tiles, x: &[f32], out: &mut [f32]) -> bool {
    if !tiles.cols.is_multiple_of(16) || !w.cols.is_multiple_of(16) {
        return false;
    }
    let mut numbers = Fp8::new();
    let mut ahead = Ahead::new(w, 2);
    for (first, out) in out.chunks_mut(2).enumerate() {
        let row = |i: usize| (2 * first + i).min(w.rows - 1);
        let (codes, scales) = ([w.row(row(0)), w.row(row(1))], [w.scales(row(0)), w.scales(row(1))]);
        let mut acc = [[_mm256_setzero_ps(); 2]; 2];
        for (tile, start) in (0..w.cols).step_by(tiles.cols).enumerate() {
            let factors = [Fp8::factor(tiles, scales[0], tile), Fp8::factor(tiles, scales[1], tile)];
            if !factors[0].is_finite() || !factors[1].is_finite() {
                return false;
            }
            let cols = start..w.cols.min(start + tiles.cols);
            ahead.advance(2 * cols.len());
            numbers.add_tile([&codes[0][cols.clone()], &codes[1][cols.clone()]], factors, &x[cols], &mut acc);
        }
        for (out, acc) in out.iter_mut().zip(acc) {
            *out = scalar::sum_lanes(&to_lanes(&acc));
        }
    }
    numbers.all_numbers()
}
