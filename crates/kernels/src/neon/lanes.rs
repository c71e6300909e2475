//! Unpacking blocks with NEON: 32 lanes at a time, in the order of the row, as the signed bytes that
//! [`quant`](crate::quant) defines. [`shared`](super::shared) multiplies them.

use std::arch::aarch64::*;

use super::{Four, floats, halves_at, widen_halves};
use crate::quant::fp4::{E2M1, HALVES_OF_E4M3, half_of_power};
use crate::quant::grids;
use crate::quant::iq::{IQ4_VALUES, even_signs};
use crate::quant::{
    Iq1M, Iq1S, Iq2S, Iq2Xs, Iq2Xxs, Iq3S, Iq3Xxs, Iq4Nl, Iq4Xs, Mxfp4, Nvfp4, Q2K, Q3K, Q4_0, Q4_1, Q4K,
    Q5_0, Q5_1, Q5K, Q6K, Q8_0, Quant,
};

/// A type that is unpacked here.
///
/// # Safety
/// All functions must receive whole blocks of the type, on a CPU with the instructions of [`super`].
pub(super) trait Lanes: Quant {
    /// Lanes that share an integer scale: 16 or 32, or `None` if the only scale is a float. Types with integer scales
    /// have blocks of 256 lanes.
    const SCALE_LANES: Option<usize>;

    /// 32 lanes of a block.
    unsafe fn part(block: *const u8, part: usize) -> [int8x16_t; 2];

    /// The integer scales, one per 16 lanes. Called only if the type has them.
    unsafe fn scales(_block: *const u8) -> [int16x8_t; 2] {
        unreachable!("the only scale is a float")
    }

    /// The integer minima, in the form of the scales, if the type has both.
    unsafe fn mins(_block: *const u8) -> [int16x8_t; 2] {
        unreachable!("no integer minima")
    }

    /// One float of each of four blocks.
    unsafe fn d(blocks: &Four, float: usize) -> float32x4_t;

    /// The scale of four blocks' minima, if the type has them.
    unsafe fn dmin(_blocks: &Four) -> float32x4_t {
        unreachable!("no minima")
    }
}

/// The functions of [`Lanes`], each compiled for the instructions of [`super`].
macro_rules! lanes {
    ($q:ty, scales $scales:expr; $(fn $name:ident($($arg:ident: $type:ty),*) -> $out:ty $body:block)*) => {
        impl Lanes for $q {
            const SCALE_LANES: Option<usize> = $scales;
            $(
                #[inline]
                #[target_feature(enable = "neon,dotprod")]
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

lanes! { Q4_0, scales None;
    fn part(block: *const u8, _part: usize) -> [int8x16_t; 2] {
        minus(nibbles(block.add(2)), 8)
    }
    fn d(blocks: &Four, _float: usize) -> float32x4_t {
        halves_at(blocks, 0)
    }
}

lanes! { Q4_1, scales None;
    fn part(block: *const u8, _part: usize) -> [int8x16_t; 2] {
        minus(nibbles(block.add(4)), 0)
    }
    fn d(blocks: &Four, _float: usize) -> float32x4_t {
        halves_at(blocks, 0)
    }
    fn dmin(blocks: &Four) -> float32x4_t {
        vnegq_f32(halves_at(blocks, 2))
    }
}

lanes! { Q5_0, scales None;
    fn part(block: *const u8, _part: usize) -> [int8x16_t; 2] {
        minus(with_fifth(nibbles(block.add(6)), u32_at(block, 2)), 16)
    }
    fn d(blocks: &Four, _float: usize) -> float32x4_t {
        halves_at(blocks, 0)
    }
}

lanes! { Q5_1, scales None;
    fn part(block: *const u8, _part: usize) -> [int8x16_t; 2] {
        minus(with_fifth(nibbles(block.add(8)), u32_at(block, 4)), 0)
    }
    fn d(blocks: &Four, _float: usize) -> float32x4_t {
        halves_at(blocks, 0)
    }
    fn dmin(blocks: &Four) -> float32x4_t {
        vnegq_f32(halves_at(blocks, 2))
    }
}

lanes! { Q8_0, scales None;
    fn part(block: *const u8, _part: usize) -> [int8x16_t; 2] {
        minus(two_registers(block.add(2)), 0)
    }
    fn d(blocks: &Four, _float: usize) -> float32x4_t {
        halves_at(blocks, 0)
    }
}

// ---------------------------------------------------------------------------------------------------
// K types

lanes! { Q2K, scales Some(16);
    fn part(block: *const u8, part: usize) -> [int8x16_t; 2] {
        minus(bits(two_registers(block.add(16 + part / 4 * 32)), part % 4 * 2, 3), 0)
    }
    fn scales(block: *const u8) -> [int16x8_t; 2] {
        words(vandq_u8(vld1q_u8(block), vdupq_n_u8(15)))
    }
    fn mins(block: *const u8) -> [int16x8_t; 2] {
        words(vshrq_n_u8::<4>(vld1q_u8(block)))
    }
    fn d(blocks: &Four, _float: usize) -> float32x4_t {
        halves_at(blocks, 80)
    }
    fn dmin(blocks: &Four) -> float32x4_t {
        halves_at(blocks, 82)
    }
}

lanes! { Q3K, scales Some(16);
    fn part(block: *const u8, part: usize) -> [int8x16_t; 2] {
        let pairs = bits(two_registers(block.add(32 + part / 4 * 32)), part % 4 * 2, 3);
        let third = bits(two_registers(block), part, 1);
        minus([vsliq_n_u8::<2>(pairs[0], third[0]), vsliq_n_u8::<2>(pairs[1], third[1])], 4)
    }
    fn scales(block: *const u8) -> [int16x8_t; 2] {
        let low = block.add(96).cast::<u64>().read_unaligned();
        let high = u64::from(u32_at(block, 104));
        let (nibble, pair) = (0x0f0f_0f0f_0f0f_0f0f, 0x0303_0303);
        let top = |first: u32| (high >> first & pair) << 4 | (high >> (first + 2) & pair) << 36;
        let scales = vcombine_u8(vcreate_u8(low & nibble | top(0)), vcreate_u8(low >> 4 & nibble | top(4)));
        let [a, b] = words(scales);
        [vsubq_s16(a, vdupq_n_s16(32)), vsubq_s16(b, vdupq_n_s16(32))]
    }
    fn d(blocks: &Four, _float: usize) -> float32x4_t {
        halves_at(blocks, 108)
    }
}

lanes! { Q4K, scales Some(32);
    fn part(block: *const u8, part: usize) -> [int8x16_t; 2] {
        minus(bits(two_registers(block.add(16 + part / 2 * 32)), part % 2 * 4, 15), 0)
    }
    fn scales(block: *const u8) -> [int16x8_t; 2] {
        six_bits(u32_at(block, 4), u32_at(block, 12))
    }
    fn mins(block: *const u8) -> [int16x8_t; 2] {
        six_bits(u32_at(block, 8), u32_at(block, 12) >> 4)
    }
    fn d(blocks: &Four, _float: usize) -> float32x4_t {
        halves_at(blocks, 0)
    }
    fn dmin(blocks: &Four) -> float32x4_t {
        halves_at(blocks, 2)
    }
}

lanes! { Q5K, scales Some(32);
    fn part(block: *const u8, part: usize) -> [int8x16_t; 2] {
        let nibbles = bits(two_registers(block.add(48 + part / 2 * 32)), part % 2 * 4, 15);
        let fifth = bits(two_registers(block.add(16)), part, 1);
        minus([vsliq_n_u8::<4>(nibbles[0], fifth[0]), vsliq_n_u8::<4>(nibbles[1], fifth[1])], 0)
    }
    fn scales(block: *const u8) -> [int16x8_t; 2] {
        six_bits(u32_at(block, 4), u32_at(block, 12))
    }
    fn mins(block: *const u8) -> [int16x8_t; 2] {
        six_bits(u32_at(block, 8), u32_at(block, 12) >> 4)
    }
    fn d(blocks: &Four, _float: usize) -> float32x4_t {
        halves_at(blocks, 0)
    }
    fn dmin(blocks: &Four) -> float32x4_t {
        halves_at(blocks, 2)
    }
}

lanes! { Q6K, scales Some(16);
    fn part(block: *const u8, part: usize) -> [int8x16_t; 2] {
        // Half of a block is two runs of 32 low nibbles, then the same two of high ones.
        let (half, quarter) = (part / 4, part % 4);
        let low = bits(two_registers(block.add(half * 64 + quarter % 2 * 32)), quarter / 2 * 4, 15);
        let high = bits(two_registers(block.add(128 + half * 32)), quarter * 2, 3);
        minus([vsliq_n_u8::<4>(low[0], high[0]), vsliq_n_u8::<4>(low[1], high[1])], 32)
    }
    fn scales(block: *const u8) -> [int16x8_t; 2] {
        let scales = vld1q_s8(block.add(192).cast());
        [vmovl_s8(vget_low_s8(scales)), vmovl_high_s8(scales)]
    }
    fn d(blocks: &Four, _float: usize) -> float32x4_t {
        halves_at(blocks, 208)
    }
}

// ---------------------------------------------------------------------------------------------------
// Four-bit tables

lanes! { Iq4Nl, scales None;
    fn part(block: *const u8, _part: usize) -> [int8x16_t; 2] {
        look_up(&IQ4_VALUES, nibbles(block.add(2)))
    }
    fn d(blocks: &Four, _float: usize) -> float32x4_t {
        halves_at(blocks, 0)
    }
}

lanes! { Iq4Xs, scales Some(32);
    fn part(block: *const u8, part: usize) -> [int8x16_t; 2] {
        look_up(&IQ4_VALUES, nibbles(block.add(8 + 16 * part)))
    }
    fn scales(block: *const u8) -> [int16x8_t; 2] {
        let low = vmovl_u8(vcreate_u8(spread_nibbles(u32_at(block, 4))));
        let shifts = vld1q_s16([0, -2, -4, -6, -8, -10, -12, -14].as_ptr());
        let high = vshlq_u16(vdupq_n_u16(block.add(2).cast::<u16>().read_unaligned()), shifts);
        let both = vsliq_n_u16::<4>(low, vandq_u16(high, vdupq_n_u16(3)));
        twice(vsubq_s16(vreinterpretq_s16_u16(both), vdupq_n_s16(32)))
    }
    fn d(blocks: &Four, _float: usize) -> float32x4_t {
        halves_at(blocks, 0)
    }
}

lanes! { Mxfp4, scales None;
    fn part(block: *const u8, _part: usize) -> [int8x16_t; 2] {
        look_up(&E2M1, nibbles(block.add(1)))
    }
    fn d(blocks: &Four, _float: usize) -> float32x4_t {
        let d = |row: usize| half_of_power(blocks[row].read());
        floats(&[d(0), d(1), d(2), d(3)])
    }
}

lanes! { Nvfp4, scales None;
    fn part(block: *const u8, part: usize) -> [int8x16_t; 2] {
        // Eight bytes hold sixteen lanes.
        let [low, high] = nibbles(block.add(4 + 16 * part));
        let (low, high) = (vreinterpretq_u64_u8(low), vreinterpretq_u64_u8(high));
        let (first, second) = (vzip1q_u64(low, high), vzip2q_u64(low, high));
        look_up(&E2M1, [vreinterpretq_u8_u64(first), vreinterpretq_u8_u64(second)])
    }
    fn d(blocks: &Four, float: usize) -> float32x4_t {
        let d = |row: usize| HALVES_OF_E4M3[usize::from(blocks[row].add(float).read())];
        floats(&[d(0), d(1), d(2), d(3)])
    }
}

// ---------------------------------------------------------------------------------------------------
// Grids

lanes! { Iq2Xxs, scales Some(32);
    fn part(block: *const u8, part: usize) -> [int8x16_t; 2] {
        let points = u32_at(block, 2 + 8 * part);
        let point = |i: u32| &grids::IQ2_XXS[(points >> (8 * i) & 255) as usize];
        let signs = four_even_signs(u32_at(block, 6 + 8 * part));
        with_signs(four_points(point(0), point(1), point(2), point(3)), signs)
    }
    fn scales(block: *const u8) -> [int16x8_t; 2] {
        // The upper one of every two dwords.
        let four = |at: usize| {
            let (a, b) = (vld1q_u8(block.add(at)), vld1q_u8(block.add(at + 16)));
            vmovn_u32(vshrq_n_u32::<28>(vuzp2q_u32(vreinterpretq_u32_u8(a), vreinterpretq_u32_u8(b))))
        };
        twice(odd(vcombine_u16(four(2), four(34))))
    }
    fn d(blocks: &Four, _float: usize) -> float32x4_t {
        vmulq_n_f32(halves_at(blocks, 0), 0.125)
    }
}

lanes! { Iq2Xs, scales Some(16);
    fn part(block: *const u8, part: usize) -> [int8x16_t; 2] {
        let packed = block.add(2 + 8 * part).cast::<u64>().read_unaligned();
        let point = |i: u32| &grids::IQ2_XS[(packed >> (16 * i) & 511) as usize];
        let signs = |i: u32| u32::from(even_signs((packed >> (16 * i + 9)) as u32)) << (8 * i);
        let signs = signs(0) | signs(1) | signs(2) | signs(3);
        with_signs(four_points(point(0), point(1), point(2), point(3)), signs)
    }
    fn scales(block: *const u8) -> [int16x8_t; 2] {
        sixteen_odd_scales(block.add(66))
    }
    fn d(blocks: &Four, _float: usize) -> float32x4_t {
        vmulq_n_f32(halves_at(blocks, 0), 0.125)
    }
}

lanes! { Iq2S, scales Some(16);
    fn part(block: *const u8, part: usize) -> [int8x16_t; 2] {
        let low = u32_at(block, 2 + 4 * part);
        let high = u32::from(block.add(66 + part).read());
        let point = |i: u32| &grids::IQ2_S[(low >> (8 * i) & 255 | (high >> (2 * i) & 3) << 8) as usize];
        with_signs(four_points(point(0), point(1), point(2), point(3)), u32_at(block, 34 + 4 * part))
    }
    fn scales(block: *const u8) -> [int16x8_t; 2] {
        sixteen_odd_scales(block.add(74))
    }
    fn d(blocks: &Four, _float: usize) -> float32x4_t {
        vmulq_n_f32(halves_at(blocks, 0), 0.125)
    }
}

lanes! { Iq3Xxs, scales Some(32);
    fn part(block: *const u8, part: usize) -> [int8x16_t; 2] {
        let points = block.add(2 + 8 * part).cast::<u64>().read_unaligned();
        let point = |i: u32| &grids::IQ3_XXS[(points >> (8 * i) & 255) as usize];
        let lanes = eight_points([
            point(0), point(1), point(2), point(3), point(4), point(5), point(6), point(7),
        ]);
        with_signs(lanes, four_even_signs(u32_at(block, 66 + 4 * part)))
    }
    fn scales(block: *const u8) -> [int16x8_t; 2] {
        let four = |at: usize| vmovn_u32(vshrq_n_u32::<28>(vreinterpretq_u32_u8(vld1q_u8(block.add(at)))));
        twice(odd(vcombine_u16(four(66), four(82))))
    }
    fn d(blocks: &Four, _float: usize) -> float32x4_t {
        vmulq_n_f32(halves_at(blocks, 0), 0.25)
    }
}

lanes! { Iq3S, scales Some(32);
    fn part(block: *const u8, part: usize) -> [int8x16_t; 2] {
        let low = block.add(2 + 8 * part).cast::<u64>().read_unaligned();
        let high = u64::from(block.add(66 + part).read());
        let point = |i: u32| {
            let number = low >> (8 * i) & 255 | (high >> i & 1) << 8;
            &grids::IQ3_S[number as usize]
        };
        let lanes = eight_points([
            point(0), point(1), point(2), point(3), point(4), point(5), point(6), point(7),
        ]);
        with_signs(lanes, u32_at(block, 74 + 4 * part))
    }
    fn scales(block: *const u8) -> [int16x8_t; 2] {
        twice(odd(vmovl_u8(vcreate_u8(spread_nibbles(u32_at(block, 106))))))
    }
    fn d(blocks: &Four, _float: usize) -> float32x4_t {
        halves_at(blocks, 0)
    }
}

lanes! { Iq1S, scales Some(32);
    fn part(block: *const u8, part: usize) -> [int8x16_t; 2] {
        let low = u32_at(block, 2 + 4 * part);
        let high = u32::from(block.add(34 + 2 * part).cast::<u16>().read_unaligned());
        let point = |i: u32| &grids::IQ1[(low >> (8 * i) & 255 | (high >> (3 * i) & 7) << 8) as usize];
        let [a, b] = four_points(point(0), point(1), point(2), point(3));
        let shift = vdupq_n_s8(if high >> 15 == 1 { -1 } else { 1 });
        [vaddq_s8(a, shift), vaddq_s8(b, shift)]
    }
    fn scales(block: *const u8) -> [int16x8_t; 2] {
        let packed = vreinterpretq_u16_u8(vld1q_u8(block.add(34)));
        twice(odd(vandq_u16(vshrq_n_u16::<12>(packed), vdupq_n_u16(7))))
    }
    fn d(blocks: &Four, _float: usize) -> float32x4_t {
        vmulq_n_f32(halves_at(blocks, 0), 0.125)
    }
}

lanes! { Iq1M, scales Some(16);
    fn part(block: *const u8, part: usize) -> [int8x16_t; 2] {
        let low = u32_at(block, 4 * part);
        let high = u32::from(block.add(32 + 2 * part).cast::<u16>().read_unaligned());
        let point = |i: u32| &grids::IQ1[(low >> (8 * i) & 255 | (high >> (4 * i) & 7) << 8) as usize];
        let [a, b] = four_points(point(0), point(1), point(2), point(3));
        // One bit for every eight lanes: where it is set they go down.
        let shift = |i: u32| vdup_n_s8(1 - (high >> (4 * i + 2) & 2) as i8);
        [vaddq_s8(a, vcombine_s8(shift(0), shift(1))), vaddq_s8(b, vcombine_s8(shift(2), shift(3)))]
    }
    fn scales(block: *const u8) -> [int16x8_t; 2] {
        // Each of four words four times, shifted so that one of its four scales is at the bottom.
        let word = |i: usize| vdup_n_u16(block.add(48 + 2 * i).cast::<u16>().read_unaligned());
        let shifts = vld1q_s16([0, -3, -6, -9, 0, -3, -6, -9].as_ptr());
        let eight = |i: usize| {
            let moved = vshlq_u16(vcombine_u16(word(i), word(i + 1)), shifts);
            odd(vandq_u16(moved, vdupq_n_u16(7)))
        };
        [eight(0), eight(2)]
    }
    fn d(blocks: &Four, _float: usize) -> float32x4_t {
        let half = |row: usize| {
            // The upper nibbles of four words, the first the lowest.
            let words = blocks[row].add(48).cast::<u64>().read_unaligned();
            (words >> 12 & 0xf | words >> 24 & 0xf0 | words >> 36 & 0xf00 | words >> 48 & 0xf000) as u16
        };
        let halves = [half(0), half(1), half(2), half(3)];
        vmulq_n_f32(widen_halves(vld1_u16(halves.as_ptr())), 0.125)
    }
}

// ---------------------------------------------------------------------------------------------------
// What several types have

/// # Safety
/// The block must have four bytes at `at`.
#[inline(always)]
unsafe fn u32_at(block: *const u8, at: usize) -> u32 {
    // SAFETY: the caller's promise.
    unsafe { block.add(at).cast::<u32>().read_unaligned() }
}

/// # Safety
/// `bytes` must point to 32 bytes.
#[inline]
#[target_feature(enable = "neon,dotprod")]
unsafe fn two_registers(bytes: *const u8) -> [uint8x16_t; 2] {
    // SAFETY: the caller's promise.
    unsafe { [vld1q_u8(bytes), vld1q_u8(bytes.add(16))] }
}

/// 16 bytes' low nibbles, then their high ones.
///
/// # Safety
/// `bytes` must point to 16 bytes.
#[inline]
#[target_feature(enable = "neon,dotprod")]
unsafe fn nibbles(bytes: *const u8) -> [uint8x16_t; 2] {
    // SAFETY: the caller's promise.
    let bytes = unsafe { vld1q_u8(bytes) };
    [vandq_u8(bytes, vdupq_n_u8(15)), vshrq_n_u8::<4>(bytes)]
}

/// Every byte shifted right by `first` bits, masked.
#[inline]
#[target_feature(enable = "neon,dotprod")]
fn bits(bytes: [uint8x16_t; 2], first: usize, mask: u8) -> [uint8x16_t; 2] {
    let (right, mask) = (vdupq_n_s8(-(first as i8)), vdupq_n_u8(mask));
    [vandq_u8(vshlq_u8(bytes[0], right), mask), vandq_u8(vshlq_u8(bytes[1], right), mask)]
}

/// Subtracts an offset from lanes.
#[inline]
#[target_feature(enable = "neon,dotprod")]
fn minus(lanes: [uint8x16_t; 2], offset: i8) -> [int8x16_t; 2] {
    let lower = |lanes| vsubq_s8(vreinterpretq_s8_u8(lanes), vdupq_n_s8(offset));
    [lower(lanes[0]), lower(lanes[1])]
}

/// Values of a table of sixteen.
#[inline]
#[target_feature(enable = "neon,dotprod")]
fn look_up(values: &[i8; 16], numbers: [uint8x16_t; 2]) -> [int8x16_t; 2] {
    // SAFETY: the table is one register long.
    let values = unsafe { vld1q_s8(values.as_ptr()) };
    [vqtbl1q_s8(values, numbers[0]), vqtbl1q_s8(values, numbers[1])]
}

/// A byte of ones for every set bit, a byte of zeros for every other bit.
#[inline]
#[target_feature(enable = "neon,dotprod")]
fn spread(bits: u32) -> [uint8x16_t; 2] {
    let bit = vreinterpretq_u8_u64(vdupq_n_u64(0x8040_2010_0804_0201));
    let [a, b, c, d] = bits.to_le_bytes();
    [
        vtstq_u8(vcombine_u8(vdup_n_u8(a), vdup_n_u8(b)), bit),
        vtstq_u8(vcombine_u8(vdup_n_u8(c), vdup_n_u8(d)), bit),
    ]
}

/// Nibbles, each with a fifth bit from `fifth`.
#[inline]
#[target_feature(enable = "neon,dotprod")]
fn with_fifth(nibbles: [uint8x16_t; 2], fifth: u32) -> [uint8x16_t; 2] {
    let ([a, b], top) = (spread(fifth), vdupq_n_u8(16));
    [vorrq_u8(nibbles[0], vandq_u8(a, top)), vorrq_u8(nibbles[1], vandq_u8(b, top))]
}

/// Lanes, negated where a bit is set.
#[inline]
#[target_feature(enable = "neon,dotprod")]
fn with_signs(lanes: [int8x16_t; 2], bits: u32) -> [int8x16_t; 2] {
    let [a, b] = spread(bits);
    [vbslq_s8(a, vnegq_s8(lanes[0]), lanes[0]), vbslq_s8(b, vnegq_s8(lanes[1]), lanes[1])]
}

/// Four groups of seven signs, each with an eighth sign that makes the number of set bits even.
#[inline(always)]
fn four_even_signs(bits: u32) -> u32 {
    u32::from_le_bytes([
        even_signs(bits),
        even_signs(bits >> 7),
        even_signs(bits >> 14),
        even_signs(bits >> 21),
    ])
}

/// Four groups of eight lanes.
#[inline]
#[target_feature(enable = "neon,dotprod")]
fn four_points(a: &[i8; 8], b: &[i8; 8], c: &[i8; 8], d: &[i8; 8]) -> [int8x16_t; 2] {
    // SAFETY: a point is half a register long.
    let eight = |lanes: &[i8; 8]| unsafe { vld1_s8(lanes.as_ptr()) };
    [vcombine_s8(eight(a), eight(b)), vcombine_s8(eight(c), eight(d))]
}

/// Eight groups of four lanes.
#[inline]
#[target_feature(enable = "neon,dotprod")]
fn eight_points(points: [&[i8; 4]; 8]) -> [int8x16_t; 2] {
    let mut lanes = [0; 32];
    for (lanes, point) in lanes.as_chunks_mut::<4>().0.iter_mut().zip(points) {
        *lanes = *point;
    }
    // SAFETY: they are two registers long.
    unsafe { [vld1q_s8(lanes.as_ptr()), vld1q_s8(lanes.as_ptr().add(16))] }
}

/// Eight nibbles as bytes.
#[inline(always)]
fn spread_nibbles(packed: u32) -> u64 {
    // Each step separates the upper half of every run from its lower half.
    let mut spread = u64::from(packed);
    spread = (spread | spread << 16) & 0x0000_ffff_0000_ffff;
    spread = (spread | spread << 8) & 0x00ff_00ff_00ff_00ff;
    (spread | spread << 4) & 0x0f0f_0f0f_0f0f_0f0f
}

/// The eight scales or minima of Q4_K and Q5_K: four in the low six bits of `low`; four in nibbles of `high`, whose
/// upper two bits are those of `low`.
#[inline]
#[target_feature(enable = "neon,dotprod")]
fn six_bits(low: u32, high: u32) -> [int16x8_t; 2] {
    let (first, last) = (low & 0x3f3f_3f3f, high & 0x0f0f_0f0f | low >> 2 & 0x3030_3030);
    let eight = vmovl_u8(vcreate_u8(u64::from(first) | u64::from(last) << 32));
    twice(vreinterpretq_s16_u16(eight))
}

/// Sixteen bytes as 16-bit words.
#[inline]
#[target_feature(enable = "neon,dotprod")]
fn words(bytes: uint8x16_t) -> [int16x8_t; 2] {
    [vreinterpretq_s16_u16(vmovl_u8(vget_low_u8(bytes))), vreinterpretq_s16_u16(vmovl_high_u8(bytes))]
}

/// Every word twice: one scale for 32 lanes as two scales for 16.
#[inline]
#[target_feature(enable = "neon,dotprod")]
fn twice(words: int16x8_t) -> [int16x8_t; 2] {
    [vzip1q_s16(words, words), vzip2q_s16(words, words)]
}

/// Scales of `n` and a half, doubled.
#[inline]
#[target_feature(enable = "neon,dotprod")]
fn odd(n: uint16x8_t) -> int16x8_t {
    vreinterpretq_s16_u16(vorrq_u16(vshlq_n_u16::<1>(n), vdupq_n_u16(1)))
}

/// Sixteen scales of a nibble and a half, doubled.
///
/// # Safety
/// `bytes` must point to eight bytes.
#[inline]
#[target_feature(enable = "neon,dotprod")]
unsafe fn sixteen_odd_scales(bytes: *const u8) -> [int16x8_t; 2] {
    // SAFETY: the caller's promise.
    let bytes = unsafe { vld1_u8(bytes) };
    let (low, high) = (vand_u8(bytes, vdup_n_u8(15)), vshr_n_u8::<4>(bytes));
    [odd(vmovl_u8(vzip1_u8(low, high))), odd(vmovl_u8(vzip2_u8(low, high)))]
}
