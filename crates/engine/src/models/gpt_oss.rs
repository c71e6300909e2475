//! gpt-oss: attention with biases and sinks, with a window in every other layer; all layers are mixtures, whose
//! experts have biases and clamp their inner values.

use super::decoder::{self, FeedForward, Mixture, Recipe};
use super::{Arch, BiasNames, Builder, Config, ExpertNames, Fused, Model, Name, keys};
use crate::backend::Activation;
use crate::blocks::rope::{RopeScaling, Yarn};
use crate::error::Result;
use crate::format::Format;

/// The family's entry in the registry.
pub const ARCH: Arch = Arch { gguf: "gpt-oss", hugging_face: &["GptOssForCausalLM", "gpt_oss"], describe };

const SINKS: Name = Name::new("attn_sinks.weight", "self_attn.sinks");
const FFN_NORM: Name = Name::new("post_attention_norm.weight", "post_attention_layernorm.weight");
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
    let router = decoder::softmax_router(config, true)?;
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
    let recipe = Recipe {
        scaling: Some(scaling(config)?),
        qkv_bias: true,
        out_bias: true,
        sinks: Some(SINKS),
        windows: windows(config)?,
        ffn_norm: FFN_NORM,
        ..Recipe::new(FeedForward::Mixture(mixture))
    };
    decoder::describe(config, b, &recipe)
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

/// How many positions each layer sees (`None` for all): every other layer has a window, unless the file says
/// otherwise.
fn windows(config: &Config<'_>) -> Result<Vec<Option<usize>>> {
    let (layers, window) = (config.layers()?, config.count(keys::WINDOW)?);
    let Some(types) = config.optional_texts(keys::LAYER_TYPES)? else {
        return Ok((0..layers).map(|l| l.is_multiple_of(2).then_some(window)).collect());
    };
    if types.len() != layers {
        return Err(config.error(keys::LAYER_TYPES, "does not have one type for each layer"));
    }
    let window_of = |name: &str| match name {
        "sliding_attention" => Ok(Some(window)),
        "full_attention" => Ok(None),
        other => Err(config.unsupported(keys::LAYER_TYPES, other)),
    };
    types.iter().map(window_of).collect()
}
