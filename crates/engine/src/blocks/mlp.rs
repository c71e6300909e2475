//! The gated feed-forward block that every token uses: in dense layers, and as the shared expert of a mixture.

use crate::backend::{Activation, Backend, Buf, Matrix};
use crate::error::Result;

/// A feed-forward block, and its buffers, which layers share.
#[derive(Clone, Copy, Debug)]
pub struct Mlp {
    /// `[rows, inner]`
    pub gate: Buf,
    /// `[rows, inner]`
    pub up: Buf,
    /// The activation function.
    pub activation: Activation,
}

/// The weights of one layer.
#[derive(Clone, Copy, Debug)]
pub struct MlpWeights {
    /// `[inner, hidden]`
    pub gate: Matrix,
    /// `[inner, hidden]`
    pub up: Matrix,
    /// `[hidden, inner]`
    pub down: Matrix,
}

impl Mlp {
    /// `out = W_d activation(W_g x, W_u x)`
    ///
    /// # Errors
    /// If the backend fails.
    pub fn forward(&self, b: &mut dyn Backend, w: &MlpWeights, x: Buf, out: Buf) -> Result<()> {
        b.matmul(x, &[(w.gate, self.gate), (w.up, self.up)])?;
        b.activate(self.gate, self.up, self.activation)?;
        b.matmul(self.gate, &[(w.down, out)])
    }
}
