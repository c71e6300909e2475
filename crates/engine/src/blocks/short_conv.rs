//! A gated short convolution: two gates around a causal convolution of each channel.

use crate::LayerIdx;
use crate::backend::{Batch, Buf, Convolution, Gate, Matrix, Vector};
use crate::blocks::Context;
use crate::error::Result;

/// The sizes and buffers of the block, shared by all layers of a model.
#[derive(Clone, Copy, Debug)]
pub struct ShortConv {
    /// Positions that the convolution spans, including its own.
    pub kernel: usize,
    /// Floats of recurrent state per layer and sequence.
    pub state: usize,
    /// `[rows, channels]` The gate before the convolution.
    pub before: Buf,
    /// `[rows, channels]` The gate after it.
    pub after: Buf,
    /// `[rows, channels]` The convolution's input.
    pub x: Buf,
    /// `[rows, channels]` Its output.
    pub convolved: Buf,
}

/// The weights of one layer.
#[derive(Clone, Copy, Debug)]
pub struct ShortConvWeights {
    /// `[channels, hidden]` The projections to the gate before the convolution, to the gate after it, and to its input.
    pub projections: [Matrix; 3],
    /// `[kernel, channels]`
    pub filters: Vector,
    /// `[hidden, channels]`
    pub out: Matrix,
}

impl ShortConv {
    /// `out = W_o( after · convolution(before · x) )`
    ///
    /// # Errors
    /// If the backend fails.
    pub fn forward(
        &self,
        cx: &mut Context<'_>,
        batch: &mut Batch<'_>,
        layer: LayerIdx,
        w: &ShortConvWeights,
        x: Buf,
        out: Buf,
    ) -> Result<()> {
        let b = cx.backend();
        let [before, after, input] = w.projections;
        b.matmul(x, &[(before, self.before), (after, self.after), (input, self.x)])?;
        b.gate(self.x, self.before, Gate::Factor)?;
        let &ShortConv { x, convolved, kernel, .. } = self;
        b.convolve(&Convolution { layer, x, out: convolved, filters: w.filters, kernel }, batch)?;
        b.gate(convolved, self.after, Gate::Factor)?;
        b.matmul(convolved, &[(w.out, out)])
    }
}
