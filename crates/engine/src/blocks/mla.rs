//! Multi-head latent attention: keys and values of all heads come from one small latent vector of a position, and only
//! that is kept, beside the channels of the key that rotate.
//!
//! A head's keys are `W_K c` and its values `W_V c` for the latents `c`. Neither is ever made: `q · W_K c` is
//! `W_Kᵀ q · c`, and a weighted sum of values is `W_V` times the weighted sum of latents. So every head attends to the
//! same keys, `[k_rotated | c]`, whose values are the latents inside them.

use crate::LayerIdx;
use crate::backend::Batch;
use crate::backend::{Attention, Buf, HeadMatrices, KvShape, Matrix, Rope, Vector};
use crate::blocks::Context;
use crate::error::Result;

/// The sizes and buffers of attention, alike in all layers of a model.
#[derive(Clone, Debug)]
pub struct Mla {
    /// One head of keys, `rotated + rank` channels, and its values, `rank` channels.
    pub kv: KvShape,
    /// Multiplies every score.
    pub scale: f32,
    /// The rotary embedding.
    pub rope: Rope,
    /// Of the norms of latents.
    pub eps: f32,
    /// `[rows, query rank]`, where queries have latents, too.
    pub q_latent: Option<Buf>,
    /// `[rows, heads · (plain + rotated)]`
    pub q: Buf,
    /// The queries that latents are asked with: `[rows, heads · (rotated + rank)]`
    pub absorbed: Buf,
    /// The rotated channels of the key: `[rows, rotated]`
    pub k: Buf,
    /// `[rows, rank]`
    pub latent: Buf,
    /// `[rows, heads · rank]`
    pub attended: Buf,
    /// `[rows, heads · value]`
    pub values: Buf,
    /// `[rows, rotated]`
    pub angles: Buf,
}

/// The weights of one layer.
#[derive(Clone, Copy, Debug)]
pub struct MlaWeights {
    /// To queries.
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

/// The weights that make queries.
#[derive(Clone, Copy, Debug)]
pub enum QueryWeights {
    /// `[heads · (plain + rotated), hidden]`
    Direct(Matrix),
    /// By way of a latent.
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
    /// Computes what all layers share: the angles of the batch's positions.
    ///
    /// # Errors
    /// The backend's.
    pub fn begin(&self, cx: &mut Context<'_>, batch: &Batch<'_>) -> Result<()> {
        cx.backend().rope_angles(&self.rope, batch.positions, self.angles)
    }

    /// `out = W_o · attention(x)`
    ///
    /// # Errors
    /// The backend's.
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
            (QueryWeights::Latent { .. }, None) => unreachable!("latents of queries have a buffer"),
        }
        b.rms_norm(self.latent, w.latent_norm, self.eps, self.latent)?;
        b.head_products(self.q, &w.absorb, self.absorbed)?;
        b.rope(self.absorbed, self.kv.key_dim, self.rope.pairs, self.angles)?;
        b.rope(self.k, self.k.width, self.rope.pairs, self.angles)?;
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
