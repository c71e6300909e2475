//! The IQ family: lanes are points of a grid, or values of a table, chosen by number.
//!
//! The scales of the format are halves and its floats are multiplied by eighths or quarters; here both are brought to
//! integers times a smaller `d`. Few bits are involved, so nothing of that rounds.

use super::plain::unpack_nibbles;
use super::{Quant, SUB, Unpacked, f16_at, grids};
use crate::DType;

/// The values of IQ4_NL and IQ4_XS.
pub const IQ4_VALUES: [i8; 16] = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];

/// `d: f16 · nibbles: [u8; 16]`
pub struct Iq4Nl;

impl Quant for Iq4Nl {
    const DTYPE: DType = DType::IQ4_NL;
    const BLOCK: usize = 32;
    const HAS_MINS: bool = false;

    fn unpack(block: &[u8], out: &mut Unpacked) {
        out.d[0] = f16_at(block, 0);
        out.scales[..2].fill(1);
        unpack_nibbles(&block[2..18], &mut out.lanes, |nibble, _| IQ4_VALUES[nibble as usize]);
    }
}

/// `d: f16 · upper pairs of scale bits: u16 · lower nibbles of scales: [u8; 4] · nibbles: [u8; 128]`
pub struct Iq4Xs;

impl Quant for Iq4Xs {
    const DTYPE: DType = DType::IQ4_XS;
    const BLOCK: usize = 256;
    const HAS_MINS: bool = false;

    fn unpack(block: &[u8], out: &mut Unpacked) {
        out.d[0] = f16_at(block, 0);
        let high = u16_at(block, 2);
        for part in 0..8 {
            let low = block[4 + part / 2] >> (4 * (part % 2)) & 15;
            let top = (high >> (2 * part) & 3) << 4;
            set_scale(out, part, (i16::from(low) | top as i16) - 32);
            let lanes = &mut out.lanes[32 * part..][..32];
            unpack_nibbles(&block[8 + 16 * part..], lanes, |nibble, _| IQ4_VALUES[nibble as usize]);
        }
    }
}

/// `d: f16`, then for every 32 lanes `points: [u8; 4] · signs: 4 × 7 bits, scale: 4 bits`
pub struct Iq2Xxs;

impl Quant for Iq2Xxs {
    const DTYPE: DType = DType::IQ2_XXS;
    const BLOCK: usize = 256;
    const HAS_MINS: bool = false;

    fn unpack(block: &[u8], out: &mut Unpacked) {
        out.d[0] = f16_at(block, 0) * 0.125;
        for part in 0..8 {
            let points = &block[2 + 8 * part..][..4];
            let signs = u32_at(block, 6 + 8 * part);
            set_scale(out, part, odd(signs >> 28));
            for (i, &point) in points.iter().enumerate() {
                let lanes = &mut out.lanes[32 * part + 8 * i..][..8];
                set_signed(lanes, &grids::IQ2_XXS[usize::from(point)], even_signs(signs >> (7 * i)));
            }
        }
    }
}

/// `d: f16 · 32 × (point: 9 bits, signs: 7 bits) · scales: 16 × 4 bits`
pub struct Iq2Xs;

impl Quant for Iq2Xs {
    const DTYPE: DType = DType::IQ2_XS;
    const BLOCK: usize = 256;
    const HAS_MINS: bool = false;

    fn unpack(block: &[u8], out: &mut Unpacked) {
        out.d[0] = f16_at(block, 0) * 0.125;
        unpack_nibble_scales(&block[66..74], out);
        for (i, lanes) in out.lanes.chunks_exact_mut(8).enumerate() {
            let packed = u16_at(block, 2 + 2 * i);
            set_signed(lanes, &grids::IQ2_XS[usize::from(packed & 511)], even_signs(u32::from(packed >> 9)));
        }
    }
}

/// `d: f16 · points: [u8; 32] · signs: [u8; 32] · upper bits of points: 32 × 2 bits · scales: 16 × 4 bits`
pub struct Iq2S;

impl Quant for Iq2S {
    const DTYPE: DType = DType::IQ2_S;
    const BLOCK: usize = 256;
    const HAS_MINS: bool = false;

    fn unpack(block: &[u8], out: &mut Unpacked) {
        out.d[0] = f16_at(block, 0) * 0.125;
        unpack_nibble_scales(&block[74..82], out);
        for (i, lanes) in out.lanes.chunks_exact_mut(8).enumerate() {
            let top = usize::from(block[66 + i / 4] >> (2 * (i % 4)) & 3) << 8;
            set_signed(lanes, &grids::IQ2_S[usize::from(block[2 + i]) | top], block[34 + i]);
        }
    }
}

/// `d: f16 · points: [u8; 64] · for every 32 lanes signs: 4 × 7 bits, scale: 4 bits`
pub struct Iq3Xxs;

impl Quant for Iq3Xxs {
    const DTYPE: DType = DType::IQ3_XXS;
    const BLOCK: usize = 256;
    const HAS_MINS: bool = false;

    fn unpack(block: &[u8], out: &mut Unpacked) {
        out.d[0] = f16_at(block, 0) * 0.25;
        for part in 0..8 {
            let signs = u32_at(block, 66 + 4 * part);
            set_scale(out, part, odd(signs >> 28));
            for i in 0..4 {
                let signs = even_signs(signs >> (7 * i));
                let lanes = &mut out.lanes[32 * part + 8 * i..][..8];
                for (half, lanes) in lanes.chunks_exact_mut(4).enumerate() {
                    let point = block[2 + 8 * part + 2 * i + half];
                    set_signed(lanes, &grids::IQ3_XXS[usize::from(point)], signs >> (4 * half));
                }
            }
        }
    }
}

/// `d: f16 · points: [u8; 64] · upper bits of points: 64 × 1 bit · signs: [u8; 32] · scales: 8 × 4 bits`
pub struct Iq3S;

impl Quant for Iq3S {
    const DTYPE: DType = DType::IQ3_S;
    const BLOCK: usize = 256;
    const HAS_MINS: bool = false;

    fn unpack(block: &[u8], out: &mut Unpacked) {
        out.d[0] = f16_at(block, 0);
        for part in 0..8 {
            set_scale(out, part, odd(u32::from(block[106 + part / 2] >> (4 * (part % 2)) & 15)));
        }
        for (i, lanes) in out.lanes.chunks_exact_mut(4).enumerate() {
            let top = usize::from(block[66 + i / 8] >> (i % 8) & 1) << 8;
            let signs = block[74 + i / 2] >> (4 * (i % 2));
            set_signed(lanes, &grids::IQ3_S[usize::from(block[2 + i]) | top], signs);
        }
    }
}

/// `d: f16 · points: [u8; 32] · for every 32 lanes upper bits of points: 4 × 3 bits, scale: 3 bits, shift: 1 bit`
pub struct Iq1S;

impl Quant for Iq1S {
    const DTYPE: DType = DType::IQ1_S;
    const BLOCK: usize = 256;
    const HAS_MINS: bool = false;

    fn unpack(block: &[u8], out: &mut Unpacked) {
        out.d[0] = f16_at(block, 0) * 0.125;
        for part in 0..8 {
            let high = u16_at(block, 34 + 2 * part);
            set_scale(out, part, odd(u32::from(high >> 12 & 7)));
            for i in 0..4 {
                let top = usize::from(high >> (3 * i) & 7) << 8;
                let point = usize::from(block[2 + 4 * part + i]) | top;
                set_shifted(&mut out.lanes[32 * part + 8 * i..][..8], point, high >> 15 == 1);
            }
        }
    }
}

/// `points: [u8; 32] · 32 × (upper bits of a point: 3 bits, shift: 1 bit) · 4 × (scales: 4 × 3 bits, a quarter of d)`
pub struct Iq1M;

impl Quant for Iq1M {
    const DTYPE: DType = DType::IQ1_M;
    const BLOCK: usize = 256;
    const HAS_MINS: bool = false;

    fn unpack(block: &[u8], out: &mut Unpacked) {
        let mut d = 0;
        for i in 0..4 {
            let packed = u16_at(block, 48 + 2 * i);
            d |= packed >> 12 << (4 * i);
            for j in 0..4 {
                out.scales[4 * i + j] = odd(u32::from(packed >> (3 * j) & 7));
            }
        }
        out.d[0] = f16_at(&d.to_le_bytes(), 0) * 0.125;
        for (i, lanes) in out.lanes.chunks_exact_mut(8).enumerate() {
            let high = block[32 + i / 2] >> (4 * (i % 2));
            set_shifted(lanes, usize::from(block[i]) | usize::from(high & 7) << 8, high & 8 != 0);
        }
    }
}

/// Seven signs and an eighth that makes the number of minus signs even.
pub const fn even_signs(bits: u32) -> u8 {
    let seven = bits as u8 & 127;
    seven | (seven.count_ones() as u8 & 1) << 7
}

/// A scale of `n` and a half, doubled.
fn odd(n: u32) -> i16 {
    2 * n as i16 + 1
}

/// The scale of 32 lanes.
fn set_scale(out: &mut Unpacked, part: usize, scale: i16) {
    out.scales[part * 32 / SUB..(part + 1) * 32 / SUB].fill(scale);
}

/// Sixteen scales of four bits.
fn unpack_nibble_scales(bytes: &[u8], out: &mut Unpacked) {
    for (i, byte) in bytes.iter().enumerate() {
        out.scales[2 * i] = odd(u32::from(byte & 15));
        out.scales[2 * i + 1] = odd(u32::from(byte >> 4));
    }
}

/// The lanes of a point, negative where a bit is set.
fn set_signed(lanes: &mut [i8], point: &[i8], signs: u8) {
    for (i, (lane, value)) in lanes.iter_mut().zip(point).enumerate() {
        *lane = if signs >> i & 1 == 1 { -value } else { *value };
    }
}

/// The lanes of a point of the one-bit grid, shifted by an eighth.
fn set_shifted(lanes: &mut [i8], point: usize, down: bool) {
    for (lane, value) in lanes.iter_mut().zip(&grids::IQ1[point]) {
        *lane = if down { value - 1 } else { value + 1 };
    }
}

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([bytes[at], bytes[at + 1]])
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from(u16_at(bytes, at)) | u32::from(u16_at(bytes, at + 2)) << 16
}
