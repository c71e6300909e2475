//! The feed-forward blocks of a family: dense ones and mixtures of experts, their settings and the names of their tensors.

use super::recipe::Norms;
use super::{BiasNames, Builder, Config, ExpertNames, Name, keys};
use crate::backend::{Activation, Buf, ExpertBuffers, Router, RouterWeights, Scores, Vector};
use crate::blocks::mlp::{Mlp, MlpWeights};
use crate::blocks::moe::{Moe, MoeWeights, RouterInput, SharedExpert, SharedWeights};
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
    /// The names of its gate, up and down.
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

    fn weights(&self, b: &mut Builder<'_>, l: usize, hidden: usize) -> Result<MlpWeights> {
        let inner = self.inner;
        let [gate, up, down] = self.names.map(|name| name.of_layer(l));
        let [gate, up] = match self.together {
            Some(both) if b.format() != Format::Gguf => {
                b.matrix_in_parts(both.of_layer(l), [inner; 2], hidden)?
            }
            _ => [b.matrix(gate, inner, hidden)?, b.matrix(up, inner, hidden)?],
        };
        Ok(MlpWeights { gate, up, down: b.matrix(down, hidden, inner)? })
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
    /// The shared expert, if there is one.
    pub shared: Option<Shared>,
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
            shared: None,
        }
    }

    fn weights(&self, b: &mut Builder<'_>, l: usize, hidden: usize) -> Result<MoeWeights> {
        let Mixture { router, inner, .. } = *self;
        let vector = |b: &mut Builder<'_>, name: Option<Name>| -> Result<Option<Vector>> {
            name.map(|name| b.vector(name.of_layer(l), router.experts)).transpose()
        };
        // In GGUF files, these are named like a scale of the experts' matrices, so they are declared first.
        let factors = vector(b, self.factors)?;
        let scales = b.experts(&self.names, &router, hidden, inner)?;
        let matrix = b.router(self.gate.of_layer(l), router.experts, hidden)?;
        let bias = vector(b, self.gate_bias)?;
        let correction = vector(b, self.correction)?;
        let shared = match &self.shared {
            None => None,
            Some(shared) => Some(SharedWeights {
                mlp: shared.dense.weights(b, l, hidden)?,
                gate: shared.gate.map(|name| b.matrix(name.of_layer(l), 1, hidden)).transpose()?,
                scale: shared.scale.map(|scale| b.constant(scale, 1)),
            }),
        };
        let biases = self.biases.map(|names| names.vectors(b, l, self, hidden)).transpose()?;
        Ok(MoeWeights { router: RouterWeights { matrix, bias, correction, factors }, shared, biases, scales })
    }
}

impl BiasNames {
    /// Declares the biases of layer `l`: gate, up and down.
    fn vectors(
        &self,
        b: &mut Builder<'_>,
        l: usize,
        mixture: &Mixture,
        hidden: usize,
    ) -> Result<[Vector; 3]> {
        let (experts, inner) = (mixture.router.experts, mixture.inner);
        let both = self.alternating.of_layer(l);
        let [beside_two, beside_one] = self.down.map(|name| name.of_layer(l));
        if b.has(both) {
            let shape = [experts, 2 * inner];
            let (gate, up) = (b.every_other(both, &shape, 0)?, b.every_other(both, &shape, 1)?);
            return Ok([gate, up, b.flat(beside_one, &[experts, hidden])?]);
        }
        let mut whole = |name: Name, width: usize| b.flat(name, &[experts, width]);
        let [gate, up] = self.separate.map(|name| name.of_layer(l));
        Ok([whole(gate, inner)?, whole(up, inner)?, whole(beside_two, hidden)?])
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
    Dense(Mlp, MlpWeights),
    Mixture(Box<(Moe, MoeWeights)>),
    Both(Box<BothBlocks>),
}

/// A dense block and a mixture side by side.
pub struct BothBlocks {
    pub mlp: Mlp,
    pub mlp_weights: MlpWeights,
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
    dense: Option<[Buf; 2]>,
    mixture: Option<MixtureBuffers>,
    /// The input and output of a mixture beside a dense block.
    beside: Option<[Buf; 2]>,
}

struct MixtureBuffers {
    logits: Buf,
    gate: Buf,
    up: Buf,
    out: Buf,
    /// Gate and up of the shared expert, the gate of its output, and its output.
    shared: Option<[Buf; 4]>,
    /// What routers read, if they do not read their mixture's input.
    normed: Option<Buf>,
    /// The experts' input, if weights multiply it.
    weighed: Option<Buf>,
}

impl FfnBuffers {
    /// Declares the buffers for these blocks, whose input is `x`.
    pub fn declare(b: &mut Builder<'_>, blocks: &[&FeedForward], x: Buf) -> FfnBuffers {
        let hidden = x.width;
        let dense = blocks.iter().filter_map(|block| block.dense()).map(|dense| dense.inner).max();
        let mixtures: Vec<&Mixture> = blocks.iter().filter_map(|block| block.mixture()).collect();
        let beside = blocks.iter().any(|block| matches!(block, FeedForward::Both(_)));
        FfnBuffers {
            x,
            dense: dense.map(|inner| [b.buffer(inner), b.buffer(inner)]),
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
                let moe = self.moe(b, mixture, self.x, norms, l)?;
                Ok(Ffn::Mixture(Box::new((moe, mixture.weights(b, l, hidden)?))))
            }
            FeedForward::Both(both) => {
                let [x, out] = self.beside.expect("it was declared for such a block");
                let [before, after] = both.mixture_norms;
                Ok(Ffn::Both(Box::new(BothBlocks {
                    mlp: self.mlp(&both.dense),
                    mlp_weights: both.dense.weights(b, l, hidden)?,
                    mlp_norm: norms.norm(b, both.dense_norm.of_layer(l), hidden)?,
                    moe: self.moe(b, &both.mixture, x, norms, l)?,
                    moe_weights: both.mixture.weights(b, l, hidden)?,
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
        let [gate, up] = self.dense.expect("it was declared for such a block");
        Mlp { gate: gate.narrow(dense.inner), up: up.narrow(dense.inner), activation: dense.activation }
    }

    fn moe(&self, b: &mut Builder<'_>, mixture: &Mixture, x: Buf, norms: &Norms, l: usize) -> Result<Moe> {
        let &Mixture { router, inner, activation, .. } = mixture;
        let buffers = self.mixture.as_ref().expect("it was declared for such a block");
        let reads = match mixture.reads {
            Reads::Input => RouterInput::Same,
            Reads::LayerInput => RouterInput::Early,
            Reads::Stream(name, factor) => {
                let weight = b.vector_times(name.of_layer(l), x.width, factor)?;
                let norm = Norm { kind: norms.kind, weight, bias: None, eps: norms.eps };
                RouterInput::Normed(norm, buffers.normed.expect("it was declared for such a router"))
            }
        };
        Ok(Moe {
            router,
            reads,
            logits: buffers.logits.narrow(router.experts),
            x,
            activation,
            buffers: ExpertBuffers {
                x: buffers.weighed.filter(|_| mixture.weighs_input).unwrap_or(x),
                gate: buffers.gate.narrow(router.top_k * inner),
                up: buffers.up.narrow(router.top_k * inner),
                out: buffers.out.narrow(router.top_k * x.width),
            },
            shared: buffers.shared.zip(mixture.shared).map(|([gate, up, open, out], shared)| {
                let Dense { inner, activation, .. } = shared.dense;
                let mlp = Mlp { gate: gate.narrow(inner), up: up.narrow(inner), activation };
                SharedExpert { mlp, gate: open, out }
            }),
        })
    }
}

impl MixtureBuffers {
    fn declare(b: &mut Builder<'_>, mixtures: &[&Mixture], hidden: usize) -> MixtureBuffers {
        let most = |width: &dyn Fn(&Mixture) -> usize| mixtures.iter().map(|m| width(m)).max().unwrap_or(0);
        let inner = most(&|m| m.router.top_k * m.inner);
        let shared = mixtures.iter().filter_map(|m| m.shared).map(|shared| shared.dense.inner).max();
        let normed = mixtures.iter().any(|m| matches!(m.reads, Reads::Stream(..)));
        let weighed = mixtures.iter().any(|m| m.weighs_input);
        MixtureBuffers {
            logits: b.buffer(most(&|m| m.router.experts)),
            gate: b.buffer(inner),
            up: b.buffer(inner),
            out: b.buffer(most(&|m| m.router.top_k) * hidden),
            shared: shared.map(|inner| [inner, inner, 1, hidden].map(|width| b.buffer(width))),
            normed: normed.then(|| b.buffer(hidden)),
            weighed: weighed.then(|| b.buffer(hidden)),
        }
    }
}
