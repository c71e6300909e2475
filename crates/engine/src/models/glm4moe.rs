//! GLM-4.5, 4.6 and 4.7, and Solar-Open: attention with biases and partial rotation; the first layers dense, the others mixtures with
//! a shared expert, whose router uses sigmoids and a correction.

use super::attention::{AttentionNames, Grouped, QkNorm};
use super::feed_forward::{self, Dense, FeedForward, Mixture, Shared};
use super::recipe::{LayerRecipe, Recipe};
use super::{Arch, Builder, Config, Model, Reference, decoder, keys};
use crate::backend::Router;
use crate::error::Result;
use crate::format::Value;

/// The family's entry in the registry.
pub const ARCH: Arch = Arch {
    gguf: "glm4moe",
    name: "GLM-4.5, Solar-Open",
    models: "GLM-4.5 to 4.7 (355B-A32B), GLM-4.5-Air (106B-A12B), Solar-Open-100B",
    mlx: true,
    reference: Reference::Transformers,
    hugging_face: &["Glm4MoeForCausalLM", "glm4_moe", "SolarOpenForCausalLM", "solar_open"],
    describe,
};

fn describe(config: &Config<'_>, b: &mut Builder<'_>) -> Result<Box<dyn Model>> {
    if config.architecture().to_lowercase().starts_with("solar") {
        config.assume(&[
            ("rope_theta", Value::Float(1e6)),
            ("partial_rotary_factor", Value::Float(1.0)),
            ("head_dim", Value::Unsigned(128)),
        ]);
    }
    if config.optional_bool(keys::ROUTER_NORMALISES)? == Some(false) {
        return Err(config.unsupported(keys::ROUTER_NORMALISES, "false"));
    }
    let scale = config.router_scale()?;
    let inner = config.count(keys::EXPERT_INNER)?;
    let mixture = Mixture {
        correction: Some(Mixture::CORRECTION),
        shared: Shared::plain(config.number(keys::SHARED_EXPERTS)?, inner),
        ..Mixture::new(Router { scale, ..feed_forward::sigmoid_router(config)? }, inner)
    };
    // GGUF files have no settings for these two, but the tensors.
    let names = AttentionNames::USUAL;
    let qk_norm = config.optional_bool(keys::QK_NORM)?.unwrap_or_else(|| b.has(names.q_norm.of_layer(0)));
    let qkv_bias = config.optional_bool(keys::QKV_BIAS)?.unwrap_or_else(|| names.have_qkv_bias(b, 0));
    let attention = Grouped {
        qkv_bias,
        qk_norm: if qk_norm { QkNorm::Head } else { QkNorm::None },
        ..Grouped::read_partial(config)?
    };
    let layer =
        |ffn: FeedForward| LayerRecipe::new(attention.clone(), ffn).with_ffn_norm(LayerRecipe::POST_NORM);
    let dense = layer(Dense::new(config.count(keys::INNER)?).into());
    let dense_layers = config.number(keys::DENSE_LAYERS)?;
    decoder::describe(config, b, &Recipe::dense_first(config, dense_layers, &dense, &layer(mixture.into()))?)
}
