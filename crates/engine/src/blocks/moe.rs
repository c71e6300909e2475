//! A mixture of experts: the router picks a few experts for each token, their outputs are added up.

use smallvec::SmallVec;

use crate::backend::{
    Activation, Backend, Buf, ExpertBuffers, Experts, Matrix, Mixture, Router, Routing, Vector,
};
use crate::blocks::Context;
use crate::blocks::mlp::{Mlp, MlpWeights};
use crate::error::Result;
use crate::experts::{Acquisition, Leases, Purpose};
use crate::{ExpertIdx, LayerIdx};

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

/// The weights of the expert that every token uses, in one layer.
#[derive(Clone, Copy, Debug)]
pub struct SharedWeights {
    /// The expert itself.
    pub mlp: MlpWeights,
    /// `[1, hidden]` The sigmoid of its product scales the expert's output; without it, all of that counts.
    pub gate: Option<Matrix>,
}

/// The weights of a router.
#[derive(Clone, Copy, Debug)]
pub struct Gate {
    /// `[experts, hidden]`
    pub weights: Matrix,
    /// `[experts]` Added to the logits.
    pub bias: Option<Vector>,
    /// `[experts]` Added to the scores for the choice alone.
    pub correction: Option<Vector>,
}

/// The dense weights that a layer's pass needs.
#[derive(Clone, Copy, Debug)]
pub struct Gates {
    /// This layer's router.
    pub here: Gate,
    /// The next layer's, if it has one: applied to what this layer's experts read, it tells
    /// which experts will probably be asked for next.
    pub next: Option<Gate>,
    /// Those of the shared expert, if there is one.
    pub shared: Option<SharedWeights>,
    /// What the experts' gate, up and down add to their products.
    pub biases: Option<[Vector; 3]>,
    /// `[experts]` What the products of the experts' gate, up and down are multiplied by.
    pub scales: [Option<Vector>; 3],
}

impl Moe {
    /// `out = Σ weight · expert(x)` over the chosen experts, plus the shared one, with `x` in the buffers' `x`.
    ///
    /// Experts are computed in the order in which the store has them ready. Their outputs are kept apart and
    /// added in rank order, so that the order of arrival changes no bit.
    ///
    /// # Errors
    /// The backend's, and the store's if an expert cannot be read.
    pub fn forward(&self, cx: &mut Context<'_>, layer: LayerIdx, gates: Gates, out: Buf) -> Result<()> {
        if cx.store.device_holds(layer) {
            return self.forward_on_device(cx, layer, gates, out);
        }
        let b = &mut *cx.backend;
        self.route(b, gates.here, cx.routing)?;
        if let Some(observer) = &mut cx.observer {
            observer(layer, cx.routing);
        }
        let mut acquisition = cx.store.acquire(layer, cx.routing.chosen(), cx.purpose);
        let mut assistant = cx.assistant.as_deref_mut().filter(|_| b.takes_outputs());
        let elsewhere = match &assistant {
            Some(assistant) => acquisition.take_coldest(assistant.share(acquisition.ready())),
            None => Leases::new(),
        };
        // The way to the device is the narrowest: what has to go there sets out before anything else.
        b.demand(acquisition.demanded())?;
        if let Some(assistant) = assistant.as_mut().filter(|_| !elsewhere.is_empty()) {
            let rows = cx.routing.experts().len() / cx.routing.top_k();
            b.read(self.buffers.x, assistant.input(rows * self.buffers.x.width()))?;
        }
        let experts = self.experts(layer, gates);
        let expects = cx.expected.as_mut().zip(gates.next);
        if let Some((_, next)) = expects {
            self.router_logits(b, next)?;
            b.foresee(self.logits, &self.router, next.correction)?;
        }
        if !acquisition.on_device().is_empty() {
            b.experts_there(&experts, cx.routing, acquisition.on_device())?;
        }
        let next_layer = LayerIdx(layer.0 + 1);
        let mut likely: SmallVec<[ExpertIdx; 32]> = SmallVec::new();
        if let Some((expected, next)) = expects {
            b.foreseen(self.logits, &self.router, next.correction, expected)?;
            // A token's first choices nearly always come true, its last ones hardly more often than not.
            let firsts = expected.top_k().div_ceil(2);
            let rows = expected.experts().chunks_exact(expected.top_k());
            likely.extend(rows.flat_map(|row| &row[..firsts]).map(|&expert| ExpertIdx(expert)));
            cx.store.prefetch(next_layer, &likely);
        }
        // The drive is at work meanwhile.
        let shared = self.shared.as_ref().zip(gates.shared);
        if let Some((shared, w)) = shared {
            shared.forward(b, &w, self.buffers.x)?;
        }
        let hand_over = |acquisition: &mut Acquisition<'_>, b: &mut dyn Backend| {
            let leases = acquisition.next_ready_letting_go(&mut |wait| b.let_go(wait))?;
            let Some(mut leases) = leases else { return Ok(false) };
            leases.sort_unstable_by_key(|lease| lease.expert());
            b.experts(&experts, cx.routing, leases).map(|()| true)
        };
        while acquisition.ready() > 0 {
            hand_over(&mut acquisition, b)?;
        }
        // What is there is on its way to the device, and the drive is at work.
        if let Some(assistant) = assistant.filter(|_| !elsewhere.is_empty()) {
            b.put_outputs(&experts, assistant.compute(&experts, cx.routing, elsewhere)?)?;
        }
        while hand_over(&mut acquisition, b)? {}
        if gates.next.is_some() {
            // Of a prompt that asks for nearly all, any will do.
            let nearly_all =
                cx.purpose == Purpose::Prompt && 4 * cx.routing.chosen().len() >= 3 * self.router.experts;
            let room = b.room_ahead();
            let leases = match nearly_all {
                true => cx.store.send_ahead(next_layer, cx.store.layer_experts(next_layer), room),
                false => cx.store.send_ahead(next_layer, likely.into_iter(), room),
            };
            // The way to the device would be idle until the next layer has chosen.
            if !leases.is_empty() {
                b.send_ahead(leases)?;
            }
        }
        b.combine(cx.routing, self.buffers.out, out)?;
        match shared {
            Some((shared, _)) => b.add(out, shared.out),
            None => Ok(()),
        }
    }

    fn experts(&self, layer: LayerIdx, gates: Gates) -> Experts {
        let Gates { biases, scales, .. } = gates;
        Experts { layer, buffers: self.buffers, activation: self.activation, biases, scales }
    }

    /// As [`forward`](Self::forward), where all experts of the layer are in the device's memory: nothing is asked of the store.
    fn forward_on_device(&self, cx: &mut Context<'_>, layer: LayerIdx, gates: Gates, out: Buf) -> Result<()> {
        let b = &mut *cx.backend;
        let Gate { correction, .. } = gates.here;
        self.router_logits(b, gates.here)?;
        if let Some(observer) = &mut cx.observer {
            b.route(self.logits, &self.router, correction, cx.routing)?;
            observer(layer, cx.routing);
        }
        let experts = self.experts(layer, gates);
        // Where others of the model's experts come and go, it counts which are used.
        let noted = cx.purpose == Purpose::Token && !cx.store.device_holds_all();
        b.mixture(&Mixture { logits: self.logits, router: &self.router, correction, experts, noted, out })?;
        match self.shared.as_ref().zip(gates.shared) {
            Some((shared, w)) => {
                shared.forward(b, &w, self.buffers.x)?;
                b.add(out, shared.out)
            }
            None => Ok(()),
        }
    }

    /// What a router chooses for the rows of `x`.
    fn route(&self, b: &mut dyn Backend, gate: Gate, routing: &mut Routing) -> Result<()> {
        self.router_logits(b, gate)?;
        b.route(self.logits, &self.router, gate.correction, routing)
    }

    fn router_logits(&self, b: &mut dyn Backend, gate: Gate) -> Result<()> {
        b.matmul(self.buffers.x, &[(gate.weights, self.logits)])?;
        match gate.bias {
            Some(bias) => b.add_bias(self.logits, bias),
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
