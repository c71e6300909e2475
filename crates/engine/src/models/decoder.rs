//! The decoder that most families are: before each block a norm, after it the residual; attention, then a feed-forward
//! block that is dense or a mixture of experts. A family says in a [`Recipe`] what is its own.

use forebay_kernels::RopePairs;

use super::attention::{Attention, Mixer, Sizes};
pub use super::attention::{AttentionKind, NormSpan, Q_NORM, has_qkv_bias};
use super::linear::Linear;
use super::{BiasNames, Builder, Config, ExpertNames, Model, Name, keys};
use crate::LayerIdx;
use crate::backend::{
    Activation, Batch, Buf, BufShape, DeltaShape, ExpertBuffers, KvShape, Matrix, Router, RouterWeights,
    Scores, StateShape, Vector,
};
use crate::blocks::Context;
use crate::blocks::head::Head;
use crate::blocks::mlp::{Mlp, MlpWeights};
use crate::blocks::moe::{Moe, MoeLayer, MoeWeights, SharedExpert, SharedWeights};
use crate::blocks::rope::RopeScaling;
use crate::error::Result;

const EMBED: Name = Name::new("token_embd.weight", "model.embed_tokens.weight");
const NORM: Name = Name::new("output_norm.weight", "model.norm.weight");
const OUTPUT: Name = Name::new("output.weight", "lm_head.weight");
// Of every layer:
const ATTN_NORM: Name = Name::new("attn_norm.weight", "input_layernorm.weight");
// Of dense layers:
const GATE: Name = Name::new("ffn_gate.weight", "mlp.gate_proj.weight");
const UP: Name = Name::new("ffn_up.weight", "mlp.up_proj.weight");
const DOWN: Name = Name::new("ffn_down.weight", "mlp.down_proj.weight");

/// What a family has of its own.
pub struct Recipe {
    /// What attention keeps.
    pub attention: AttentionKind,
    /// Which channels rotate together.
    pub pairs: RopePairs,
    /// How the rotation is stretched, where the configuration does not tell all of it.
    pub scaling: Option<RopeScaling>,
    /// Whether queries, keys and values have biases.
    pub qkv_bias: bool,
    /// Whether the output of attention has a bias.
    pub out_bias: bool,
    /// What the scores are called that count in the softmax's sum and have no value, if there are any.
    pub sinks: Option<Name>,
    /// How many positions each layer sees, if not all; layers beyond the list see all.
    pub windows: Vec<Option<usize>>,
    /// What the norms of queries and keys span.
    pub qk_norm: Option<NormSpan>,
    /// Whether the configuration may let only the first channels of a head rotate.
    pub partial_rope: bool,
    /// Whether the projection of queries also yields a gate for what is attended to.
    pub gated: bool,
    /// The heads of those layers that have linear attention, if there are any.
    pub linear: Option<DeltaShape>,
    /// Whether the file has the weights of norms less one.
    pub zero_centred_norms: bool,
    /// What the norm before the feed-forward block is called.
    pub ffn_norm: Name,
    /// The feed-forward blocks.
    pub feed_forward: FeedForward,
}

impl Recipe {
    /// What the norm before the feed-forward block is called in most families.
    pub const FFN_NORM: Name = Name::new("ffn_norm.weight", "post_attention_layernorm.weight");

    /// The plainest decoder with these feed-forward blocks.
    pub fn new(feed_forward: FeedForward) -> Recipe {
        Recipe {
            attention: AttentionKind::Grouped,
            pairs: RopePairs::HalfSplit,
            scaling: None,
            qkv_bias: false,
            out_bias: false,
            sinks: None,
            windows: Vec::new(),
            qk_norm: None,
            partial_rope: false,
            gated: false,
            linear: None,
            zero_centred_norms: false,
            ffn_norm: Recipe::FFN_NORM,
            feed_forward,
        }
    }

    /// A norm of the family's kind.
    pub fn norm(&self, b: &mut Builder<'_>, name: Name, len: usize) -> Result<Vector> {
        if self.zero_centred_norms { b.vector_of(name, len, |w| w + 1.0) } else { b.vector(name, len) }
    }
}

/// The feed-forward blocks of a family.
pub enum FeedForward {
    /// All dense, this many channels wide inside.
    Dense(usize),
    /// All mixtures.
    Mixture(Mixture),
    /// Mixtures but for the first layers.
    DenseFirst {
        /// How many layers are dense.
        layers: usize,
        /// Channels inside those.
        inner: usize,
        /// The others.
        mixture: Mixture,
    },
}

/// A mixture of experts.
pub struct Mixture {
    /// What the router is called.
    pub gate: Name,
    /// What the bias of its logits is called, if it has one.
    pub gate_bias: Option<Name>,
    /// What the correction of its scores is called, if it has one.
    pub correction: Option<Name>,
    /// What the experts are called in folders.
    pub names: ExpertNames,
    /// What their biases are called, if they have any.
    pub biases: Option<BiasNames>,
    /// The function inside them.
    pub activation: Activation,
    /// How experts are chosen.
    pub router: Router,
    /// Channels inside an expert.
    pub inner: usize,
    /// The expert that every token uses, if there is one.
    pub shared: Option<Shared>,
}

/// The expert that every token uses.
pub struct Shared {
    /// Channels inside.
    pub inner: usize,
    /// What gate, up and down are called.
    pub names: [Name; 3],
    /// What the weights are called that say how far its output is let through, if there are any.
    pub open: Option<Name>,
}

impl Shared {
    /// `count` experts `inner` channels wide, which are one that is so many times as wide, always let through.
    pub fn plain(count: usize, inner: usize) -> Option<Shared> {
        const NAMES: [Name; 3] = [
            Name::new("ffn_gate_shexp.weight", "mlp.shared_experts.gate_proj.weight"),
            Name::new("ffn_up_shexp.weight", "mlp.shared_experts.up_proj.weight"),
            Name::new("ffn_down_shexp.weight", "mlp.shared_experts.down_proj.weight"),
        ];
        (count > 0).then(|| Shared { inner: count * inner, names: NAMES, open: None })
    }
}

impl Mixture {
    /// What most families call the router.
    pub const GATE: Name = Name::new("ffn_gate_inp.weight", "mlp.gate.weight");
    /// What most families call the correction of its scores.
    pub const CORRECTION: Name = Name::new("exp_probs_b.bias", "mlp.gate.e_score_correction_bias");

    /// The plainest mixture of experts that are `inner` channels wide inside.
    pub fn new(router: Router, inner: usize) -> Mixture {
        Mixture {
            gate: Mixture::GATE,
            gate_bias: None,
            correction: None,
            names: ExpertNames::USUAL,
            biases: None,
            activation: Activation::SwiGlu,
            router,
            inner,
            shared: None,
        }
    }
}

impl BiasNames {
    /// The biases of layer `l`: gate, up and down.
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
        let [gate, up] = self.apart.map(|name| name.of_layer(l));
        Ok([whole(gate, inner)?, whole(up, inner)?, whole(beside_two, hidden)?])
    }
}

/// A router as the configuration describes it: the softmax over all experts chooses.
///
/// # Errors
/// If the counts are missing or do not fit each other.
pub fn softmax_router(config: &Config<'_>, normalise: bool) -> Result<Router> {
    let experts = config.count(keys::EXPERTS)?;
    let top_k = config.count(keys::EXPERTS_USED)?;
    if top_k > experts {
        return Err(config.error(keys::EXPERTS_USED, "is larger than the number of experts"));
    }
    Ok(Router { experts, top_k, scores: Scores::Softmax, groups: None, normalise, scale: 1.0 })
}

/// A router as the configuration describes it: the sigmoids choose, and the weights of the chosen sum to one.
///
/// # Errors
/// If the counts are missing or do not fit each other, or other scores are asked for.
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

struct Decoder {
    embed: Matrix, // [vocab, hidden]
    eps: f32,
    layers: Vec<Layer>,
    attention: Attention,
    head: Head,
    x: Buf,      // [rows, hidden] the residual stream
    normed: Buf, // [rows, hidden] what a block reads
    added: Buf,  // [rows, hidden] what a block adds
}

struct Layer {
    attn_norm: Vector, // [hidden]
    mixer: Mixer,
    window: Option<usize>,
    ffn_norm: Vector, // [hidden]
    ffn: Ffn,
}

/// A layer's feed-forward block.
enum Ffn {
    Dense(Mlp, MlpWeights),
    Mixture(Box<(Moe, MoeWeights)>),
}

impl Layer {
    /// The router, if it has one.
    fn router(&self) -> Option<RouterWeights> {
        match &self.ffn {
            Ffn::Dense(..) => None,
            Ffn::Mixture(mixture) => Some(mixture.1.router),
        }
    }
}

/// Refuses what some files ask for and no family here has.
fn refuse_others(config: &Config<'_>) -> Result<()> {
    if let Some(other) = config.optional_text(keys::ACTIVATION)?.filter(|&name| name != "silu") {
        return Err(config.unsupported(keys::ACTIVATION, other));
    }
    if config.optional_bool(keys::SLIDING_WINDOW)? == Some(true) {
        return Err(config.unsupported(keys::SLIDING_WINDOW, "true"));
    }
    keys::NOT_HONOURED.into_iter().try_for_each(|key| config.refuse_nonzero(key))
}

/// Declares the decoder of a recipe.
///
/// # Errors
/// If the configuration or a tensor does not fit, or asks for what is not supported.
pub fn describe(config: &Config<'_>, b: &mut Builder<'_>, recipe: &Recipe) -> Result<Box<dyn Model>> {
    let layers = config.layers()?;
    let sizes = Sizes::read(config, recipe)?;
    let hidden = config.count(keys::HIDDEN)?;
    let eps = config.float(keys::NORM_EPS)?;
    refuse_others(config)?;
    let vocab = b.rows_of(EMBED)?;

    let (x, normed, added) = (b.buffer(hidden), b.buffer(hidden), b.buffer(hidden));
    let blocks = Blocks::new(b, &recipe.feed_forward, normed);
    let linear = linear_layers(config, b, recipe, layers)?;
    let embed = b.table(EMBED, vocab, hidden)?;
    let layers = (0..layers)
        .map(|l| {
            Ok(Layer {
                attn_norm: recipe.norm(b, ATTN_NORM.of_layer(l), hidden)?,
                mixer: match &linear {
                    Some(linear) if Linear::is_layer(b, l) => Mixer::Linear(linear.net, linear.layer(b, l)?),
                    _ => sizes.weights(b, recipe, l)?,
                },
                window: recipe.windows.get(l).copied().flatten(),
                ffn_norm: recipe.norm(b, recipe.ffn_norm.of_layer(l), hidden)?,
                ffn: blocks.layer(b, l)?,
            })
        })
        .collect::<Result<Vec<_>>>()?;
    let norm = recipe.norm(b, NORM, hidden)?;
    // Without an output matrix of its own, a model uses the embedding for both, unless it says otherwise.
    let tied = !b.has(OUTPUT) && config.optional_bool(keys::TIED)? != Some(false);
    let output = if tied { embed } else { b.matrix(OUTPUT, vocab, hidden)? };

    // Only now have the tensors shown that the sizes are true.
    let attention = sizes.block(config, b, recipe)?;
    let head = Head {
        norm,
        eps,
        output,
        x,
        picked: b.buffer_of(BufShape { rows: Head::ROWS, width: hidden }),
        logits: b.buffer_of(BufShape { rows: Head::ROWS, width: vocab }),
    };
    Ok(Box::new(Decoder { embed, eps, layers, attention, head, x, normed, added }))
}

/// The layers of linear attention of a model that has any.
fn linear_layers(
    config: &Config<'_>,
    b: &mut Builder<'_>,
    recipe: &Recipe,
    layers: usize,
) -> Result<Option<Linear>> {
    let Some(shape) = recipe.linear else { return Ok(None) };
    let first = (0..layers).find(|&l| Linear::is_layer(b, l));
    first.map(|first| Linear::new(b, config, shape, first)).transpose()
}

/// The feed-forward blocks, whose buffers all layers share.
enum Blocks<'r> {
    Dense { mlp: Mlp, inner: usize, hidden: usize },
    Mixture { moe: Moe, mixture: &'r Mixture },
    DenseFirst { layers: usize, dense: Box<Blocks<'r>>, mixtures: Box<Blocks<'r>> },
}

impl<'r> Blocks<'r> {
    /// The blocks that read `x`.
    fn new(b: &mut Builder<'_>, feed_forward: &'r FeedForward, x: Buf) -> Blocks<'r> {
        match feed_forward {
            &FeedForward::Dense(inner) => Blocks::dense(b, inner, x),
            FeedForward::Mixture(mixture) => Blocks::mixture(b, mixture, x),
            FeedForward::DenseFirst { layers, inner, mixture } => Blocks::DenseFirst {
                layers: *layers,
                dense: Box::new(Blocks::dense(b, *inner, x)),
                mixtures: Box::new(Blocks::mixture(b, mixture, x)),
            },
        }
    }

    fn dense(b: &mut Builder<'_>, inner: usize, x: Buf) -> Blocks<'r> {
        Blocks::Dense { mlp: mlp(b, inner), inner, hidden: x.width }
    }

    fn mixture(b: &mut Builder<'_>, mixture: &'r Mixture, x: Buf) -> Blocks<'r> {
        let Mixture { router, inner, .. } = *mixture;
        let moe = Moe {
            router,
            logits: b.buffer(router.experts),
            activation: mixture.activation,
            buffers: ExpertBuffers {
                x,
                gate: b.buffer(router.top_k * inner),
                up: b.buffer(router.top_k * inner),
                out: b.buffer(router.top_k * x.width),
            },
            shared: mixture.shared.as_ref().map(|shared| SharedExpert {
                mlp: mlp(b, shared.inner),
                gate: b.buffer(1),
                out: b.buffer(x.width),
            }),
        };
        Blocks::Mixture { moe, mixture }
    }

    /// The block of layer `l`, which is the next, with its weights.
    fn layer(&self, b: &mut Builder<'_>, l: usize) -> Result<Ffn> {
        match self {
            &Blocks::Dense { mlp, inner, hidden } => {
                b.no_experts();
                Ok(Ffn::Dense(
                    mlp,
                    mlp_weights(b, [GATE, UP, DOWN].map(|name| name.of_layer(l)), inner, hidden)?,
                ))
            }
            &Blocks::Mixture { moe, mixture } => {
                let Mixture { router, inner, .. } = *mixture;
                let hidden = moe.buffers.x.width;
                let scales = b.experts(&mixture.names, &router, hidden, inner)?;
                let matrix = b.router(mixture.gate.of_layer(l), router.experts, hidden)?;
                let bias =
                    mixture.gate_bias.map(|name| b.vector(name.of_layer(l), router.experts)).transpose()?;
                let correction =
                    mixture.correction.map(|name| b.vector(name.of_layer(l), router.experts)).transpose()?;
                let shared =
                    mixture.shared.as_ref().map(|shared| shared.weights(b, l, hidden)).transpose()?;
                let biases = mixture.biases.map(|names| names.vectors(b, l, mixture, hidden)).transpose()?;
                let router = RouterWeights { matrix, bias, correction };
                Ok(Ffn::Mixture(Box::new((moe, MoeWeights { router, shared, biases, scales }))))
            }
            Blocks::DenseFirst { layers, dense, mixtures } => {
                if l < *layers {
                    dense.layer(b, l)
                } else {
                    mixtures.layer(b, l)
                }
            }
        }
    }
}

impl Shared {
    fn weights(&self, b: &mut Builder<'_>, l: usize, hidden: usize) -> Result<SharedWeights> {
        let mlp = mlp_weights(b, self.names.map(|name| name.of_layer(l)), self.inner, hidden)?;
        let gate = self.open.map(|name| b.matrix(name.of_layer(l), 1, hidden)).transpose()?;
        Ok(SharedWeights { mlp, gate })
    }
}

fn mlp(b: &mut Builder<'_>, inner: usize) -> Mlp {
    Mlp { gate: b.buffer(inner), up: b.buffer(inner) }
}

/// The weights called gate, up and down.
fn mlp_weights(b: &mut Builder<'_>, names: [Name; 3], inner: usize, hidden: usize) -> Result<MlpWeights> {
    let [gate, up, down] = names;
    Ok(MlpWeights {
        gate: b.matrix(gate, inner, hidden)?,
        up: b.matrix(up, inner, hidden)?,
        down: b.matrix(down, hidden, inner)?,
    })
}

impl Model for Decoder {
    fn forward(&self, cx: &mut Context<'_>, batch: &mut Batch<'_>) -> Result<()> {
        cx.backend().embed(self.embed, batch.tokens, self.x)?;
        match &self.attention {
            Attention::Grouped(gqa) => gqa.begin(cx, batch)?,
            Attention::Latent(mla) => mla.begin(cx, batch)?,
        }
        for (i, layer) in self.layers.iter().enumerate() {
            cx.begin_layer(i, self.layers.len())?;
            let i = LayerIdx(i);
            cx.backend().rms_norm(self.x, layer.attn_norm, self.eps, self.normed)?;
            let (x, out) = (self.normed, self.added);
            match (&layer.mixer, &self.attention) {
                (Mixer::Grouped(w), Attention::Grouped(gqa)) => gqa.forward(cx, batch, i, w, x, out)?,
                (Mixer::Latent(w), Attention::Latent(mla)) => mla.forward(cx, batch, i, w, x, out)?,
                (Mixer::Linear(net, w), _) => net.forward(cx, batch, i, w, x, out)?,
                _ => unreachable!("all layers have the same attention"),
            }
            cx.backend().add(self.x, self.added)?;

            cx.backend().rms_norm(self.x, layer.ffn_norm, self.eps, self.normed)?;
            match &layer.ffn {
                Ffn::Dense(mlp, w) => mlp.forward(cx.backend(), w, self.normed, self.added)?,
                Ffn::Mixture(mixture) => {
                    let (moe, weights) = &**mixture;
                    let next = self.layers.get(i.0 + 1).and_then(Layer::router);
                    moe.forward(cx, MoeLayer { layer: i, weights, next }, self.added)?;
                }
            }
            cx.backend().add(self.x, self.added)?;
        }
        Ok(())
    }

    fn head(&self) -> &Head {
        &self.head
    }

    fn state(&self) -> Vec<StateShape> {
        let kv = match &self.attention {
            Attention::Grouped(gqa) => gqa.kv,
            Attention::Latent(mla) => mla.kv,
        };
        let state = |layer: &Layer| match layer.mixer {
            Mixer::Grouped(_) | Mixer::Latent(_) => {
                StateShape::Attention(KvShape { window: layer.window, ..kv })
            }
            Mixer::Linear(net, _) => StateShape::Recurrent(net.state),
        };
        self.layers.iter().map(state).collect()
    }
}
