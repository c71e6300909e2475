//! Qwen2-MoE: grouped-query attention with biases, every layer a mixture with a gated shared expert.

use forebay_kernels::RopePairs;

use super::decoder::{self, FeedForward, Mixture, Recipe};
use super::{Arch, Builder, Config, ExpertNames, Model, keys};
use crate::error::Result;
use crate::format::Format;

/// The family's entry in the registry.
pub const ARCH: Arch =
    Arch { gguf: "qwen2moe", hugging_face: &["Qwen2MoeForCausalLM", "qwen2_moe"], describe };

fn describe(config: &Config<'_>, b: &mut Builder<'_>) -> Result<Box<dyn Model>> {
    // GGUF files do not say: their weights are left as they are.
    let normalise = match config.format() {
        Format::Gguf => false,
        Format::HuggingFace | Format::Mlx => config.optional_bool(keys::ROUTER_NORMALISES)?.unwrap_or(false),
    };
    let recipe = Recipe {
        pairs: RopePairs::HalfSplit,
        qkv_bias: true,
        qk_norm: None,
        feed_forward: FeedForward::Mixture(Mixture {
            gate: Mixture::GATE,
            names: ExpertNames::USUAL,
            router: decoder::softmax_router(config, normalise)?,
            inner: config.count(keys::EXPERT_INNER)?,
            shared_inner: Some(config.count(keys::SHARED_INNER)?),
        }),
    };
    decoder::describe(config, b, &recipe)
}
