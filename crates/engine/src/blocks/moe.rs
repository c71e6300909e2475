//! A mixture of experts: the router chooses a few experts for each token, and their weighted outputs are added.

use crate::LayerIdx;
use crate::backend::{
    Activation, Backend, Buf, ExpertBuffers, Experts, Matrix, Router, RouterWeights, Vector,
};
use crate::blocks::Context;
use crate::blocks::mlp::{Mlp, MlpWeights};
use crate::error::Result;
use crate::experts::Mixture;

/// The router and the buffers of a mixture, shared by all layers of a model.
#[derive(Clone, Copy, Debug)]
pub struct Moe {
    /// The settings of the router.
    pub router: Router,
    /// `[rows, experts]`
    pub logits: Buf,
    /// The experts' buffers.
    pub buffers: ExpertBuffers,
    /// The experts' activation function.
    pub activation: Activation,
    /// The shared expert's buffers, if there is one.
    pub shared: Option<SharedExpert>,
}

/// The buffers of the shared expert, which every token uses.
#[derive(Clone, Copy, Debug)]
pub struct SharedExpert {
    /// Its feed-forward block.
    pub mlp: Mlp,
    /// `[rows, 1]` The gate of its output.
    pub gate: Buf,
    /// `[rows, hidden]`
    pub out: Buf,
}

/// The dense weights of one layer's mixture.
#[derive(Clone, Copy, Debug)]
pub struct MoeWeights {
    /// This layer's router.
    pub router: RouterWeights,
    /// The shared expert's weights, if there is one.
    pub shared: Option<SharedWeights>,
    /// Biases of the experts' gate, up and down projections.
    pub biases: Option<[Vector; 3]>,
    /// `[experts]` Factors of the products of the experts' gate, up and down projections.
    pub scales: [Option<Vector>; 3],
}

/// The weights of the shared expert in one layer.
#[derive(Clone, Copy, Debug)]
pub struct SharedWeights {
    /// Its feed-forward block.
    pub mlp: MlpWeights,
    /// `[1, hidden]` The sigmoid of its product scales the expert's output; without it, the output is not scaled.
    pub gate: Option<Matrix>,
}

/// A layer's mixture, and the next layer's router for prefetching.
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
    /// If the executor fails, for example because an expert cannot be read.
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
            // Reborrows, to shorten the lifetime to that of the call.
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
