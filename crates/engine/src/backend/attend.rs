//! Attention on the CPU: which queries pass over which pages together.

use std::cell::RefCell;
use std::ops::Range;

use forebay_kernels::{AttentionStep, KEY_BLOCK, Kernels, Rows, RunningSoftmax, TileMut};

use super::kv::CpuKv;

/// Consecutive tokens whose queries pass over the keys together, so that keys and values are read once for all.
pub const QUERY_TILE: usize = 8;

/// The query heads that share a key head.
pub struct GroupedHeads<'a> {
    pub kernels: &'a Kernels,
    pub kv: &'a CpuKv,
    /// The key head.
    pub head: usize,
    /// Query heads for each key head.
    pub group: usize,
    /// Multiplies every score.
    pub scale: f32,
}

/// Memory of one thread, kept from call to call.
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
    /// Rows `tokens` of a chunk that starts at position `start` attend to all positions up to their own;
    /// `out` receives `[tokens, group · value_dim]`.
    ///
    /// A query meets the pages in order, whatever queries are beside it, so tiles change no bit.
    pub fn attend(
        &self,
        queries: Rows<'_, f32>,
        tokens: Range<usize>,
        start: usize,
        out: &mut TileMut<'_, f32>,
    ) {
        SCRATCH.with_borrow_mut(|scratch| {
            self.gather(queries, tokens.clone(), scratch);
            let all = 0..tokens.len();
            // Pages that even the first token sees whole.
            let common = (start + tokens.start + 1) / KEY_BLOCK;
            for page in 0..common {
                self.step(page, (page + 1) * KEY_BLOCK, all.clone(), scratch);
            }
            for (i, token) in tokens.enumerate() {
                let len = start + token + 1;
                for page in common..len.div_ceil(KEY_BLOCK) {
                    self.step(page, len, i..i + 1, scratch);
                }
            }
            (self.kernels.attend_finish)(&scratch.running, &mut scratch.out);
            for (i, values) in scratch.out.chunks_exact(out.cols()).enumerate() {
                out.row(i).copy_from_slice(values);
            }
        });
    }

    /// Copies the group's heads of all tokens together, and starts afresh.
    fn gather(&self, queries: Rows<'_, f32>, tokens: Range<usize>, scratch: &mut Scratch) {
        let shape = self.kv.shape();
        let width = self.group * shape.key_dim;
        let heads = tokens.len() * self.group;
        scratch.queries.clear();
        for token in tokens {
            scratch.queries.extend_from_slice(&queries.row(token)[self.head * width..][..width]);
        }
        scratch.running.clear();
        scratch.running.resize(heads, RunningSoftmax::START);
        scratch.out.clear();
        scratch.out.resize(heads * shape.value_dim, 0.0);
    }

    /// Some of the tokens pass over one page, as far as the first `len` positions reach.
    fn step(&self, page: usize, len: usize, tokens: Range<usize>, scratch: &mut Scratch) {
        let shape = self.kv.shape();
        let (keys, values) = self.kv.page(self.head, page, len);
        let heads = tokens.start * self.group..tokens.end * self.group;
        let step = AttentionStep {
            queries: &scratch.queries[heads.start * shape.key_dim..heads.end * shape.key_dim],
            keys,
            values,
            head_dim: shape.key_dim,
            value_dim: shape.value_dim,
            scale: self.scale,
        };
        let out = &mut scratch.out[heads.start * shape.value_dim..heads.end * shape.value_dim];
        (self.kernels.attend)(&step, &mut scratch.running[heads], out);
    }
}
