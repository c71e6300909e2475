//! The plain types: 32 lanes per block, with one or two f16 for all of them.

use super::{Quant, Unpacked, f16_at};
use crate::DType;

/// `d: f16 · nibbles: [u8; 16]`, each 8 too high
pub struct Q4_0;

impl Quant for Q4_0 {
    const DTYPE: DType = DType::Q4_0;
    const BLOCK: usize = 32;
    const HAS_MINS: bool = false;

    fn unpack(block: &[u8], out: &mut Unpacked) {
        one_float(block, out);
        unpack_nibbles(&block[2..18], &mut out.lanes, |nibble, _| nibble as i8 - 8);
    }
}

/// `d: f16 · m: f16 · nibbles: [u8; 16]`
pub struct Q4_1;

impl Quant for Q4_1 {
    const DTYPE: DType = DType::Q4_1;
    const BLOCK: usize = 32;
    const HAS_MINS: bool = true;

    fn unpack(block: &[u8], out: &mut Unpacked) {
        two_floats(block, out);
        unpack_nibbles(&block[4..20], &mut out.lanes, |nibble, _| nibble as i8);
    }
}

/// `d: f16 · fifth bits: u32 · nibbles: [u8; 16]`, each 16 too high
pub struct Q5_0;

impl Quant for Q5_0 {
    const DTYPE: DType = DType::Q5_0;
    const BLOCK: usize = 32;
    const HAS_MINS: bool = false;

    fn unpack(block: &[u8], out: &mut Unpacked) {
        one_float(block, out);
        let fifth = &block[2..6];
        unpack_nibbles(&block[6..22], &mut out.lanes, |nibble, i| with_fifth(nibble, fifth, i) - 16);
    }
}

/// `d: f16 · m: f16 · fifth bits: u32 · nibbles: [u8; 16]`
pub struct Q5_1;

impl Quant for Q5_1 {
    const DTYPE: DType = DType::Q5_1;
    const BLOCK: usize = 32;
    const HAS_MINS: bool = true;

    fn unpack(block: &[u8], out: &mut Unpacked) {
        two_floats(block, out);
        let fifth = &block[4..8];
        unpack_nibbles(&block[8..24], &mut out.lanes, |nibble, i| with_fifth(nibble, fifth, i));
    }
}

/// `d: f16 · lanes: [i8; 32]`
pub struct Q8_0;

impl Quant for Q8_0 {
    const DTYPE: DType = DType::Q8_0;
    const BLOCK: usize = 32;
    const HAS_MINS: bool = false;

    fn unpack(block: &[u8], out: &mut Unpacked) {
        one_float(block, out);
        for (lane, byte) in out.lanes[..32].iter_mut().zip(&block[2..34]) {
            *lane = *byte as i8;
        }
    }
}

/// The scale at the start of a block.
fn one_float(block: &[u8], out: &mut Unpacked) {
    out.d[0] = f16_at(block, 0);
    out.scales[..2].fill(1);
}

/// The scale at the start of a block, and the number added to every weight, stored as a minimum of opposite sign.
fn two_floats(block: &[u8], out: &mut Unpacked) {
    one_float(block, out);
    out.dmin = -f16_at(block, 2);
    out.mins[..2].fill(1);
}

/// Sets 32 lanes from 16 bytes, low nibbles first. `lane` converts a nibble, given its index.
pub(super) fn unpack_nibbles(bytes: &[u8], lanes: &mut [i8], lane: impl Fn(u8, usize) -> i8) {
    for (i, byte) in bytes[..16].iter().enumerate() {
        lanes[i] = lane(byte & 15, i);
        lanes[i + 16] = lane(byte >> 4, i + 16);
    }
}

/// A nibble with bit `i` of `fifth` above it.
fn with_fifth(nibble: u8, fifth: &[u8], i: usize) -> i8 {
    (nibble | (fifth[i / 8] >> (i % 8) & 1) << 4) as i8
}
