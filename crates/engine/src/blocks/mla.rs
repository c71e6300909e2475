//! Multi-head latent attention: the KV cache keeps one small latent vector per position, from which the keys and
//! values of all heads are derived, and the rotated channels of the key.
//!
//! A head's keys are `W_K c` and its values `W_V c` for the latents `c`. Neither is ever computed: `q · W_K c` equals
//! `W_Kᵀ q · c`, and a weighted sum of values equals `W_V` times the weighted sum of latents. So every head attends
//! to the same keys, `[k_rotated | c]`, whose values are the latents inside them.

use crate::LayerIdx;
use crate::backend::{Attention, Batch, Buf, Gate, HeadMatrices, KvShape, Matrix, RopePairs, Vector};
use crate::blocks::Context;
use crate::error::Result;

/// The sizes and buffers of attention, shared by all layers of a model.
#[derive(Clone, Copy, Debug)]
pub struct Mla {
    /// One key head of `rotated + rank` channels, with values of `rank` channels.
    pub kv: KvShape,
    /// The factor of every score.
    pub scale: f32,
    /// Which channels rotate together.
    pub pairs: RopePairs,
    /// The epsilon of the norms of latents.
    pub eps: f32,
    /// `[rows, query rank]` The latents of queries, if the model has them.
    pub q_latent: Option<Buf>,
    /// `[rows, heads · (plain + rotated)]`
    pub q: Buf,
    /// Queries multiplied by `W_Kᵀ`: `[rows, heads · (rotated + rank)]`
    pub absorbed: Buf,
    /// The rotated channels of the key: `[rows, rotated]`
    pub k: Buf,
    /// `[rows, rank]`
    pub latent: Buf,
    /// `[rows, heads · rank]`
    pub attended: Buf,
    /// `[rows, heads · value]`
    pub values: Buf,
    /// `[rows, rotated]` The cosines and sines of the rows' positions.
    pub angles: Buf,
    /// `[rows, 1]` Factors of the queries, if they depend on the position.
    pub temperature: Option<Buf>,
}

/// The weights of one layer.
#[derive(Clone, Copy, Debug)]
pub struct MlaWeights {
    /// The projection to queries.
    pub q: QueryWeights,
    /// `[rotated, hidden]`
    pub k: Matrix,
    /// `[rank, hidden]`
    pub latent: Matrix,
    /// `[rank]`
    pub latent_norm: Vector,
    /// `W_Kᵀ` of each head: `[rank, plain]`
    pub absorb: HeadMatrices,
    /// `W_V` of each head: `[value, rank]`
    pub v: HeadMatrices,
    /// `[hidden, heads · value]`
    pub out: Matrix,
}

/// The weights that compute queries.
#[derive(Clone, Copy, Debug)]
pub enum QueryWeights {
    /// `[heads · (plain + rotated), hidden]`
    Direct(Matrix),
    /// Through a latent.
    Latent {
        /// `[query rank, hidden]`
        down: Matrix,
        /// `[query rank]`
        norm: Vector,
        /// `[heads · (plain + rotated), query rank]`
        up: Matrix,
    },
}

impl Mla {
    /// `out = W_o · attention(x)`
    ///
    /// # Errors
    /// If the backend fails.
    pub fn forward(
        &self,
        cx: &mut Context<'_>,
        batch: &mut Batch<'_>,
        layer: LayerIdx,
        w: &MlaWeights,
        x: Buf,
        out: Buf,
    ) -> Result<()> {
        let b = cx.backend();
        match (w.q, self.q_latent) {
            (QueryWeights::Latent { down, norm, up }, Some(q_latent)) => {
                b.matmul(x, &[(down, q_latent), (w.latent, self.latent), (w.k, self.k)])?;
                b.rms_norm(q_latent, norm, self.eps, q_latent)?;
                b.matmul(q_latent, &[(up, self.q)])?;
            }
            (QueryWeights::Direct(q), _) => {
                b.matmul(x, &[(q, self.q), (w.latent, self.latent), (w.k, self.k)])?;
            }
            (QueryWeights::Latent { .. }, None) => {
                unreachable!("a model with query latents has a buffer for them")
            }
        }
        if let Some(factors) = self.temperature {
            b.gate(self.q, factors, Gate::Factor)?;
        }
        b.rms_norm(self.latent, w.latent_norm, self.eps, self.latent)?;
        b.head_products(self.q, &w.absorb, self.absorbed)?;
        b.rope(self.absorbed, self.kv.key_dim, self.pairs, self.angles)?;
        b.rope(self.k, self.k.width, self.pairs, self.angles)?;
        let attention = Attention {
            layer,
            q: self.absorbed,
            k: self.k,
            v: self.latent,
            out: self.attended,
            scale: self.scale,
            sinks: None,
        };
        b.attention(&attention, batch)?;
        b.head_products(self.attended, &w.v, self.values)?;
        b.matmul(self.values, &[(w.out, out)])
    }
}
