//! Random weights of any type. The bytes of blocks are drawn directly; only their scales are chosen, so that the
//! weights have the wanted standard deviation and a mean of about zero.

use forebay_kernels::DType;
use forebay_kernels::math::exp;
use forebay_kernels::quant::dequantise_row;
use half::f16;
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};

/// The distribution of a tensor's numbers.
#[derive(Clone, Copy)]
pub enum Content {
    /// All equal.
    Constant(f32),
    /// Gaussian with this standard deviation.
    Gaussian(f32),
    /// Uniform between these two.
    Between(f32, f32),
    /// Gaussian rows with lengths e^g, where g is Gaussian with this standard deviation.
    Router(f32),
    /// Blocks of a quantised type.
    Blocks(Blocks),
}

impl Content {
    /// Fills rows of `cols` numbers of a type.
    pub fn fill(self, dtype: DType, cols: usize, rng: &mut ChaCha8Rng, out: &mut [u8]) {
        match self {
            Content::Blocks(blocks) => blocks.fill(rng, out),
            Content::Constant(value) => floats(dtype, out, || value),
            Content::Gaussian(deviation) => floats(dtype, out, || deviation * gaussian(rng)),
            Content::Between(low, high) => floats(dtype, out, || {
                let unit = (rng.next_u32() >> 8) as f32 / (1 << 24) as f32;
                low + (high - low) * unit
            }),
            Content::Router(skew) => {
                let deviation = 1.0 / (cols as f32).sqrt();
                for row in out.chunks_exact_mut(cols * dtype.block_bytes()) {
                    let length = deviation * exp(skew * gaussian(rng));
                    floats(dtype, row, || length * gaussian(rng));
                }
            }
        }
    }
}

/// Numbers of a float type.
fn floats(dtype: DType, out: &mut [u8], mut next: impl FnMut() -> f32) {
    for number in out.chunks_exact_mut(dtype.block_bytes()) {
        let value = next();
        match dtype {
            DType::F32 => number.copy_from_slice(&value.to_le_bytes()),
            DType::F16 => number.copy_from_slice(&f16::from_f32(value).to_le_bytes()),
            _ => number.copy_from_slice(&half::bf16::from_f32(value).to_le_bytes()),
        }
    }
}

/// The sum of twelve uniform numbers is close enough to Gaussian, and has the same bits everywhere.
pub(crate) fn gaussian(rng: &mut ChaCha8Rng) -> f32 {
    let sum: u64 = (0..3)
        .map(|_| {
            let bits = rng.next_u64();
            (bits & 0xffff) + (bits >> 16 & 0xffff) + (bits >> 32 & 0xffff) + (bits >> 48)
        })
        .sum();
    sum as f32 / 65_536.0 - 6.0
}

/// How blocks of a quantised type are drawn.
#[derive(Clone, Copy)]
pub struct Blocks {
    dtype: DType,
    places: Places,
    scales: Scales,
}

/// The places of the floats in a block.
#[derive(Clone, Copy)]
enum Places {
    /// An f16 scale and perhaps an f16 scale of minima.
    Halves { scale: usize, min: Option<usize> },
    /// An f16 in the upper nibbles of four odd bytes, starting here.
    Nibbles(usize),
    /// This many 8-bit floats at the start.
    Bytes(usize),
}

/// The values of those floats.
#[derive(Clone, Copy, Default)]
struct Scales {
    scale: f32,
    min: f32,
    byte: u8,
}

impl Places {
    fn of(dtype: DType) -> Option<Places> {
        use DType::*;
        Some(match dtype {
            Q4_0 | Q5_0 | Q8_0 | IQ1_S | IQ2_XXS | IQ2_XS | IQ2_S | IQ3_XXS | IQ3_S | IQ4_NL | IQ4_XS => {
                Places::Halves { scale: 0, min: None }
            }
            Q4_1 | Q5_1 | Q4_K | Q5_K => Places::Halves { scale: 0, min: Some(2) },
            Q2_K => Places::Halves { scale: 80, min: Some(82) },
            Q3_K => Places::Halves { scale: 108, min: None },
            Q6_K => Places::Halves { scale: 208, min: None },
            IQ1_M => Places::Nibbles(49),
            MXFP4 => Places::Bytes(1),
            NVFP4 => Places::Bytes(4),
            _ => return None,
        })
    }
}

impl Blocks {
    /// Blocks whose weights have this standard deviation, or the closest that the type's scales allow; `None` for
    /// types that are not drawn as blocks.
    pub fn new(dtype: DType, deviation: f32) -> Option<Blocks> {
        let blocks = Blocks { dtype, places: Places::of(dtype)?, scales: Scales::default() };
        let with = |scales| Blocks { scales, ..blocks };
        let scales = match blocks.places {
            Places::Bytes(_) => {
                let distance = |byte: u8| {
                    let (_, found) = with(Scales { byte, ..Scales::default() }).measure();
                    // Compares by ratio, because twice as large is as wrong as half as large.
                    let ratio = found / f64::from(deviation);
                    if ratio.is_finite() && ratio > 0.0 { ratio.max(1.0 / ratio) } else { f64::INFINITY }
                };
                let bytes = (0..=u8::MAX).map(|byte| (distance(byte), byte));
                let best = bytes.min_by(|(a, _), (b, _)| a.total_cmp(b));
                Scales { byte: best.map_or(0, |(_, byte)| byte), ..Scales::default() }
            }
            Places::Halves { min: Some(_), .. } => {
                let (of_scale, _) = with(Scales { scale: 1.0, ..Scales::default() }).measure();
                let (of_min, _) = with(Scales { min: 1.0, ..Scales::default() }).measure();
                let min = -(of_scale / of_min) as f32;
                let (_, found) = with(Scales { scale: 1.0, min, byte: 0 }).measure();
                let scale = deviation / found as f32;
                Scales { scale, min: min * scale, byte: 0 }
            }
            Places::Halves { min: None, .. } | Places::Nibbles(_) => {
                let (_, found) = with(Scales { scale: 1.0, ..Scales::default() }).measure();
                Scales { scale: deviation / found as f32, ..Scales::default() }
            }
        };
        Some(with(scales))
    }

    /// Draws whole blocks.
    fn fill(&self, rng: &mut ChaCha8Rng, out: &mut [u8]) {
        rng.fill_bytes(out);
        let [scale, least] = [self.scales.scale, self.scales.min].map(|v| f16::from_f32(v).to_bits());
        // Without minima, integers may be off-centre, so the scale keeps its random sign.
        let signed = |drawn: u8| scale & 0x7fff | u16::from(drawn & 0x80) << 8;
        for block in out.chunks_exact_mut(self.dtype.block_bytes()) {
            match self.places {
                Places::Halves { scale: at, min: None } => {
                    let value = signed(block[at + 1]);
                    block[at..at + 2].copy_from_slice(&value.to_le_bytes());
                }
                Places::Halves { scale: at, min: Some(min) } => {
                    block[at..at + 2].copy_from_slice(&scale.to_le_bytes());
                    block[min..min + 2].copy_from_slice(&least.to_le_bytes());
                }
                Places::Nibbles(at) => {
                    let value = signed(block[at + 6]);
                    for i in 0..4 {
                        let byte = &mut block[at + 2 * i];
                        *byte = *byte & 15 | (value >> (4 * i) << 4) as u8;
                    }
                }
                Places::Bytes(count) => block[..count].fill(self.scales.byte),
            }
        }
    }

    /// The mean and standard deviation of the weights of some blocks.
    fn measure(&self) -> (f64, f64) {
        const WEIGHTS: usize = 1 << 14;
        let mut bytes = vec![0; WEIGHTS / self.dtype.block_len() * self.dtype.block_bytes()];
        self.fill(&mut ChaCha8Rng::seed_from_u64(0), &mut bytes);
        let mut weights = vec![0.0; WEIGHTS];
        dequantise_row(self.dtype, &bytes, &mut weights);
        let mean = weights.iter().map(|&w| f64::from(w)).sum::<f64>() / WEIGHTS as f64;
        let square = weights.iter().map(|&w| (f64::from(w) - mean).powi(2)).sum::<f64>() / WEIGHTS as f64;
        (mean, square.sqrt())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weights_of_every_type_have_the_wanted_deviation() {
        for dtype in DType::computable().filter(|dtype| !dtype.is_float()) {
            // Real models have 256 to 8192 columns.
            for deviation in [1.0, 0.06, 0.02, 0.011] {
                let blocks = Blocks::new(dtype, deviation).expect("its scales are somewhere");
                let mut bytes = vec![0; 1024 * 256 / dtype.block_len() * dtype.block_bytes()];
                blocks.fill(&mut ChaCha8Rng::seed_from_u64(7), &mut bytes);
                let mut weights = vec![0.0; 1024 * 256];
                dequantise_row(dtype, &bytes, &mut weights);
                let count = weights.len() as f32;
                let mean = weights.iter().sum::<f32>() / count;
                let found = (weights.iter().map(|w| (w - mean).powi(2)).sum::<f32>() / count).sqrt();
                let ratio = found / deviation;
                // 8-bit scales are powers of two, or nearly.
                let slack = if matches!(blocks.places, Places::Bytes(_)) { 1.45 } else { 1.1 };
                assert!((1.0 / slack..slack).contains(&ratio), "{dtype}: {found} instead of {deviation}");
                assert!(mean.abs() < 0.05 * found, "{dtype}: a mean of {mean} beside {found}");
            }
        }
    }

    #[test]
    fn a_router_has_rows_of_different_lengths() {
        let mut bytes = vec![0; 1000 * 64 * 4];
        Content::Router(0.4).fill(DType::F32, 64, &mut ChaCha8Rng::seed_from_u64(7), &mut bytes);
        let mut weights = vec![0.0; 1000 * 64];
        dequantise_row(DType::F32, &bytes, &mut weights);
        let logs: Vec<f32> =
            weights.chunks(64).map(|row| row.iter().map(|w| w * w).sum::<f32>().sqrt().ln()).collect();
        let mean = logs.iter().sum::<f32>() / 1000.0;
        let deviation = (logs.iter().map(|l| (l - mean).powi(2)).sum::<f32>() / 1000.0).sqrt();
        assert!(mean.abs() < 0.05 && (0.36..0.46).contains(&deviation), "{mean} ± {deviation}");
    }
}
