//! Unpacking blocks with AVX2: 32 lanes at a time, in the order of the row.
//!
//! [`shared`](super::shared) multiplies the unpacked lanes: for one token directly from registers, for several tokens
//! from a panel of rows. The AVX-512 kernels use these functions, too.

use std::arch::x86_64::*;

use super::{Eight, halves_at};
use crate::quant::fp4::{E2M1, HALVES_OF_E4M3, Mxfp4, Nvfp4};
use crate::quant::grids;
use crate::quant::iq::{IQ4_VALUES, even_signs};
use crate::quant::{
    Iq1M, Iq1S, Iq2S, Iq2Xs, Iq2Xxs, Iq3S, Iq3Xxs, Iq4Nl, Iq4Xs, Q2K, Q3K, Q4_0, Q4_1, Q5_0, Q5_1, Quant,
};

/// Runs `$body` with `$q` bound to the type that `$dtype` names, if it is unpacked here.
macro_rules! with_lanes {
    ($dtype:expr, $q:ident => $body:expr) => {
        $crate::quant::with_quant! { $dtype, $q => $body,
            Q4_0 => Q4_0,
            Q4_1 => Q4_1,
            Q5_0 => Q5_0,
            Q5_1 => Q5_1,
            Q2_K => Q2K,
            Q3_K => Q3K,
            IQ1_S => Iq1S,
            IQ1_M => Iq1M,
            IQ2_XXS => Iq2Xxs,
            IQ2_XS => Iq2Xs,
            IQ2_S => Iq2S,
            IQ3_XXS => Iq3Xxs,
            IQ3_S => Iq3S,
            IQ4_NL => Iq4Nl,
            IQ4_XS => Iq4Xs,
            MXFP4 => Mxfp4,
            NVFP4 => Nvfp4,
        }
    };
}
pub(crate) use with_lanes;

/// A type that is unpacked here.
///
/// # Safety
/// All functions must receive whole blocks of the type, on a CPU with the instructions of [`super`].
pub(crate) trait Lanes: Quant {
    /// Whether lanes are signed bytes, or unsigned ones.
    const SIGNED: bool;
    /// The offset of unsigned lanes.
    const OFFSET: i16;
    /// The largest magnitude of a lane, which determines how many products fit 16 bits.
    const LARGEST: usize;
    /// Lanes that share an integer scale: 16 or 32, or `None` if the only scale is a float.
    const SCALE_LANES: Option<usize>;

    /// 32 lanes of a block.
    unsafe fn part(block: *const u8, part: usize) -> Part;

    /// 16 lanes each of two blocks: their first halves, then their second halves. Only for blocks of 32 lanes.
    unsafe fn halves(_first: *const u8, _second: *const u8) -> [Part; 2] {
        unreachable!("blocks of 32 lanes only")
    }

    /// The integer scales: sixteen words, one per 16 lanes. Called only if the type has them.
    unsafe fn scales(_block: *const u8) -> __m256i {
        unreachable!("the only scale is a float")
    }

    /// The integer minima, in the form of the scales, if the type has both.
    unsafe fn mins(_block: *const u8) -> __m256i {
        unreachable!("no integer minima")
    }

    /// One float of each of eight blocks.
    unsafe fn d(blocks: &Eight, float: usize) -> __m256;

    /// The scale of eight blocks' minima, if the type has them.
    unsafe fn dmin(_blocks: &Eight) -> __m256 {
        unreachable!("no minima")
    }
}

/// 32 lanes as magnitudes and signs, the form for byte products.
#[derive(Clone, Copy)]
pub(crate) struct Part {
    magnitudes: __m256i,
    /// Bytes with the signs of the lanes, if they are signed.
    signs: __m256i,
}

impl Part {
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    fn unsigned(lanes: __m256i) -> Part {
        Part { magnitudes: lanes, signs: lanes }
    }

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    fn signed(lanes: __m256i) -> Part {
        Part { magnitudes: _mm256_abs_epi8(lanes), signs: lanes }
    }

    /// The lanes as bytes.
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    pub(crate) fn lanes<Q: Lanes>(self) -> __m256i {
        if Q::SIGNED { _mm256_sign_epi8(self.magnitudes, self.signs) } else { self.magnitudes }
    }

    /// The products with 32 activations, added in pairs to words. A lane's sign is moved to its activation, which is at
    /// most 127, so negation cannot overflow. Two times 128 · 127 fit 16 bits.
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    pub(crate) fn pairs<Q: Lanes>(self, x: __m256i) -> __m256i {
        let x = if Q::SIGNED { _mm256_sign_epi8(x, self.signs) } else { x };
        _mm256_maddubs_epi16(self.magnitudes, x)
    }
}

/// The functions of [`Lanes`], each compiled for the instructions of [`super`].
macro_rules! lanes {
    ($q:ty, signed up to $largest:literal, scales $scales:expr; $($functions:tt)*) => {
        lanes! { $q, true, 0, $largest, $scales; $($functions)* }
    };
    ($q:ty, $offset:literal too high and up to $largest:literal, scales $scales:expr; $($functions:tt)*) => {
        lanes! { $q, false, $offset, $largest, $scales; $($functions)* }
    };
    ($q:ty, $signed:literal, $offset:literal, $largest:literal, $scales:expr;
     $(fn $name:ident($($arg:ident: $type:ty),*) -> $out:ty $body:block)*) => {
        impl Lanes for $q {
            const SIGNED: bool = $signed;
            const OFFSET: i16 = $offset;
            const LARGEST: usize = $largest;
            const SCALE_LANES: Option<usize> = $scales;
            $(
                #[inline]
                #[target_feature(enable = "avx2,fma,f16c")]
                unsafe fn $name($($arg: $type),*) -> $out {
                    // SAFETY: the offsets stay inside a block of the type, which the caller promises.
                    unsafe { $body }
                }
            )*
        }
    };
}

// ---------------------------------------------------------------------------------------------------
// Plain types

lanes! { Q4_0, 8 too high and up to 15, scales None;
    fn part(block: *const u8, _part: usize) -> Part {
        Part::unsigned(nibbles(block.add(2)))
    }
    fn halves(first: *const u8, second: *const u8) -> [Part; 2] {
        let [low, high] = two_nibbles(first.add(2), second.add(2));
        [Part::unsigned(low), Part::unsigned(high)]
    }
    fn d(blocks: &Eight, _float: usize) -> __m256 {
        halves_at(blocks, 0)
    }
}

lanes! { Q4_1, 0 too high and up to 15, scales None;
    fn part(block: *const u8, _part: usize) -> Part {
        Part::unsigned(nibbles(block.add(4)))
    }
    fn halves(first: *const u8, second: *const u8) -> [Part; 2] {
        let [low, high] = two_nibbles(first.add(4), second.add(4));
        [Part::unsigned(low), Part::unsigned(high)]
    }
    fn d(blocks: &Eight, _float: usize) -> __m256 {
        halves_at(blocks, 0)
    }
    fn dmin(blocks: &Eight) -> __m256 {
        negative(halves_at(blocks, 2))
    }
}

lanes! { Q5_0, 16 too high and up to 31, scales None;
    fn part(block: *const u8, _part: usize) -> Part {
        Part::unsigned(with_fifth(nibbles(block.add(6)), u32_at(block, 2)))
    }
    fn halves(first: *const u8, second: *const u8) -> [Part; 2] {
        let [low, high] = two_nibbles(first.add(6), second.add(6));
        let (a, b) = (u32_at(first, 2), u32_at(second, 2));
        [
            Part::unsigned(with_fifth(low, a & 0xffff | b << 16)),
            Part::unsigned(with_fifth(high, a >> 16 | b & 0xffff_0000)),
        ]
    }
    fn d(blocks: &Eight, _float: usize) -> __m256 {
        halves_at(blocks, 0)
    }
}

lanes! { Q5_1, 0 too high and up to 31, scales None;
    fn part(block: *const u8, _part: usize) -> Part {
        Part::unsigned(with_fifth(nibbles(block.add(8)), u32_at(block, 4)))
    }
    fn halves(first: *const u8, second: *const u8) -> [Part; 2] {
        let [low, high] = two_nibbles(first.add(8), second.add(8));
        let (a, b) = (u32_at(first, 4), u32_at(second, 4));
        [
            Part::unsigned(with_fifth(low, a & 0xffff | b << 16)),
            Part::unsigned(with_fifth(high, a >> 16 | b & 0xffff_0000)),
        ]
    }
    fn d(blocks: &Eight, _float: usize) -> __m256 {
        halves_at(blocks, 0)
    }
    fn dmin(blocks: &Eight) -> __m256 {
        negative(halves_at(blocks, 2))
    }
}

// ---------------------------------------------------------------------------------------------------
// K types

lanes! { Q2K, 0 too high and up to 3, scales Some(16);
    fn part(block: *const u8, part: usize) -> Part {
        Part::unsigned(pairs_of_bits(block.add(16), part))
    }
    fn scales(block: *const u8) -> __m256i {
        let packed = _mm_loadu_si128(block.cast());
        _mm256_cvtepu8_epi16(_mm_and_si128(packed, _mm_set1_epi8(15)))
    }
    fn mins(block: *const u8) -> __m256i {
        let packed = _mm_loadu_si128(block.cast());
        _mm256_cvtepu8_epi16(_mm_and_si128(_mm_srli_epi16::<4>(packed), _mm_set1_epi8(15)))
    }
    fn d(blocks: &Eight, _float: usize) -> __m256 {
        halves_at(blocks, 80)
    }
    fn dmin(blocks: &Eight) -> __m256 {
        halves_at(blocks, 82)
    }
}

lanes! { Q3K, 4 too high and up to 7, scales Some(16);
    fn part(block: *const u8, part: usize) -> Part {
        let third = _mm256_loadu_si256(block.cast());
        // Bit `part` of every byte becomes bit 2.
        let third = _mm256_sllv_epi32(_mm256_srlv_epi32(third, _mm256_set1_epi32(part as i32)), _mm256_set1_epi32(2));
        let third = _mm256_and_si256(third, _mm256_set1_epi8(4));
        Part::unsigned(_mm256_or_si256(pairs_of_bits(block.add(32), part), third))
    }
    fn scales(block: *const u8) -> __m256i {
        let low = block.add(96).cast::<u64>().read_unaligned();
        let high = u64::from(u32_at(block, 104));
        let (nibble, pair) = (0x0f0f_0f0f_0f0f_0f0f, 0x0303_0303);
        let top = |first: u32| (high >> first & pair) << 4 | (high >> (first + 2) & pair) << 36;
        let scales = _mm_set_epi64x((low >> 4 & nibble | top(4)) as i64, (low & nibble | top(0)) as i64);
        _mm256_sub_epi16(_mm256_cvtepu8_epi16(scales), _mm256_set1_epi16(32))
    }
    fn d(blocks: &Eight, _float: usize) -> __m256 {
        halves_at(blocks, 108)
    }
}

// ---------------------------------------------------------------------------------------------------
// Four-bit tables

lanes! { Iq4Nl, signed up to 127, scales None;
    fn part(block: *const u8, _part: usize) -> Part {
        Part::signed(look_up(&IQ4_VALUES, nibbles(block.add(2))))
    }
    fn halves(first: *const u8, second: *const u8) -> [Part; 2] {
        let [low, high] = two_nibbles(first.add(2), second.add(2));
        [Part::signed(look_up(&IQ4_VALUES, low)), Part::signed(look_up(&IQ4_VALUES, high))]
    }
    fn d(blocks: &Eight, _float: usize) -> __m256 {
        halves_at(blocks, 0)
    }
}

lanes! { Iq4Xs, signed up to 127, scales Some(32);
    fn part(block: *const u8, part: usize) -> Part {
        Part::signed(look_up(&IQ4_VALUES, nibbles(block.add(8 + 16 * part))))
    }
    fn scales(block: *const u8) -> __m256i {
        let low = nibble_scales(u32_at(block, 4));
        let high = _mm256_set1_epi32(i32::from(block.add(2).cast::<u16>().read_unaligned()));
        let high = _mm256_srlv_epi32(high, _mm256_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14));
        let high = _mm256_slli_epi32::<4>(_mm256_and_si256(high, _mm256_set1_epi32(3)));
        both_words(_mm256_sub_epi32(_mm256_or_si256(low, high), _mm256_set1_epi32(32)))
    }
    fn d(blocks: &Eight, _float: usize) -> __m256 {
        halves_at(blocks, 0)
    }
}

lanes! { Mxfp4, 12 too high and up to 24, scales None;
    fn part(block: *const u8, _part: usize) -> Part {
        Part::unsigned(look_up(&E2M1_FROM_ZERO, nibbles(block.add(1))))
    }
    fn halves(first: *const u8, second: *const u8) -> [Part; 2] {
        let [low, high] = two_nibbles(first.add(1), second.add(1));
        [Part::unsigned(look_up(&E2M1_FROM_ZERO, low)), Part::unsigned(look_up(&E2M1_FROM_ZERO, high))]
    }
    fn d(blocks: &Eight, _float: usize) -> __m256 {
        let exponent = |lane: usize| i16::from(blocks[lane].read());
        let exponents = _mm256_cvtepi16_epi32(_mm_setr_epi16(
            exponent(0), exponent(1), exponent(2), exponent(3),
            exponent(4), exponent(5), exponent(6), exponent(7),
        ));
        // As `fp4::half_of_power`.
        let two = _mm256_set1_epi32(2);
        let normal = _mm256_slli_epi32::<23>(_mm256_sub_epi32(exponents, _mm256_set1_epi32(1)));
        let small = _mm256_sllv_epi32(_mm256_set1_epi32(0x0020_0000), exponents);
        _mm256_castsi256_ps(_mm256_blendv_epi8(normal, small, _mm256_cmpgt_epi32(two, exponents)))
    }
}

lanes! { Nvfp4, 12 too high and up to 24, scales None;
    fn part(block: *const u8, part: usize) -> Part {
        let bytes = _mm_loadu_si128(block.add(4 + 16 * part).cast());
        let mask = _mm_set1_epi8(15);
        let low = _mm_and_si128(bytes, mask);
        let high = _mm_and_si128(_mm_srli_epi16::<4>(bytes), mask);
        // Eight bytes hold sixteen lanes.
        let lanes = _mm256_set_m128i(_mm_unpackhi_epi64(low, high), _mm_unpacklo_epi64(low, high));
        Part::unsigned(look_up(&E2M1_FROM_ZERO, lanes))
    }
    fn d(blocks: &Eight, float: usize) -> __m256 {
        let d = |lane: usize| HALVES_OF_E4M3[usize::from(blocks[lane].add(float).read())];
        _mm256_setr_ps(d(0), d(1), d(2), d(3), d(4), d(5), d(6), d(7))
    }
}

// ---------------------------------------------------------------------------------------------------
// Grids

lanes! { Iq2Xxs, signed up to 43, scales Some(32);
    fn part(block: *const u8, part: usize) -> Part {
        let point = |i: usize| &grids::IQ2_XXS[usize::from(block.add(2 + 8 * part + i).read())];
        let magnitudes = four_points(point(0), point(1), point(2), point(3));
        Part { magnitudes, signs: four_even_signs(u32_at(block, 6 + 8 * part)) }
    }
    fn scales(block: *const u8) -> __m256i {
        let load = |at: usize| _mm256_loadu_ps(block.add(at).cast());
        let odd = _mm256_shuffle_ps::<0b11_01_11_01>(load(2), load(34));
        let in_order = _mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_castps_si256(odd));
        odd_scales(_mm256_srli_epi32::<28>(in_order))
    }
    fn d(blocks: &Eight, _float: usize) -> __m256 {
        _mm256_mul_ps(halves_at(blocks, 0), _mm256_set1_ps(0.125))
    }
}

lanes! { Iq2Xs, signed up to 43, scales Some(16);
    fn part(block: *const u8, part: usize) -> Part {
        let packed = block.add(2 + 8 * part).cast::<u64>().read_unaligned();
        let point = |i: u32| &grids::IQ2_XS[(packed >> (16 * i) & 511) as usize];
        let signs = |i: u32| &EVEN_SIGNS[(packed >> (16 * i + 9) & 127) as usize];
        Part {
            magnitudes: four_points(point(0), point(1), point(2), point(3)),
            signs: four_points(signs(0), signs(1), signs(2), signs(3)),
        }
    }
    fn scales(block: *const u8) -> __m256i {
        sixteen_odd_scales(block.add(66))
    }
    fn d(blocks: &Eight, _float: usize) -> __m256 {
        _mm256_mul_ps(halves_at(blocks, 0), _mm256_set1_ps(0.125))
    }
}

lanes! { Iq2S, signed up to 43, scales Some(16);
    fn part(block: *const u8, part: usize) -> Part {
        let high = usize::from(block.add(66 + part).read());
        let low = |i: usize| usize::from(block.add(2 + 4 * part + i).read());
        let point = |i: usize| &grids::IQ2_S[low(i) | (high >> (2 * i) & 3) << 8];
        Part {
            magnitudes: four_points(point(0), point(1), point(2), point(3)),
            signs: signs(u32_at(block, 34 + 4 * part)),
        }
    }
    fn scales(block: *const u8) -> __m256i {
        sixteen_odd_scales(block.add(74))
    }
    fn d(blocks: &Eight, _float: usize) -> __m256 {
        _mm256_mul_ps(halves_at(blocks, 0), _mm256_set1_ps(0.125))
    }
}

lanes! { Iq3Xxs, signed up to 62, scales Some(32);
    fn part(block: *const u8, part: usize) -> Part {
        let point = |i: usize| &grids::IQ3_XXS[usize::from(block.add(2 + 8 * part + i).read())];
        let magnitudes = eight_points([
            point(0), point(1), point(2), point(3), point(4), point(5), point(6), point(7),
        ]);
        Part { magnitudes, signs: four_even_signs(u32_at(block, 66 + 4 * part)) }
    }
    fn scales(block: *const u8) -> __m256i {
        odd_scales(_mm256_srli_epi32::<28>(_mm256_loadu_si256(block.add(66).cast())))
    }
    fn d(blocks: &Eight, _float: usize) -> __m256 {
        _mm256_mul_ps(halves_at(blocks, 0), _mm256_set1_ps(0.25))
    }
}

lanes! { Iq3S, signed up to 15, scales Some(32);
    fn part(block: *const u8, part: usize) -> Part {
        let high = usize::from(block.add(66 + part).read());
        let low = |i: usize| usize::from(block.add(2 + 8 * part + i).read());
        let point = |i: usize| &grids::IQ3_S[low(i) | (high >> i & 1) << 8];
        let magnitudes = eight_points([
            point(0), point(1), point(2), point(3), point(4), point(5), point(6), point(7),
        ]);
        Part { magnitudes, signs: signs(u32_at(block, 74 + 4 * part)) }
    }
    fn scales(block: *const u8) -> __m256i {
        odd_scales(nibble_scales(u32_at(block, 106)))
    }
    fn d(blocks: &Eight, _float: usize) -> __m256 {
        halves_at(blocks, 0)
    }
}

lanes! { Iq1S, 9 too high and up to 18, scales Some(32);
    fn part(block: *const u8, part: usize) -> Part {
        let high = usize::from(block.add(34 + 2 * part).cast::<u16>().read_unaligned());
        let low = |i: usize| usize::from(block.add(2 + 4 * part + i).read());
        let point = |i: usize| &grids::IQ1[low(i) | (high >> (3 * i) & 7) << 8];
        let shift = _mm256_set1_epi8(9 + if high >> 15 == 1 { -1 } else { 1 });
        Part::unsigned(_mm256_add_epi8(four_points(point(0), point(1), point(2), point(3)), shift))
    }
    fn scales(block: *const u8) -> __m256i {
        let packed = _mm256_cvtepu16_epi32(_mm_loadu_si128(block.add(34).cast()));
        odd_scales(_mm256_and_si256(_mm256_srli_epi32::<12>(packed), _mm256_set1_epi32(7)))
    }
    fn d(blocks: &Eight, _float: usize) -> __m256 {
        _mm256_mul_ps(halves_at(blocks, 0), _mm256_set1_ps(0.125))
    }
}

lanes! { Iq1M, 9 too high and up to 18, scales Some(16);
    fn part(block: *const u8, part: usize) -> Part {
        let high = usize::from(block.add(32 + 2 * part).cast::<u16>().read_unaligned());
        let low = |i: usize| usize::from(block.add(4 * part + i).read());
        let point = |i: usize| &grids::IQ1[low(i) | (high >> (4 * i) & 7) << 8];
        // One bit for every eight lanes: where it is set they go down.
        let bits = _mm256_and_si256(_mm256_set1_epi64x(high as i64), _mm256_setr_epi64x(8, 0x80, 0x800, 0x8000));
        let up = _mm256_cmpeq_epi64(bits, _mm256_setzero_si256());
        let shift = _mm256_blendv_epi8(_mm256_set1_epi8(9 - 1), _mm256_set1_epi8(9 + 1), up);
        Part::unsigned(_mm256_add_epi8(four_points(point(0), point(1), point(2), point(3)), shift))
    }
    fn scales(block: *const u8) -> __m256i {
        // Each of four words four times, shifted so that one of its four scales starts at bit 9.
        let words = _mm256_set1_epi64x(block.add(48).cast::<i64>().read_unaligned());
        let index = |word: i64| 0x0100_0100_0100_0100 + word * 0x0202_0202_0202_0202;
        let words = _mm256_shuffle_epi8(words, _mm256_setr_epi64x(index(0), index(1), index(2), index(3)));
        let powers = _mm256_set1_epi64x(0x0001_0008_0040_0200);
        let scales = _mm256_srli_epi16::<9>(_mm256_mullo_epi16(words, powers));
        let scales = _mm256_and_si256(scales, _mm256_set1_epi16(7));
        _mm256_or_si256(_mm256_slli_epi16::<1>(scales), _mm256_set1_epi16(1))
    }
    fn d(blocks: &Eight, _float: usize) -> __m256 {
        let half = |lane: usize| {
            // The upper nibbles of four words, the first the lowest.
            let words = blocks[lane].add(48).cast::<u64>().read_unaligned();
            (words >> 12 & 0xf | words >> 24 & 0xf0 | words >> 36 & 0xf00 | words >> 48 & 0xf000) as i16
        };
        let halves =
            _mm_setr_epi16(half(0), half(1), half(2), half(3), half(4), half(5), half(6), half(7));
        _mm256_mul_ps(_mm256_cvtph_ps(halves), _mm256_set1_ps(0.125))
    }
}

// ---------------------------------------------------------------------------------------------------
// What several types have

/// [`E2M1`] raised to be unsigned.
const E2M1_FROM_ZERO: [i8; 16] = {
    let mut values = E2M1;
    let mut i = 0;
    while i < 16 {
        values[i] += 12;
        i += 1;
    }
    values
};

/// Every combination of seven signs, with an eighth sign that makes the number of minus signs even.
static EVEN_SIGNS: [[i8; 8]; 128] = {
    let mut all = [[1; 8]; 128];
    let mut i = 0;
    while i < 8 * 128 {
        if even_signs((i / 8) as u32) >> (i % 8) & 1 == 1 {
            all[i / 8][i % 8] = -1;
        }
        i += 1;
    }
    all
};

/// # Safety
/// The block must have four bytes at `at`.
#[inline(always)]
unsafe fn u32_at(block: *const u8, at: usize) -> u32 {
    // SAFETY: the caller's promise.
    unsafe { block.add(at).cast::<u32>().read_unaligned() }
}

/// 16 bytes' low nibbles, then their high ones.
///
/// # Safety
/// The pointer must point to 16 bytes.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn nibbles(bytes: *const u8) -> __m256i {
    // SAFETY: the caller's promise.
    let bytes = unsafe { _mm_loadu_si128(bytes.cast()) };
    let both = _mm256_set_m128i(_mm_srli_epi16::<4>(bytes), bytes);
    _mm256_and_si256(both, _mm256_set1_epi8(15))
}

/// The low nibbles of twice 16 bytes, and the high ones.
///
/// # Safety
/// Both pointers must point to 16 bytes.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn two_nibbles(first: *const u8, second: *const u8) -> [__m256i; 2] {
    // SAFETY: the caller's promise.
    let bytes = unsafe { _mm256_loadu2_m128i(second.cast(), first.cast()) };
    let mask = _mm256_set1_epi8(15);
    [_mm256_and_si256(bytes, mask), _mm256_and_si256(_mm256_srli_epi16::<4>(bytes), mask)]
}

/// The pairs of bits of a part, of which each 32 bytes hold four.
///
/// # Safety
/// The pointer must point to 64 bytes.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn pairs_of_bits(bytes: *const u8, part: usize) -> __m256i {
    // SAFETY: the caller's promise.
    let bytes = unsafe { _mm256_loadu_si256(bytes.add(part / 4 * 32).cast()) };
    let shifted = _mm256_srlv_epi32(bytes, _mm256_set1_epi32(part as i32 % 4 * 2));
    _mm256_and_si256(shifted, _mm256_set1_epi8(3))
}

/// Values of a table of sixteen.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn look_up(values: &[i8; 16], numbers: __m256i) -> __m256i {
    // SAFETY: the table is 16 bytes long.
    let values = unsafe { _mm_loadu_si128(values.as_ptr().cast()) };
    _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(values), numbers)
}

/// A byte of ones for every bit that is set, of zeros for the others.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn spread(bits: u32) -> __m256i {
    let byte = 0x0101_0101_0101_0101;
    let bytes = _mm256_setr_epi64x(0, byte, 2 * byte, 3 * byte);
    let bit = _mm256_set1_epi64x(0x8040_2010_0804_0201u64 as i64);
    let repeated = _mm256_shuffle_epi8(_mm256_set1_epi32(bits as i32), bytes);
    _mm256_cmpeq_epi8(_mm256_and_si256(repeated, bit), bit)
}

/// Nibbles, each with a fifth bit from `fifth`.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn with_fifth(nibbles: __m256i, fifth: u32) -> __m256i {
    _mm256_or_si256(nibbles, _mm256_and_si256(spread(fifth), _mm256_set1_epi8(16)))
}

/// A sign for every bit: minus where it is set.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn signs(bits: u32) -> __m256i {
    _mm256_or_si256(spread(bits), _mm256_set1_epi8(1))
}

/// Four groups of seven signs, each with an eighth sign that makes the number of set bits even.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn four_even_signs(bits: u32) -> __m256i {
    let eight = |i: u32| &EVEN_SIGNS[(bits >> (7 * i) & 127) as usize];
    four_points(eight(0), eight(1), eight(2), eight(3))
}

/// Four groups of eight lanes.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn four_points(a: &[i8; 8], b: &[i8; 8], c: &[i8; 8], d: &[i8; 8]) -> __m256i {
    // SAFETY: a point is eight bytes long.
    let eight = |lanes: &[i8; 8]| unsafe { lanes.as_ptr().cast::<i64>().read_unaligned() };
    _mm256_setr_epi64x(eight(a), eight(b), eight(c), eight(d))
}

/// Eight times four lanes.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn eight_points(points: [&[i8; 4]; 8]) -> __m256i {
    // SAFETY: a point is four bytes long.
    let four = |i: usize| unsafe { points[i].as_ptr().cast::<i32>().read_unaligned() };
    _mm256_setr_epi32(four(0), four(1), four(2), four(3), four(4), four(5), four(6), four(7))
}

/// Eight nibbles, a dword each.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn nibble_scales(packed: u32) -> __m256i {
    let shifts = _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28);
    let nibbles = _mm256_srlv_epi32(_mm256_set1_epi32(packed as i32), shifts);
    _mm256_and_si256(nibbles, _mm256_set1_epi32(15))
}

/// The low word of every dword, twice: a scale for 32 lanes as two for 16.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn both_words(v: __m256i) -> __m256i {
    _mm256_blend_epi16::<0b1010_1010>(v, _mm256_slli_epi32::<16>(v))
}

/// Eight scales of `n` and a half, doubled, each for 32 lanes.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn odd_scales(n: __m256i) -> __m256i {
    both_words(_mm256_or_si256(_mm256_slli_epi32::<1>(n), _mm256_set1_epi32(1)))
}

/// Sixteen scales of a nibble and a half, doubled.
///
/// # Safety
/// The pointer must point to eight bytes.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn sixteen_odd_scales(bytes: *const u8) -> __m256i {
    // SAFETY: the caller's promise.
    let bytes = unsafe { _mm_loadl_epi64(bytes.cast()) };
    let nibbles = _mm_unpacklo_epi8(bytes, _mm_srli_epi16::<4>(bytes));
    let nibbles = _mm256_cvtepu8_epi16(_mm_and_si128(nibbles, _mm_set1_epi8(15)));
    _mm256_or_si256(_mm256_slli_epi16::<1>(nibbles), _mm256_set1_epi16(1))
}

/// The opposite of each float.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn negative(v: __m256) -> __m256 {
    _mm256_xor_ps(v, _mm256_set1_ps(-0.0))
}
