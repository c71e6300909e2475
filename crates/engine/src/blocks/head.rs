//! From hidden states to logits.

use super::norm::Norm;
use crate::backend::{Backend, Buf, Matrix, Vector};
use crate::error::Result;

/// The last norm and the output projection.
#[derive(Clone, Copy, Debug)]
pub struct Head {
    /// The last norm.
    pub norm: Norm,
    /// `[hidden]` Factors of its outputs.
    pub input_scale: Option<Vector>,
    /// `[vocab, hidden]`
    pub output: Matrix,
    /// `[vocab]` Added to the logits.
    pub bias: Option<Vector>,
    /// `[1]` A factor of the logits.
    pub scale: Option<Vector>,
    /// The bound of logits: they become `cap · tanh(logit / cap)`.
    pub softcap: Option<f32>,
    /// The hidden states of the batch: `[rows, hidden]`
    pub x: Buf,
    /// The rows to compute logits for: `[ROWS, hidden]`
    pub picked: Buf,
    /// `[ROWS, vocab]`
    pub logits: Buf,
}

impl Head {
    /// The most rows in one call of [`forward`](Self::forward). It is bounded because a row of logits is large.
    pub const ROWS: usize = 16;

    /// The number of logits.
    pub fn vocab(&self) -> usize {
        self.logits.width
    }

    /// Computes the logits of some rows of the last batch.
    ///
    /// # Errors
    /// If the backend fails.
    pub fn forward(&self, b: &mut dyn Backend, rows: &[usize]) -> Result<()> {
        assert!(rows.len() <= Head::ROWS);
        b.pick(self.x, rows, self.picked)?;
        self.norm.forward(b, self.picked, self.picked)?;
        if let Some(scale) = self.input_scale {
            b.scale(self.picked, scale)?;
        }
        b.matmul(self.picked, &[(self.output, self.logits)])?;
        if let Some(bias) = self.bias {
            b.add_bias(self.logits, bias)?;
        }
        if let Some(scale) = self.scale {
            b.scale(self.logits, scale)?;
        }
        self.softcap.map_or(Ok(()), |cap| b.softcap(self.logits, cap))
    }
}
