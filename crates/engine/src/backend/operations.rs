//! The parameters of a [`Backend`](super::Backend)'s operations: shapes, buffers and weights.

use std::ops::Range;

use forebay_kernels::RopePairs;

use super::{Activation, Buf, Matrix, Vector};
use crate::LayerIdx;

/// Rotary embedding: the angles of position `p` are `p · frequencies`; cosine and sine are scaled.
#[derive(Clone, Debug)]
pub struct Rope {
    /// One for each two channels that rotate.
    pub frequencies: Vec<f32>,
    /// Divisors of the frequencies, one for each.
    pub divisors: Option<Vector>,
    /// The factor of cosine and sine.
    pub scale: f32,
}

/// Heads to be normalised and rotated.
#[derive(Clone, Copy, Debug)]
pub struct Heads {
    /// Channels of a head.
    pub dim: usize,
    /// The epsilon of the norms.
    pub eps: f32,
    /// Which channels rotate together.
    pub pairs: RopePairs,
    /// The rows' angles, from [`Backend::rope_angles`](super::Backend::rope_angles).
    pub angles: Buf,
}

/// Causal attention of one layer.
#[derive(Clone, Copy, Debug)]
pub struct Attention {
    /// The layer whose keys and values these are.
    pub layer: LayerIdx,
    /// `[rows, query heads · key_dim]`
    pub q: Buf,
    /// `[rows, key heads · key_dim]`; of latent keys, without the channels that are their values.
    pub k: Buf,
    /// `[rows, key heads · value_dim]`
    pub v: Buf,
    /// `[rows, query heads · value_dim]`
    pub out: Buf,
    /// The factor of every score.
    pub scale: f32,
    /// `[query heads]` Scores that are part of the softmax's sum but have no value.
    pub sinks: Option<Vector>,
}

/// One thing for each matrix of a feed-forward block, which computes `W_d activation(W_g x, W_u x)`, or `W_d
/// activation(W_u x)` without a gate.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Parts<T> {
    /// For `W_g`, the gate projection, if the block has one.
    pub gate: Option<T>,
    /// For `W_u`, the up projection.
    pub up: T,
    /// For `W_d`, the down projection.
    pub down: T,
}

impl<T> Parts<T> {
    /// Those that there are, in the order gate, up, down.
    pub fn iter(&self) -> impl Iterator<Item = &T> {
        self.gate.iter().chain([&self.up, &self.down])
    }

    /// What `function` makes of each, in the same order.
    pub fn each<U>(&self, mut function: impl FnMut(&T) -> U) -> Parts<U> {
        Parts {
            gate: self.gate.as_ref().map(&mut function),
            up: function(&self.up),
            down: function(&self.down),
        }
    }
}

impl<T: Copy> Parts<T> {
    /// Those of the matrices that multiply the block's input: gate and up, or up alone.
    pub fn inputs(&self) -> [Option<T>; 2] {
        match self.gate {
            Some(gate) => [Some(gate), Some(self.up)],
            None => [Some(self.up), None],
        }
    }
}

/// The routed experts of a layer. An expert is a feed-forward block or, with adjugate experts, the sum of two.
#[derive(Clone, Copy, Debug)]
pub struct Experts {
    /// The layer that the experts belong to.
    pub layer: LayerIdx,
    /// `[rows, width]` The input.
    pub x: Buf,
    /// The block of each expert. Its output is that of the expert.
    pub block: ExpertBlock,
    /// The smaller blocks that are added to those of the experts, and their factor.
    pub adjugate: Option<(ExpertBlock, f32)>,
}

/// A feed-forward block of each expert of a layer.
#[derive(Clone, Copy, Debug)]
pub struct ExpertBlock {
    /// The activation function, which says whether there is a gate.
    pub activation: Activation,
    /// `[rows, top_k · inner]` The products with gate, or with up if there is no gate; then what the activation function
    /// makes of them.
    pub inner: Buf,
    /// `[rows, top_k · inner]` The products with up, if there is a gate.
    pub up: Option<Buf>,
    /// `[rows, top_k · width]` The output of each expert of each token, in the order of
    /// [`Routing`](crate::backend::Routing)'s places.
    pub out: Buf,
    /// Biases of all experts, one expert after another: `[experts · inner]`, for down `[experts · width]`
    pub biases: Option<Parts<Vector>>,
    /// `[experts]` Factors of the products, before biases are added.
    pub scales: Parts<Option<Vector>>,
}

/// A causal convolution of single channels.
#[derive(Clone, Copy, Debug)]
pub struct Convolution {
    /// The layer whose state it is.
    pub layer: LayerIdx,
    /// `[rows, channels]`
    pub x: Buf,
    /// `[rows, channels]` Not the same buffer.
    pub out: Buf,
    /// `[kernel, channels]`
    pub filters: Vector,
    /// Positions that it spans, including its own; at least two.
    pub kernel: usize,
}

/// The heads of linear attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeltaShape {
    /// Heads of queries and keys.
    pub key_heads: usize,
    /// Heads of values, a multiple of `key_heads`.
    pub value_heads: usize,
    /// Channels of a query and of a key.
    pub key_dim: usize,
    /// Channels of a value.
    pub value_dim: usize,
    /// Positions that the convolution spans, including its own; at least two.
    pub kernel: usize,
    /// Which value heads share a key head.
    pub order: HeadOrder,
}

/// Which value heads share a key head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HeadOrder {
    /// Consecutive value heads share a key head.
    Grouped,
    /// Value head `i` uses key head `i % key_heads`.
    Interleaved,
}

impl DeltaShape {
    /// Channels of all queries, keys and values together, in this order.
    pub fn channels(&self) -> usize {
        2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim
    }

    /// The channels of a value head's query, key and value.
    pub fn channels_of(&self, head: usize) -> [Range<usize>; 3] {
        let key_head = match self.order {
            HeadOrder::Grouped => head / (self.value_heads / self.key_heads),
            HeadOrder::Interleaved => head % self.key_heads,
        };
        let key = |at: usize| at * self.key_dim..(at + 1) * self.key_dim;
        let value = 2 * self.key_heads * self.key_dim + head * self.value_dim;
        [key(key_head), key(self.key_heads + key_head), value..value + self.value_dim]
    }
}

/// Linear attention of one layer by the gated delta rule.
#[derive(Clone, Copy, Debug)]
pub struct DeltaRule {
    /// The layer whose state it is.
    pub layer: LayerIdx,
    /// The heads.
    pub shape: DeltaShape,
    /// `[rows, channels]` Queries, keys and values before the convolution.
    pub qkv: Buf,
    /// `[rows, channels]` The convolved queries, keys and values.
    pub convolved: Buf,
    /// `[rows, value_heads]` The decay of the state, before its function. Overwritten.
    pub a: Buf,
    /// `[rows, value_heads]` The strength of the correction, before its function. Overwritten.
    pub b: Buf,
    /// `[rows, value_heads · value_dim]`
    pub out: Buf,
    /// `[kernel, channels]`
    pub filters: Vector,
    /// `[value_heads]` Decay rates of the states, negative.
    pub rates: Vector,
    /// `[value_heads]` Added to `a`.
    pub biases: Vector,
}

/// One part of every group of a row, and its destination.
#[derive(Clone, Copy, Debug)]
pub struct RowPart {
    /// Its floats in one group.
    pub width: usize,
    /// The destination: the parts of all groups, one after another.
    pub to: Buf,
    /// The offset in the destination's row.
    pub at: usize,
}

/// One matrix per head, stored as rows of one matrix.
#[derive(Clone, Copy, Debug)]
pub struct HeadMatrices {
    /// All heads' rows one after another, the same number for each.
    pub stored: Matrix,
    /// The number of heads.
    pub heads: usize,
    /// The first of a head's rows that belongs to its matrix.
    pub first: usize,
    /// How many rows belong to it.
    pub rows: usize,
    /// Whether the stored rows are the columns of the head's matrix.
    pub transposed: bool,
}
