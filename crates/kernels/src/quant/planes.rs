//! Matrices whose scales are separate from their codes: unpacks them group by group.
//!
//! A group is a run of weights in a row that share a scale and possibly a bias: `weight = lane · scale + bias`.

use super::f16_at;
use super::fp4::{E2M1, half_of_power};
use crate::DType;
use crate::encoding::{Affine, Encoding, MXFP4_GROUP, Tiles};
use crate::tensor::MatRef;

/// The most lanes of a group.
pub const MAX_GROUP: usize = 128;

/// A group of a row.
pub struct Group {
    /// The integers. Only the group's length of them is meaningful.
    pub lanes: [i16; MAX_GROUP],
    /// The factor of the lanes.
    pub scale: f32,
    /// Added to each; zero if the encoding has no biases.
    pub bias: f32,
}

impl Group {
    /// An empty group.
    pub fn new() -> Group {
        Group { lanes: [0; MAX_GROUP], scale: 0.0, bias: 0.0 }
    }

    /// Unpacks group `index` of a row.
    ///
    /// # Panics
    /// If the encoding has no groups.
    #[inline(always)]
    pub fn unpack(&mut self, w: MatRef<'_>, row: usize, index: usize) {
        match w.encoding {
            Encoding::Affine(Affine { bits, group, scales }) => {
                let codes = &w.row(row)[index * group / 8 * bits..][..group / 8 * bits];
                unpack_codes(bits, codes, &mut self.lanes[..group]);
                self.scale = float_at(scales, w.scales(row), index);
                self.bias = float_at(scales, w.biases(row), index);
            }
            Encoding::Mxfp4 => {
                let codes = &w.row(row)[index * MXFP4_GROUP / 2..][..MXFP4_GROUP / 2];
                for (lanes, byte) in self.lanes.chunks_exact_mut(2).zip(codes) {
                    lanes[0] = E2M1[usize::from(byte & 15)].into();
                    lanes[1] = E2M1[usize::from(byte >> 4)].into();
                }
                self.scale = half_of_power(w.scales(row)[index]);
                self.bias = 0.0;
            }
            other => panic!("{other} is not in groups"),
        }
    }
}

impl Default for Group {
    fn default() -> Self {
        Group::new()
    }
}

/// Unpacks codes of `bits` bits, lowest bits first. Eight codes take `bits` bytes.
#[inline(always)]
fn unpack_codes(bits: usize, codes: &[u8], out: &mut [i16]) {
    let mask = (1u64 << bits) - 1;
    for (codes, out) in codes.chunks_exact(bits).zip(out.chunks_exact_mut(8)) {
        let word = codes.iter().rev().fold(0, |word, &byte| word << 8 | u64::from(byte));
        for (i, out) in out.iter_mut().enumerate() {
            *out = (word >> (bits * i) & mask) as i16;
        }
    }
}

/// The weights of a row, starting at column `first`. If weights share a scale, `first` and the length of `out` must be
/// whole groups.
#[inline(always)]
pub fn dequantise(w: MatRef<'_>, row: usize, first: usize, out: &mut [f32]) {
    match w.encoding {
        Encoding::Blocks(dtype) => {
            let bytes = |n| dtype.row_bytes(n).expect("whole blocks");
            super::dequantise_row(dtype, &w.row(row)[bytes(first)..bytes(first + out.len())], out);
        }
        Encoding::Columns(dtype) => {
            for (i, out) in out.iter_mut().enumerate() {
                *out = w.element(dtype, row, first + i);
            }
        }
        Encoding::Affine(Affine { group, .. }) => dequantise_groups(w, row, first, group, out),
        Encoding::Mxfp4 => dequantise_groups(w, row, first, MXFP4_GROUP, out),
        Encoding::Tiles(Tiles { cols, scales, .. }) => {
            let (codes, factors) = (&w.row(row)[first..first + out.len()], w.scales(row));
            let mut done = 0;
            while done < out.len() {
                let tile = (first + done) / cols;
                let end = out.len().min((tile + 1) * cols - first);
                let scale = float_at(scales, factors, tile);
                for (out, &code) in out[done..end].iter_mut().zip(&codes[done..end]) {
                    *out = fp8(code) * scale;
                }
                done = end;
            }
        }
    }
}

#[inline(always)]
fn dequantise_groups(w: MatRef<'_>, row: usize, first: usize, group: usize, out: &mut [f32]) {
    assert!(first.is_multiple_of(group) && out.len().is_multiple_of(group));
    let mut unpacked = Group::new();
    for (i, out) in out.chunks_exact_mut(group).enumerate() {
        unpacked.unpack(w, row, first / group + i);
        for (out, lane) in out.iter_mut().zip(&unpacked.lanes) {
            *out = f32::from(*lane) * unpacked.scale + unpacked.bias;
        }
    }
}

/// The value of an FP8 code (E4M3: no infinities, one NaN of either sign).
#[inline(always)]
pub fn fp8(code: u8) -> f32 {
    let magnitude = u32::from(code & 0x7f);
    // Below eight there is no implicit leading one, only eighths of the smallest exponent.
    let small = magnitude as f32 * (1.0 / 512.0);
    let normal = f32::from_bits((magnitude << 20) + (120 << 23));
    let value = if magnitude < 8 { small } else { normal };
    let value = if magnitude == 0x7f { f32::NAN } else { value };
    f32::from_bits(value.to_bits() | u32::from(code & 0x80) << 24)
}

/// Float `index` of a plane of floats.
#[inline(always)]
pub fn float_at(dtype: DType, bytes: &[u8], index: usize) -> f32 {
    match dtype {
        DType::F32 => f32::from_le_bytes(*bytes[4 * index..].first_chunk().expect("a float there")),
        DType::F16 => f16_at(bytes, 2 * index),
        DType::BF16 => {
            f32::from_bits(u32::from(bytes[2 * index]) << 16 | u32::from(bytes[2 * index + 1]) << 24)
        }
        // A power of two: twice the half that is used for doubled numbers.
        DType::F8_E8M0 => half_of_power(bytes[index]) * 2.0,
        other => panic!("{other} is not a type of scales"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fp8_numbers_are_the_published_ones() {
        let table = [
            (0x00, 0.0),
            (0x01, 0.001953125),
            (0x07, 0.013671875),
            (0x08, 0.015625),
            (0x38, 1.0),
            (0x39, 1.125),
            (0x7e, 448.0),
            (0xb8, -1.0),
        ];
        for (code, value) in table {
            assert_eq!(fp8(code), value, "{code:#x}");
        }
        assert!(fp8(0x7f).is_nan() && fp8(0xff).is_nan());
        assert!(fp8(0x80) == 0.0 && fp8(0x80).is_sign_negative());
    }

    #[test]
    fn powers_of_two_reach_from_end_to_end() {
        assert_eq!(half_of_power(128), 1.0);
        assert_eq!(half_of_power(0), 2f32.powi(-126) / 4.0);
        assert_eq!(half_of_power(1), 2f32.powi(-126) / 2.0);
        assert_eq!(half_of_power(255), 2f32.powi(127));
        assert_eq!(float_at(DType::F8_E8M0, &[127], 0), 1.0);
    }
}
