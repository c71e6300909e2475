//! From hidden states to logits.

use crate::backend::{Backend, Buf, Matrix, Vector};
use crate::error::Result;

/// The last norm and the output projection.
#[derive(Clone, Copy, Debug)]
pub struct Head {
    /// `[hidden]`
    pub norm: Vector,
    /// The epsilon of the norm.
    pub eps: f32,
    /// `[vocab, hidden]`
    pub output: Matrix,
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
        b.rms_norm(self.picked, self.norm, self.eps, self.picked)?;
        b.matmul(self.picked, &[(self.output, self.logits)])
    }
}
