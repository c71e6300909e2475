//! Norms of rows.

use crate::backend::{Backend, Buf, Vector};
use crate::error::Result;

/// A norm with its weights.
#[derive(Clone, Copy, Debug)]
pub struct Norm {
    /// What is normalised.
    pub kind: NormKind,
    /// `[width]`
    pub weight: Vector,
    /// `[width]` Added afterwards.
    pub bias: Option<Vector>,
    /// The epsilon.
    pub eps: f32,
}

/// What a norm normalises.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NormKind {
    /// The root of the mean square (RMSNorm).
    Rms,
    /// The distance from the mean (LayerNorm).
    Layer,
}

impl Norm {
    /// `out = norm(x)`; `x` may be `out`.
    ///
    /// # Errors
    /// If the backend fails.
    pub fn forward(&self, b: &mut dyn Backend, x: Buf, out: Buf) -> Result<()> {
        match self.kind {
            NormKind::Rms => b.rms_norm(x, self.weight, self.eps, out)?,
            NormKind::Layer => b.layer_norm(x, self.weight, self.eps, out)?,
        }
        self.bias.map_or(Ok(()), |bias| b.add_bias(out, bias))
    }
}
