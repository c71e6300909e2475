//! What the operations of a [`Backend`](super::Backend) are about: their shapes, buffers and weights.

use std::ops::Range;

use forebay_kernels::RopePairs;

use super::{Buf, Matrix, Vector};
use crate::LayerIdx;

/// Rotary embedding: the angles of position `p` are `p · frequencies`, cosine and sine are scaled.
#[derive(Clone, Debug)]
pub struct Rope {
    /// Half as many as the channels that rotate.
    pub frequencies: Vec<f32>,
    /// What divides them, one by one.
    pub divisors: Option<Vector>,
    /// Multiplies cosine and sine.
    pub scale: f32,
    /// Which channels rotate together.
    pub pairs: RopePairs,
}

/// Heads that are normed and rotated.
#[derive(Clone, Copy, Debug)]
pub struct Heads {
    /// Channels of a head.
    pub dim: usize,
    /// Of the norms.
    pub eps: f32,
    /// Which channels rotate together.
    pub pairs: RopePairs,
    /// Of the rows, as [`Backend::rope_angles`](super::Backend::rope_angles) made them.
    pub angles: Buf,
}

/// Causal attention of one layer.
#[derive(Clone, Copy, Debug)]
pub struct Attention {
    /// The layer, which says whose keys and values these are.
    pub layer: LayerIdx,
    /// `[rows, query heads · key_dim]`
    pub q: Buf,
    /// `[rows, key heads · key_dim]`, of latent keys without the channels that are their values.
    pub k: Buf,
    /// `[rows, key heads · value_dim]`
    pub v: Buf,
    /// `[rows, query heads · value_dim]`
    pub out: Buf,
    /// Multiplies every score.
    pub scale: f32,
    /// `[query heads]` Scores that count in the softmax's sum and have no value.
    pub sinks: Option<Vector>,
}

/// The routed experts of a layer.
#[derive(Clone, Copy, Debug)]
pub struct Experts {
    /// The layer, which says whose experts these are.
    pub layer: LayerIdx,
    /// Where they work.
    pub buffers: ExpertBuffers,
    /// The function inside.
    pub activation: Activation,
    /// What gate, up and down add to their products, all experts one after another: `[experts · inner]` twice, then
    /// `[experts · hidden]`
    pub biases: Option<[Vector; 3]>,
    /// `[experts]` What the products of gate, up and down are multiplied by, before biases are added.
    pub scales: [Option<Vector>; 3],
}

/// How an expert joins its gate and its up.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Activation {
    /// `SiLU(gate) · up`
    SwiGlu,
    /// `(up + 1) · gate · σ(alpha · gate)`, with `gate` at most `limit` and `up` within `±limit`
    Clamped {
        /// How steep the sigmoid is.
        alpha: f32,
        /// Where both are cut off.
        limit: f32,
    },
}

/// The heads of linear attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeltaShape {
    /// Heads of queries and keys.
    pub key_heads: usize,
    /// Heads of values, a multiple of those.
    pub value_heads: usize,
    /// Channels of a query and of a key.
    pub key_dim: usize,
    /// Channels of a value.
    pub value_dim: usize,
    /// Positions that the convolution spans, its own among them; at least two.
    pub kernel: usize,
    /// Which value heads share a key head.
    pub order: HeadOrder,
}

/// Which value heads share a key head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HeadOrder {
    /// Neighbours.
    Grouped,
    /// Every so many, as cards are dealt.
    Dealt,
}

impl DeltaShape {
    /// Channels of all queries, keys and values together, which lie in this order.
    pub fn channels(&self) -> usize {
        2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim
    }

    /// The channels of a value head's query, key and value.
    pub fn channels_of(&self, head: usize) -> [Range<usize>; 3] {
        let key_head = match self.order {
            HeadOrder::Grouped => head / (self.value_heads / self.key_heads),
            HeadOrder::Dealt => head % self.key_heads,
        };
        let key = |at: usize| at * self.key_dim..(at + 1) * self.key_dim;
        let value = 2 * self.key_heads * self.key_dim + head * self.value_dim;
        [key(key_head), key(self.key_heads + key_head), value..value + self.value_dim]
    }
}

/// Linear attention of one layer by the gated delta rule.
#[derive(Clone, Copy, Debug)]
pub struct DeltaRule {
    /// The layer, which says whose state it is.
    pub layer: LayerIdx,
    /// The heads.
    pub shape: DeltaShape,
    /// `[rows, channels]` Queries, keys and values before the convolution.
    pub qkv: Buf,
    /// `[rows, channels]` Where they are put after it.
    pub convolved: Buf,
    /// `[rows, value_heads]` How much of the state stays, before its function. Overwritten.
    pub a: Buf,
    /// `[rows, value_heads]` How much is corrected, before its function. Overwritten.
    pub b: Buf,
    /// `[rows, value_heads · value_dim]`
    pub out: Buf,
    /// `[kernel, channels]`
    pub filters: Vector,
    /// `[value_heads]` How fast states fade, negative.
    pub rates: Vector,
    /// `[value_heads]` Added to `a`.
    pub biases: Vector,
}

/// A part of every group of a row, and where it goes.
#[derive(Clone, Copy, Debug)]
pub struct RowPart {
    /// Floats of it in a group.
    pub width: usize,
    /// Where those of all groups are put, one after the other.
    pub to: Buf,
    /// From which float of a row on.
    pub at: usize,
}

/// A matrix for each head, as rows of one that is stored.
#[derive(Clone, Copy, Debug)]
pub struct HeadMatrices {
    /// The heads' rows one after another, as many for each.
    pub stored: Matrix,
    /// How many heads there are.
    pub heads: usize,
    /// The first of a head's rows that belong to its matrix.
    pub first: usize,
    /// How many do.
    pub rows: usize,
    /// Whether they are the columns of its matrix.
    pub transposed: bool,
}

/// The buffers of the routed experts of a layer.
#[derive(Clone, Copy, Debug)]
pub struct ExpertBuffers {
    /// What the experts read: `[rows, hidden]`
    pub x: Buf,
    /// `[rows, top_k · inner]`
    pub gate: Buf,
    /// `[rows, top_k · inner]`
    pub up: Buf,
    /// What each expert of each token gives: `[rows, top_k · hidden]`, in the order of
    /// [`Routing`](crate::backend::Routing)'s places.
    pub out: Buf,
}
