//! Random test data for the kernels, the same in every run.

#![allow(dead_code)]

use forebay_kernels::{Affine, DType, Encoding, MatRef, Planes, Tiles};
use half::f16;

/// Every encoding that the kernels support. Of encodings with parameters, a selection that covers each value of each
/// parameter.
pub fn encodings() -> Vec<Encoding> {
    let mut all: Vec<Encoding> = DType::computable().map(Encoding::Blocks).collect();
    for bits in [2, 3, 4, 5, 6, 8] {
        for (group, scales) in [(32, DType::F16), (64, DType::BF16), (128, DType::F32), (32, DType::BF16)] {
            all.push(Encoding::Affine(Affine { bits, group, scales }));
        }
    }
    all.push(Encoding::Mxfp4);
    for (rows, cols) in [(128, 128), (4, 32), (5, 48), (3, 7)] {
        for scales in [DType::F32, DType::BF16, DType::F8_E8M0] {
            all.push(Encoding::Tiles(Tiles { rows, cols, scales }));
        }
    }
    all.extend([DType::F32, DType::F16, DType::BF16].map(Encoding::Columns));
    all
}

/// Encodings that are multiplied with quantised activations.
pub fn quantised() -> impl Iterator<Item = Encoding> {
    encodings().into_iter().filter(|e| e.activation_block().is_some())
}

/// Columns that belong together: a block or a group.
pub fn block_len(encoding: Encoding) -> usize {
    match encoding {
        Encoding::Blocks(dtype) => dtype.block_len(),
        Encoding::Affine(affine) => affine.group,
        Encoding::Mxfp4 => 32,
        Encoding::Tiles(_) | Encoding::Columns(_) => 1,
    }
}

/// The planes of a matrix, owned.
pub struct Stored {
    pub encoding: Encoding,
    pub rows: usize,
    pub cols: usize,
    pub codes: Vec<u8>,
    pub scales: Vec<u8>,
    pub biases: Vec<u8>,
}

impl Stored {
    /// A matrix of random weights near one.
    pub fn random(random: &mut Random, encoding: Encoding, rows: usize, cols: usize) -> Stored {
        let codes = encoding.plane_bytes(rows, cols).unwrap()[0];
        let codes = match encoding {
            Encoding::Blocks(dtype) | Encoding::Columns(dtype) => random.weights(dtype, rows, cols),
            // One FP8 code is NaN.
            Encoding::Tiles(_) => {
                (0..codes).map(|_| random.bits() as u8).map(|b| b - u8::from(b & 127 == 127)).collect()
            }
            _ => (0..codes).map(|_| random.bits() as u8).collect(),
        };
        Stored::with_codes(random, encoding, rows, cols, codes)
    }

    /// A matrix of given codes, with random scales and biases that keep its weights near one.
    pub fn with_codes(
        random: &mut Random,
        encoding: Encoding,
        rows: usize,
        cols: usize,
        mut codes: Vec<u8>,
    ) -> Stored {
        let [_, scales, biases] = encoding.plane_bytes(rows, cols).unwrap();
        let mut floats = |dtype: DType, bytes: usize, size: f32, centre: f32| -> Vec<u8> {
            let count = bytes / dtype.block_bytes();
            let value = |random: &mut Random| size * (centre + random.unit());
            match dtype {
                DType::F8_E8M0 => (0..count).map(|_| 118 + (random.bits() % 4) as u8).collect(),
                DType::F32 => (0..count).flat_map(|_| value(random).to_le_bytes()).collect(),
                DType::F16 => (0..count).flat_map(|_| f16::from_f32(value(random)).to_le_bytes()).collect(),
                _ => {
                    (0..count).flat_map(|_| ((value(random).to_bits() >> 16) as u16).to_le_bytes()).collect()
                }
            }
        };
        let (scales, biases) = match encoding {
            Encoding::Affine(Affine { bits, scales: dtype, .. }) => {
                let size = 2.0 / (1 << bits) as f32;
                (floats(dtype, scales, size, 1.5), floats(dtype, biases, 1.0, -1.0))
            }
            Encoding::Tiles(tiles) => (floats(tiles.scales, scales, 0.01, 1.5), Vec::new()),
            Encoding::Mxfp4 => (floats(DType::F8_E8M0, scales, 0.0, 0.0), Vec::new()),
            Encoding::Blocks(dtype) if !dtype.is_float() => {
                set_scales(dtype, &mut codes, random);
                (Vec::new(), Vec::new())
            }
            _ => (Vec::new(), Vec::new()),
        };
        Stored { encoding, rows, cols, codes, scales, biases }
    }

    pub fn view(&self) -> MatRef<'_> {
        let planes = Planes { codes: &self.codes, scales: &self.scales, biases: &self.biases };
        MatRef::from_planes(self.encoding, self.rows, self.cols, planes)
    }

    pub fn bytes(&self) -> usize {
        self.codes.len() + self.scales.len() + self.biases.len()
    }
}

/// A small random number generator (SplitMix64).
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

/// Where a type's block has f16 scales, and a magnitude that keeps the weights near one.
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
