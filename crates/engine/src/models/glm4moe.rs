//! GLM-4.5, 4.6 and 4.7: attention with biases and partial rotation; the first layers dense, the others mixtures with
//! a shared expert, whose router uses sigmoids and a correction.

use super::decoder::{self, FeedForward, Mixture, NormSpan, Recipe, Shared};
use super::{Arch, Builder, Config, Model, Name, keys};
use crate::backend::Router;
use crate::error::Result;

/// The family's entry in the registry.
pub const ARCH: Arch = Arch { gguf: "glm4moe", hugging_face: &["Glm4MoeForCausalLM", "glm4_moe"], describe };

const FFN_NORM: Name = Name::new("post_attention_norm.weight", "post_attention_layernorm.weight");

fn describe(config: &Config<'_>, b: &mut Builder<'_>) -> Result<Box<dyn Model>> {
    if config.optional_bool(keys::ROUTER_NORMALISES)? == Some(false) {
        return Err(config.unsupported(keys::ROUTER_NORMALISES, "false"));
    }
    let scale = config.router_scale()?;
    let inner = config.count(keys::EXPERT_INNER)?;
    let mixture = Mixture {
        correction: Some(Mixture::CORRECTION),
        shared: Shared::plain(config.number(keys::SHARED_EXPERTS)?, inner),
        ..Mixture::new(Router { scale, ..decoder::sigmoid_router(config)? }, inner)
    };
    let feed_forward = FeedForward::DenseFirst {
        layers: config.number(keys::DENSE_LAYERS)?,
        inner: config.count(keys::INNER)?,
        mixture,
    };
    // GGUF files have no settings for these two, but the tensors.
    let qk_norm = config.optional_bool(keys::QK_NORM)?.unwrap_or_else(|| b.has(decoder::Q_NORM.of_layer(0)));
    let qkv_bias = config.optional_bool(keys::QKV_BIAS)?.unwrap_or_else(|| decoder::has_qkv_bias(b, 0));
    let recipe = Recipe {
        qkv_bias,
        qk_norm: qk_norm.then_some(NormSpan::Head),
        partial_rope: true,
        ffn_norm: FFN_NORM,
        ..Recipe::new(feed_forward)
    };
    decoder::describe(config, b, &recipe)
}
