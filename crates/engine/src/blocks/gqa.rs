//! Grouped-query attention: several query heads share one key head and one value head.

use crate::LayerIdx;
use crate::backend::Batch;
use crate::backend::{Attention, Buf, Heads, KvShape, Matrix, Rope, RowPart, Vector};
use crate::blocks::Context;
use crate::error::Result;

/// The sizes and buffers of attention, shared by all layers of a model.
#[derive(Clone, Debug)]
pub struct Gqa {
    /// The heads, and the keys and values kept for all positions; a layer with a window keeps fewer.
    pub kv: KvShape,
    /// The factor of every score.
    pub scale: f32,
    /// The rotary embedding.
    pub rope: Rope,
    /// The epsilon of the norms of queries and keys.
    pub eps: f32,
    /// `[rows, query heads · key_dim]`
    pub q: Buf,
    /// `[rows, key heads · key_dim]`
    pub k: Buf,
    /// `[rows, key heads · value_dim]`
    pub v: Buf,
    /// `[rows, query heads · value_dim]`
    pub attended: Buf,
    /// `[rows, rotated channels]`
    pub angles: Buf,
    /// The gate of the attention's output, if the model has one.
    pub gate: Option<AttentionGate>,
}

/// The buffers of an output gate whose logits come from the query projection, after each head's query.
#[derive(Clone, Copy, Debug)]
pub struct AttentionGate {
    /// `[rows, query heads · 2 · key_dim]`
    pub queries_and_gate: Buf,
    /// `[rows, query heads · key_dim]`
    pub gate: Buf,
}

/// The weights of one layer.
#[derive(Clone, Copy, Debug)]
pub struct GqaWeights {
    /// `[query heads · key_dim, hidden]`, twice as many rows if there is a gate.
    pub q: Matrix,
    /// `[key heads · key_dim, hidden]`
    pub k: Matrix,
    /// `[key heads · value_dim, hidden]`
    pub v: Matrix,
    /// `[hidden, query heads · value_dim]`
    pub out: Matrix,
    /// Added to queries, keys and values: `[query heads · key_dim]`, `[key heads · key_dim]`, `[key heads · value_dim]`
    pub biases: Option<[Vector; 3]>,
    /// Added to the output: `[hidden]`
    pub out_bias: Option<Vector>,
    /// `[query heads]` Scores that count in the softmax's sum and have no value.
    pub sinks: Option<Vector>,
    /// Norms of queries and keys before the rotation: `[key_dim]`, applied to each head, or as long as all heads
    /// together.
    pub norms: Option<[Vector; 2]>,
}

impl Gqa {
    /// Computes what all layers share: the rotation angles of the batch's positions.
    ///
    /// # Errors
    /// If the backend fails.
    pub fn begin(&self, cx: &mut Context<'_>, batch: &Batch<'_>) -> Result<()> {
        cx.backend().rope_angles(&self.rope, batch.positions, self.angles)
    }

    /// `out = W_o · attention(x)`
    ///
    /// # Errors
    /// If the backend fails.
    pub fn forward(
        &self,
        cx: &mut Context<'_>,
        batch: &mut Batch<'_>,
        layer: LayerIdx,
        w: &GqaWeights,
        x: Buf,
        out: Buf,
    ) -> Result<()> {
        let b = cx.backend();
        let q = self.gate.map_or(self.q, |gate| gate.queries_and_gate);
        b.matmul(x, &[(w.q, q), (w.k, self.k), (w.v, self.v)])?;
        if let Some(AttentionGate { queries_and_gate, gate }) = self.gate {
            let parts = [self.q, gate].map(|to| RowPart { width: self.kv.key_dim, to, at: 0 });
            b.ungroup(queries_and_gate, gate.width / self.kv.key_dim, &parts)?;
        }
        for (heads, bias) in [self.q, self.k, self.v].into_iter().zip(w.biases.into_iter().flatten()) {
            b.add_bias(heads, bias)?;
        }
        let [q_norm, k_norm] = w.norms.map_or([None; 2], |norms| norms.map(Some));
        let heads =
            Heads { dim: self.kv.key_dim, eps: self.eps, pairs: self.rope.pairs, angles: self.angles };
        b.norm_and_rotate([(self.q, q_norm), (self.k, k_norm)], &heads)?;
        let attention = Attention {
            layer,
            q: self.q,
            k: self.k,
            v: self.v,
            out: self.attended,
            scale: self.scale,
            sinks: w.sinks,
        };
        b.attention(&attention, batch)?;
        if let Some(AttentionGate { gate, .. }) = self.gate {
            b.sigmoid_gate(self.attended, gate)?;
        }
        b.matmul(self.attended, &[(w.out, out)])?;
        match w.out_bias {
            Some(bias) => b.add_bias(out, bias),
            None => Ok(()),
        }
    }
}
