//! The operations a model is written in, and who computes them.
//!
//! A model's forward pass is a sequence of calls on a [`Backend`]. Weights, activations and attention memory
//! are handles, because only the backend knows where they live; what crosses to the host is the router's
//! choice, which the expert store needs, and logits: the likeliest tokens', or all of a row.

mod assistant;
mod attend;
mod cpu;
mod delta;
mod heads;
mod kv;
mod logits;
mod pieces;
mod ranking;
mod recurrent;
mod routing;
mod sequence;

use std::any::Any;
use std::io::{self, Read, Write};
use std::ops::Range;
use std::time::Duration;

use forebay_kernels::{Encoding, MatRef, Planes, RopePairs};

pub(crate) use assistant::ASSISTED_ROWS;
pub use assistant::{Assistant, Outputs};
pub use cpu::{CpuBackend, Precision};
pub use kv::{KvPages, KvType};
pub use logits::{Best, Logits};
pub(crate) use logits::{Kept, Row, note_loss};
pub use pieces::Pieces;
pub(crate) use ranking::buffer as rank_buffer;
pub use ranking::{Ranked, rank, tame};
pub use recurrent::{Advance, Recurrent};
pub use routing::{GroupScore, Groups, Router, Routing, Scores};
pub(crate) use sequence::MARKS;
pub use sequence::{Batch, Sequence, SequenceState};

use crate::error::Result;
use crate::experts::{DevicePart, DeviceSlot, ExpertLayer, Leases, SlotClasses};
use crate::memory::SharedBytes;
use crate::{ExpertIdx, LayerIdx, TokenId};

/// A weight matrix of the dense part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Matrix(pub(crate) usize);

impl Matrix {
    /// The matrix that was loaded so many matrices after the first.
    pub fn nth(index: usize) -> Matrix {
        Matrix(index)
    }

    /// Which of the matrices it is, in the order in which they were [loaded](Backend::load).
    pub fn index(self) -> usize {
        self.0
    }
}

/// A small vector of weights: a norm, a bias.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Vector(pub(crate) usize);

impl Vector {
    /// The vector that was loaded so many vectors after the first.
    pub fn nth(index: usize) -> Vector {
        Vector(index)
    }

    /// Which of the vectors it is, in the order in which they were [loaded](Backend::load).
    pub fn index(self) -> usize {
        self.0
    }
}

/// Scratch memory for activations: rows of `width` floats, as many as the current [`begin`](Backend::begin)
/// says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Buf {
    pub(crate) id: usize,
    pub(crate) width: usize,
}

impl Buf {
    /// The backend's buffer of this number, whose rows have so many floats.
    pub fn nth(index: usize, width: usize) -> Buf {
        Buf { id: index, width }
    }

    /// Which of the backend's buffers it is.
    pub fn index(self) -> usize {
        self.id
    }

    /// Floats in a row.
    pub fn width(self) -> usize {
        self.width
    }
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
    /// What multiplies all its weights besides.
    pub scale: f32,
}

impl HostMatrix {
    /// The matrix for the kernels, which do not know its scale.
    pub fn view(&self) -> MatRef<'_> {
        let [codes, scales, biases] = &self.planes;
        MatRef::from_planes(self.encoding, self.rows, self.cols, Planes { codes, scales, biases })
    }
}

/// What one layer of one sequence keeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StateShape {
    /// Keys and values.
    Attention(KvShape),
    /// So many floats, however many positions there are.
    Recurrent(usize),
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
    /// How many positions a query sees, its own among them, if not all.
    pub window: Option<usize>,
    /// Whether a value is nothing but the last channels of its key, and kept only there.
    pub latent: bool,
}

impl KvShape {
    /// Channels of a key before those that are its value, where they are; else all.
    pub fn own_key_dim(&self) -> usize {
        if self.latent { self.key_dim - self.value_dim } else { self.key_dim }
    }

    /// Numbers kept of a position.
    pub fn position(&self) -> usize {
        self.heads * (self.own_key_dim() + self.value_dim)
    }
}

/// What one layer keeps of one sequence, where the backend computes.
///
/// A layer need not be able to go back to every position: a window forgets, and a recurrent state has only the
/// positions that were *marked* before they were computed. All layers of a sequence have the same marks.
pub trait LayerState: Any + Send {
    /// The number of positions it has seen.
    fn len(&self) -> usize;

    /// Whether it has seen none.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The largest number of positions, not more than `len`, that it can go back to.
    fn reach(&self, len: usize) -> usize;

    /// Goes back to `len` positions, if it has seen more. They must be [within reach](Self::reach).
    fn truncate(&mut self, len: usize);

    /// Forgets what neither the positions after the last one need, nor those after `marks`.
    fn settle(&mut self, marks: &[usize]);

    /// Bytes that it takes once it has been computed up to `len` positions with these marks.
    fn bytes_for(&self, len: usize, marks: &[usize]) -> u64;

    /// The same state again. What both have seen they share.
    fn fork(&self) -> Box<dyn LayerState>;

    /// Bytes of what it shares with a fork for as long as neither goes back.
    fn shared_bytes(&self) -> u64;

    /// Writes it to a snapshot.
    ///
    /// # Errors
    /// The writer's.
    fn save(&self, to: &mut dyn Write) -> io::Result<()>;

    /// Reads what [`save`](Self::save) wrote after `len` positions, into a new state.
    ///
    /// # Errors
    /// The reader's; if what is there is something else, or there is no memory for it.
    fn load(&mut self, len: usize, from: &mut dyn Read) -> io::Result<()>;

    /// For the backend that made it.
    fn as_any_mut(&mut self) -> &mut dyn Any;
}

/// A number of a snapshot.
fn read_number(from: &mut dyn Read) -> io::Result<usize> {
    let mut bytes = [0; 8];
    from.read_exact(&mut bytes)?;
    usize::try_from(u64::from_le_bytes(bytes)).map_err(|_| damaged())
}

fn write_number(to: &mut dyn Write, number: usize) -> io::Result<()> {
    to.write_all(&(number as u64).to_le_bytes())
}

/// What a snapshot is that holds something else than it should.
fn damaged() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "its state is not that of so many tokens")
}

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
    /// Of the rows, as [`Backend::rope_angles`] made them.
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
pub struct Part {
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
    /// [`Routing`]'s places.
    pub out: Buf,
}

/// A whole mixture, whose experts are all in the device's memory.
#[derive(Clone, Copy, Debug)]
pub struct Mixture<'a> {
    /// The router's: `[rows, experts]`
    pub logits: Buf,
    /// How experts are chosen.
    pub router: &'a Router,
    /// `[experts]` Added to the scores for the choice alone.
    pub correction: Option<Vector>,
    /// The experts.
    pub experts: Experts,
    /// Whether the choice is to be [told](Backend::tell) after the batch.
    pub noted: bool,
    /// `[rows, hidden]`
    pub out: Buf,
}

/// A device besides the processor.
pub trait Device: Send + Sync {
    /// A backend there with these buffers, numbered in order.
    ///
    /// # Errors
    /// If it has no memory for them, or fails.
    fn backend(&self, precision: Precision, buffers: &[BufShape]) -> Result<Box<dyn Backend>>;

    /// Whether it has a way to compute with matrices that are stored so.
    fn computes(&self, encoding: Encoding) -> bool;

    /// Bytes that models may use there.
    fn memory(&self) -> u64;

    /// Tokens of a prompt that are best computed together there.
    fn chunk(&self) -> usize;

    /// Bytes a second that are copied there from memory of the computer, tried for a moment.
    ///
    /// # Errors
    /// If it has no memory for that, or fails.
    fn link_speed(&self) -> Result<f64>;

    /// Lets the device copy from memory of the computer by itself, as long as what is returned lives. A copy is from one such part.
    ///
    /// # Errors
    /// If the system does not allow it. Copies are slower then.
    fn pin(&self, memory: SharedBytes) -> Result<Box<dyn Send>>;
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

    /// Makes slots for routed experts in the device's own memory: so many of each class, or fewer, not less than the classes'
    /// least, if it has no more. Says how many there are; `None` from a backend that computes experts where they are leased.
    fn make_slots(
        &mut self,
        layers: &[Option<ExpertLayer>],
        classes: &SlotClasses,
        slots: &[usize],
    ) -> Result<Option<Vec<usize>>> {
        let _ = (layers, classes, slots);
        Ok(None)
    }

    /// Gives up the memory of some slots, which hold nobody, to conversations.
    fn lend(&mut self, part: DevicePart) -> Result<()> {
        let _ = part;
        unreachable!("only a device with memory of its own is asked")
    }

    /// Makes slots again whose memory was lent; `false` if there is none for them.
    fn take_back(&mut self, part: DevicePart) -> Result<bool> {
        let _ = part;
        unreachable!("only a device with memory of its own is asked")
    }

    /// Brings experts to their [places](crate::experts::Lease::place) in the device's memory.
    fn lift(&mut self, leases: Leases) -> Result<()> {
        let _ = leases;
        unreachable!("only a device with memory of its own is asked")
    }

    /// Drops leases that it keeps while experts are on their way to the device's memory, and whether it did. It may be told to
    /// `wait` until it can.
    fn let_go(&mut self, wait: bool) -> Result<bool> {
        let _ = wait;
        Ok(false)
    }

    /// How long it has waited for copies to the device's memory to end, since it was last asked. What [`let_go`](Self::let_go) waited
    /// for is not counted.
    fn copy_wait(&mut self) -> Duration {
        Duration::ZERO
    }

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

    /// Norms every head of each buffer that has a norm, and rotates all by the angles of their rows: a norm is as long as
    /// a head, or as all heads together.
    fn norm_and_rotate(&mut self, buffers: &[(Buf, Option<Vector>)], heads: &Heads) -> Result<()> {
        for &(buf, norm) in buffers {
            if let Some(norm) = norm {
                self.rms_norm(buf, norm, heads.eps, buf)?;
            }
        }
        for &(buf, _) in buffers {
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
    fn ungroup(&mut self, x: Buf, groups: usize, parts: &[Part]) -> Result<()>;

    /// Chooses experts for every row from the router's logits, with a correction `[experts]` of the scores if there
    /// is one, and tells the host.
    fn route(
        &mut self,
        logits: Buf,
        router: &Router,
        correction: Option<Vector>,
        routing: &mut Routing,
    ) -> Result<()>;

    /// Starts to choose as [`route`](Self::route) does, where it is only foreseen that it will be: what was chosen before still
    /// counts for [`experts`](Self::experts) and [`combine`](Self::combine).
    fn foresee(&mut self, logits: Buf, router: &Router, correction: Option<Vector>) -> Result<()> {
        let _ = (logits, router, correction);
        Ok(())
    }

    /// Tells the host what was [foreseen](Self::foresee) with the same arguments.
    fn foreseen(
        &mut self,
        logits: Buf,
        router: &Router,
        correction: Option<Vector>,
        routing: &mut Routing,
    ) -> Result<()> {
        self.route(logits, router, correction, routing)
    }

    /// These experts are asked for now, and in memory: starts to copy them to the device, before it is known where they go there.
    /// What was sent ahead and is not among them is given up.
    fn demand(&mut self, leases: Leases) -> Result<()> {
        let _ = leases;
        Ok(())
    }

    /// How many experts it has room for that are [sent ahead](Self::send_ahead).
    fn room_ahead(&self) -> usize {
        0
    }

    /// Starts to copy experts to the device that will probably be asked for next.
    fn send_ahead(&mut self, leases: Leases) -> Result<()> {
        let _ = leases;
        Ok(())
    }

    /// Computes `W_d( activation(W_g x, W_u x) )`, with biases if there are any, for the leased experts and the rows
    /// routed to them. Where leases have [places](crate::experts::Lease::place) the experts are brought there first.
    fn experts(&mut self, experts: &Experts, routing: &Routing, leases: Leases) -> Result<()>;

    /// The same, for experts that are in the device's memory.
    fn experts_there(
        &mut self,
        experts: &Experts,
        routing: &Routing,
        there: &[(ExpertIdx, DeviceSlot)],
    ) -> Result<()> {
        let _ = (experts, routing, there);
        unreachable!("only a device with memory of its own is asked")
    }

    /// Whether experts of the batch at hand may be computed [elsewhere](Assistant).
    fn takes_outputs(&self) -> bool {
        false
    }

    /// Takes what experts gave that were computed elsewhere, as if they had been here.
    fn put_outputs(&mut self, experts: &Experts, outputs: &Outputs) -> Result<()> {
        let _ = (experts, outputs);
        unreachable!("only a backend that takes outputs is asked")
    }

    /// `out[t] = Σ weight · expert output`, in rank order.
    fn combine(&mut self, routing: &Routing, experts: Buf, out: Buf) -> Result<()>;

    /// Routes, computes the chosen experts and combines what they give, as [`route`](Self::route),
    /// [`experts_there`](Self::experts_there) and [`combine`](Self::combine) do, without telling the host: all of the layer's
    /// experts are in the device's memory.
    fn mixture(&mut self, mixture: &Mixture<'_>) -> Result<()> {
        let _ = mixture;
        unreachable!("only a device with memory of its own is asked")
    }

    /// Tells what mixtures of the last batch chose that were to be noted: the layer, and an expert for each row and rank.
    fn tell(&mut self, listener: &mut dyn FnMut(LayerIdx, &[u32])) -> Result<()> {
        let _ = listener;
        Ok(())
    }

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

/// A weight on its way to the backend.
pub enum Weight {
    /// The next [`Matrix`].
    Matrix(HostMatrix),
    /// The next [`Vector`].
    Vector(Vec<f32>),
}
