//! The arithmetic that a model is written in, and who computes it.
//!
//! A model's forward pass is a sequence of calls on a [`Backend`]. Weights, activations and attention memory
//! are handles, because only the backend knows where they live. Two things cross to the host: a router's
//! choice, and logits: the likeliest tokens', or all of a row. A backend computes with experts that it is given; which those are
//! and how they come there is the business of an [executor](crate::experts::ExpertExecutor).

mod attend;
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

use forebay_kernels::RopePairs;

pub use cpu::{CpuBackend, ExpertWeights, Precision};
pub use handles::{Buf, BufShape, HostMatrix, Matrix, Vector, Weight};
pub use kv::{KvPages, KvType};
pub use logits::{Best, Logits};
pub(crate) use logits::{Kept, Row, note_loss};
pub use operations::{
    Activation, Attention, DeltaRule, DeltaShape, ExpertBuffers, Experts, HeadMatrices, HeadOrder, Heads,
    Rope, RowPart,
};
pub use pieces::Pieces;
pub(crate) use ranking::buffer as rank_buffer;
pub use ranking::{Ranked, rank, tame};
pub use recurrent::{Advance, Recurrent};
pub use routing::{GroupScore, Groups, Router, RouterWeights, Routing, Scores};
pub(crate) use sequence::MARKS;
pub use sequence::{Batch, Sequence, SequenceState};
pub use state::{KvShape, LayerState, StateShape};
use state::{damaged, read_number, write_number};

use crate::TokenId;
use crate::error::Result;

/// The arithmetic of a forward pass, on one device.
///
/// Every operation works on as many rows as the last [`begin`](Self::begin) said. A wrong shape is a bug of
/// the caller and panics; an error is the device's.
#[allow(clippy::missing_errors_doc)]
pub trait Backend: Send {
    /// The device and its instruction set, for people.
    fn name(&self) -> String;

    /// Takes the weights, in the order of their handles.
    fn load(&mut self, weight: Weight) -> Result<()>;

    /// The state of one layer of a new sequence.
    fn new_state(&self, shape: StateShape) -> Box<dyn LayerState>;

    /// The following operations work on this many rows.
    fn begin(&mut self, rows: usize);

    /// `out[t] = table[tokens[t]]`
    fn embed(&mut self, table: Matrix, tokens: &[TokenId], out: Buf) -> Result<()>;

    /// `out = norm(x) · w`, over the whole row or over each part of it as long as `w`. `x` may be `out`.
    fn rms_norm(&mut self, x: Buf, w: Vector, eps: f32, out: Buf) -> Result<()>;

    /// `out = W x` for several matrices that read the same `x`.
    fn matmul(&mut self, x: Buf, products: &[(Matrix, Buf)]) -> Result<()>;

    /// `out[h] = [rest | W[h] part]` for every head `h` of a row, with `x[h] = [part | rest]`: as many channels as the
    /// head's matrix has columns are multiplied, and those after them, if there are any, come first.
    fn head_products(&mut self, x: Buf, w: &HeadMatrices, out: Buf) -> Result<()>;

    /// Cosines and sines of the batch's positions: `[rows, cos… | sin…]`.
    fn rope_angles(&mut self, rope: &Rope, positions: &[u32], out: Buf) -> Result<()>;

    /// Rotates every head of `x` in place by the angles of its row.
    fn rope(&mut self, x: Buf, head_dim: usize, pairs: RopePairs, angles: Buf) -> Result<()>;

    /// Norms every head of queries and keys, where they have a norm, and rotates both by the angles of their rows. A norm is as
    /// long as a head, or as all heads together.
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

    /// Appends the batch's keys and values to its sequences, then attends from every row to all positions
    /// of its sequence up to its own, or to those in the layer's window.
    fn attention(&mut self, attention: &Attention, batch: &mut Batch<'_>) -> Result<()>;

    /// Convolves the batch's queries, keys and values over the positions of their sequences, each channel by itself,
    /// with SiLU after it; gives queries and keys the length one, queries also the factor `1 / √key_dim`; then takes
    /// every value head's state through the tokens: with `g = exp(rate · softplus(a + bias))`,
    /// `S ← g · S`, `S ← S + k · (σ(b) · (v − Sᵀ k))ᵀ`, `out = Sᵀ q`.
    fn delta_rule(&mut self, rule: &DeltaRule, batch: &mut Batch<'_>) -> Result<()>;

    /// Parts rows of `x` that are `groups` groups, each made of these parts in order.
    fn ungroup(&mut self, x: Buf, groups: usize, parts: &[RowPart]) -> Result<()>;

    /// Chooses experts for every row from the router's logits, with a correction `[experts]` of the scores if there
    /// is one, and tells the host.
    fn route(
        &mut self,
        logits: Buf,
        router: &Router,
        correction: Option<Vector>,
        routing: &mut Routing,
    ) -> Result<()>;

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

    /// All operations asked for so far are on their way: a backend may collect them until now.
    fn submit(&mut self) -> Result<()> {
        Ok(())
    }

    /// Copies a buffer's rows to the host.
    fn read(&mut self, x: Buf, out: &mut [f32]) -> Result<()>;

    /// Copies one row to the host.
    fn read_row(&mut self, x: Buf, row: usize, out: &mut [f32]) -> Result<()>;

    /// Tells the host the `k` likeliest tokens of each row of logits, as [`rank`] has them: `[rows, k]`. Where a row has
    /// fewer that are possible, the rest are any of minus infinity.
    fn best(&mut self, logits: Buf, k: usize, out: &mut Vec<Ranked>) -> Result<()>;
}
