//! Phi-3.5-MoE: attention with biases, layer norms with biases, and mixtures whose routers are sparse mixers. llama.cpp
//! computes another model from the same files: it has RMS norms and the usual softmax.

use super::attention::{AttentionNames, Grouped};
use super::feed_forward::{self, Mixture};
use super::llama::{EXPERTS, ROUTER};
use super::positions::{self, Rotating};
use super::recipe::{LayerRecipe, Norms, Recipe};
use super::{Arch, Builder, Config, Model, Name, Reference, decoder, keys};
use crate::backend::{Router, Scores};
use crate::blocks::norm::NormKind;
use crate::blocks::rope::RopeScaling;
use crate::error::Result;
use crate::format::Key;

/// The family's entry in the registry.
pub const ARCH: Arch = Arch {
    gguf: "phimoe",
    name: "Phi-3.5-MoE",
    models: "Phi-3.5-MoE (42B-A6.6B), up to 4096 tokens of context",
    mlx: true,
    reference: Reference::Transformers,
    hugging_face: &["PhiMoEForCausalLM", "PhimoeForCausalLM", "phimoe"],
    describe,
};

const OUTPUT_BIAS: Name = Name::new("output.bias", "lm_head.bias");
/// Half of the sparse mixer's tolerance.
const JITTER: Key = Key { gguf: "", hugging_face: &["router_jitter_noise"] };
/// Whether logits have a bias.
const HAS_OUTPUT_BIAS: Key = Key { gguf: "", hugging_face: &["lm_head_bias"] };
/// The factor of cosine and sine in the published model with LongRoPE. GGUF files have another one, which converters
/// compute from the context lengths and which is ignored.
const SCALE: f64 = 1.243_163_121_016_122;

fn describe(config: &Config<'_>, b: &mut Builder<'_>) -> Result<Box<dyn Model>> {
    let bias = config.optional_bool(keys::QKV_BIAS)?;
    let bias = bias.unwrap_or_else(|| AttentionNames::USUAL.have_qkv_bias(b, 0));
    let attention = Grouped { qkv_bias: bias, out_bias: bias, ..attention(config, b)? };
    let mixture =
        Mixture { gate: ROUTER, names: EXPERTS, ..Mixture::new(router(config)?, config.count(keys::INNER)?) };
    let eps = config.float(keys::NORM_EPS)?;
    let has_output_bias = config.optional_bool(HAS_OUTPUT_BIAS)?.unwrap_or_else(|| b.has(OUTPUT_BIAS));
    let recipe = Recipe {
        norms: Norms { kind: NormKind::Layer, bias: true, ..Norms::rms(eps) },
        output_bias: has_output_bias.then_some(OUTPUT_BIAS),
        ..Recipe::uniform(config, &LayerRecipe::new(attention, mixture))?
    };
    decoder::describe(config, b, &recipe)
}

fn attention(config: &Config<'_>, b: &mut Builder<'_>) -> Result<Grouped> {
    let context = config.context()?;
    let window = config.number(keys::WINDOW)?;
    if (1..context).contains(&window) {
        return Err(config.unsupported(keys::WINDOW, &window.to_string()));
    }
    let attention = Grouped::read(config)?;
    let Some(rotation) = attention.rotation.filter(|_| positions::has_short_and_long(b)) else {
        return Ok(attention);
    };
    config.optional_float(keys::ROPE_ATTENTION_MULTIPLIER)?;
    let original = config.count(keys::ROPE_ORIGINAL)?;
    b.limit_context(original);
    let scaling = RopeScaling::Listed { scale: SCALE, original };
    Ok(Grouped { rotation: Some(Rotating::new(rotation.channels, rotation.base, scaling)), ..attention })
}

/// GGUF files do not have the jitter; that of the published models is 0.01.
fn router(config: &Config<'_>) -> Result<Router> {
    let router = feed_forward::softmax_router(config, false)?;
    if router.top_k != 2 {
        return Err(config.unsupported(keys::EXPERTS_USED, &router.top_k.to_string()));
    }
    let jitter = config.optional_numbers(JITTER, 1)?.map_or(0.01, |jitter| jitter[0]);
    Ok(Router { scores: Scores::SparseMixer { tolerance: 2.0 * jitter as f32 }, ..router })
}
