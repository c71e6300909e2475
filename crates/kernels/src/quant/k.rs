//! The K family: 256 lanes per block, with integer scales for parts of it.

use super::{Quant, SUB, Unpacked, f16_at};
use crate::DType;

/// `scales: 16 × 4 bits, mins: 16 × 4 bits · pairs of bits: [u8; 64] · d: f16 · dmin: f16`
pub struct Q2K;

impl Quant for Q2K {
    const DTYPE: DType = DType::Q2_K;
    const BLOCK: usize = 256;
    const HAS_MINS: bool = true;

    fn unpack(block: &[u8], out: &mut Unpacked) {
        out.d[0] = f16_at(block, 80);
        out.dmin = f16_at(block, 82);
        for (sub, byte) in block[..16].iter().enumerate() {
            out.scales[sub] = i16::from(byte & 15);
            out.mins[sub] = i16::from(byte >> 4);
        }
        for (part, lanes) in out.lanes.chunks_exact_mut(32).enumerate() {
            let pairs = &block[16 + part / 4 * 32..][..32];
            for (lane, byte) in lanes.iter_mut().zip(pairs) {
                *lane = (byte >> (part % 4 * 2) & 3) as i8;
            }
        }
    }
}

/// `third bits: [u8; 32] · pairs of bits: [u8; 64] · scales: 16 × 6 bits in 12 bytes · d: f16`
pub struct Q3K;

impl Quant for Q3K {
    const DTYPE: DType = DType::Q3_K;
    const BLOCK: usize = 256;
    const HAS_MINS: bool = false;

    fn unpack(block: &[u8], out: &mut Unpacked) {
        out.d[0] = f16_at(block, 108);
        // Eight bytes hold the low nibbles of scales 0–7 and 8–15, and four bytes hold the upper two bits of every
        // fourth scale.
        let (low, high) = (&block[96..104], &block[104..108]);
        for sub in 0..16 {
            let nibble = low[sub % 8] >> (sub / 8 * 4) & 15;
            let top = high[sub % 4] >> (sub / 4 * 2) & 3;
            out.scales[sub] = i16::from(nibble | top << 4) - 32;
        }
        for (part, lanes) in out.lanes.chunks_exact_mut(32).enumerate() {
            let pairs = &block[32 + part / 4 * 32..][..32];
            for (i, lane) in lanes.iter_mut().enumerate() {
                let pair = pairs[i] >> (part % 4 * 2) & 3;
                let third = block[i] >> part & 1;
                *lane = (pair | third << 2) as i8 - 4;
            }
        }
    }
}

/// `d: f16 · dmin: f16 · scales and mins: 8 × 6 bits each in 12 bytes · nibbles: [u8; 128]`
pub struct Q4K;

impl Quant for Q4K {
    const DTYPE: DType = DType::Q4_K;
    const BLOCK: usize = 256;
    const HAS_MINS: bool = true;

    fn unpack(block: &[u8], out: &mut Unpacked) {
        unpack_scales_and_mins(block, out);
        let nibbles = &block[16..144];
        for (lanes, bytes) in out.lanes.chunks_exact_mut(64).zip(nibbles.chunks_exact(32)) {
            for (i, byte) in bytes.iter().enumerate() {
                lanes[i] = (byte & 15) as i8;
                lanes[i + 32] = (byte >> 4) as i8;
            }
        }
    }
}

/// `d: f16 · dmin: f16 · scales and mins as in Q4_K · fifth bits: [u8; 32] · nibbles: [u8; 128]`
pub struct Q5K;

impl Quant for Q5K {
    const DTYPE: DType = DType::Q5_K;
    const BLOCK: usize = 256;
    const HAS_MINS: bool = true;

    fn unpack(block: &[u8], out: &mut Unpacked) {
        unpack_scales_and_mins(block, out);
        let fifth = &block[16..48];
        let nibbles = &block[48..176];
        for (group, (lanes, bytes)) in
            out.lanes.chunks_exact_mut(64).zip(nibbles.chunks_exact(32)).enumerate()
        {
            for (i, byte) in bytes.iter().enumerate() {
                let bits = fifth[i] >> (2 * group);
                lanes[i] = (byte & 15 | (bits & 1) << 4) as i8;
                lanes[i + 32] = (byte >> 4 | (bits & 2) << 3) as i8;
            }
        }
    }
}

/// `low nibbles: [u8; 128] · high pairs of bits: [u8; 64] · scales: [i8; 16] · d: f16`
pub struct Q6K;

impl Quant for Q6K {
    const DTYPE: DType = DType::Q6_K;
    const BLOCK: usize = 256;
    const HAS_MINS: bool = false;

    fn unpack(block: &[u8], out: &mut Unpacked) {
        out.d[0] = f16_at(block, 208);
        for (scale, byte) in out.scales.iter_mut().zip(&block[192..208]) {
            *scale = i16::from(*byte as i8);
        }
        let (low, high) = (&block[..128], &block[128..192]);
        for (half, lanes) in out.lanes.chunks_exact_mut(128).enumerate() {
            let (low, high) = (&low[half * 64..][..64], &high[half * 32..][..32]);
            for i in 0..32 {
                let bits = high[i];
                lanes[i] = (low[i] & 15 | (bits & 3) << 4) as i8 - 32;
                lanes[i + 32] = (low[i + 32] & 15 | (bits >> 2 & 3) << 4) as i8 - 32;
                lanes[i + 64] = (low[i] >> 4 | (bits >> 4 & 3) << 4) as i8 - 32;
                lanes[i + 96] = (low[i + 32] >> 4 | (bits >> 6) << 4) as i8 - 32;
            }
        }
    }
}

/// The head that Q4_K and Q5_K share: two floats, then eight scales and eight minima of six bits, each
/// for 32 lanes.
///
/// Bytes 0–3 hold scales 0–3, bytes 4–7 minima 0–3, each in the low six bits. Bytes 8–11 hold the low
/// nibbles of scales (low) and minima (high) 4–7, whose upper two bits fill the top of bytes 0–7.
fn unpack_scales_and_mins(block: &[u8], out: &mut Unpacked) {
    out.d[0] = f16_at(block, 0);
    out.dmin = f16_at(block, 2);
    let packed = &block[4..16];
    for i in 0..4 {
        let pairs = [
            (i, packed[i] & 63, packed[i + 4] & 63),
            (i + 4, packed[i + 8] & 15 | packed[i] >> 6 << 4, packed[i + 8] >> 4 | packed[i + 4] >> 6 << 4),
        ];
        for (part, scale, min) in pairs {
            let subs = part * 32 / SUB..(part + 1) * 32 / SUB;
            out.scales[subs.clone()].fill(i16::from(scale));
            out.mins[subs].fill(i16::from(min));
        }
    }
}
