//! The four-bit floats: a sign, two bits of exponent, one of mantissa, and a scale that is itself a short float.

use super::plain::unpack_nibbles;
use super::{Quant, SUB, Unpacked};
use crate::DType;

/// The doubles of the sixteen floats.
pub const E2M1: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

/// `exponent of d: u8 · nibbles: [u8; 16]`
pub struct Mxfp4;

impl Quant for Mxfp4 {
    const DTYPE: DType = DType::MXFP4;
    const BLOCK: usize = 32;
    const HAS_MINS: bool = false;

    fn unpack(block: &[u8], out: &mut Unpacked) {
        out.d[0] = half_of_power(block[0]);
        out.scales[..2].fill(1);
        unpack_nibbles(&block[1..17], &mut out.lanes, |nibble, _| E2M1[nibble as usize]);
    }
}

/// `d: [u8; 4] · nibbles: [u8; 32]`: a scale for every 16 lanes, whose low nibbles come first
pub struct Nvfp4;

impl Quant for Nvfp4 {
    const DTYPE: DType = DType::NVFP4;
    const BLOCK: usize = 64;
    const FLOATS: usize = 4;
    const HAS_MINS: bool = false;

    fn unpack(block: &[u8], out: &mut Unpacked) {
        out.scales[..4].fill(1);
        let (scales, nibbles) = block.split_at(4);
        for part in 0..4 {
            out.d[part] = HALVES_OF_E4M3[usize::from(scales[part])];
            let lanes = &mut out.lanes[part * SUB..][..SUB];
            for (i, byte) in nibbles[part * SUB / 2..][..SUB / 2].iter().enumerate() {
                lanes[i] = E2M1[usize::from(byte & 15)];
                lanes[i + 8] = E2M1[usize::from(byte >> 4)];
            }
        }
    }
}

/// Half of `2^(exponent − 127)`, since lanes are doubled. The two smallest are below the normal floats.
pub fn half_of_power(exponent: u8) -> f32 {
    let bits = match exponent {
        0 | 1 => 0x0020_0000 << exponent,
        _ => u32::from(exponent - 1) << 23,
    };
    f32::from_bits(bits)
}

/// Half of each float of four bits of exponent and three of mantissa, since lanes are doubled.
pub static HALVES_OF_E4M3: [f32; 256] = {
    let mut halves = [0.0; 256];
    let mut byte = 0;
    while byte < 256 {
        halves[byte] = half_of_e4m3(byte as u32);
        byte += 1;
    }
    halves
};

/// The sign is ignored, and what is not a number counts as zero where it has no sign.
const fn half_of_e4m3(byte: u32) -> f32 {
    let (exponent, mantissa) = (byte >> 3 & 15, byte & 7);
    // The smallest step is 2⁻⁹, halved.
    let (steps, power) = match exponent {
        _ if byte == 0x7f => (0, 0),
        0 => (mantissa, 0),
        _ => (8 + mantissa, exponent - 1),
    };
    steps as f32 * f32::from_bits((127 - 10 + power) << 23)
}
