//! gpt-oss: attention with biases and sinks, with a window in every other layer; all layers are mixtures, whose
//! experts have biases and clamp their inner values.

use super::attention::{self, Grouped};
use super::feed_forward::{self, Mixture};
use super::positions::Rotating;
use super::recipe::{LayerRecipe, Recipe};
use super::{Arch, BiasNames, Builder, Config, ExpertNames, Fused, Model, Name, Reference, decoder, keys};
use crate::backend::Activation;
use crate::blocks::rope::{RopeScaling, Yarn};
use crate::error::Result;
use crate::format::Format;

/// The family's entry in the registry.
pub const ARCH: Arch = Arch {
    gguf: "gpt-oss",
    name: "gpt-oss",
    models: "gpt-oss-20b, gpt-oss-120b",
    mlx: true,
    reference: Reference::Transformers,
    hugging_face: &["GptOssForCausalLM", "gpt_oss"],
    describe,
};

const SINKS: Name = Name::new("attn_sinks.weight", "self_attn.sinks");
const ROUTER: Name = Name::new("ffn_gate_inp.weight", "mlp.router.weight");
const ROUTER_BIAS: Name = Name::new("ffn_gate_inp.bias", "mlp.router.bias");
const EXPERTS: ExpertNames = ExpertNames { fused: Fused::Alternating, ..ExpertNames::USUAL };
const BIASES: BiasNames = BiasNames {
    separate: [
        Name::new("ffn_gate_exps.bias", "mlp.experts.gate_proj.bias"),
        Name::new("ffn_up_exps.bias", "mlp.experts.up_proj.bias"),
    ],
    alternating: Name::new("", "mlp.experts.gate_up_proj_bias"),
    down: [
        Name::new("ffn_down_exps.bias", "mlp.experts.down_proj.bias"),
        Name::new("", "mlp.experts.down_proj_bias"),
    ],
};

fn describe(config: &Config<'_>, b: &mut Builder<'_>) -> Result<Box<dyn Model>> {
    if let Some(other) = config.optional_count(keys::ROUTER_FUNCTION)?.filter(|&function| function != 3) {
        return Err(config.unsupported(keys::ROUTER_FUNCTION, &other.to_string()));
    }
    // The softmax over the chosen experts equals the normalised softmax over all.
    let router = feed_forward::softmax_router(config, true)?;
    let alpha = config.optional_float(keys::SWIGLU_ALPHA)?.unwrap_or(1.702);
    let limit = config.optional_float(keys::SWIGLU_LIMIT)?.unwrap_or(7.0);
    let inner = match config.format() {
        Format::Gguf => config.count(keys::EXPERT_INNER)?,
        Format::HuggingFace | Format::Mlx => config.count(keys::INNER)?,
    };
    let mixture = Mixture {
        gate: ROUTER,
        gate_bias: Some(ROUTER_BIAS),
        names: EXPERTS,
        biases: Some(BIASES),
        activation: Activation::Clamped { alpha, limit },
        ..Mixture::new(router, inner)
    };
    let attention = Grouped { qkv_bias: true, out_bias: true, sinks: Some(SINKS), ..Grouped::read(config)? };
    let base = config.optional_float(keys::ROPE_BASE)?.unwrap_or(10_000.0);
    let rotation = Some(Rotating::new(attention.key_dim, base, scaling(config)?));
    // Every other layer has a window, unless the file says otherwise.
    let period = attention::window_period(config, 2)?;
    let windows = attention::windows(config, config.layers()?, |l| !(l + 1).is_multiple_of(period))?;
    let layer = |window| {
        let attention = Grouped { window, rotation, ..attention.clone() };
        LayerRecipe::new(attention, mixture.clone()).with_ffn_norm(LayerRecipe::POST_NORM)
    };
    decoder::describe(config, b, &Recipe::new(config, windows.into_iter().map(layer).collect())?)
}

/// GGUF files do not say that YaRN's boundaries are not rounded.
fn scaling(config: &Config<'_>) -> Result<RopeScaling> {
    Ok(match config.rope_scaling()? {
        RopeScaling::Yarn(yarn) if config.format() == Format::Gguf => {
            RopeScaling::Yarn(Yarn { round: false, ..yarn })
        }
        other => other,
    })
}
