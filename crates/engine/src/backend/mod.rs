//! The operations of a forward pass, and the CPU that computes them.
//!
//! A model's forward pass is a sequence of calls on a [`Backend`]. Weights, activations and KV caches are handles,
//! because only the backend knows where they are. Only two results are copied to RAM: the router's choices, and
//! logits (the likeliest, or all of a row). A backend computes with experts that an
//! [executor](crate::experts::ExpertExecutor) gives it; it knows nothing about their tiers.

mod attend;
mod convolution;
mod cpu;
mod delta;
mod handles;
mod heads;
mod kv;
mod logits;
mod operations;
mod pieces;
mod ranking;
mod recurrent;
mod routing;
mod sequence;
mod state;

pub use forebay_kernels::{Activation, Gate, RopePairs};

pub use cpu::{CpuBackend, ExpertWeights, Precision};
pub use handles::{Buf, BufShape, HostMatrix, Matrix, Vector, Weight};
pub use kv::{KvPages, KvType};
pub use logits::{Best, Logits};
pub(crate) use logits::{Kept, Row, note_loss};
pub use operations::{
    Attention, Convolution, DeltaRule, DeltaShape, ExpertBlock, Experts, HeadMatrices, HeadOrder, Heads,
    Parts, Rope, RowPart,
};
pub use pieces::Pieces;
pub(crate) use ranking::buffer as rank_buffer;
pub use ranking::{Ranked, rank, tame};
pub use recurrent::{Advance, Recurrent};
pub use routing::{GroupScore, Groups, Router, RouterWeights, Routing, Scores};
pub(crate) use sequence::MARKS;
pub use sequence::{Batch, Sequence, SequenceState};
pub use state::{KvShape, LayerState, StateShape, Window};
use state::{damaged, read_number, write_number};

use crate::TokenId;
use crate::error::Result;

/// The operations of a forward pass, on one device.
///
/// Every operation works on the number of rows that the last [`begin`](Self::begin) set. A wrong shape is a bug of
/// the caller and panics; an error means that the device failed.
#[allow(clippy::missing_errors_doc)]
pub trait Backend: Send {
    /// The device and its instruction set, for messages.
    fn name(&self) -> String;

    /// Loads a weight. Its handle is its position in the order of loading.
    fn load(&mut self, weight: Weight) -> Result<()>;

    /// An empty state for one layer of a new sequence.
    fn new_state(&self, shape: StateShape) -> Box<dyn LayerState>;

    /// Sets the number of rows of the following operations.
    fn begin(&mut self, rows: usize);

    /// `out[t] = table[tokens[t]]`
    fn embed(&mut self, table: Matrix, tokens: &[TokenId], out: Buf) -> Result<()>;

    /// `out = norm(x) · w`, over the whole row, or over each part of it if `w` is shorter. `x` may be `out`.
    fn rms_norm(&mut self, x: Buf, w: Vector, eps: f32, out: Buf) -> Result<()>;

    /// `out = (x − mean) / √(variance + eps) · w`, over the whole row. `x` may be `out`.
    fn layer_norm(&mut self, x: Buf, w: Vector, eps: f32, out: Buf) -> Result<()>;

    /// `out = W x` for several matrices with the same input `x`.
    fn matmul(&mut self, x: Buf, products: &[(Matrix, Buf)]) -> Result<()>;

    /// `out[h] = [rest | W[h] part]` for every head `h` of a row, where `x[h] = [part | rest]`. `part` has as many
    /// channels as the head's matrix has columns.
    fn head_products(&mut self, x: Buf, w: &HeadMatrices, out: Buf) -> Result<()>;

    /// Cosines and sines of the batch's positions: `[rows, cos… | sin…]`.
    fn rope_angles(&mut self, rope: &Rope, positions: &[u32], out: Buf) -> Result<()>;

    /// Rotates every head of `x` in place by its row's angles.
    fn rope(&mut self, x: Buf, head_dim: usize, pairs: RopePairs, angles: Buf) -> Result<()>;

    /// Normalises every head of queries and keys, where there is a norm, and rotates both by their rows' angles. A
    /// norm is as long as one head, or as all heads together.
    fn norm_and_rotate(&mut self, buffers: [(Buf, Option<Vector>); 2], heads: &Heads) -> Result<()> {
        for (buf, norm) in buffers {
            if let Some(norm) = norm {
                self.rms_norm(buf, norm, heads.eps, buf)?;
            }
        }
        for (buf, _) in buffers {
            self.rope(buf, heads.dim, heads.pairs, heads.angles)?;
        }
        Ok(())
    }

    /// Appends the batch's keys and values to its sequences. Then each row attends to all positions of its sequence
    /// up to its own, or to those in the layer's window.
    fn attention(&mut self, attention: &Attention, batch: &mut Batch<'_>) -> Result<()>;

    /// Convolves the batch's queries, keys and values over the positions of their sequences, channel by channel, and
    /// applies SiLU. Then scales queries and keys to length one, and queries by `1 / √key_dim`. Then updates every
    /// value head's state token by token: with `g = exp(rate · softplus(a + bias))`, `S ← g · S`, `S ← S + k · (σ(b)
    /// · (v − Sᵀ k))ᵀ`, `out = Sᵀ q`.
    fn delta_rule(&mut self, rule: &DeltaRule, batch: &mut Batch<'_>) -> Result<()>;

    /// Convolves the batch's rows over the positions of their sequences, channel by channel: `out[t] = Σ filters[i] ·
    /// x[t − kernel + 1 + i]`, where rows before the first position are zero. The state is the last `kernel − 1` rows.
    fn convolve(&mut self, convolution: &Convolution, batch: &mut Batch<'_>) -> Result<()>;

    /// Splits rows of `x` that have `groups` groups, each made of these parts in order.
    fn ungroup(&mut self, x: Buf, groups: usize, parts: &[RowPart]) -> Result<()>;

    /// Chooses experts for every row from the router's logits and copies the choices to RAM.
    fn route(
        &mut self,
        logits: Buf,
        router: &Router,
        weights: &RouterWeights,
        routing: &mut Routing,
    ) -> Result<()>;

    /// `out[t] = x[t] · σ(max(logits[t]))`, for routers whose weights multiply the input of the best expert.
    fn weigh_by_best(&mut self, x: Buf, logits: Buf, out: Buf) -> Result<()>;

    /// `x = x + y`
    fn add(&mut self, x: Buf, y: Buf) -> Result<()>;

    /// `x[t] = x[t] + w`
    fn add_bias(&mut self, x: Buf, w: Vector) -> Result<()>;

    /// `x[t] = x[t] · w`, where `w` has one number for each of a row, or one for all.
    fn scale(&mut self, x: Buf, w: Vector) -> Result<()>;

    /// `x = activation(x, up)`, or `x = activation(x)` if the activation function has no gate.
    fn activate(&mut self, x: Buf, up: Option<Buf>, activation: Activation) -> Result<()>;

    /// `x = x · function(gate)`, where a number of `gate`'s row belongs to one of `x` or to several consecutive ones.
    fn gate(&mut self, x: Buf, gate: Buf, function: Gate) -> Result<()>;

    /// `x = cap · tanh(x / cap)`
    fn softcap(&mut self, x: Buf, cap: f32) -> Result<()>;

    /// `out[i] = x[rows[i]]`; the following operations work on the copied rows.
    fn pick(&mut self, x: Buf, rows: &[usize], out: Buf) -> Result<()>;

    /// Starts all operations called so far. A backend may collect operations until then.
    fn submit(&mut self) -> Result<()> {
        Ok(())
    }

    /// Copies rows from RAM to a buffer.
    fn write(&mut self, x: Buf, values: &[f32]) -> Result<()>;

    /// Copies a buffer's rows to RAM.
    fn read(&mut self, x: Buf, out: &mut [f32]) -> Result<()>;

    /// Copies one row to RAM.
    fn read_row(&mut self, x: Buf, row: usize, out: &mut [f32]) -> Result<()>;

    /// Finds the `k` likeliest tokens of each row of logits, in the order of [`rank`]: `[rows, k]`. If fewer are
    /// possible, the rest are arbitrary tokens with minus infinity.
    fn best(&mut self, logits: Buf, k: usize, out: &mut Vec<Ranked>) -> Result<()>;
}
