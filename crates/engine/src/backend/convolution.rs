//! Causal convolutions of single channels on the CPU, and how they are divided among threads.

use forebay_kernels::{Grain, Kernels, Pool, Rows, Tap, TileMut};
use smallvec::SmallVec;

/// A convolution of each channel over the positions of a sequence.
pub struct Filters<'a> {
    pub kernels: &'a Kernels,
    pub pool: &'a Pool,
    /// `[kernel, channels]`
    pub weights: &'a [f32],
    /// Channels that one piece of work computes.
    pub together: usize,
}

/// Consecutive tokens of a sequence.
pub struct Inputs<'a> {
    /// The number of tokens of the sequence before these.
    pub start: usize,
    /// `[tokens, channels]`
    pub rows: Rows<'a, f32>,
    /// `[kernel − 1, channels]` The inputs of the tokens before these; `None` if there are none.
    pub before: Option<&'a [f32]>,
}

impl Filters<'_> {
    /// Writes the convolved rows to `out` and the last `kernel − 1` inputs to `kept`. `finish` receives the first
    /// channel of a piece and its channels of a convolved row.
    pub fn convolve(
        &self,
        inputs: &Inputs<'_>,
        out: &mut [f32],
        kept: &mut [f32],
        finish: impl Fn(usize, &mut [f32]) + Sync,
    ) {
        let &Inputs { start, rows, before } = inputs;
        let channels = rows.width();
        let kernel = self.weights.len() / channels;
        let past = kernel - 1;
        let matrices = [TileMut::new(out, channels), TileMut::new(kept, channels)];
        let grains = [rows.len(), past].map(|rows| Grain { rows, cols: self.together });
        self.pool.for_tile_pairs(matrices, grains, |piece, [mut out, mut kept]| {
            let first = piece * self.together;
            let cols = first..first + out.cols();
            // The stored inputs of the previous tokens, then the inputs of these tokens. Before the first token the
            // inputs are zero, whatever is stored.
            let input = |i: usize| match i.checked_sub(past) {
                Some(row) => Some(&rows.row(row)[cols.clone()]),
                None if start + i < past => None,
                None => before.map(|before| &before[i * channels..][cols.clone()]),
            };
            for row in 0..rows.len() {
                let taps: SmallVec<[Tap<'_>; 8]> = (0..kernel)
                    .filter_map(|j| {
                        Some(Tap { w: &self.weights[j * channels..][cols.clone()], x: input(row + j)? })
                    })
                    .collect();
                (self.kernels.convolve)(&taps, out.row(row));
                finish(first, out.row(row));
            }
            for i in 0..past {
                match input(rows.len() + i) {
                    Some(input) => kept.row(i).copy_from_slice(input),
                    None => kept.row(i).fill(0.0),
                }
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use forebay_testing::assert_same_bits;

    use super::*;

    const KERNEL: usize = 4;
    /// Not a multiple of the channels computed together.
    const CHANNELS: usize = 37;
    const TOKENS: usize = 11;

    /// Arbitrary numbers between −1 and 1.
    fn noise(len: usize, seed: u32) -> Vec<f32> {
        let bits = |i: u32| (i ^ seed).wrapping_mul(0x9e37_79b9).rotate_left(13).wrapping_mul(0x85eb_ca6b);
        (0..len as u32).map(|i| bits(i) as f32 / (1u64 << 31) as f32 - 1.0).collect()
    }

    /// The convolved rows, computed in chunks that start at these tokens.
    fn run(threads: usize, starts: &[usize]) -> Vec<f32> {
        let (weights, x) = (noise(KERNEL * CHANNELS, 1), noise(TOKENS * CHANNELS, 2));
        let pool = Pool::new(threads).unwrap();
        let kernels = Kernels::detect().unwrap();
        let filters = Filters { kernels, pool: &pool, weights: &weights, together: 8 };
        let mut out = vec![f32::NAN; TOKENS * CHANNELS];
        let mut before: Option<Vec<f32>> = None;
        for (i, &start) in starts.iter().enumerate() {
            let end = starts.get(i + 1).copied().unwrap_or(TOKENS);
            let of = start * CHANNELS..end * CHANNELS;
            let rows = Rows::new(&x[of.clone()], CHANNELS);
            let mut kept = vec![f32::NAN; (KERNEL - 1) * CHANNELS];
            let inputs = Inputs { start, rows, before: before.as_deref() };
            filters.convolve(&inputs, &mut out[of], &mut kept, |_, _| {});
            before = Some(kept);
        }
        out
    }

    #[test]
    fn a_row_is_the_weighted_sum_of_the_inputs_up_to_its_own() {
        let (weights, x) = (noise(KERNEL * CHANNELS, 1), noise(TOKENS * CHANNELS, 2));
        let out = run(1, &[0]);
        for (token, row) in out.chunks(CHANNELS).enumerate() {
            for (channel, &y) in row.iter().enumerate() {
                let at = |j: usize| (token + 1 + j).checked_sub(KERNEL).map(|t| x[t * CHANNELS + channel]);
                let sum: f32 =
                    (0..KERNEL).filter_map(|j| Some(weights[j * CHANNELS + channel] * at(j)?)).sum();
                assert!((y - sum).abs() < 1e-6, "token {token}, channel {channel}: {y}, not {sum}");
            }
        }
    }

    #[test]
    fn tokens_may_be_cut_anywhere() {
        let whole = run(1, &[0]);
        for cut in 1..TOKENS {
            assert_same_bits(&run(3, &[0, cut]), &whole, &format!("cut at {cut}"));
        }
        assert_same_bits(&run(2, &(0..TOKENS).collect::<Vec<_>>()), &whole, "cut everywhere");
    }
}
