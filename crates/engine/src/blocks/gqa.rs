//! Grouped-query attention: several query heads share one key head and one value head.

use smallvec::{SmallVec, smallvec};

use crate::LayerIdx;
use crate::backend::{
    Attention, Backend, Batch, Buf, Gate, Heads, KvShape, Matrix, RopePairs, RowPart, Vector,
};
use crate::blocks::Context;
use crate::error::Result;

/// The sizes of a layer's attention, and its buffers, which layers share.
#[derive(Clone, Copy, Debug)]
pub struct Gqa {
    /// The key heads, and which positions queries see.
    pub kv: KvShape,
    /// The factor of every score.
    pub scale: f32,
    /// The rotation of queries and keys; `None` in layers without positions.
    pub rotation: Option<Rotation>,
    /// The epsilon of the norms of queries, keys and values.
    pub eps: f32,
    /// `[rows, query heads · key_dim]`
    pub q: Buf,
    /// `[rows, key heads · key_dim]`
    pub k: Buf,
    /// `[rows, key heads · value_dim]`
    pub v: Buf,
    /// `[rows, query heads · value_dim]`
    pub attended: Buf,
    /// The gate of the attention's output, if the layer has one.
    pub gate: Option<AttentionGate>,
    /// `[rows, 1]` Factors of the queries, if they depend on the position.
    pub temperature: Option<Buf>,
}

/// A rotation whose angles are ready.
#[derive(Clone, Copy, Debug)]
pub struct Rotation {
    /// `[rows, rotated channels]` The cosines and sines of the rows' positions.
    pub angles: Buf,
    /// Which channels rotate together.
    pub pairs: RopePairs,
}

/// Where the logits of an output gate come from, and their buffers.
#[derive(Clone, Copy, Debug)]
pub enum AttentionGate {
    /// From the query projection, after each head's query.
    BesideQueries {
        /// `[rows, query heads · 2 · key_dim]`
        queries_and_gate: Buf,
        /// `[rows, query heads · key_dim]`
        gate: Buf,
    },
    /// From a matrix of their own.
    Own {
        /// `[rows, query heads]`, or with a number for each channel of the output.
        gate: Buf,
        /// How logits become factors.
        function: Gate,
    },
}

/// The weights of one layer.
#[derive(Clone, Copy, Debug)]
pub struct GqaWeights {
    /// `[query heads · key_dim, hidden]`, twice as many rows if gates are beside queries.
    pub q: Matrix,
    /// `[key heads · key_dim, hidden]`
    pub k: Matrix,
    /// `[key heads · value_dim, hidden]`
    pub v: Matrix,
    /// `[hidden, query heads · value_dim]`
    pub out: Matrix,
    /// The projection to the logits of an [own](AttentionGate::Own) gate.
    pub gate: Option<Matrix>,
    /// Added to queries, keys and values: `[query heads · key_dim]`, `[key heads · key_dim]`, `[key heads · value_dim]`
    pub biases: Option<[Vector; 3]>,
    /// Added to the output: `[hidden]`
    pub out_bias: Option<Vector>,
    /// `[query heads]` Scores that count in the softmax's sum and have no value.
    pub sinks: Option<Vector>,
    /// Norms of queries and keys.
    pub norms: Option<QkNorms>,
    /// `[value_dim]` The norm of values.
    pub value_norm: Option<Vector>,
    /// `[1]` A factor of values.
    pub value_scale: Option<Vector>,
}

/// Norms of queries and keys: as long as a head, or as all heads together.
#[derive(Clone, Copy, Debug)]
pub struct QkNorms {
    /// Of queries.
    pub q: Vector,
    /// Of keys.
    pub k: Vector,
    /// Whether they come after the rotation.
    pub after_rotation: bool,
}

impl Gqa {
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
        self.project(b, w, x)?;
        for (heads, bias) in [self.q, self.k, self.v].into_iter().zip(w.biases.into_iter().flatten()) {
            b.add_bias(heads, bias)?;
        }
        self.norm_and_rotate(b, w.norms)?;
        if let Some(norm) = w.value_norm {
            b.rms_norm(self.v, norm, self.eps, self.v)?;
        }
        if let Some(scale) = w.value_scale {
            b.scale(self.v, scale)?;
        }
        if let Some(factors) = self.temperature {
            b.gate(self.q, factors, Gate::Factor)?;
        }
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
        match self.gate {
            Some(AttentionGate::BesideQueries { gate, .. }) => {
                b.gate(self.attended, gate, Gate::Sigmoid)?;
            }
            Some(AttentionGate::Own { gate, function }) => b.gate(self.attended, gate, function)?,
            None => {}
        }
        b.matmul(self.attended, &[(w.out, out)])?;
        match w.out_bias {
            Some(bias) => b.add_bias(out, bias),
            None => Ok(()),
        }
    }

    /// Computes queries, keys, values and the logits of the gate.
    fn project(&self, b: &mut dyn Backend, w: &GqaWeights, x: Buf) -> Result<()> {
        let q = match self.gate {
            Some(AttentionGate::BesideQueries { queries_and_gate, .. }) => queries_and_gate,
            _ => self.q,
        };
        let mut products: SmallVec<[(Matrix, Buf); 4]> = smallvec![(w.q, q), (w.k, self.k), (w.v, self.v)];
        if let (Some(AttentionGate::Own { gate, .. }), Some(matrix)) = (self.gate, w.gate) {
            products.push((matrix, gate));
        }
        b.matmul(x, &products)?;
        if let Some(AttentionGate::BesideQueries { queries_and_gate, gate }) = self.gate {
            let parts = [self.q, gate].map(|to| RowPart { width: self.kv.key_dim, to, at: 0 });
            b.ungroup(queries_and_gate, gate.width / self.kv.key_dim, &parts)?;
        }
        Ok(())
    }

    fn norm_and_rotate(&self, b: &mut dyn Backend, norms: Option<QkNorms>) -> Result<()> {
        let norm = |b: &mut dyn Backend| -> Result<()> {
            for (heads, norm) in norms.into_iter().flat_map(|norms| [(self.q, norms.q), (self.k, norms.k)]) {
                b.rms_norm(heads, norm, self.eps, heads)?;
            }
            Ok(())
        };
        let Some(Rotation { angles, pairs }) = self.rotation else { return norm(b) };
        let heads = Heads { dim: self.kv.key_dim, eps: self.eps, pairs, angles };
        match norms {
            Some(QkNorms { after_rotation: true, .. }) => {
                b.norm_and_rotate([(self.q, None), (self.k, None)], &heads)?;
                norm(b)
            }
            _ => {
                let [q, k] = norms.map_or([None; 2], |norms| [Some(norms.q), Some(norms.k)]);
                b.norm_and_rotate([(self.q, q), (self.k, k)], &heads)
            }
        }
    }
}
