//! Qwen2-MoE: grouped-query attention with biases; every layer is a mixture with a gated shared expert.

use super::decoder::{self, FeedForward, Mixture, Recipe, Shared};
use super::{Arch, Builder, Config, Model, Name, keys};
use crate::error::Result;
use crate::format::Format;

/// The family's entry in the registry.
pub const ARCH: Arch =
    Arch { gguf: "qwen2moe", hugging_face: &["Qwen2MoeForCausalLM", "qwen2_moe"], describe };

const SHARED: [Name; 3] = [
    Name::new("ffn_gate_shexp.weight", "mlp.shared_expert.gate_proj.weight"),
    Name::new("ffn_up_shexp.weight", "mlp.shared_expert.up_proj.weight"),
    Name::new("ffn_down_shexp.weight", "mlp.shared_expert.down_proj.weight"),
];
const SHARED_GATE: Name = Name::new("ffn_gate_inp_shexp.weight", "mlp.shared_expert_gate.weight");

fn describe(config: &Config<'_>, b: &mut Builder<'_>) -> Result<Box<dyn Model>> {
    // GGUF files do not have this setting; their weights are not normalised.
    let normalise = match config.format() {
        Format::Gguf => false,
        Format::HuggingFace | Format::Mlx => config.optional_bool(keys::ROUTER_NORMALISES)?.unwrap_or(false),
    };
    let shared = Shared { inner: config.count(keys::SHARED_INNER)?, names: SHARED, gate: Some(SHARED_GATE) };
    let router = decoder::softmax_router(config, normalise)?;
    let mixture = Mixture { shared: Some(shared), ..Mixture::new(router, config.count(keys::EXPERT_INNER)?) };
    let recipe = Recipe { qkv_bias: true, ..Recipe::new(FeedForward::Mixture(mixture)) };
    decoder::describe(config, b, &recipe)
}
