//! Linear attention by the gated delta rule: each head keeps a matrix that maps keys to values, and each token
//! corrects it.

use smallvec::SmallVec;

use crate::LayerIdx;
use crate::backend::{Activation, Batch, Buf, DeltaRule, DeltaShape, Matrix, RowPart, Vector};
use crate::blocks::Context;
use crate::error::Result;

/// The sizes and buffers of linear attention, shared by all layers of a model.
#[derive(Clone, Copy, Debug)]
pub struct DeltaNet {
    /// The heads and their dimensions.
    pub shape: DeltaShape,
    /// Floats of recurrent state per layer and sequence.
    pub state: usize,
    /// The epsilon of the norm of the heads' outputs.
    pub eps: f32,
    /// `[rows, channels]` Queries, keys and values before the convolution.
    pub qkv: Buf,
    /// `[rows, channels]` Queries, keys and values after the convolution.
    pub convolved: Buf,
    /// `[rows, value_heads · value_dim]` The gate of the output.
    pub z: Buf,
    /// `[rows, value_heads]` The strength of the correction.
    pub b: Buf,
    /// `[rows, value_heads]` The decay of the state.
    pub a: Buf,
    /// `[rows, value_heads · value_dim]` The heads' outputs.
    pub out: Buf,
}

/// The weights of one layer.
#[derive(Clone, Copy, Debug)]
pub struct DeltaWeights {
    /// `[channels, hidden]` and `[value_heads · value_dim, hidden]`
    pub qkv_z: Pair,
    /// `[value_heads, hidden]` each
    pub b_a: Pair,
    /// `[kernel, channels]` The filters of the convolution.
    pub filters: Vector,
    /// `[value_heads]` The decay rates of the states, negative.
    pub rates: Vector,
    /// `[value_heads]` Added to `a`.
    pub biases: Vector,
    /// `[value_dim]` The norm of each head's output.
    pub norm: Vector,
    /// `[hidden, value_heads · value_dim]`
    pub out: Matrix,
}

/// Two projections of the same input.
#[derive(Clone, Copy, Debug)]
pub enum Pair {
    /// Two matrices.
    Separate(Matrix, Matrix),
    /// One matrix whose rows are grouped by key head, each group with everything that belongs to the head, and a
    /// buffer for its product.
    Interleaved(Matrix, Buf),
}

impl DeltaNet {
    /// `out = W_o( norm(heads) · SiLU(z) )`
    ///
    /// # Errors
    /// If the backend fails.
    pub fn forward(
        &self,
        cx: &mut Context<'_>,
        batch: &mut Batch<'_>,
        layer: LayerIdx,
        w: &DeltaWeights,
        x: Buf,
        out: Buf,
    ) -> Result<()> {
        self.project(cx, w, x)?;
        let b = cx.backend();
        let rule = DeltaRule {
            layer,
            shape: self.shape,
            qkv: self.qkv,
            convolved: self.convolved,
            a: self.a,
            b: self.b,
            out: self.out,
            filters: w.filters,
            rates: w.rates,
            biases: w.biases,
        };
        b.delta_rule(&rule, batch)?;
        b.rms_norm(self.out, w.norm, self.eps, self.out)?;
        b.activate(self.z, Some(self.out), Activation::SwiGlu)?;
        b.matmul(self.z, &[(w.out, out)])
    }

    /// Computes `qkv`, `z`, `b` and `a`.
    fn project(&self, cx: &mut Context<'_>, w: &DeltaWeights, x: Buf) -> Result<()> {
        let pairs = [(w.qkv_z, [self.qkv, self.z]), (w.b_a, [self.b, self.a])];
        let mut products: SmallVec<[(Matrix, Buf); 4]> = SmallVec::new();
        for (pair, bufs) in pairs {
            match pair {
                Pair::Separate(first, second) => products.extend([(first, bufs[0]), (second, bufs[1])]),
                Pair::Interleaved(both, buf) => products.push((both, buf)),
            }
        }
        cx.backend().matmul(x, &products)?;

        let DeltaShape { key_heads, value_heads, key_dim, value_dim, .. } = self.shape;
        let group = value_heads / key_heads;
        if let Pair::Interleaved(_, buf) = w.qkv_z {
            let keys = key_heads * key_dim;
            let parts = [
                RowPart { width: key_dim, to: self.qkv, at: 0 },
                RowPart { width: key_dim, to: self.qkv, at: keys },
                RowPart { width: group * value_dim, to: self.qkv, at: 2 * keys },
                RowPart { width: group * value_dim, to: self.z, at: 0 },
            ];
            cx.backend().ungroup(buf, key_heads, &parts)?;
        }
        if let Pair::Interleaved(_, buf) = w.b_a {
            let parts = [self.b, self.a].map(|to| RowPart { width: group, to, at: 0 });
            cx.backend().ungroup(buf, key_heads, &parts)?;
        }
        Ok(())
    }
}
