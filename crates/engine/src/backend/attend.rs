//! Attention on the CPU: how queries are grouped to read keys and values together.

use std::cell::RefCell;
use std::ops::Range;

use forebay_kernels::{AttentionStep, KEY_BLOCK, Kernels, Rows, RunningSoftmax, TileMut};

use super::kv::CpuKv;

/// Consecutive tokens whose queries are computed together, so that keys and values are read once for all of them.
pub const QUERY_TILE: usize = 8;

/// The most query heads computed together. Their queries and outputs stay in the CPU cache.
const HEAD_TILE: usize = 16;

/// How many of the `sharing` query heads of a key head one thread computes, so that `pieces` pieces of work are cut
/// into enough for the threads. The result divides `sharing`.
pub fn heads_at_once(sharing: usize, pieces: usize, threads: usize) -> usize {
    let most = (sharing * pieces / threads).clamp(1, HEAD_TILE).min(sharing);
    (1..=most).rev().find(|&heads| sharing.is_multiple_of(heads)).unwrap_or(1)
}

/// Query heads that share a key head, and their keys and values.
pub struct GroupedHeads<'a> {
    pub kernels: &'a Kernels,
    pub kv: &'a CpuKv,
    /// The key head.
    pub head: usize,
    /// The first query head.
    pub first: usize,
    /// The number of query heads.
    pub group: usize,
    /// The factor of every score.
    pub scale: f32,
    /// One score per query head that is part of the softmax's sum but has no value.
    pub sinks: Option<&'a [f32]>,
}

/// Buffers of one thread, reused from call to call.
#[derive(Default)]
struct Scratch {
    queries: Vec<f32>,            // [tokens, group, key_dim]
    running: Vec<RunningSoftmax>, // [tokens, group]
    out: Vec<f32>,                // [tokens, group, value_dim]
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

impl GroupedHeads<'_> {
    /// Rows `tokens` of a chunk that starts at position `start` attend to all positions that they see; `out` receives
    /// `[tokens, group · value_dim]`.
    ///
    /// A query reads the pages in order, whatever other queries it is grouped with, so grouping changes no bit.
    pub fn attend(
        &self,
        queries: Rows<'_, f32>,
        tokens: Range<usize>,
        start: usize,
        out: &mut TileMut<'_, f32>,
    ) {
        SCRATCH.with_borrow_mut(|scratch| {
            self.gather(queries, tokens.clone(), scratch);
            let sight = |token: usize| self.kv.sight(start + token + 1);
            let pages = |token: usize| sight(token).start / KEY_BLOCK..sight(token).end.div_ceil(KEY_BLOCK);
            // The pages that both the first and the last token see as a whole.
            let first = sight(tokens.end - 1).start.div_ceil(KEY_BLOCK);
            let common = first..first.max(sight(tokens.start).end / KEY_BLOCK);
            for (i, token) in tokens.clone().enumerate() {
                for page in pages(token).start..common.start.min(pages(token).end) {
                    self.step(page, sight(token), i..i + 1, scratch);
                }
            }
            for page in common.clone() {
                self.step(page, sight(tokens.start), 0..tokens.len(), scratch);
            }
            for (i, token) in tokens.enumerate() {
                for page in common.end.max(pages(token).start)..pages(token).end {
                    self.step(page, sight(token), i..i + 1, scratch);
                }
            }
            (self.kernels.attend_finish)(&scratch.running, &mut scratch.out);
            for (i, values) in scratch.out.chunks_exact(out.cols()).enumerate() {
                out.row(i).copy_from_slice(values);
            }
        });
    }

    /// Copies the queries of the group's heads, and resets the softmax.
    fn gather(&self, queries: Rows<'_, f32>, tokens: Range<usize>, scratch: &mut Scratch) {
        let shape = self.kv.shape();
        let width = self.group * shape.key_dim;
        let heads = tokens.len() * self.group;
        scratch.queries.clear();
        for token in tokens {
            scratch.queries.extend_from_slice(&queries.row(token)[self.first * shape.key_dim..][..width]);
        }
        scratch.running.clear();
        match self.sinks {
            None => scratch.running.resize(heads, RunningSoftmax::START),
            Some(sinks) => {
                let sinks = &sinks[self.first..][..self.group];
                let begun = sinks.iter().map(|&sink| RunningSoftmax { max: sink, sum: 1.0 });
                scratch.running.extend(begun.cycle().take(heads));
            }
        }
        scratch.out.clear();
        scratch.out.resize(heads * shape.value_dim, 0.0);
    }

    /// Attends from some of the tokens to the given positions of one page.
    fn step(&self, page: usize, positions: Range<usize>, tokens: Range<usize>, scratch: &mut Scratch) {
        let shape = self.kv.shape();
        let (keys, values) = self.kv.page(self.head, page, positions);
        let heads = tokens.start * self.group..tokens.end * self.group;
        let step = AttentionStep {
            queries: &scratch.queries[heads.start * shape.key_dim..heads.end * shape.key_dim],
            keys,
            values,
            head_dim: shape.key_dim,
            value_dim: shape.value_dim,
            value_stride: if shape.latent { shape.key_dim } else { shape.value_dim },
            scale: self.scale,
        };
        let out = &mut scratch.out[heads.start * shape.value_dim..heads.end * shape.value_dim];
        (self.kernels.attend)(&step, &mut scratch.running[heads], out);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heads_are_cut_into_enough_equal_parts() {
        // One token with many heads per key head, many such tokens, and groups that are divided only as far as
        // needed.
        assert_eq!(heads_at_once(128, 1, 16), 8);
        assert_eq!(heads_at_once(128, 64, 16), 16);
        assert_eq!(heads_at_once(16, 1, 12), 1);
        assert_eq!(heads_at_once(4, 8, 2), 4);
        assert_eq!(heads_at_once(6, 8, 12), 3);
        assert_eq!(heads_at_once(1, 1, 64), 1);
    }
}
