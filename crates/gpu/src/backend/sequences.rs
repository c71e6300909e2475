//! Operations on the KV caches and recurrent states of sequences: attention, convolutions and the gated delta rule.

use std::sync::Arc;

use forebay_engine::internals::backend::{
    Attention, Backend, Batch, Buf, Convolution, DeltaRule, HeadOrder, Heads, KvPages, KvShape, Precision,
    Recurrent, Sequence, Vector, Window,
};
use forebay_engine::{LayerIdx, Result};
use forebay_kernels::{KEY_BLOCK, RopePairs, STATE_COLUMNS};

use super::GpuBackend;
use crate::device::{Memory, Span};
use crate::heap::{BLOCKS, Heap};
use crate::recorder::{Args, Bound};
use crate::shaders::{Cell, File, HeapView, Name};
use crate::state::DevicePieces;

/// Constants of attention.wgsl: threads of a workgroup, the most query heads that it computes, and positions whose
/// softmax is computed separately.
const THREADS: usize = 128;
const MOST_HEADS: usize = 8;
const SEGMENT: usize = 256;

/// Bytes of workgroup memory beside queries and scores: room for sums, and for highest scores and factors.
const SUMS_BYTES: usize = 256 * 4 + 2 * MOST_HEADS * 4;

/// Constants of prompt.wgsl: queries of a workgroup, the most channels of a value, the memory of a workgroup; and the
/// fewest rows of a sequence for which it is faster.
const PROMPT_QUERIES: usize = 32;
const MOST_PROMPT_VALUE_DIM: usize = 256;
const PROMPT_BYTES: usize =
    (PROMPT_QUERIES + KEY_BLOCK) * 9 * 16 + PROMPT_QUERIES * (KEY_BLOCK + 6) * 4 + 256 * 4;
const FEWEST_PROMPT_ROWS: usize = 4;

/// If there are at least this many workgroups, segments are not divided among more.
const ENOUGH_WORKGROUPS: usize = 256;

/// The capacity of page tables is a power of two, so that what is bound seldom moves.
const FEWEST_PAGES: usize = 16;

/// Channels of a convolution per workgroup.
const CHANNELS: usize = 128;

/// The address of no state.
const NOWHERE: u32 = u32::MAX;

/// What the operations on sequences need.
pub struct Sequences {
    /// The memory of all states.
    pub heap: Arc<Heap>,
    /// Results of segments.
    partial: Option<Memory>,
}

impl Sequences {
    /// Without states.
    pub fn new(heap: Arc<Heap>) -> Sequences {
        Sequences { heap, partial: None }
    }
}

/// Stretches of different sequences, which are computed together: tokens between two stored states of a sequence.
struct Round {
    /// As the kernels' struct `Stretch`.
    stretches: Vec<[u32; 5]>,
    /// The most tokens of a stretch.
    longest: usize,
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
        let mut before = advance.from.map_or(NOWHERE, |piece| piece.address().for_kernels());
        for (i, (end, after)) in advance.to.into_iter().enumerate() {
            if i == rounds.len() {
                rounds.push(Round { stretches: Vec::new(), longest: 0 });
            }
            let tokens = end - start;
            let after = after.address().for_kernels();
            rounds[i].stretches.push([row as u32, tokens as u32, start as u32, before, after]);
            rounds[i].longest = rounds[i].longest.max(tokens);
            before = after;
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

/// Query heads per workgroup, where this many share a key head and a workgroup has this much memory.
fn heads_at_once(key_dim: usize, sharing: usize, memory: usize) -> Option<usize> {
    let fits = |heads: usize| heads * (key_dim + KEY_BLOCK) * 4 + SUMS_BYTES <= memory;
    let most = sharing.next_power_of_two().min(MOST_HEADS);
    std::iter::successors(Some(most), |heads| Some(heads / 2))
        .take_while(|&heads| heads > 0)
        .find(|&h| fits(h))
}

/// Whether there is a kernel for heads of this shape, if a workgroup has this much memory.
pub fn attends(shape: &KvShape, memory: usize) -> bool {
    let in_fours = [shape.key_dim, shape.value_dim].iter().all(|dim| dim.is_multiple_of(4));
    in_fours && heads_at_once(shape.key_dim, 1, memory).is_some()
}

/// The rows of a batch for the kernels of attention.
struct Listed {
    /// See `batch` in attention.wgsl.
    rows: Span,
    shape: KvShape,
    /// The most segments of a row.
    segments: usize,
}

impl GpuBackend {
    /// The heap's blocks for kernels that read and write such cells.
    fn heap(&self, cell: Cell) -> (HeapView, impl Iterator<Item = Bound>) {
        let blocks = self.sequences.heap.blocks();
        let count = blocks.len().next_power_of_two().min(BLOCKS);
        let none = std::iter::repeat_n(Bound::None, count - blocks.len());
        (HeapView { blocks: count as u32, cell }, blocks.into_iter().map(Bound::from).chain(none))
    }

    /// Makes room for the batch's positions in a layer, and lists its rows.
    fn list_rows(&mut self, layer: LayerIdx, batch: &mut Batch<'_>) -> Result<Option<Listed>> {
        let mut list = vec![0; 2 * batch.tokens.len()];
        let (mut found, mut segments) = (None, 0);
        for sequence in batch.sequences.iter_mut() {
            let (start, rows) = (sequence.state.len(), sequence.rows.clone());
            let end = start + rows.len();
            let kv = pages_of(sequence, layer);
            kv.grow(end)?;
            let table = list.len();
            for row in rows {
                list[2 * row..2 * row + 2].copy_from_slice(&[table as u32, batch.positions[row]]);
            }
            let address = |page| kv.piece(page).map_or(0, |page| page.address().for_kernels());
            list.extend((0..kv.page_count()).map(address));
            list.resize(table + kv.page_count().next_power_of_two().max(FEWEST_PAGES), 0);
            let seen = kv.shape().window.map_or(end, |window| end.min(window.most() + SEGMENT));
            segments = segments.max(seen.div_ceil(SEGMENT));
            found = Some(kv.shape());
        }
        let Some(shape) = found else { return Ok(None) };
        Ok(Some(Listed { rows: self.recorder.params(&list)?, shape, segments }))
    }

    /// Implements [`Backend::norm_and_rotate`].
    pub(super) fn prepare_heads(
        &mut self,
        mut buffers: [(Buf, Option<Vector>); 2],
        heads: &Heads,
    ) -> Result<()> {
        for (buf, norm) in &mut buffers {
            // A norm of all heads together.
            if let Some(all) = norm.take_if(|norm| self.vectors[norm.index()].1.len() != heads.dim) {
                self.rms_norm(*buf, all, heads.eps, *buf)?;
            }
        }
        let [(q, q_norm), (k, k_norm)] = buffers;
        let [q_heads, k_heads] = [q, k].map(|buf| buf.width() / heads.dim);
        let args = Args::new().int(q_heads).int(k_heads).int(heads.dim).int(heads.angles.width() / 2);
        let args = args.flag(heads.pairs == RopePairs::Interleaved);
        let args = args.flag(q_norm.is_some()).flag(k_norm.is_some()).float(heads.eps);
        let norm = |norm: Option<Vector>| norm.map(|norm| self.vector(norm)).into();
        let bound =
            [self.at(q).into(), self.at(k).into(), norm(q_norm), norm(k_norm), self.at(heads.angles).into()];
        let name = Name::new(File::Rotate, "norm_and_rotate");
        self.record(&name, [q_heads + k_heads, self.rows, 1], &args, &bound)
    }

    /// Implements [`Backend::attention`].
    pub(super) fn attend(&mut self, a: &Attention, batch: &mut Batch<'_>) -> Result<()> {
        let Some(Listed { rows: batch_rows, shape, segments }) = self.list_rows(a.layer, batch)? else {
            return Ok(());
        };
        let KvShape { heads: kv_heads, key_dim, value_dim, window, latent } = shape;
        let q_heads = a.q.width() / key_dim;
        let sharing = q_heads / kv_heads;
        let memory = self.gpu.limits.max_compute_workgroup_storage_size as usize;
        let rows = self.rows;
        let prompt = rows >= FEWEST_PROMPT_ROWS * batch.sequences.len()
            && value_dim <= MOST_PROMPT_VALUE_DIM
            && PROMPT_BYTES <= memory;
        let heads = match prompt {
            true => sharing.next_power_of_two().min(PROMPT_QUERIES),
            false => heads_at_once(key_dim, sharing, memory).expect("`attends` was asked before"),
        };
        let tiles = kv_heads * sharing.div_ceil(heads);
        let enough = prompt || tiles * rows >= ENOUGH_WORKGROUPS;
        let splits = if enough { 1 } else { segments };
        let [values, sums] = match splits {
            1 => [Bound::None, Bound::None],
            _ => self.partial(rows * segments * q_heads, value_dim)?,
        };
        let listed = match prompt {
            true => Some(self.list_tiles(batch, PROMPT_QUERIES / heads)?),
            false => None,
        };
        // A row of another sequence needs no key that this batch adds.
        let appends = batch.sequences.len() == rows;

        let (heap, blocks) = self.heap(match self.precision {
            Precision::Fast => Cell::FourHalves,
            Precision::Exact => Cell::FourSingles,
        });
        let name = |file, entry| {
            let name = Name::new(file, entry).reaching(heap);
            let name = name.with("KEY_DIM", key_dim as u32).with("VALUE_DIM", value_dim as u32);
            let name = name.with("KV_HEADS", kv_heads as u32).with("LATENT", latent.into());
            name.with("HEADS", heads as u32)
        };
        let args = Args::new().int(q_heads).int(splits).int(segments);
        let args = args.int(window.map_or(0, Window::most)).flag(matches!(window, Some(Window::Chunk(_))));
        let args = args.flag(appends).flag(a.sinks.is_some()).float(a.scale);
        let tile_count = listed.as_ref().map_or(0, |listed| listed.bytes as usize / 8);
        let mut bound: Vec<Bound> = blocks.collect();
        bound.extend([batch_rows.into(), listed.into()]);
        bound.extend([a.q, a.k, a.v].map(|buf| self.at(buf).into()));
        bound.extend([a.sinks.map(|sinks| self.vector(sinks)).into(), self.at(a.out).into(), values, sums]);
        if !appends {
            let own = shape.own_key_dim() + value_dim;
            let groups = (kv_heads * own / 4).div_ceil(THREADS);
            self.record(&name(File::Attention, "append"), [groups, rows, 1], &args, &bound)?;
        }
        if prompt {
            return self.record(&name(File::Prompt, "attend"), [tiles, tile_count, 1], &args, &bound);
        }
        self.record(&name(File::Attention, "attend"), [tiles, rows, splits], &args, &bound)?;
        if splits > 1 {
            let groups = (q_heads * value_dim / 4).div_ceil(THREADS);
            self.record(&name(File::Attention, "merge"), [groups, rows, 1], &args, &bound)?;
        }
        Ok(())
    }

    /// Lists the rows of a batch that workgroups compute together: the first, and how many.
    fn list_tiles(&mut self, batch: &Batch<'_>, each: usize) -> Result<Span> {
        let mut tiles: Vec<[u32; 2]> = Vec::new();
        for rows in batch.sequences.iter().map(|sequence| sequence.rows.clone()) {
            let tile = |first: usize| [first as u32, each.min(rows.end - first) as u32];
            tiles.extend(rows.clone().step_by(each).map(tile));
        }
        self.recorder.params(&tiles.concat())
    }

    /// Memory for the results of this many softmaxes: values, and sums.
    fn partial(&mut self, count: usize, value_dim: usize) -> Result<[Bound; 2]> {
        let values = ((count * value_dim * 4) as u64).next_multiple_of(256);
        let sums = (count * 8) as u64;
        let wanted = values + sums;
        if self.sequences.partial.as_ref().is_none_or(|there| there.bytes() < wanted) {
            self.sequences.partial = None;
            self.sequences.partial = Some(self.gpu.allocate(wanted.next_power_of_two(), "scratch")?);
        }
        let there = self.sequences.partial.as_ref().expect("it was just made").whole();
        Ok([there.part(0, values).into(), there.part(values, sums).into()])
    }

    /// Implements [`Backend::convolve`].
    pub(super) fn convolve_rows(&mut self, c: &Convolution, batch: &mut Batch<'_>) -> Result<()> {
        let channels = c.x.width();
        for Round { stretches, longest } in rounds(batch, c.layer)? {
            let listed = self.recorder.params(&stretches.concat())?;
            let args = Args::new().int(channels).int(c.kernel).int(CHANNELS).flag(false);
            let args = args.int(0).float(1.0).int(0).int(0).int(0);
            let (heap, blocks) = self.heap(Cell::Single);
            let mut bound: Vec<Bound> = blocks.collect();
            bound.extend([listed.into(), self.vector(c.filters).into()]);
            bound.extend([self.at(c.x).into(), self.at(c.out).into()]);
            bound.extend(std::iter::repeat_n(Bound::None, 5));
            let name = Name::new(File::Delta, "convolve").reaching(heap);
            let name = name.with("KEY_DIM", STATE_COLUMNS as u32).with("VALUE_DIM", STATE_COLUMNS as u32);
            let grid = [channels.div_ceil(CHANNELS), longest.max(c.kernel - 1), stretches.len()];
            self.record(&name, grid, &args, &bound)?;
        }
        Ok(())
    }

    /// Implements [`Backend::delta_rule`].
    pub(super) fn recur(&mut self, d: &DeltaRule, batch: &mut Batch<'_>) -> Result<()> {
        let s = d.shape;
        let channels = s.channels();
        for Round { stretches, longest } in rounds(batch, d.layer)? {
            let listed = self.recorder.params(&stretches.concat())?;
            let args = Args::new().int(channels).int(s.kernel).int(s.key_dim).flag(true);
            let args = args.int(2 * s.key_heads * s.key_dim).float(1.0 / (s.key_dim as f32).sqrt());
            let args = args.int(s.key_heads).int(s.value_heads).flag(s.order == HeadOrder::Interleaved);
            let (heap, blocks) = self.heap(Cell::Single);
            let mut bound: Vec<Bound> = blocks.collect();
            bound.extend([listed.into(), self.vector(d.filters).into()]);
            bound.extend([d.qkv, d.convolved, d.a, d.b].map(|buf| self.at(buf).into()));
            bound.extend([self.vector(d.rates).into(), self.vector(d.biases).into(), self.at(d.out).into()]);
            let name = |entry| {
                let name = Name::new(File::Delta, entry).reaching(heap);
                name.with("KEY_DIM", s.key_dim as u32).with("VALUE_DIM", s.value_dim as u32)
            };
            let grid = [channels.div_ceil(s.key_dim), longest.max(s.kernel - 1), stretches.len()];
            self.record(&name("convolve"), grid, &args, &bound)?;
            let grid = [s.value_dim.div_ceil(STATE_COLUMNS), s.value_heads, stretches.len()];
            self.record(&name("recur"), grid, &args, &bound)?;
        }
        Ok(())
    }
}

// The kernels are written for this page length and number of columns.
const _: () = assert!(KEY_BLOCK == 64 && STATE_COLUMNS == 32);
