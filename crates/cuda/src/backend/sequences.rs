//! Operations that read KV caches and recurrent states: attention and the gated delta rule.

use std::ops::Range;

use forebay_engine::internals::backend::Batch;
use forebay_engine::internals::backend::Sequence;
use forebay_engine::internals::backend::{
    Attention, Convolution, DeltaRule, HeadOrder, KvPages, KvShape, Precision, Recurrent, Window,
};
use forebay_engine::{LayerIdx, Result};
use forebay_kernels::{KEY_BLOCK, RopePairs, STATE_COLUMNS};

use super::{COUNTERS, CudaBackend, Scratch};
use crate::driver::Address;
use crate::program::{Args, Shape};
use crate::state::DevicePieces;

/// Constants of the attention kernels: threads per block, query heads per block, keys per step, the most splits of the
/// positions, and the most channels of a value.
const THREADS: usize = 256;
const HEADS: usize = THREADS / 32;
const KEYS: usize = 32;
const MOST_SPLITS: usize = 64;
const MOST_VALUE_DIM: usize = 512;

/// Constants of the attention kernels for prompts: threads per block, queries per block, and the fewest tokens of a
/// sequence for which they are faster.
const PROMPT_THREADS: usize = 128;
const PROMPT_QUERIES: usize = 64;
const FEWEST_PROMPT_ROWS: usize = 8;

/// Constants of the attention kernel for decode steps: the most sequences, with one row each; query heads per block;
/// keys per step; the most channels of a head; and the padding of rows in shared memory.
const MOST_STEP_ROWS: usize = 512;
const STEP_HEADS: usize = 8;
const STEP_KEYS: usize = 128;
const MOST_STEP_DIM: usize = 256;
const STEP_PADDING: usize = 8;

/// Layers that are started before the others are recorded, so that the GPU computes them meanwhile.
const FIRST_LAYERS: usize = 4;

/// The capacity of page lists is a power of two, so that they seldom move.
const FEWEST_PAGES: usize = 16;

/// Threads per block of the recurrence.
const RECUR_THREADS: usize = 128;

/// Constants of the linear-attention kernels for many tokens: tokens per chunk, threads per block, bytes of a chunk's
/// results for one head, and extra shared memory of the first kernel.
const CHUNK: usize = 64;
const CHUNK_THREADS: usize = 256;
const CHUNK_BYTES: usize = (2 * CHUNK * CHUNK + 2 * CHUNK) * 4;
const CHUNKS_SHARED: usize = (CHUNK * (CHUNK + 1) + 2 * CHUNK) * 4;

/// The sequence of each row of the batch, and its position there.
#[derive(Clone, Copy)]
pub struct RowParams {
    sequence: Address,
    position: Address,
}

/// How the positions of attention are split among blocks.
struct Shares {
    /// The number of splits, and where their partial results are stored if there are several.
    splits: usize,
    partial: Address,
}

/// Stretches of different sequences, which are computed together: tokens between two stored states of a sequence.
struct Round {
    /// As the kernels' struct `Stretch`.
    stretches: Vec<[u64; 4]>,
    /// The most tokens of a stretch.
    longest: usize,
    /// The chunks of all stretches.
    chunks: usize,
}

/// The stretches of a batch. Those of one sequence are computed one after the other.
fn rounds(batch: &mut Batch<'_>, layer: LayerIdx) -> Result<Vec<Round>> {
    let mut rounds: Vec<Round> = Vec::new();
    for sequence in batch.sequences.iter_mut() {
        let mut start = sequence.state.len();
        let (state, marks) = sequence.state.layer(layer);
        let state = state
            .as_any_mut()
            .downcast_mut::<Recurrent<DevicePieces>>()
            .expect("the state was made by this backend");
        let mut row = sequence.rows.start;
        let advance = state.advance(start, start + sequence.rows.len(), marks)?;
        let mut before = advance.from.map_or(0, |piece| piece.address());
        for (i, (end, after)) in advance.to.into_iter().enumerate() {
            if i == rounds.len() {
                rounds.push(Round { stretches: Vec::new(), longest: 0, chunks: 0 });
            }
            let round = &mut rounds[i];
            let tokens = end - start;
            let two = |low: usize, high: usize| low as u64 | (high as u64) << 32;
            round.stretches.push([two(row, tokens), two(start, round.chunks), before, after.address()]);
            round.chunks += tokens.div_ceil(CHUNK);
            round.longest = round.longest.max(tokens);
            before = after.address();
            (start, row) = (end, row + tokens);
        }
    }
    Ok(rounds)
}

/// The KV cache of a sequence in a layer.
fn pages_of<'a>(sequence: &'a mut Sequence<'_>, layer: LayerIdx) -> &'a mut KvPages<DevicePieces> {
    let (kv, _) = sequence.state.layer(layer);
    kv.as_any_mut().downcast_mut().expect("the state was made by this backend")
}

/// Blocks per row of a decode step.
fn step_blocks(a: &Attention, shape: &KvShape) -> usize {
    shape.heads * (a.q.width() / shape.key_dim / shape.heads).div_ceil(STEP_HEADS)
}

/// Shared memory per block of a decode step: keys, values, queries and weights as f16, the row's own key and value,
/// scores, rotated heads, and factors.
fn step_shared(shape: &KvShape) -> usize {
    let KvShape { key_dim, value_dim, .. } = *shape;
    let (key, value) = (key_dim + STEP_PADDING, value_dim + STEP_PADDING);
    let two_heads = 2 * STEP_HEADS;
    let halves =
        STEP_KEYS * (key + value) + two_heads * (key + STEP_KEYS + STEP_PADDING) + key_dim + value_dim;
    let floats = STEP_HEADS * (STEP_KEYS + STEP_PADDING / 2 + key_dim) + two_heads;
    2 * halves + 4 * floats
}

/// Shared memory per block of the attention kernels for any shape: keys, values if they are `staged`, and queries.
fn attend_shared(shape: &KvShape, single: bool, staged: bool) -> usize {
    let cell = if single { 4 } else { 2 };
    // An odd multiple of 16, so that keys are in different banks.
    let key = ((shape.key_dim * cell / 16 + 1) | 1) * 16;
    KEYS * key + if staged { KEYS * shape.value_dim * cell } else { 0 } + HEADS * shape.key_dim * 4
}

/// Whether there is a kernel for heads of this shape, if a block has this much shared memory.
pub fn attends(shape: &KvShape, shared_limit: usize) -> bool {
    shape.value_dim <= MOST_VALUE_DIM && attend_shared(shape, true, false) <= shared_limit
}

impl CudaBackend {
    fn row_params(&mut self, batch: &Batch<'_>) -> Result<RowParams> {
        if let Some((_, params)) = self.row_params.filter(|(turn, _)| *turn == self.recorder.turn()) {
            return Ok(params);
        }
        let mut sequence = vec![0u32; batch.tokens.len()];
        for (i, s) in batch.sequences.iter().enumerate() {
            sequence[s.rows.clone()].fill(i as u32);
        }
        let sequence = self.recorder.params(&sequence)?;
        let position = self.recorder.params(batch.positions)?;
        let params = RowParams { sequence, position };
        self.row_params = Some((self.recorder.turn(), params));
        Ok(params)
    }

    /// Implements [`Backend::attention`](forebay_engine::internals::backend::Backend::attention).
    pub(super) fn attend(&mut self, a: &Attention, batch: &mut Batch<'_>) -> Result<()> {
        let kernels = self.kernels()?;
        let begins = a.layer.0 >= FIRST_LAYERS && !self.started;
        if begins || self.recorder.has_many_params() {
            // Deferred operations stay deferred: they name no addresses.
            self.recorder.submit()?;
            self.row_params = None;
            self.started = true;
        }
        let mut shape = None;
        let (mut longest, mut pages) = (0, 0);
        for sequence in batch.sequences.iter_mut() {
            let end = sequence.state.len() + sequence.rows.len();
            let kv = pages_of(sequence, a.layer);
            kv.grow(end)?;
            longest = longest.max(end);
            pages = pages.max(kv.page_count());
            shape = Some(kv.shape());
        }
        let Some(shape) = shape else { return Ok(()) };
        let params = self.row_params(batch)?;
        let capacity = pages.next_power_of_two().max(FEWEST_PAGES);
        let mut tables = vec![0u64; batch.sequences.len() * capacity];
        for (sequence, table) in batch.sequences.iter_mut().zip(tables.chunks_exact_mut(capacity)) {
            let kv = pages_of(sequence, a.layer);
            for (i, address) in table[..kv.page_count()].iter_mut().enumerate() {
                *address = kv.piece(i).map_or(0, |page| page.address());
            }
        }
        let tables = self.recorder.params(&tables)?;

        let single = self.precision == Precision::Exact;
        let KvShape { heads, key_dim, value_dim, window, latent } = shape;
        let kv = Args::new().at(params.sequence).at(params.position).at(tables).int(capacity);
        let kv = kv.int(heads).int(key_dim).int(value_dim).flag(latent).flag(single);
        let kv = kv.int(window.map_or(0, Window::most)).flag(matches!(window, Some(Window::Chunk(_))));
        let q_heads = a.q.width() / key_dim;
        if self.is_a_step(a, batch, &shape) {
            return self.attend_step(a, kv, &shape, longest);
        }
        let args = kv.clone().at(self.at(a.k)).at(self.at(a.v));
        self.record(kernels.append, Shape::new([self.rows, 1, 1], 512), args)?;

        let plain = !single && !latent && q_heads / heads <= PROMPT_QUERIES;
        let prompt = match (key_dim, value_dim) {
            (32, 32) => Some(kernels.attend_prompt_32),
            (64, 64) => Some(kernels.attend_prompt_64),
            (128, 128) => Some(kernels.attend_prompt_128),
            (192, 128) => Some(kernels.attend_prompt_192_128),
            _ => None,
        };
        let rows_each = self.rows / batch.sequences.len();
        // Many sequences occupy the multiprocessors as well as many tokens of one sequence do.
        let busy = 2 * heads * batch.sequences.len() >= self.gpu.multiprocessors as usize;
        if let Some(kernel) = prompt.filter(|_| plain && (busy || rows_each >= FEWEST_PROMPT_ROWS)) {
            let each = PROMPT_QUERIES / (q_heads / heads);
            let cut = |rows: Range<usize>| {
                let tile = move |row: usize| [row as u32, each.min(rows.end - row) as u32];
                rows.clone().step_by(each).map(tile)
            };
            let tokens: Vec<[u32; 2]> = batch.sequences.iter().flat_map(|s| cut(s.rows.clone())).collect();
            let listed = self.recorder.params(&tokens.concat())?;
            let args = kv.at(self.at(a.q)).at(self.at(a.out)).at(self.optional(a.sinks)).at(listed);
            let args = args.int(q_heads).float(a.scale);
            return self.record(kernel, Shape::new([heads, tokens.len(), 1], PROMPT_THREADS), args);
        }
        let blocks = heads * (q_heads / heads).div_ceil(HEADS);
        let Shares { splits, partial } = self.shares(a, &shape, longest, blocks, KEYS)?;
        // Scratch memory may have been allocated, and recorded operations started.
        let args = kv.at(self.at(a.q)).at(self.at(a.out)).at(partial).at(self.optional(a.sinks));
        // Values that do not fit beside the keys are read from memory.
        let staged = !latent && attend_shared(&shape, single, true) <= self.gpu.shared_limit as usize;
        let shared = attend_shared(&shape, single, staged);
        let args = args.int(q_heads).int(self.rows).int(splits).flag(staged).float(a.scale);
        let kernel = if single { kernels.attend_singles } else { kernels.attend_halves };
        self.record(kernel, Shape::new([blocks, self.rows, splits], THREADS).shared(shared), args.clone())?;
        if splits > 1 {
            self.record(
                kernels.merge,
                Shape::new([q_heads, self.rows, 1], value_dim.next_multiple_of(32).min(256)),
                args,
            )?;
        }
        Ok(())
    }

    /// Splits the positions, for a kernel with this many blocks per row and keys per step.
    fn shares(
        &mut self,
        a: &Attention,
        shape: &KvShape,
        longest: usize,
        blocks: usize,
        keys: usize,
    ) -> Result<Shares> {
        let q_heads = a.q.width() / shape.key_dim;
        // Positions are split if there are not enough rows for all multiprocessors. The number of splits changes rarely
        // as lengths grow, so that graphs can be reused.
        let seen = shape.window.map_or(longest, |window| longest.min(window.most() + keys));
        let tiles = seen.div_ceil(keys).next_power_of_two();
        let wanted = (2 * self.gpu.multiprocessors as usize).div_ceil(blocks * self.rows);
        let splits = wanted.next_power_of_two().min(tiles).min(MOST_SPLITS);
        let partial = match splits {
            1 => 0,
            _ => self.scratch(Scratch::Partial, splits * self.rows * q_heads * (shape.value_dim + 2) * 4)?,
        };
        Ok(Shares { splits, partial })
    }

    /// Whether every sequence has one row, so that one kernel can do everything.
    fn is_a_step(&self, a: &Attention, batch: &Batch<'_>, shape: &KvShape) -> bool {
        let single_rows = batch.sequences.len() == self.rows && self.rows <= MOST_STEP_ROWS;
        let whole = [shape.key_dim, shape.value_dim]
            .iter()
            .all(|&dim| dim.is_multiple_of(16) && dim <= MOST_STEP_DIM);
        let counted = self.rows * step_blocks(a, shape) <= COUNTERS;
        let fits = whole && counted && step_shared(shape) <= self.gpu.shared_limit as usize;
        single_rows && fits && !shape.latent && self.precision == Precision::Fast
    }

    /// Attention of one row of each sequence, with the rotation if it was deferred.
    fn attend_step(&mut self, a: &Attention, kv: Args, shape: &KvShape, longest: usize) -> Result<()> {
        let kernels = self.kernels()?;
        let blocks = step_blocks(a, shape);
        let Shares { splits, partial } = self.shares(a, shape, longest, blocks, STEP_KEYS)?;
        let rotation = self.prior_rotation(a.q, a.k);
        let [q_norm, k_norm] = rotation.map_or([None; 2], |rotation| [rotation.q_norm, rotation.k_norm]);
        let heads = rotation.map(|rotation| rotation.heads);
        let args = kv.at(self.at(a.q)).at(self.at(a.k)).at(self.at(a.v));
        let args = args.at(self.optional(q_norm)).at(self.optional(k_norm));
        let args = args.at(heads.map_or(0, |heads| self.at(heads.angles)));
        let args = args.at(self.optional(a.sinks)).at(self.at(a.out));
        let args = args.at(partial).at(self.counters.address());
        let args = args.int(a.q.width() / shape.key_dim).int(self.rows).int(splits);
        let args = args.int(heads.map_or(0, |heads| heads.angles.width() / 2));
        let args = args.flag(heads.is_some_and(|heads| heads.pairs == RopePairs::Interleaved));
        let args = args.float(a.scale).float(heads.map_or(0.0, |heads| heads.eps));
        let grid = Shape::new([blocks, self.rows, splits], THREADS);
        let kernel = match (shape.key_dim, shape.value_dim) {
            (128, 128) => kernels.attend_step_128,
            _ => kernels.attend_step,
        };
        self.record(kernel, grid.shared(step_shared(shape)), args)
    }

    /// Implements [`Backend::convolve`](forebay_engine::internals::backend::Backend::convolve).
    pub(super) fn convolve_rows(&mut self, c: &Convolution, batch: &mut Batch<'_>) -> Result<()> {
        for Round { stretches, longest, .. } in rounds(batch, c.layer)? {
            let listed = self.recorder.params(&stretches.concat())?;
            self.convolve_round(c, listed, [longest, stretches.len()], false)?;
        }
        Ok(())
    }

    /// Convolves so many stretches of at most so many tokens. If it `activates`, SiLU follows.
    fn convolve_round(
        &mut self,
        c: &Convolution,
        listed: Address,
        [tokens, stretches]: [usize; 2],
        activates: bool,
    ) -> Result<()> {
        let kernels = self.kernels()?;
        let channels = c.x.width();
        let args = Args::new().at(listed).at(self.at(c.x)).at(self.at(c.out)).at(self.vector(c.filters));
        let args = args.int(c.kernel).int(channels).flag(activates);
        let grid = [channels.div_ceil(128), tokens.max(c.kernel - 1), stretches];
        self.record(kernels.convolve, Shape::new(grid, 128), args)
    }

    /// Implements [`Backend::delta_rule`](forebay_engine::internals::backend::Backend::delta_rule).
    pub(super) fn recur(&mut self, d: &DeltaRule, batch: &mut Batch<'_>) -> Result<()> {
        let kernels = self.kernels()?;
        let count = self.rows * d.a.width();
        let args = Args::new().at(self.at(d.a)).at(self.at(d.b)).at(self.vector(d.rates));
        let args = args.at(self.vector(d.biases)).long(count).int(d.a.width());
        self.record(kernels.delta_gates, Shape::each(count), args)?;

        let s = d.shape;
        let channels = s.channels();
        // For a head's queries and keys in shared memory.
        let rows = 2 * CHUNK * (s.key_dim + 4) * 4;
        let chunks_shared = rows.max(CHUNK * CHUNK * 4);
        let pass_shared = (s.key_dim + CHUNK) * STATE_COLUMNS * 4 + 2 * CHUNK * s.key_dim * 4;
        let by_chunks = self.precision == Precision::Fast
            && s.key_dim.is_multiple_of(4)
            && channels.is_multiple_of(4)
            && (chunks_shared + CHUNKS_SHARED).max(pass_shared) <= self.gpu.shared_limit as usize;
        for Round { stretches, longest: tokens, chunks } in rounds(batch, d.layer)? {
            let by_chunks = by_chunks && tokens >= CHUNK;
            let found = match by_chunks {
                true => self.scratch(Scratch::Chunks, chunks * s.value_heads * CHUNK_BYTES)?,
                false => 0,
            };
            let listed = self.recorder.params(&stretches.concat())?;
            let args = Args::new().at(listed).at(self.at(d.qkv)).at(self.at(d.convolved));
            let args = args.at(self.at(d.a)).at(self.at(d.b)).at(self.at(d.out)).at(self.vector(d.filters));
            let args = args.int(s.key_heads).int(s.value_heads).int(s.key_dim).int(s.value_dim).int(s.kernel);
            let args = args.flag(s.order == HeadOrder::Interleaved).int(channels);
            let convolution = Convolution {
                layer: d.layer,
                x: d.qkv,
                out: d.convolved,
                filters: d.filters,
                kernel: s.kernel,
            };
            self.convolve_round(&convolution, listed, [tokens, stretches.len()], true)?;
            let heads = [2 * s.key_heads, tokens, stretches.len()];
            self.record(kernels.delta_norm, Shape::new(heads, 32), args.clone())?;
            let blocks = [s.value_dim.div_ceil(STATE_COLUMNS), s.value_heads, stretches.len()];
            if by_chunks {
                let args = args.at(found);
                let each = [tokens.div_ceil(CHUNK), s.value_heads, stretches.len()];
                let shape = Shape::new(each, CHUNK_THREADS).shared(chunks_shared);
                self.record(kernels.delta_chunks, shape, args.clone())?;
                self.record(kernels.delta_pass, Shape::new(blocks, CHUNK_THREADS).shared(pass_shared), args)?;
                continue;
            }
            let shared = (s.key_dim * STATE_COLUMNS + 2 * s.key_dim) * 4;
            self.record(kernels.recur, Shape::new(blocks, RECUR_THREADS).shared(shared), args)?;
        }
        Ok(())
    }
}

// The kernels are written for this page length and number of columns.
const _: () = assert!(KEY_BLOCK == 64 && STATE_COLUMNS == 32);
