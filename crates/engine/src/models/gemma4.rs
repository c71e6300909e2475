//! Gemma 4: attention with a window in most layers. The others have longer heads, whose values are their keys, and
//! another rotation. In the models with experts, every layer has a dense block and a mixture side by side. Models with
//! embeddings for each layer (E2B, E4B) are not supported.

use super::attention::{self, AttentionNames, Grouped, QkNorm};
use super::feed_forward::{self, Both, Dense, FeedForward, Mixture, Reads};
use super::needs::NeedKind;
use super::positions::{ROPE_DIVISORS, Rotating};
use super::recipe::{BlockNorms, LayerRecipe, Recipe};
use super::{Arch, Builder, Config, ExpertNames, LayerKind, Model, Name, Reference, decoder, keys};
use crate::backend::{Activation, Window};
use crate::error::Result;
use crate::format::{Format, Key};

/// The family's entry in the registry.
pub const ARCH: Arch = Arch {
    gguf: "gemma4",
    name: "Gemma 4",
    models: "Gemma-4-26B-A4B, dense Gemma-4-31B",
    mlx: true,
    reference: Reference::Transformers,
    hugging_face: &[
        "Gemma4ForConditionalGeneration",
        "Gemma4ForCausalLM",
        "Gemma4UnifiedForConditionalGeneration",
        "Gemma4UnifiedForCausalLM",
        "gemma4",
        "gemma4_text",
        "gemma4_unified",
        "gemma4_unified_text",
    ],
    describe,
};

/// Whether layers without a window have no projection to values.
const VALUE_IS_KEY: Key = Key { gguf: "", hugging_face: &["attention_k_eq_v"] };
/// Whether layers have experts.
const HAS_EXPERTS: Key = Key { gguf: "", hugging_face: &["enable_moe_block"] };

/// The norms of attention in this family and the one before.
pub const MIXER_NORMS: BlockNorms = BlockNorms {
    before: Some(LayerRecipe::MIXER_NORM),
    after: Some(Name::new("post_attention_norm.weight", "post_attention_layernorm.weight")),
};
/// Those of feed-forward blocks.
pub const FFN_NORMS: BlockNorms = BlockNorms {
    before: Some(Name::new("ffn_norm.weight", "pre_feedforward_layernorm.weight")),
    after: Some(Name::new("post_ffw_norm.weight", "post_feedforward_layernorm.weight")),
};
const DENSE_NORM: Name = Name::new("post_ffw_norm_1.weight", "post_feedforward_layernorm_1.weight");
const MIXTURE_NORMS: [Name; 2] = [
    Name::new("pre_ffw_norm_2.weight", "pre_feedforward_layernorm_2.weight"),
    Name::new("post_ffw_norm_2.weight", "post_feedforward_layernorm_2.weight"),
];
const LAYER_SCALE: Name = Name::new("layer_output_scale.weight", "layer_scalar");
const ROUTER: Name = Name::new("ffn_gate_inp.weight", "router.proj.weight");
const ROUTER_NORM: Name = Name::new("ffn_gate_inp.scale", "router.scale");
const EXPERT_FACTORS: Name = Name::new("ffn_down_exps.scale", "router.per_expert_scale");
const EXPERTS: ExpertNames = ExpertNames { module: "", ..ExpertNames::USUAL };

fn describe(config: &Config<'_>, b: &mut Builder<'_>) -> Result<Box<dyn Model>> {
    refuse(config)?;
    let hidden = config.count(keys::HIDDEN)?;
    let feed_forward = feed_forward(config, hidden)?;
    let period = attention::window_period(config, 6)?;
    let windows = attention::windows(config, config.layers()?, |l| !(l + 1).is_multiple_of(period))?;
    let mut layers = Vec::new();
    for (l, window) in windows.into_iter().enumerate() {
        layers.push(LayerRecipe {
            mixer_norms: MIXER_NORMS,
            ffn_norms: FFN_NORMS,
            scale: b.has(LAYER_SCALE.of_layer(l)).then_some(LAYER_SCALE),
            ..LayerRecipe::new(attention(config, b, l, window)?, feed_forward.clone())
        });
    }
    let recipe = Recipe {
        embedding_scale: Some((hidden as f32).sqrt()),
        softcap: config.nonzero_float(keys::LOGIT_SOFTCAP)?.map(|bound| bound as f32),
        ..Recipe::new(config, layers)?
    };
    decoder::describe(config, b, &recipe)
}

/// Refuses the models that have more than this, and settings that no published model has.
fn refuse(config: &Config<'_>) -> Result<()> {
    config.refuse_true(keys::QKV_BIAS)?;
    // With "vision", only the tokens of an image see those after them.
    if let Some(other) = config.optional_text(keys::BIDIRECTIONAL)?.filter(|&name| name != "vision") {
        return Err(config.unsupported(keys::BIDIRECTIONAL, other));
    }
    match config.optional_text(keys::HIDDEN_ACTIVATION)? {
        None | Some("gelu_pytorch_tanh") => Ok(()),
        Some(other) => Err(config.unsupported(keys::HIDDEN_ACTIVATION, other)),
    }
}

/// The attention of layer `l`.
fn attention(config: &Config<'_>, b: &mut Builder<'_>, l: usize, window: Option<Window>) -> Result<Grouped> {
    let kind = if window.is_some() { LayerKind::Windowed } else { LayerKind::Full };
    let own = config.of_layer(l, kind);
    let heads = own.count(keys::HEADS)?;
    let kv_heads = own.optional_counts(keys::KV_HEADS, l + 1)?.map_or(heads, |counts| counts[l]);
    let dim = own.count(keys::KEY_DIM)?;
    if own.optional_count(keys::VALUE_DIM)?.is_some_and(|value| value != dim) {
        return Err(own.error(keys::VALUE_DIM, "must equal the key length"));
    }
    own.float(keys::ROPE_BASE)?;
    let divided = window.is_none();
    // In GGUF files, divisors tell which channels do not rotate.
    if divided && config.format() == Format::Gguf && !b.has(ROPE_DIVISORS) {
        return Err(b.miss(&ROPE_DIVISORS.in_format(Format::Gguf), &[dim / 2], NeedKind::Vector));
    }
    let value_is_key = match config.format() {
        Format::Gguf => {
            let AttentionNames { v, qkv, .. } = AttentionNames::USUAL;
            !b.has(v.of_layer(l)) && !b.has(qkv.of_layer(l))
        }
        Format::HuggingFace | Format::Mlx => {
            window.is_none() && config.optional_bool(VALUE_IS_KEY)?.unwrap_or(false)
        }
    };
    Ok(Grouped {
        rotation: Some(Rotating { divided, ..Rotating::read(&own, dim)? }),
        window,
        scale: 1.0,
        qk_norm: QkNorm::Head,
        value_norm: true,
        value_is_key,
        ..Grouped::of(&own, [heads, kv_heads], dim)?
    })
}

/// The feed-forward block of every layer.
fn feed_forward(config: &Config<'_>, hidden: usize) -> Result<FeedForward> {
    let activation = Activation::GeGlu;
    let dense = Dense { activation, ..Dense::new(config.count(keys::INNER)?) };
    let has_experts = match config.format() {
        Format::Gguf => config.number(keys::EXPERTS)? > 0,
        Format::HuggingFace | Format::Mlx => config.optional_bool(HAS_EXPERTS)?.unwrap_or(false),
    };
    if !has_experts {
        return Ok(dense.into());
    }
    let router = feed_forward::softmax_router(config, true)?;
    let mixture = Mixture {
        gate: ROUTER,
        factors: Some(EXPERT_FACTORS),
        reads: Reads::Stream(ROUTER_NORM, 1.0 / (hidden as f32).sqrt()),
        names: EXPERTS,
        activation,
        ..Mixture::new(router, config.count(keys::EXPERT_INNER)?)
    };
    let (dense_norm, mixture_norms) = (DENSE_NORM, MIXTURE_NORMS);
    Ok(FeedForward::Both(Box::new(Both { dense, dense_norm, mixture, mixture_norms })))
}
