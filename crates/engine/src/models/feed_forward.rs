//! The feed-forward blocks of a family: dense ones and mixtures of experts, their settings and the names of their tensors.

use super::experts::{BlockShape, ExpertShape};
use super::recipe::Norms;
use super::{BiasNames, Builder, Config, ExpertNames, Name, keys};
use crate::backend::{Activation, Buf, ExpertBlock, Matrix, Parts, Router, RouterWeights, Scores, Vector};
use crate::blocks::mlp::Mlp;
use crate::blocks::moe::{ExpertInput, Latent, Moe, MoeWeights, RouterInput, SharedExpert, SharedWeights};
use crate::blocks::norm::Norm;
use crate::error::Result;
use crate::format::{Format, Key};

/// The feed-forward block of a layer.
#[derive(Clone)]
pub enum FeedForward {
    /// The same for all tokens.
    Dense(Box<Dense>),
    /// A mixture of experts.
    Mixture(Box<Mixture>),
    /// Both, side by side.
    Both(Box<Both>),
}

impl From<Dense> for FeedForward {
    fn from(dense: Dense) -> FeedForward {
        FeedForward::Dense(Box::new(dense))
    }
}

impl From<Mixture> for FeedForward {
    fn from(mixture: Mixture) -> FeedForward {
        FeedForward::Mixture(Box::new(mixture))
    }
}

/// A dense block.
#[derive(Clone, Copy)]
pub struct Dense {
    /// Its inner channels.
    pub inner: usize,
    /// Its activation function.
    pub activation: Activation,
    /// The names of its gate, up and down. A block whose activation function has no gate does not use the first.
    pub names: [Name; 3],
    /// The name of gate and up if folders have them in one tensor, one after the other.
    pub together: Option<Name>,
}

impl Dense {
    /// A block with this many inner channels, SwiGLU and the usual names.
    pub fn new(inner: usize) -> Dense {
        const NAMES: [Name; 3] = [
            Name::new("ffn_gate.weight", "mlp.gate_proj.weight"),
            Name::new("ffn_up.weight", "mlp.up_proj.weight"),
            Name::new("ffn_down.weight", "mlp.down_proj.weight"),
        ];
        Dense { inner, activation: Activation::SwiGlu, names: NAMES, together: None }
    }

    fn weights(&self, b: &mut Builder<'_>, l: usize, hidden: usize) -> Result<Parts<Matrix>> {
        let inner = self.inner;
        let [gate, up, down] = self.names.map(|name| name.of_layer(l));
        let (gate, up) = match self.together {
            Some(both) if b.format() != Format::Gguf => {
                let [gate, up] = b.matrix_in_parts(both.of_layer(l), [inner; 2], hidden)?;
                (Some(gate), up)
            }
            _ if self.activation.is_gated() => {
                (Some(b.matrix(gate, inner, hidden)?), b.matrix(up, inner, hidden)?)
            }
            _ => (None, b.matrix(up, inner, hidden)?),
        };
        Ok(Parts { gate, up, down: b.matrix(down, hidden, inner)? })
    }
}

/// A dense block and a mixture that read the same stream, each through its own norm, and whose outputs are added.
#[derive(Clone)]
pub struct Both {
    /// The dense block. It reads what the layer's norm before the feed-forward block gives.
    pub dense: Dense,
    /// The norm of its output.
    pub dense_norm: Name,
    /// The mixture.
    pub mixture: Mixture,
    /// The norms of the mixture's input and output.
    pub mixture_norms: [Name; 2],
}

/// A mixture of experts.
#[derive(Clone)]
pub struct Mixture {
    /// The name of the router.
    pub gate: Name,
    /// The name of the bias of its logits, if it has one.
    pub gate_bias: Option<Name>,
    /// The name of the correction of its scores, if it has one.
    pub correction: Option<Name>,
    /// The name of factors of the experts' weights, if there are any.
    pub factors: Option<Name>,
    /// What the router reads.
    pub reads: Reads,
    /// Whether the weight of the only expert multiplies its input instead of its output.
    pub weighs_input: bool,
    /// The names of experts in folders.
    pub names: ExpertNames,
    /// The names of experts' biases, if they have any.
    pub biases: Option<BiasNames>,
    /// The experts' activation function.
    pub activation: Activation,
    /// The settings of the router.
    pub router: Router,
    /// An expert's inner channels.
    pub inner: usize,
    /// The projections around experts that compute in fewer channels.
    pub latent: Option<Projections>,
    /// Smaller experts, which some experts share.
    pub adjugate: Option<Adjugate>,
    /// The shared expert, if there is one.
    pub shared: Option<Shared>,
}

/// Projections of a mixture's input to the channels in which its experts compute, and of their sum back.
#[derive(Clone, Copy)]
pub struct Projections {
    /// The experts' input and output channels.
    pub width: usize,
    /// The names of the projection to them, and of that back.
    pub names: [Name; 2],
}

/// Adjugate experts: every expert of a group of consecutive ones also has the output of the group's small expert.
#[derive(Clone, Copy)]
pub struct Adjugate {
    /// The names of their tensors.
    pub names: ExpertNames,
    /// The experts of a group, whose size divides the number of experts.
    pub group: usize,
    /// Their inner channels.
    pub inner: usize,
    /// The factor of their outputs.
    pub scale: f32,
}

/// What a router reads.
#[derive(Clone, Copy)]
pub enum Reads {
    /// The mixture's input.
    Input,
    /// The residual stream through a norm, whose weights have this name and are multiplied by this factor.
    Stream(Name, f32),
    /// The layer's input, before attention.
    LayerInput,
}

/// The shared expert, which every token uses.
#[derive(Clone, Copy)]
pub struct Shared {
    /// Its feed-forward block.
    pub dense: Dense,
    /// The name of the weights of its output gate, if there is one.
    pub gate: Option<Name>,
    /// A factor of its output.
    pub scale: Option<f32>,
}

impl Shared {
    /// Names of a single shared expert.
    pub const SINGLE: [Name; 3] = [
        Name::new("ffn_gate_shexp.weight", "mlp.shared_expert.gate_proj.weight"),
        Name::new("ffn_up_shexp.weight", "mlp.shared_expert.up_proj.weight"),
        Name::new("ffn_down_shexp.weight", "mlp.shared_expert.down_proj.weight"),
    ];

    /// `count` shared experts of `inner` channels each, as one expert with `count · inner` channels and no gate.
    pub fn plain(count: usize, inner: usize) -> Option<Shared> {
        const NAMES: [Name; 3] = [
            Name::new("ffn_gate_shexp.weight", "mlp.shared_experts.gate_proj.weight"),
            Name::new("ffn_up_shexp.weight", "mlp.shared_experts.up_proj.weight"),
            Name::new("ffn_down_shexp.weight", "mlp.shared_experts.down_proj.weight"),
        ];
        (count > 0).then(|| Shared::named(count * inner, NAMES))
    }

    /// A shared expert with these names of gate, up and down.
    pub fn named(inner: usize, names: [Name; 3]) -> Shared {
        Shared { dense: Dense { names, ..Dense::new(inner) }, gate: None, scale: None }
    }
}

impl Mixture {
    /// The usual name of the router.
    pub const GATE: Name = Name::new("ffn_gate_inp.weight", "mlp.gate.weight");
    /// The usual name of the correction of its scores.
    pub const CORRECTION: Name = Name::new("exp_probs_b.bias", "mlp.gate.e_score_correction_bias");

    /// A plain mixture of experts with `inner` inner channels.
    pub fn new(router: Router, inner: usize) -> Mixture {
        Mixture {
            gate: Mixture::GATE,
            gate_bias: None,
            correction: None,
            factors: None,
            reads: Reads::Input,
            weighs_input: false,
            names: ExpertNames::USUAL,
            biases: None,
            activation: Activation::SwiGlu,
            router,
            inner,
            latent: None,
            adjugate: None,
            shared: None,
        }
    }

    /// The experts' input and output channels.
    fn width(&self, hidden: usize) -> usize {
        self.latent.map_or(hidden, |latent| latent.width)
    }

    /// The experts, whose input and output channels are these.
    fn experts(&self, width: usize) -> ExpertShape {
        let Mixture { ref names, router, inner, activation, .. } = *self;
        let is_gated = activation.is_gated();
        let block = BlockShape { names: *names, count: router.experts, width, inner, is_gated };
        let adjugate = self.adjugate.map(|Adjugate { names, group, inner, .. }| BlockShape {
            names,
            count: block.count / group,
            inner,
            ..block
        });
        ExpertShape { block, adjugate, used: router.top_k }
    }

    fn weights(&self, b: &mut Builder<'_>, l: usize, hidden: usize) -> Result<MixtureWeights> {
        let router = self.router;
        let vector = |b: &mut Builder<'_>, name: Option<Name>| -> Result<Option<Vector>> {
            name.map(|name| b.vector(name.of_layer(l), router.experts)).transpose()
        };
        // In GGUF files, these are named like a scale of the experts' matrices, so they are declared first.
        let factors = vector(b, self.factors)?;
        let scales = b.experts(&self.experts(self.width(hidden)))?;
        let matrix = b.router(self.gate.of_layer(l), router.experts, hidden)?;
        let bias = vector(b, self.gate_bias)?;
        let correction = vector(b, self.correction)?;
        let latent = match self.latent {
            None => None,
            Some(Projections { width, names }) => {
                let [down, up] = names.map(|name| name.of_layer(l));
                Some([b.matrix(down, width, hidden)?, b.matrix(up, hidden, width)?])
            }
        };
        let shared = match &self.shared {
            None => None,
            Some(shared) => Some(SharedWeights {
                mlp: shared.dense.weights(b, l, hidden)?,
                gate: shared.gate.map(|name| b.matrix(name.of_layer(l), 1, hidden)).transpose()?,
                scale: shared.scale.map(|scale| b.constant(scale, 1)),
            }),
        };
        let biases = self.biases.map(|names| names.vectors(b, l, self, hidden)).transpose()?;
        let router = RouterWeights { matrix, bias, correction, factors };
        Ok(MixtureWeights { moe: MoeWeights { router, shared }, latent, biases, scales })
    }
}

/// The handles of a mixture's weights.
struct MixtureWeights {
    moe: MoeWeights,
    /// The projection to the experts' channels, and that back.
    latent: Option<[Matrix; 2]>,
    biases: Option<Parts<Vector>>,
    scales: Parts<Option<Vector>>,
}

impl BiasNames {
    /// Declares the biases of layer `l`: gate, up and down.
    fn vectors(
        &self,
        b: &mut Builder<'_>,
        l: usize,
        mixture: &Mixture,
        hidden: usize,
    ) -> Result<Parts<Vector>> {
        let (experts, inner) = (mixture.router.experts, mixture.inner);
        let both = self.alternating.of_layer(l);
        let [beside_two, beside_one] = self.down.map(|name| name.of_layer(l));
        if b.has(both) {
            let shape = [experts, 2 * inner];
            let (gate, up) = (b.every_other(both, &shape, 0)?, b.every_other(both, &shape, 1)?);
            return Ok(Parts { gate: Some(gate), up, down: b.flat(beside_one, &[experts, hidden])? });
        }
        let mut whole = |name: Name, width: usize| b.flat(name, &[experts, width]);
        let [gate, up] = self.separate.map(|name| name.of_layer(l));
        let (gate, up) = (whole(gate, inner)?, whole(up, inner)?);
        Ok(Parts { gate: Some(gate), up, down: whole(beside_two, hidden)? })
    }
}

/// A router that chooses by softmax over all experts, with the configuration's counts.
///
/// # Errors
/// If the counts are missing or inconsistent.
pub fn softmax_router(config: &Config<'_>, normalise: bool) -> Result<Router> {
    softmax_router_of(config, keys::EXPERTS, keys::EXPERTS_USED, normalise)
}

/// The same with other names of the settings. The number of experts of a token may be a list with one for each layer.
///
/// # Errors
/// If the counts are missing or inconsistent.
pub fn softmax_router_of(config: &Config<'_>, experts: Key, used: Key, normalise: bool) -> Result<Router> {
    let top_k = config.optional_uniform(used, config.layers()?)?;
    let top_k = top_k.ok_or_else(|| config.error(used, "is missing"))?;
    if top_k == 0 {
        return Err(config.error(used, "is 0"));
    }
    let experts = config.count(experts)?;
    if top_k > experts {
        return Err(config.error(used, "is larger than the number of experts"));
    }
    Ok(Router { experts, top_k, scores: Scores::Softmax, groups: None, normalise, epsilon: 0.0, scale: 1.0 })
}

/// A router that chooses by sigmoids and normalises the weights, with the configuration's counts.
///
/// # Errors
/// If the counts are missing or inconsistent, or the configuration asks for other scores.
pub fn sigmoid_router(config: &Config<'_>) -> Result<Router> {
    if let Some(other) = config.optional_count(keys::ROUTER_FUNCTION)?.filter(|&function| function != 2) {
        return Err(config.unsupported(keys::ROUTER_FUNCTION, &other.to_string()));
    }
    if let Some(other) = config.optional_text(keys::ROUTER_SCORES)?.filter(|&name| name != "sigmoid") {
        return Err(config.unsupported(keys::ROUTER_SCORES, other));
    }
    if let Some(groups) = config.optional_count(keys::ROUTER_GROUPS)?.filter(|&groups| groups != 1) {
        return Err(config.unsupported(keys::ROUTER_GROUPS, &groups.to_string()));
    }
    Ok(Router { scores: Scores::Sigmoid, ..softmax_router(config, true)? })
}

/// The number of layers with dense feed-forward blocks, which are the first ones.
///
/// # Errors
/// If the setting is invalid, or a dense layer comes later.
pub fn dense_layers(config: &Config<'_>) -> Result<usize> {
    let Some(types) = config.optional_texts(keys::FEED_FORWARD_TYPES)? else {
        return config.number(keys::DENSE_LAYERS);
    };
    let dense = types.iter().take_while(|&name| name == "dense").count();
    match types.iter().skip(dense).find(|&name| name != "sparse") {
        Some(other) => Err(config.unsupported(keys::FEED_FORWARD_TYPES, other)),
        None => Ok(dense),
    }
}

/// The feed-forward block of one layer, with its weights.
pub enum Ffn {
    Dense(Mlp, Parts<Matrix>),
    Mixture(Box<(Moe, MoeWeights)>),
    Both(Box<BothBlocks>),
}

/// A dense block and a mixture side by side.
pub struct BothBlocks {
    pub mlp: Mlp,
    pub mlp_weights: Parts<Matrix>,
    pub mlp_norm: Norm,
    pub moe: Moe,
    pub moe_weights: MoeWeights,
    pub moe_norms: [Norm; 2],
    /// `[rows, hidden]` The mixture's output.
    pub out: Buf,
}

impl Ffn {
    /// The layer's mixture, if it has one.
    pub fn mixture(&self) -> Option<(&Moe, &MoeWeights)> {
        match self {
            Ffn::Dense(..) => None,
            Ffn::Mixture(mixture) => Some((&mixture.0, &mixture.1)),
            Ffn::Both(both) => Some((&both.moe, &both.moe_weights)),
        }
    }
}

impl FeedForward {
    fn dense(&self) -> Option<&Dense> {
        match self {
            FeedForward::Dense(dense) => Some(dense),
            FeedForward::Mixture(_) => None,
            FeedForward::Both(both) => Some(&both.dense),
        }
    }

    fn mixture(&self) -> Option<&Mixture> {
        match self {
            FeedForward::Dense(_) => None,
            FeedForward::Mixture(mixture) => Some(mixture),
            FeedForward::Both(both) => Some(&both.mixture),
        }
    }
}

/// The buffers that all layers share: each as wide as the widest layer needs it.
pub struct FfnBuffers {
    x: Buf,
    dense: Option<Inner>,
    mixture: Option<MixtureBuffers>,
    /// The input and output of a mixture beside a dense block.
    beside: Option<[Buf; 2]>,
}

struct MixtureBuffers {
    logits: Buf,
    inner: Inner,
    out: Buf,
    /// The output of adjugate experts.
    adjugate: Option<Buf>,
    /// Those of the shared expert, the gate of its output, and its output.
    shared: Option<(Inner, [Buf; 2])>,
    /// What routers read, if they do not read their mixture's input.
    normed: Option<Buf>,
    /// The experts' input, if weights multiply it.
    weighed: Option<Buf>,
    /// The experts' input and the sum of their outputs, if they compute in fewer channels.
    latent: Option<[Buf; 2]>,
}

/// The inner channels of feed-forward blocks: the products with gate or, without a gate, with up, and those with up
/// beside a gate.
#[derive(Clone, Copy)]
struct Inner {
    first: Buf,
    up: Option<Buf>,
}

impl Inner {
    fn declare(b: &mut Builder<'_>, width: usize, is_gated: bool) -> Inner {
        Inner { first: b.buffer(width), up: is_gated.then(|| b.buffer(width)) }
    }

    /// Those of a block with this activation function.
    fn narrow(&self, width: usize, activation: Activation) -> (Buf, Option<Buf>) {
        let up = self.up.filter(|_| activation.is_gated());
        (self.first.narrow(width), up.map(|up| up.narrow(width)))
    }

    fn mlp(&self, dense: &Dense) -> Mlp {
        let (inner, up) = self.narrow(dense.inner, dense.activation);
        Mlp { activation: dense.activation, inner, up }
    }
}

impl FfnBuffers {
    /// Declares the buffers for these blocks, whose input is `x`.
    pub fn declare(b: &mut Builder<'_>, blocks: &[&FeedForward], x: Buf) -> FfnBuffers {
        let hidden = x.width;
        let dense = || blocks.iter().filter_map(|block| block.dense());
        let has_gates = dense().any(|dense| dense.activation.is_gated());
        let inner = dense().map(|dense| dense.inner).max();
        let mixtures: Vec<&Mixture> = blocks.iter().filter_map(|block| block.mixture()).collect();
        let beside = blocks.iter().any(|block| matches!(block, FeedForward::Both(_)));
        FfnBuffers {
            x,
            dense: inner.map(|inner| Inner::declare(b, inner, has_gates)),
            mixture: (!mixtures.is_empty()).then(|| MixtureBuffers::declare(b, &mixtures, hidden)),
            beside: beside.then(|| [b.buffer(hidden), b.buffer(hidden)]),
        }
    }

    /// The block of layer `l`, which must be the next one, with its weights.
    ///
    /// # Errors
    /// If a tensor is missing or does not fit.
    pub fn block(&self, b: &mut Builder<'_>, block: &FeedForward, norms: &Norms, l: usize) -> Result<Ffn> {
        let hidden = self.x.width;
        match block {
            FeedForward::Dense(dense) => {
                b.no_experts();
                Ok(Ffn::Dense(self.mlp(dense), dense.weights(b, l, hidden)?))
            }
            FeedForward::Mixture(mixture) => {
                Ok(Ffn::Mixture(Box::new(self.moe(b, mixture, self.x, norms, l)?)))
            }
            FeedForward::Both(both) => {
                let [x, out] = self.beside.expect("it was declared for such a block");
                let [before, after] = both.mixture_norms;
                let mlp_weights = both.dense.weights(b, l, hidden)?;
                let mlp_norm = norms.norm(b, both.dense_norm.of_layer(l), hidden)?;
                let (moe, moe_weights) = self.moe(b, &both.mixture, x, norms, l)?;
                Ok(Ffn::Both(Box::new(BothBlocks {
                    mlp: self.mlp(&both.dense),
                    mlp_weights,
                    mlp_norm,
                    moe,
                    moe_weights,
                    moe_norms: [
                        norms.norm(b, before.of_layer(l), hidden)?,
                        norms.norm(b, after.of_layer(l), hidden)?,
                    ],
                    out,
                })))
            }
        }
    }

    fn mlp(&self, dense: &Dense) -> Mlp {
        self.dense.expect("it was declared for such a block").mlp(dense)
    }

    fn moe(
        &self,
        b: &mut Builder<'_>,
        mixture: &Mixture,
        x: Buf,
        norms: &Norms,
        l: usize,
    ) -> Result<(Moe, MoeWeights)> {
        const DECLARED: &str = "it was declared for such a mixture";
        let &Mixture { router, activation, .. } = mixture;
        let buffers = self.mixture.as_ref().expect(DECLARED);
        let reads = match mixture.reads {
            Reads::Input => RouterInput::Same,
            Reads::LayerInput => RouterInput::Early,
            Reads::Stream(name, factor) => {
                let weight = b.vector_times(name.of_layer(l), x.width, factor)?;
                let norm = Norm { kind: norms.kind, weight, bias: None, eps: norms.eps };
                RouterInput::Normed(norm, buffers.normed.expect(DECLARED))
            }
        };
        let MixtureWeights { moe, latent, biases, scales } = mixture.weights(b, l, x.width)?;
        let width = mixture.width(x.width);
        let experts_read = match (buffers.weighed, latent) {
            (Some(weighed), _) if mixture.weighs_input => ExpertInput::Weighed(weighed),
            (_, Some([down, up])) => {
                let [x, out] = buffers.latent.expect(DECLARED).map(|buf| buf.narrow(width));
                ExpertInput::Latent(Latent { x, out, down, up })
            }
            _ => ExpertInput::Same,
        };
        let block = |inner: usize, out: Buf, biases, scales| {
            let (inner, up) = buffers.inner.narrow(router.top_k * inner, activation);
            ExpertBlock { activation, inner, up, out: out.narrow(router.top_k * width), biases, scales }
        };
        let adjugate = mixture.adjugate.map(|Adjugate { inner, scale, .. }| {
            (block(inner, buffers.adjugate.expect(DECLARED), None, Parts::default()), scale)
        });
        let block =
            Moe {
                router,
                reads,
                logits: buffers.logits.narrow(router.experts),
                x,
                experts_read,
                block: block(mixture.inner, buffers.out, biases, scales),
                adjugate,
                shared: buffers.shared.zip(mixture.shared).map(|((inner, [gate, out]), shared)| {
                    SharedExpert { mlp: inner.mlp(&shared.dense), gate, out }
                }),
            };
        Ok((block, moe))
    }
}

impl MixtureBuffers {
    fn declare(b: &mut Builder<'_>, mixtures: &[&Mixture], hidden: usize) -> MixtureBuffers {
        let most = |width: &dyn Fn(&Mixture) -> usize| mixtures.iter().map(|m| width(m)).max().unwrap_or(0);
        let top_k = most(&|m| m.router.top_k);
        let inner = most(&|m| m.router.top_k * m.adjugate.map_or(m.inner, |small| m.inner.max(small.inner)));
        let has_gates = mixtures.iter().any(|m| m.activation.is_gated());
        let shared = || mixtures.iter().filter_map(|m| m.shared).map(|shared| shared.dense);
        let shared_has_gates = shared().any(|dense| dense.activation.is_gated());
        let normed = mixtures.iter().any(|m| matches!(m.reads, Reads::Stream(..)));
        let weighed = mixtures.iter().any(|m| m.weighs_input);
        let latent = mixtures.iter().filter_map(|m| m.latent).map(|latent| latent.width).max();
        let out = top_k * most(&|m| m.width(hidden));
        MixtureBuffers {
            logits: b.buffer(most(&|m| m.router.experts)),
            inner: Inner::declare(b, inner, has_gates),
            out: b.buffer(out),
            adjugate: mixtures.iter().any(|m| m.adjugate.is_some()).then(|| b.buffer(out)),
            shared: shared()
                .map(|dense| dense.inner)
                .max()
                .map(|inner| (Inner::declare(b, inner, shared_has_gates), [b.buffer(1), b.buffer(hidden)])),
            normed: normed.then(|| b.buffer(hidden)),
            weighed: weighed.then(|| b.buffer(hidden)),
            latent: latent.map(|width| [b.buffer(width), b.buffer(width)]),
        }
    }
}
