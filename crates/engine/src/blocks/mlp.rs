//! The feed-forward block that every token uses: in dense layers, and as the shared expert of a mixture.

use crate::backend::{Activation, Backend, Buf, Matrix, Parts};
use crate::error::Result;

/// A feed-forward block, and its buffers, which layers share.
#[derive(Clone, Copy, Debug)]
pub struct Mlp {
    /// The activation function, which says whether there is a gate.
    pub activation: Activation,
    /// `[rows, inner]` The product with gate, or with up if there is no gate.
    pub inner: Buf,
    /// `[rows, inner]` The product with up, if there is a gate.
    pub up: Option<Buf>,
}

impl Mlp {
    /// `out = W_d activation(W_g x, W_u x)`, or `out = W_d activation(W_u x)`
    ///
    /// # Errors
    /// If the backend fails.
    pub fn forward(&self, b: &mut dyn Backend, w: &Parts<Matrix>, x: Buf, out: Buf) -> Result<()> {
        match w.gate.zip(self.up) {
            Some((gate, up)) => b.matmul(x, &[(gate, self.inner), (w.up, up)])?,
            None => b.matmul(x, &[(w.up, self.inner)])?,
        }
        b.activate(self.inner, self.up, self.activation)?;
        b.matmul(self.inner, &[(w.down, out)])
    }
}
