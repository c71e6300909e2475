//! A mixture of experts: the router chooses a few experts for each token, and their weighted outputs are added.

use crate::LayerIdx;
use crate::backend::{
    Backend, Buf, ExpertBlock, Experts, Gate, Matrix, Parts, Router, RouterWeights, Vector,
};
use crate::blocks::Context;
use crate::blocks::mlp::Mlp;
use crate::blocks::norm::Norm;
use crate::error::Result;
use crate::experts::{Mixture, NextMixture};

/// The router of a layer's mixture, its experts, and the buffers, which layers share.
#[derive(Clone, Copy, Debug)]
pub struct Moe {
    /// The settings of the router.
    pub router: Router,
    /// What the router reads.
    pub reads: RouterInput,
    /// `[rows, experts]`
    pub logits: Buf,
    /// `[rows, hidden]` The input.
    pub x: Buf,
    /// What the experts read.
    pub experts_read: ExpertInput,
    /// The experts' block.
    pub block: ExpertBlock,
    /// The adjugate experts' block and its factor, if there are any.
    pub adjugate: Option<(ExpertBlock, f32)>,
    /// The shared expert's buffers, if there is one.
    pub shared: Option<SharedExpert>,
}

/// What the router of a mixture reads.
#[derive(Clone, Copy, Debug)]
pub enum RouterInput {
    /// The mixture's input.
    Same,
    /// The residual stream, through a norm of its own into this buffer.
    Normed(Norm, Buf),
    /// The layer's input. [`Moe::route_early`] computes the logits before the layer's attention.
    Early,
}

/// What the experts of a mixture read.
#[derive(Clone, Copy, Debug)]
pub enum ExpertInput {
    /// The mixture's input.
    Same,
    /// The mixture's input times the weight of the best expert, in this buffer.
    Weighed(Buf),
    /// A projection of the mixture's input to fewer channels. Another projection takes their sum back.
    Latent(Latent),
}

/// The projections to and from the channels in which experts compute.
#[derive(Clone, Copy, Debug)]
pub struct Latent {
    /// `[rows, latent]` The experts' input.
    pub x: Buf,
    /// `[rows, latent]` Their sum.
    pub out: Buf,
    /// `[latent, hidden]`
    pub down: Matrix,
    /// `[hidden, latent]`
    pub up: Matrix,
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
}

/// The weights of the shared expert in one layer.
#[derive(Clone, Copy, Debug)]
pub struct SharedWeights {
    /// Its feed-forward block.
    pub mlp: Parts<Matrix>,
    /// `[1, hidden]` The sigmoid of its product scales the expert's output; without it, the output is not scaled.
    pub gate: Option<Matrix>,
    /// `[1]` Another factor of the expert's output.
    pub scale: Option<Vector>,
}

/// A layer's mixture, and the next one for prefetching.
#[derive(Clone, Copy, Debug)]
pub struct MoeLayer<'a> {
    /// The layer.
    pub layer: LayerIdx,
    /// Its weights.
    pub weights: &'a MoeWeights,
    /// The next mixture, if there is one soon.
    pub next: Option<NextMixture>,
    /// `[rows, hidden]` The residual stream.
    pub stream: Buf,
}

impl Moe {
    /// Computes the router's logits if they depend on the layer's input, which is still in `stream`.
    ///
    /// # Errors
    /// If the backend fails.
    pub fn route_early(&self, b: &mut dyn Backend, weights: &MoeWeights, stream: Buf) -> Result<()> {
        match self.reads {
            RouterInput::Early => weights.router.logits(b, stream, self.logits),
            RouterInput::Same | RouterInput::Normed(..) => Ok(()),
        }
    }

    /// `out = Σ weight · expert(x) + shared(x)` over the chosen experts.
    ///
    /// # Errors
    /// The executor's, for example if an expert cannot be read.
    pub fn forward(&self, cx: &mut Context<'_>, layer: MoeLayer<'_>, out: Buf) -> Result<()> {
        let &MoeWeights { router, shared } = layer.weights;
        let Moe { block, adjugate, logits, x, .. } = *self;
        let b = cx.backend();
        let input = match self.reads {
            RouterInput::Same => x,
            RouterInput::Early => layer.stream,
            RouterInput::Normed(norm, normed) => {
                norm.forward(b, layer.stream, normed)?;
                normed
            }
        };
        let mut ready = matches!(self.reads, RouterInput::Early);
        let (read, sum) = match self.experts_read {
            ExpertInput::Same => (x, out),
            ExpertInput::Weighed(weighed) => {
                router.logits(b, input, logits)?;
                b.weigh_by_best(x, logits, weighed)?;
                ready = true;
                (weighed, out)
            }
            ExpertInput::Latent(latent) => {
                b.matmul(x, &[(latent.down, latent.x)])?;
                (latent.x, latent.out)
            }
        };
        let shared = self.shared.as_ref().zip(shared);
        let mixture = Mixture {
            router: &self.router,
            weights: router,
            next: layer.next,
            input,
            logits,
            ready,
            experts: Experts { layer: layer.layer, x: read, block, adjugate },
            out: sum,
            // Reborrows, to shorten the lifetime to that of the call.
            observer: match &mut cx.observer {
                Some(observer) => Some(&mut **observer),
                None => None,
            },
        };
        cx.executor.mixture(mixture, &mut |b| match &shared {
            Some((shared, w)) => shared.forward(b, w, x),
            None => Ok(()),
        })?;
        if let ExpertInput::Latent(latent) = self.experts_read {
            cx.backend().matmul(latent.out, &[(latent.up, out)])?;
        }
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
            b.gate(self.out, self.gate, Gate::Sigmoid)?;
        }
        w.scale.map_or(Ok(()), |scale| b.scale(self.out, scale))
    }
}
