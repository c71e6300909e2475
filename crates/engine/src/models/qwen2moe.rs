//! Qwen2-MoE: grouped-query attention with biases; every layer is a mixture with a gated shared expert.

use super::attention::Grouped;
use super::feed_forward::{self, Mixture, Shared};
use super::recipe::{LayerRecipe, Recipe};
use super::{Arch, Builder, Config, Model, Name, Reference, decoder, keys};
use crate::error::Result;
use crate::format::Format;

/// The family's entry in the registry.
pub const ARCH: Arch = Arch {
    gguf: "qwen2moe",
    name: "Qwen2-MoE",
    models: "Qwen1.5-MoE-A2.7B, Qwen2-57B-A14B",
    mlx: true,
    reference: Reference::Transformers,
    hugging_face: &["Qwen2MoeForCausalLM", "qwen2_moe"],
    describe,
};

const SHARED_GATE: Name = Name::new("ffn_gate_inp_shexp.weight", "mlp.shared_expert_gate.weight");

fn describe(config: &Config<'_>, b: &mut Builder<'_>) -> Result<Box<dyn Model>> {
    // GGUF files do not have this setting; their weights are not normalised.
    let normalise = match config.format() {
        Format::Gguf => false,
        Format::HuggingFace | Format::Mlx => config.optional_bool(keys::ROUTER_NORMALISES)?.unwrap_or(false),
    };
    let shared = Shared {
        gate: Some(SHARED_GATE),
        ..Shared::named(config.count(keys::SHARED_INNER)?, Shared::SINGLE)
    };
    let router = feed_forward::softmax_router(config, normalise)?;
    let mixture = Mixture { shared: Some(shared), ..Mixture::new(router, config.count(keys::EXPERT_INNER)?) };
    let attention = Grouped { qkv_bias: true, ..Grouped::read(config)? };
    decoder::describe(config, b, &Recipe::uniform(config, &LayerRecipe::new(attention, mixture))?)
}
