//! A mixture of experts: the router picks a few experts for each token, their outputs are added up.

use crate::LayerIdx;
use crate::backend::{
    Activation, Backend, Buf, ExpertBuffers, Experts, Matrix, Router, RouterWeights, Vector,
};
use crate::blocks::Context;
use crate::blocks::mlp::{Mlp, MlpWeights};
use crate::error::Result;
use crate::experts::Mixture;

/// The router and the buffers of a mixture, alike in all layers of a model.
#[derive(Clone, Copy, Debug)]
pub struct Moe {
    /// How experts are chosen.
    pub router: Router,
    /// `[rows, experts]`
    pub logits: Buf,
    /// Where the experts work.
    pub buffers: ExpertBuffers,
    /// The function inside them.
    pub activation: Activation,
    /// Where the shared expert works, if there is one.
    pub shared: Option<SharedExpert>,
}

/// The buffers of the expert that every token uses.
#[derive(Clone, Copy, Debug)]
pub struct SharedExpert {
    /// The expert itself.
    pub mlp: Mlp,
    /// `[rows, 1]` How far its output is let through.
    pub gate: Buf,
    /// `[rows, hidden]`
    pub out: Buf,
}

/// The dense weights of one layer's mixture.
#[derive(Clone, Copy, Debug)]
pub struct MoeWeights {
    /// This layer's router.
    pub router: RouterWeights,
    /// Those of the shared expert, if there is one.
    pub shared: Option<SharedWeights>,
    /// What the experts' gate, up and down add to their products.
    pub biases: Option<[Vector; 3]>,
    /// `[experts]` What the products of the experts' gate, up and down are multiplied by.
    pub scales: [Option<Vector>; 3],
}

/// The weights of the expert that every token uses, in one layer.
#[derive(Clone, Copy, Debug)]
pub struct SharedWeights {
    /// The expert itself.
    pub mlp: MlpWeights,
    /// `[1, hidden]` The sigmoid of its product scales the expert's output; without it, all of that counts.
    pub gate: Option<Matrix>,
}

/// A layer's mixture, and what its executor may look ahead to.
#[derive(Clone, Copy, Debug)]
pub struct MoeLayer<'a> {
    /// The layer.
    pub layer: LayerIdx,
    /// Its weights.
    pub weights: &'a MoeWeights,
    /// The next layer's router, if it has one.
    pub next: Option<RouterWeights>,
}

impl Moe {
    /// `out = Σ weight · expert(x) + shared(x)` over the chosen experts, with `x` in the buffers' `x`.
    ///
    /// # Errors
    /// The executor's, for example if an expert cannot be read.
    pub fn forward(&self, cx: &mut Context<'_>, layer: MoeLayer<'_>, out: Buf) -> Result<()> {
        let &MoeWeights { router, shared, biases, scales } = layer.weights;
        let Moe { buffers, activation, .. } = *self;
        let shared = self.shared.as_ref().zip(shared);
        let mixture = Mixture {
            router: &self.router,
            weights: router,
            next: layer.next,
            logits: self.logits,
            experts: Experts { layer: layer.layer, buffers, activation, biases, scales },
            out,
            // With its lifetime cut to that of the call.
            observer: match &mut cx.observer {
                Some(observer) => Some(&mut **observer),
                None => None,
            },
        };
        cx.executor.mixture(mixture, &mut |b| match &shared {
            Some((shared, w)) => shared.forward(b, w, buffers.x),
            None => Ok(()),
        })?;
        match shared {
            Some((shared, _)) => cx.backend().add(out, shared.out),
            None => Ok(()),
        }
    }
}

impl SharedExpert {
    fn forward(&self, b: &mut dyn Backend, w: &SharedWeights, x: Buf) -> Result<()> {
        self.mlp.forward(b, &w.mlp, x, self.out)?;
        if let Some(gate) = w.gate {
            b.matmul(x, &[(gate, self.gate)])?;
            b.sigmoid_gate(self.out, self.gate)?;
        }
        Ok(())
    }
}
