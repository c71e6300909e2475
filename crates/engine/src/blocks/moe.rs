//! A mixture of experts: the router picks a few experts for each token, their outputs are added up.

use crate::LayerIdx;
use crate::backend::{Buf, ExpertBuffers, Matrix, Router};
use crate::blocks::Context;
use crate::error::Result;

/// The router and the buffers of a mixture, alike in all layers of a model.
#[derive(Clone, Copy, Debug)]
pub struct Moe {
    /// How experts are chosen.
    pub router: Router,
    /// `[rows, experts]`
    pub logits: Buf,
    /// Where the experts work.
    pub buffers: ExpertBuffers,
}

/// The routers that a layer's pass needs.
#[derive(Clone, Copy, Debug)]
pub struct Gates {
    /// `[experts, hidden]` This layer's.
    pub here: Matrix,
    /// `[experts, hidden]` The next layer's, if it has one: applied to what this layer's experts read, it tells
    /// which experts will probably be asked for next.
    pub next: Option<Matrix>,
}

impl Moe {
    /// `out = Σ weight · expert(x)` over the chosen experts, with `x` in the buffers' `x`.
    ///
    /// Experts are computed in the order in which the store has them ready. Their outputs are kept apart and
    /// added in rank order, so that the order of arrival changes no bit.
    ///
    /// # Errors
    /// The backend's, and the store's if an expert cannot be read.
    pub fn forward(&self, cx: &mut Context<'_>, layer: LayerIdx, gates: Gates, out: Buf) -> Result<()> {
        let b = &mut *cx.backend;
        b.matmul(self.buffers.x, &[(gates.here, self.logits)])?;
        b.route(self.logits, &self.router, cx.routing)?;
        (cx.observer)(layer, cx.routing);
        let mut acquisition = cx.store.acquire(layer, cx.routing.chosen(), cx.purpose);
        if let (Some(expected), Some(next)) = (&mut cx.expected, gates.next) {
            b.matmul(self.buffers.x, &[(next, self.logits)])?;
            b.route(self.logits, &self.router, expected)?;
            cx.store.prefetch(LayerIdx(layer.0 + 1), expected.chosen());
        }
        while let Some(mut leases) = acquisition.next_ready()? {
            leases.sort_unstable_by_key(|lease| lease.expert());
            b.experts(&self.buffers, cx.routing, &leases)?;
        }
        b.combine(cx.routing, self.buffers.out, out)
    }
}
