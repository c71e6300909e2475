//! Random data of every kind the kernels take, the same in every run.

#![allow(dead_code)]

use forebay_kernels::DType;
use half::f16;

/// A small generator of random numbers (SplitMix64).
pub struct Random(pub u64);

impl Random {
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Uniform in −1..1.
    pub fn unit(&mut self) -> f32 {
        (self.bits() >> 40) as f32 / (1 << 23) as f32 - 1.0
    }

    /// Gaussian, by the sum of twelve uniform numbers.
    pub fn normal(&mut self) -> f32 {
        (0..12).map(|_| self.unit() / 2.0).sum()
    }

    pub fn normals(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.normal()).collect()
    }

    /// A matrix of a type: random bits, with scales that keep the weights near one.
    pub fn weights(&mut self, dtype: DType, rows: usize, cols: usize) -> Vec<u8> {
        match dtype {
            DType::F32 => self.normals(rows * cols).iter().flat_map(|v| v.to_le_bytes()).collect(),
            DType::F16 => {
                self.normals(rows * cols).iter().flat_map(|&v| f16::from_f32(v).to_le_bytes()).collect()
            }
            DType::BF16 => {
                let high = |v: f32| ((v.to_bits() >> 16) as u16).to_le_bytes();
                self.normals(rows * cols).iter().flat_map(|&v| high(v)).collect()
            }
            _ => {
                let mut bytes: Vec<u8> =
                    (0..dtype.row_bytes(cols).unwrap() * rows).map(|_| self.bits() as u8).collect();
                set_scales(dtype, &mut bytes, self);
                bytes
            }
        }
    }
}

/// Gives every block scales that keep its weights near one.
pub fn set_scales(dtype: DType, bytes: &mut [u8], random: &mut Random) {
    for block in bytes.chunks_exact_mut(dtype.block_bytes()) {
        match dtype {
            // Half of 2⁰ or 2⁻¹, times up to 12.
            DType::MXFP4 => block[0] = 126 + (random.bits() & 1) as u8,
            // Four floats with an exponent of 6 or 7, which stands for −1 or 0.
            DType::NVFP4 => block[..4].iter_mut().for_each(|d| *d = 6 << 3 | random.bits() as u8 & 0x0f),
            // A nibble of the scale on top of each of four words.
            DType::IQ1_M => {
                let scale = f16::from_f32(0.1 * (1.5 + random.unit())).to_bits();
                for i in 0..4 {
                    block[49 + 2 * i] = block[49 + 2 * i] & 15 | (scale >> (4 * i) << 4) as u8;
                }
            }
            _ => {
                for &(at, size) in scale_fields(dtype) {
                    let scale = f16::from_f32(size * (1.5 + random.unit()));
                    block[at..at + 2].copy_from_slice(&scale.to_le_bytes());
                }
            }
        }
    }
}

/// Where a type's block has f16 scales, and a size that keeps the weights near one.
fn scale_fields(dtype: DType) -> &'static [(usize, f32)] {
    match dtype {
        DType::Q4_0 => &[(0, 0.1)],
        DType::Q4_1 => &[(0, 0.1), (2, -0.6)],
        DType::Q5_0 => &[(0, 0.05)],
        DType::Q5_1 => &[(0, 0.05), (2, -0.6)],
        DType::Q8_0 => &[(0, 0.01)],
        DType::Q2_K => &[(80, 0.04), (82, 0.03)],
        DType::Q3_K => &[(108, 0.015)],
        DType::Q4_K => &[(0, 0.003), (2, 0.02)],
        DType::Q5_K => &[(0, 0.0015), (2, 0.02)],
        DType::Q6_K => &[(208, 0.0008)],
        DType::IQ1_S => &[(0, 0.1)],
        DType::IQ2_XXS | DType::IQ2_XS | DType::IQ2_S => &[(0, 0.015)],
        DType::IQ3_XXS => &[(0, 0.006)],
        DType::IQ3_S => &[(0, 0.006)],
        DType::IQ4_NL => &[(0, 0.01)],
        DType::IQ4_XS => &[(0, 0.0005)],
        other => panic!("no random weights of type {other} yet"),
    }
}

/// ‖a − b‖ / ‖b‖
pub fn relative_error(a: &[f32], b: &[f64]) -> f64 {
    assert_eq!(a.len(), b.len());
    let difference: f64 = a.iter().zip(b).map(|(&a, b)| (f64::from(a) - b).powi(2)).sum();
    (difference / b.iter().map(|b| b * b).sum::<f64>()).sqrt()
}
