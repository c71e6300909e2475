//! The decoder that most families share: attention, then a feed-forward block that is dense or a mixture of experts,
//! each with a norm before it and a residual connection around it. A [`Recipe`] says how a family differs.

use forebay_kernels::RopePairs;

use super::attention::{Attention, Mixer, Sizes};
pub use super::attention::{AttentionKind, NormSpan, Q_NORM, has_qkv_bias};
use super::linear::Linear;
use super::{BiasNames, Builder, Config, ExpertNames, Model, Name, Span, keys};
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
// For each layer:
const ATTN_NORM: Name = Name::new("attn_norm.weight", "input_layernorm.weight");
// For dense layers:
const GATE: Name = Name::new("ffn_gate.weight", "mlp.gate_proj.weight");
const UP: Name = Name::new("ffn_up.weight", "mlp.up_proj.weight");
const DOWN: Name = Name::new("ffn_down.weight", "mlp.down_proj.weight");

/// How a family differs from the plain decoder.
pub struct Recipe {
    /// What attention stores per position.
    pub attention: AttentionKind,
    /// Which channels rotate together.
    pub pairs: RopePairs,
    /// The scaling of the rotation, if the configuration does not have all of it.
    pub scaling: Option<RopeScaling>,
    /// Whether queries, keys and values have biases.
    pub qkv_bias: bool,
    /// Whether the output of attention has a bias.
    pub out_bias: bool,
    /// The name of the attention sinks: scores that are part of the softmax's sum but have no value. `None` without
    /// sinks.
    pub sinks: Option<Name>,
    /// How many positions each layer sees; `None`, or no entry, means all.
    pub windows: Vec<Option<usize>>,
    /// The length of the norms of queries and keys; `None` without norms.
    pub qk_norm: Option<NormSpan>,
    /// Whether the configuration may restrict the rotation to the first channels of a head.
    pub partial_rope: bool,
    /// Whether the query projection also computes a gate for attention's output.
    pub gated: bool,
    /// The heads of the layers with linear attention, if there are any.
    pub linear: Option<DeltaShape>,
    /// Whether the file stores the weights of norms minus one.
    pub zero_centred_norms: bool,
    /// The name of the norm before the feed-forward block.
    pub ffn_norm: Name,
    /// The feed-forward blocks.
    pub feed_forward: FeedForward,
}

impl Recipe {
    /// The usual name of the norm before the feed-forward block.
    pub const FFN_NORM: Name = Name::new("ffn_norm.weight", "post_attention_layernorm.weight");

    /// The plain decoder with these feed-forward blocks.
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

    /// Declares a norm of the family's kind.
    pub fn norm(&self, b: &mut Builder<'_>, name: Name, len: usize) -> Result<Vector> {
        if self.zero_centred_norms { b.vector_of(name, len, |w| w + 1.0) } else { b.vector(name, len) }
    }
}

/// The feed-forward blocks of a family.
pub enum FeedForward {
    /// All dense, with this many inner channels.
    Dense(usize),
    /// All mixtures of experts.
    Mixture(Mixture),
    /// Dense in the first layers, mixtures in the others.
    DenseFirst {
        /// The number of dense layers.
        layers: usize,
        /// The inner channels of dense layers.
        inner: usize,
        /// The other layers.
        mixture: Mixture,
    },
}

/// A mixture of experts.
pub struct Mixture {
    /// The name of the router.
    pub gate: Name,
    /// The name of the bias of its logits, if it has one.
    pub gate_bias: Option<Name>,
    /// The name of the correction of its scores, if it has one.
    pub correction: Option<Name>,
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

/// The shared expert, which every token uses.
pub struct Shared {
    /// Its inner channels.
    pub inner: usize,
    /// The names of its gate, up and down.
    pub names: [Name; 3],
    /// The name of the weights of its output gate, if there is one.
    pub gate: Option<Name>,
}

impl Shared {
    /// `count` shared experts of `inner` channels each, as one expert with `count · inner` channels and no gate.
    pub fn plain(count: usize, inner: usize) -> Option<Shared> {
        const NAMES: [Name; 3] = [
            Name::new("ffn_gate_shexp.weight", "mlp.shared_experts.gate_proj.weight"),
            Name::new("ffn_up_shexp.weight", "mlp.shared_experts.up_proj.weight"),
            Name::new("ffn_down_shexp.weight", "mlp.shared_experts.down_proj.weight"),
        ];
        (count > 0).then(|| Shared { inner: count * inner, names: NAMES, gate: None })
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
    let experts = config.count(keys::EXPERTS)?;
    let top_k = config.count(keys::EXPERTS_USED)?;
    if top_k > experts {
        return Err(config.error(keys::EXPERTS_USED, "is larger than the number of experts"));
    }
    Ok(Router { experts, top_k, scores: Scores::Softmax, groups: None, normalise, scale: 1.0 })
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

struct Decoder {
    vocab: usize,
    /// `[vocab, hidden]` In the first stage.
    embed: Option<Matrix>,
    eps: f32,
    span: Span,
    layers: Vec<Layer>, // those of the span
    attention: Attention,
    /// In the last stage.
    head: Option<Head>,
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

/// The feed-forward block of one layer.
enum Ffn {
    Dense(Mlp, MlpWeights),
    Mixture(Box<(Moe, MoeWeights)>),
}

impl Layer {
    /// The layer's router, if it has one.
    fn router(&self) -> Option<RouterWeights> {
        match &self.ffn {
            Ffn::Dense(..) => None,
            Ffn::Mixture(mixture) => Some(mixture.1.router),
        }
    }
}

/// Refuses settings that no family here supports.
fn refuse_others(config: &Config<'_>) -> Result<()> {
    if let Some(other) = config.optional_text(keys::ACTIVATION)?.filter(|&name| name != "silu") {
        return Err(config.unsupported(keys::ACTIVATION, other));
    }
    Ok(())
}

/// Declares a decoder by its recipe.
///
/// # Errors
/// If the configuration or a tensor does not fit, or asks for something unsupported.
pub fn describe(config: &Config<'_>, b: &mut Builder<'_>, recipe: &Recipe) -> Result<Box<dyn Model>> {
    let span = b.span_of(config.layers()?)?;
    let sizes = Sizes::read(config, recipe)?;
    let hidden = config.count(keys::HIDDEN)?;
    let eps = config.float(keys::NORM_EPS)?;
    refuse_others(config)?;
    let vocab = b.rows_of(EMBED)?;

    let (x, normed, added) = (b.buffer(hidden), b.buffer(hidden), b.buffer(hidden));
    let blocks = Blocks::new(b, &recipe.feed_forward, normed);
    let linear = linear_layers(config, b, recipe, span.all)?;
    b.keep(span.has_first());
    let embed = b.table(EMBED, vocab, hidden)?;
    let mut layers = (0..span.all)
        .map(|l| {
            b.begin_layer();
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
    layers.truncate(span.end);
    layers.drain(..span.first);
    b.keep(span.has_last());
    let norm = recipe.norm(b, NORM, hidden)?;
    // A model without an output matrix uses the embedding table, unless the configuration says otherwise.
    let tied = !b.has(OUTPUT) && config.optional_bool(keys::TIED)? != Some(false);
    let output = match tied {
        true if span.has_first() => embed,
        true => b.matrix(EMBED, vocab, hidden)?,
        false => b.matrix(OUTPUT, vocab, hidden)?,
    };
    b.keep(true);

    // Only now have the tensors confirmed the sizes.
    let attention = sizes.block(config, b, recipe)?;
    let head = span.has_last().then(|| Head {
        norm,
        eps,
        output,
        x,
        picked: b.buffer_of(BufShape { rows: Head::ROWS, width: hidden }),
        logits: b.buffer_of(BufShape { rows: Head::ROWS, width: vocab }),
    });
    let embed = span.has_first().then_some(embed);
    Ok(Box::new(Decoder { vocab, embed, eps, span, layers, attention, head, x, normed, added }))
}

/// The layers with linear attention, if the model has any.
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

/// The feed-forward blocks. All layers share their buffers.
enum Blocks<'r> {
    Dense { mlp: Mlp, inner: usize, hidden: usize },
    Mixture { moe: Moe, mixture: &'r Mixture },
    DenseFirst { layers: usize, dense: Box<Blocks<'r>>, mixtures: Box<Blocks<'r>> },
}

impl<'r> Blocks<'r> {
    /// The blocks with input `x`.
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

    /// The block of layer `l`, which must be the next one, with its weights.
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
        let gate = self.gate.map(|name| b.matrix(name.of_layer(l), 1, hidden)).transpose()?;
        Ok(SharedWeights { mlp, gate })
    }
}

fn mlp(b: &mut Builder<'_>, inner: usize) -> Mlp {
    Mlp { gate: b.buffer(inner), up: b.buffer(inner) }
}

/// Declares the weights of a feed-forward block: gate, up and down.
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
        match (self.embed, batch.stream) {
            (Some(embed), None) => cx.backend().embed(embed, batch.tokens, self.x)?,
            (None, Some(stream)) => cx.backend().write(self.x, stream)?,
            _ => unreachable!("the first stage starts from tokens, the others from hidden states"),
        }
        match &self.attention {
            Attention::Grouped(gqa) => gqa.begin(cx, batch)?,
            Attention::Latent(mla) => mla.begin(cx, batch)?,
        }
        for (i, layer) in self.layers.iter().enumerate() {
            let next = self.layers.get(i + 1).and_then(Layer::router);
            let i = LayerIdx(self.span.first + i);
            cx.begin_layer(i.0, self.span.all)?;
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
                    moe.forward(cx, MoeLayer { layer: i, weights, next }, self.added)?;
                }
            }
            cx.backend().add(self.x, self.added)?;
        }
        Ok(())
    }

    fn head(&self) -> Option<&Head> {
        self.head.as_ref()
    }

    fn stream(&self) -> Buf {
        self.x
    }

    fn vocab(&self) -> usize {
        self.vocab
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
