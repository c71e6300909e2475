//! The gated feed-forward block that every token uses: in dense layers, and as the shared expert of a mixture.

use crate::backend::{Backend, Buf, Matrix};
use crate::error::Result;

/// The buffers of a feed-forward block, shared by all layers of a model.
#[derive(Clone, Copy, Debug)]
pub struct Mlp {
    /// `[rows, inner]`
    pub gate: Buf,
    /// `[rows, inner]`
    pub up: Buf,
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
    /// `out = W_d( SiLU(W_g x) · (W_u x) )`
    ///
    /// # Errors
    /// If the backend fails.
    pub fn forward(&self, b: &mut dyn Backend, w: &MlpWeights, x: Buf, out: Buf) -> Result<()> {
        b.matmul(x, &[(w.gate, self.gate), (w.up, self.up)])?;
        b.swiglu(self.gate, self.up)?;
        b.matmul(self.gate, &[(w.down, out)])
    }
}
