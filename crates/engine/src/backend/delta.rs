//! Linear attention on the CPU: how channels and heads of a layer are divided among threads.

use std::ops::Range;

use forebay_kernels::{DeltaStep, Grain, Kernels, Pool, Rows, STATE_COLUMNS, TileMut};

use super::DeltaShape;
use super::convolution::{Filters, Inputs};

/// The epsilon of the norms of queries and keys.
const NORM_EPS: f32 = 1e-6;

/// Heads of queries or keys (or blocks of as many value channels) convolved together: enough for hardware
/// prefetching, few enough to keep all threads busy.
const HEADS_TOGETHER: usize = 4;

/// Tokens computed for a block of a head's columns before the next block: few enough that their queries and keys,
/// which are far apart in memory, stay in the CPU cache.
const TOKENS_TOGETHER: usize = 16;

impl DeltaShape {
    /// Floats of recurrent state per layer and sequence; `None` if the size overflows. The state has the last inputs
    /// of the convolution, `[kernel − 1, channels]`, then the states of the heads in blocks of columns,
    /// `[value_heads, blocks, key_dim, STATE_COLUMNS]`.
    pub fn state_floats(&self) -> Option<usize> {
        let inputs = (self.kernel - 1).checked_mul(self.channels())?;
        let columns = self.value_dim.checked_next_multiple_of(STATE_COLUMNS)?;
        let states = columns.checked_mul(self.key_dim)?.checked_mul(self.value_heads)?;
        // Leaves room to compute the bytes of several states.
        inputs.checked_add(states).filter(|&floats| floats < usize::MAX >> 8)
    }

    /// Floats of one head's state.
    fn head_floats(&self) -> usize {
        self.value_dim.next_multiple_of(STATE_COLUMNS) * self.key_dim
    }

    /// Where a layer's state divides into inputs of the convolution and states of heads.
    fn split_at(&self) -> usize {
        (self.kernel - 1) * self.channels()
    }
}

/// The linear attention of one layer.
pub struct DeltaLayer<'a> {
    pub kernels: &'a Kernels,
    pub pool: &'a Pool,
    pub shape: DeltaShape,
    /// `[kernel, channels]`
    pub filters: &'a [f32],
}

/// Consecutive tokens of a sequence.
pub struct Stretch<'a> {
    /// The number of tokens of the sequence before these.
    pub start: usize,
    /// `[tokens, channels]`
    pub qkv: &'a [f32],
    /// `[tokens, value_heads]`
    pub keep: &'a [f32],
    /// `[tokens, value_heads]`
    pub correct: &'a [f32],
    /// `[tokens, channels]` The convolved queries, keys and values.
    pub convolved: &'a mut [f32],
    /// `[tokens, value_heads · value_dim]`
    pub out: &'a mut [f32],
}

impl DeltaLayer<'_> {
    /// Computes the tokens of a stretch, and the state after them from the state before them.
    pub fn advance(&self, stretch: Stretch<'_>, before: Option<&[f32]>, after: &mut [f32]) {
        let at = self.shape.split_at();
        let before = before.map(|before| before.split_at(at));
        let (kept, states) = after.split_at_mut(at);
        let Stretch { start, qkv, keep, correct, convolved, out } = stretch;
        let rows = Rows::new(qkv, self.shape.channels());
        let inputs = Inputs { start, rows, before: before.map(|(inputs, _)| inputs) };
        self.convolve(&inputs, convolved, kept);
        let convolved = Rows::new(convolved, self.shape.channels());
        let gates = [keep, correct].map(|gates| Rows::new(gates, self.shape.value_heads));
        self.recur(convolved, gates, before.map(|(_, states)| states), states, out);
    }

    /// Convolves and activates all channels, and normalises queries and keys.
    fn convolve(&self, inputs: &Inputs<'_>, convolved: &mut [f32], kept: &mut [f32]) {
        let DeltaShape { key_heads, key_dim, .. } = self.shape;
        // Queries, keys, and values, which are not scaled.
        let scale = |head: usize| match head / key_heads {
            0 => Some(1.0 / (key_dim as f32).sqrt()),
            1 => Some(1.0),
            _ => None,
        };
        let &DeltaLayer { kernels, pool, filters, .. } = self;
        let filters = Filters { kernels, pool, weights: filters, together: HEADS_TOGETHER * key_dim };
        filters.convolve(inputs, convolved, kept, |first, channels| {
            (kernels.activate_silu)(channels);
            for (i, head) in channels.chunks_mut(key_dim).enumerate() {
                if let Some(scale) = scale(first / key_dim + i) {
                    (kernels.l2_norm)(head, NORM_EPS, scale);
                }
            }
        });
    }

    /// The recurrence; a piece of work is one value head.
    fn recur(
        &self,
        qkv: Rows<'_, f32>,
        gates: [Rows<'_, f32>; 2],
        before: Option<&[f32]>,
        states: &mut [f32],
        out: &mut [f32],
    ) {
        let DeltaShape { value_heads, value_dim, .. } = self.shape;
        let floats = self.shape.head_floats();
        let matrices = [TileMut::new(states, floats), TileMut::new(out, value_heads * value_dim)];
        let grains = [Grain { rows: 1, cols: floats }, Grain { rows: qkv.len(), cols: value_dim }];
        self.pool.for_tile_pairs(matrices, grains, |head, [mut state, mut out]| {
            let before = before.map(|before| &before[head * floats..][..floats]);
            self.head(head, qkv, gates, before, state.row(0), &mut out);
        });
    }

    /// Computes all tokens of one head.
    fn head(
        &self,
        head: usize,
        qkv: Rows<'_, f32>,
        [keep, correct]: [Rows<'_, f32>; 2],
        before: Option<&[f32]>,
        state: &mut [f32],
        out: &mut TileMut<'_, f32>,
    ) {
        let DeltaShape { value_dim, key_dim, .. } = self.shape;
        let [q, k, v] = self.shape.channels_of(head);
        let floats = key_dim * STATE_COLUMNS;
        let rows = qkv.len();
        let blocks = state.len() / floats;
        for (first, block) in
            (0..rows).step_by(TOKENS_TOGETHER).flat_map(|first| (0..blocks).map(move |block| (first, block)))
        {
            let state = &mut state[block * floats..][..floats];
            let cols: Range<usize> = block * STATE_COLUMNS..value_dim.min((block + 1) * STATE_COLUMNS);
            // The first tokens read the state before the stretch; later ones update the new state in place.
            let mut before = before.filter(|_| first == 0).map(|before| &before[block * floats..][..floats]);
            if first == 0 && before.is_none() {
                state.fill(0.0);
            }
            for row in first..rows.min(first + TOKENS_TOGETHER) {
                let channels = qkv.row(row);
                let mut value = [0.0; STATE_COLUMNS];
                value[..cols.len()].copy_from_slice(&channels[v.clone()][cols.clone()]);
                let step = DeltaStep {
                    q: &channels[q.clone()],
                    k: &channels[k.clone()],
                    v: &value,
                    keep: keep.row(row)[head],
                    correct: correct.row(row)[head],
                };
                let mut answer = [0.0; STATE_COLUMNS];
                (self.kernels.delta_step)(&step, before.take(), state, &mut answer);
                out.row(row)[cols.clone()].copy_from_slice(&answer[..cols.len()]);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use forebay_testing::assert_same_bits;

    use super::*;
    use crate::backend::HeadOrder;

    /// More columns than one block has, and not a multiple of it.
    const SHAPE: DeltaShape = DeltaShape {
        key_heads: 2,
        value_heads: 4,
        key_dim: 6,
        value_dim: 40,
        kernel: 4,
        order: HeadOrder::Grouped,
    };
    const TOKENS: usize = 37;

    /// Arbitrary numbers between −1 and 1.
    fn noise(len: usize, seed: u32) -> Vec<f32> {
        let bits = |i: u32| (i ^ seed).wrapping_mul(0x9e37_79b9).rotate_left(13).wrapping_mul(0x85eb_ca6b);
        (0..len as u32).map(|i| bits(i) as f32 / (1u64 << 31) as f32 - 1.0).collect()
    }

    /// The outputs of the heads and the state after the last token, computed in chunks cut at these tokens.
    fn run(shape: DeltaShape, threads: usize, cuts: &[usize]) -> (Vec<f32>, Vec<f32>) {
        let (channels, heads, values) = (shape.channels(), shape.value_heads, 4 * shape.value_dim);
        let filters = noise(shape.kernel * channels, 1);
        let qkv = noise(TOKENS * channels, 2);
        let [keep, correct] =
            [3, 4].map(|seed| noise(TOKENS * heads, seed).iter().map(|gate| gate.abs()).collect::<Vec<_>>());
        let pool = Pool::new(threads).unwrap();
        let layer = DeltaLayer { kernels: Kernels::detect().unwrap(), pool: &pool, shape, filters: &filters };
        let mut convolved = vec![f32::NAN; TOKENS * channels];
        let mut out = vec![f32::NAN; TOKENS * values];
        let mut state = None;
        let mut start = 0;
        for &end in cuts.iter().chain([&TOKENS]) {
            let mut after = vec![f32::NAN; shape.state_floats().unwrap()];
            let stretch = Stretch {
                start,
                qkv: &qkv[start * channels..end * channels],
                keep: &keep[start * heads..end * heads],
                correct: &correct[start * heads..end * heads],
                convolved: &mut convolved[start * channels..end * channels],
                out: &mut out[start * values..end * values],
            };
            layer.advance(stretch, state.as_deref(), &mut after);
            (state, start) = (Some(after), end);
        }
        (out, state.unwrap())
    }

    #[test]
    fn tokens_may_be_cut_anywhere() {
        let all = |(out, state): (Vec<f32>, Vec<f32>)| [out, state].concat();
        let whole = all(run(SHAPE, 1, &[]));
        for cut in 1..TOKENS {
            assert_same_bits(&all(run(SHAPE, 3, &[cut])), &whole, &format!("cut at {cut}"));
        }
        let everywhere: Vec<usize> = (1..TOKENS).collect();
        assert_same_bits(&all(run(SHAPE, 2, &everywhere)), &whole, "cut everywhere");
    }

    #[test]
    fn the_order_decides_which_value_heads_share_a_key_head() {
        let grouped = SHAPE;
        let interleaved = DeltaShape { order: HeadOrder::Interleaved, ..SHAPE };
        let keys = |shape: DeltaShape| (0..4).map(move |head| shape.channels_of(head)[0].start / 6);
        assert_eq!(keys(grouped).collect::<Vec<_>>(), [0, 0, 1, 1]);
        assert_eq!(keys(interleaved).collect::<Vec<_>>(), [0, 1, 0, 1]);
        let heads = |shape| -> Vec<Vec<f32>> {
            let (out, _) = run(shape, 2, &[]);
            (0..4).map(|head| out[head * 40..][..40].to_vec()).collect()
        };
        let (grouped, interleaved) = (heads(grouped), heads(interleaved));
        // The first and the last value head have the same key head in both orders.
        for head in 0..4 {
            assert_eq!(grouped[head] == interleaved[head], head == 0 || head == 3, "head {head}");
        }
    }

    #[test]
    fn states_of_an_absurd_size_are_refused() {
        let absurd = 1 << 30;
        assert!(DeltaShape { key_dim: absurd, value_dim: absurd, ..SHAPE }.state_floats().is_none());
        assert!(
            DeltaShape { kernel: absurd, value_dim: absurd, value_heads: absurd, ..SHAPE }
                .state_floats()
                .is_none()
        );
    }
}
