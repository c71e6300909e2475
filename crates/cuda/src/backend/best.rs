//! Finds the likeliest tokens on the GPU, where the logits are.

use bytemuck::cast_slice_mut;
use forebay_engine::Result;
use forebay_engine::internals::backend::{Backend, Buf, Ranked, rank};

use super::{CudaBackend, Scratch};
use crate::program::{Args, Shape};

/// Constants of the kernels: logits per block, threads per block, bins per row, the most candidates per row, threads
/// for sorting, and the token that stands for too many candidates.
const SHARE: usize = 4096;
const THREADS: usize = 256;
const BINS: usize = 4096;
const MOST: usize = 4096;
const SORT_THREADS: usize = 1024;
const TOO_MANY: u32 = u32::MAX;

impl CudaBackend {
    /// Implements [`Backend::best`].
    pub(super) fn rank_rows(&mut self, logits: Buf, k: usize, out: &mut Vec<Ranked>) -> Result<()> {
        assert!(k <= MOST.min(logits.width()), "the best {k} of {}", logits.width());
        let kernels = self.kernels()?;
        let (rows, width) = (self.rows, logits.width());
        let sizes = [rows * k * 8, rows * MOST * 8, rows * BINS * 4, rows * 4];
        let found = self.scratch(Scratch::Best, sizes.iter().sum())?;
        let [gathered, bins, counts] = [1, 2, 3].map(|i| found + sizes[..i].iter().sum::<usize>() as u64);
        let args = Args::new().at(self.at(logits)).at(bins).at(counts).at(gathered).at(found);
        let args = args.int(width).int(k).int(rows);
        let shares = Shape::new([width.div_ceil(SHARE), rows, 1], THREADS);
        self.record(kernels.best_clear, Shape::each(rows * BINS), args.clone())?;
        self.record(kernels.best_count, shares, args.clone())?;
        self.record(kernels.best_gather, shares, args.clone())?;
        self.record(kernels.best_sort, Shape::new([rows, 1, 1], SORT_THREADS), args)?;
        self.submit()?;

        let mut pairs = vec![[0u32; 2]; rows * k];
        self.gpu.read(found, cast_slice_mut(&mut pairs))?;
        out.clear();
        out.extend(pairs.iter().map(|&[token, logit]| Ranked { token, logit: f32::from_bits(logit) }));
        // Too many logits are nearly equal, so the host ranks the whole row.
        for row in (0..rows).filter(|&row| pairs[row * k][0] == TOO_MANY) {
            let mut all = vec![0.0; width];
            self.read_row(logits, row, &mut all)?;
            let mut best = Vec::new();
            rank(&all, k, &mut best);
            best.resize(k, Ranked { token: 0, logit: f32::NEG_INFINITY });
            out[row * k..][..k].copy_from_slice(&best);
        }
        Ok(())
    }
}
