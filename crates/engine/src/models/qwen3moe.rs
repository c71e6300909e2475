//! Qwen3-MoE: grouped-query attention with norms of queries and keys; every layer is a mixture of experts.

use super::attention::{Grouped, QkNorm};
use super::feed_forward::{self, Mixture};
use super::recipe::{LayerRecipe, Recipe};
use super::{Arch, Builder, Config, ExpertNames, Fused, Model, Reference, decoder, keys};
use crate::error::Result;
use crate::format::{Format, Value};

/// The family's entry in the registry.
pub const ARCH: Arch = Arch {
    gguf: "qwen3moe",
    name: "Qwen3-MoE",
    models: "Qwen3-30B-A3B, 235B-A22B, Qwen3-Coder-30B-A3B and 480B-A35B",
    mlx: true,
    reference: Reference::Transformers,
    hugging_face: &["Qwen3MoeForCausalLM", "qwen3_moe"],
    describe,
};

/// Qwen3-VL-MoE's entry: its text model is the same, and always normalises weights.
pub const VL: Arch = Arch {
    gguf: "qwen3vlmoe",
    name: "Qwen3-VL-MoE, text",
    models: "Qwen3-VL-30B-A3B, 235B-A22B",
    mlx: true,
    reference: Reference::Transformers,
    hugging_face: &["Qwen3VLMoeForConditionalGeneration", "qwen3_vl_moe", "qwen3_vl_moe_text"],
    describe: |config, b| {
        config.assume(&[("rope_theta", Value::Float(500_000.0))]);
        describe_with(config, b, true)
    },
};

const EXPERTS: ExpertNames = ExpertNames { fused: Fused::Columns, ..ExpertNames::USUAL };

fn describe(config: &Config<'_>, b: &mut Builder<'_>) -> Result<Box<dyn Model>> {
    // GGUF files do not have this setting; their weights are always normalised.
    let normalise = match config.format() {
        Format::Gguf => true,
        Format::HuggingFace | Format::Mlx => config.optional_bool(keys::ROUTER_NORMALISES)?.unwrap_or(false),
    };
    describe_with(config, b, normalise)
}

fn describe_with(config: &Config<'_>, b: &mut Builder<'_>, normalise: bool) -> Result<Box<dyn Model>> {
    let router = feed_forward::softmax_router(config, normalise)?;
    let mixture = Mixture { names: EXPERTS, ..Mixture::new(router, config.count(keys::EXPERT_INNER)?) };
    let attention = Grouped { qk_norm: QkNorm::Head, ..Grouped::read(config)? };
    decoder::describe(config, b, &Recipe::uniform(config, &LayerRecipe::new(attention, mixture))?)
}
