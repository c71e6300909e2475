//! Finds the likeliest tokens: the GPU gathers a few candidates, and the host ranks them.

use bytemuck::cast_slice_mut;
use forebay_engine::Result;
use forebay_engine::internals::backend::{Backend, Buf, Ranked, rank, tame};

use super::{GpuBackend, THREADS};
use crate::device::Memory;
use crate::recorder::{Args, Bound};
use crate::shaders::{File, Name};

/// Constants of the kernels: logits per workgroup, bins per row, and the most candidates per row.
const SHARE: usize = 4096;
const BINS: usize = 4096;
const MOST: usize = 4096;

/// The memory of candidates.
#[derive(Default)]
pub struct Candidates(Option<Memory>);

impl GpuBackend {
    /// Implements [`Backend::best`].
    ///
    /// # Errors
    /// If the GPU fails, or there is no memory.
    pub(super) fn rank_rows(&mut self, logits: Buf, k: usize, out: &mut Vec<Ranked>) -> Result<()> {
        assert!(k <= MOST.min(logits.width()), "the best {k} of {}", logits.width());
        let (rows, width) = (self.rows, logits.width());
        let sizes =
            [rows * BINS * 4, (rows * 4).next_multiple_of(256), rows * MOST * 8].map(|size| size as u64);
        let memory = match self.candidates.0.take() {
            Some(memory) if memory.bytes() >= sizes.iter().sum() => memory,
            _ => self.gpu.allocate(sizes.iter().sum(), "scratch")?,
        };
        let whole = memory.whole();
        self.candidates.0 = Some(memory);
        let bins = whole.part(0, sizes[0]);
        let found = whole.part(sizes[0], sizes[1]);
        let gathered = whole.part(sizes[0] + sizes[1], sizes[2]);
        let results = whole.part(sizes[0], sizes[1] + sizes[2]);
        let args = Args::new().int(width).int(k).int(rows);
        let bound: [Bound; 4] = [self.at(logits).into(), bins.into(), found.into(), gathered.into()];
        let shares = width.div_ceil(SHARE);
        for (entry, workgroups) in [("clear", BINS / THREADS), ("count", shares), ("gather", shares)] {
            self.record(&Name::new(File::Best, entry), [workgroups, rows, 1], &args, &bound)?;
        }
        let mut words = vec![0u32; (results.bytes / 4) as usize];
        self.recorder.read(&results, cast_slice_mut(&mut words))?;

        let (counts, gathered) = words.split_at((sizes[1] / 4) as usize);
        out.clear();
        for row in 0..rows {
            let count = counts[row] as usize;
            let mut best = Vec::new();
            if count <= MOST {
                let pairs = gathered[2 * row * MOST..][..2 * count].chunks_exact(2);
                let ranked = |pair: &[u32]| Ranked { token: pair[0], logit: tame(f32::from_bits(pair[1])) };
                best.extend(pairs.map(ranked));
                best.sort_unstable_by(Ranked::by_rank);
            } else {
                // Too many logits are nearly equal, so the host ranks the whole row.
                let mut all = vec![0.0; width];
                self.read_row(logits, row, &mut all)?;
                rank(&all, k, &mut best);
            }
            best.resize(k, Ranked { token: 0, logit: f32::NEG_INFINITY });
            out.append(&mut best);
        }
        Ok(())
    }
}
