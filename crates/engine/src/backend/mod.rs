//! The operations a model is written in, and who computes them.
//!
//! A model's forward pass is a sequence of calls on a [`Backend`]. Weights, activations and attention memory
//! are handles, because only the backend knows where they live; what crosses to the host is the router's
//! choice, which the expert store needs, and the logits.

mod attend;
mod cpu;
mod kv;
mod routing;

use std::any::Any;

use forebay_kernels::{Encoding, MatRef, Planes, RopePairs};

pub use cpu::{CpuBackend, Precision};
pub use routing::{Router, Routing, Scores};

use crate::TokenId;
use crate::error::Result;
use crate::memory::SharedBytes;
use crate::session::Batch;
use crate::store::Lease;

/// A weight matrix of the dense part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Matrix(pub(crate) usize);

/// A small vector of weights: a norm, a bias.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Vector(pub(crate) usize);

/// Scratch memory for activations: rows of `width` floats, as many as the current [`begin`](Backend::begin)
/// says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Buf {
    pub(crate) id: usize,
    pub(crate) width: usize,
}

/// The shape of a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BufShape {
    /// The most rows it ever holds.
    pub rows: usize,
    /// Floats in a row.
    pub width: usize,
}

/// A matrix on its way from the file to the backend.
pub struct HostMatrix {
    /// How its weights are stored.
    pub encoding: Encoding,
    /// Output features.
    pub rows: usize,
    /// Input features.
    pub cols: usize,
    /// Codes, scales and biases as the file has them; empty where there are none.
    pub planes: [SharedBytes; 3],
}

impl HostMatrix {
    /// The matrix for the kernels.
    pub fn view(&self) -> MatRef<'_> {
        let [codes, scales, biases] = &self.planes;
        MatRef::from_planes(self.encoding, self.rows, self.cols, Planes { codes, scales, biases })
    }
}

/// What one layer of one sequence keeps of attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvShape {
    /// Key heads, and as many value heads.
    pub heads: usize,
    /// Channels of a key.
    pub key_dim: usize,
    /// Channels of a value.
    pub value_dim: usize,
}

/// One layer's keys and values of one sequence, kept where the backend computes.
pub trait Kv: Any + Send {
    /// The number of positions it holds.
    fn len(&self) -> usize;

    /// Whether it holds none.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Bytes that so many positions take.
    fn bytes_for(&self, len: usize) -> u64;

    /// Forgets all positions from `len` on.
    fn truncate(&mut self, len: usize);

    /// For the backend that made it.
    fn as_any_mut(&mut self) -> &mut dyn Any;
}

/// Rotary embedding: the angles of position `p` are `p · frequencies`, cosine and sine are scaled.
#[derive(Clone, Debug)]
pub struct Rope {
    /// Half as many as the channels that rotate.
    pub frequencies: Vec<f32>,
    /// Multiplies cosine and sine.
    pub scale: f32,
    /// Which channels rotate together.
    pub pairs: RopePairs,
}

/// Causal attention of one layer.
#[derive(Clone, Copy, Debug)]
pub struct Attention {
    /// The layer, which says whose keys and values these are.
    pub layer: crate::LayerIdx,
    /// `[rows, query heads · key_dim]`
    pub q: Buf,
    /// `[rows, key heads · key_dim]`
    pub k: Buf,
    /// `[rows, key heads · value_dim]`
    pub v: Buf,
    /// `[rows, query heads · value_dim]`
    pub out: Buf,
    /// Multiplies every score.
    pub scale: f32,
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
    /// [`Routing`]'s places.
    pub out: Buf,
}

/// A device that computes the operations of a forward pass.
///
/// Every operation works on as many rows as the last [`begin`](Self::begin) said. A wrong shape is a bug of
/// the caller and panics; an error is the device's.
#[allow(clippy::missing_errors_doc)]
pub trait Backend: Send {
    /// The device and its instruction set, for people.
    fn name(&self) -> String;

    /// Takes the weights, in the order of their handles.
    fn load(&mut self, weight: Weight) -> Result<()>;

    /// Attention memory for one layer of a new sequence.
    fn new_kv(&self, shape: KvShape) -> Box<dyn Kv>;

    /// The following operations work on this many rows.
    fn begin(&mut self, rows: usize);

    /// `out[t] = table[tokens[t]]`
    fn embed(&mut self, table: Matrix, tokens: &[TokenId], out: Buf) -> Result<()>;

    /// `out = norm(x) · w`, over the whole row or over each part of it as long as `w`. `x` may be `out`.
    fn rms_norm(&mut self, x: Buf, w: Vector, eps: f32, out: Buf) -> Result<()>;

    /// `out = W x` for several matrices that read the same `x`.
    fn matmul(&mut self, x: Buf, products: &[(Matrix, Buf)]) -> Result<()>;

    /// Cosines and sines of the batch's positions: `[rows, cos… | sin…]`.
    fn rope_angles(&mut self, rope: &Rope, positions: &[u32], out: Buf) -> Result<()>;

    /// Rotates every head of `x` in place by the angles of its row.
    fn rope(&mut self, x: Buf, head_dim: usize, pairs: RopePairs, angles: Buf) -> Result<()>;

    /// Appends the batch's keys and values to its sequences, then attends from every row to all positions
    /// of its sequence up to its own.
    fn attention(&mut self, attention: &Attention, batch: &mut Batch<'_>) -> Result<()>;

    /// Chooses experts for every row from the router's logits, with a correction `[experts]` of the scores if there
    /// is one, and tells the host.
    fn route(
        &mut self,
        logits: Buf,
        router: &Router,
        correction: Option<Vector>,
        routing: &mut Routing,
    ) -> Result<()>;

    /// Computes `W_d( SiLU(W_g x) · (W_u x) )` for the leased experts and the rows routed to them.
    fn experts(&mut self, buffers: &ExpertBuffers, routing: &Routing, leases: &[Lease]) -> Result<()>;

    /// `out[t] = Σ weight · expert output`, in rank order.
    fn combine(&mut self, routing: &Routing, experts: Buf, out: Buf) -> Result<()>;

    /// `x = x + y`
    fn add(&mut self, x: Buf, y: Buf) -> Result<()>;

    /// `x[t] = x[t] + w`
    fn add_bias(&mut self, x: Buf, w: Vector) -> Result<()>;

    /// `gate = SiLU(gate) · up`
    fn swiglu(&mut self, gate: Buf, up: Buf) -> Result<()>;

    /// `x = x · σ(gate)`, where a row of `gate` has a number for each of `x`, or one for all.
    fn sigmoid_gate(&mut self, x: Buf, gate: Buf) -> Result<()>;

    /// `out[i] = x[rows[i]]`; the following operations work on these rows.
    fn pick(&mut self, x: Buf, rows: &[usize], out: Buf) -> Result<()>;

    /// Copies a buffer's rows to the host.
    fn read(&mut self, x: Buf, out: &mut [f32]) -> Result<()>;
}

/// A weight on its way to the backend.
pub enum Weight {
    /// The next [`Matrix`].
    Matrix(HostMatrix),
    /// The next [`Vector`].
    Vector(Vec<f32>),
}
