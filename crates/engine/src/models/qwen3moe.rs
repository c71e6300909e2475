//! Qwen3-MoE: grouped-query attention with normed queries and keys, every layer a mixture of experts.

use forebay_kernels::RopePairs;

use super::decoder::{self, FeedForward, Mixture, NormSpan, Recipe};
use super::{Arch, Builder, Config, ExpertNames, Model, keys};
use crate::error::Result;
use crate::format::Format;

/// The family's entry in the registry.
pub const ARCH: Arch =
    Arch { gguf: "qwen3moe", hugging_face: &["Qwen3MoeForCausalLM", "qwen3_moe"], describe };

fn describe(config: &Config<'_>, b: &mut Builder<'_>) -> Result<Box<dyn Model>> {
    // GGUF files do not say: their weights are always made to sum to one.
    let normalise = match config.format() {
        Format::Gguf => true,
        Format::HuggingFace | Format::Mlx => config.optional_bool(keys::ROUTER_NORMALISES)?.unwrap_or(false),
    };
    let recipe = Recipe {
        pairs: RopePairs::HalfSplit,
        qkv_bias: false,
        qk_norm: Some(NormSpan::Head),
        feed_forward: FeedForward::Mixture(Mixture {
            gate: Mixture::GATE,
            names: ExpertNames::USUAL,
            router: decoder::softmax_router(config, normalise)?,
            inner: config.count(keys::EXPERT_INNER)?,
            shared_inner: None,
        }),
    };
    decoder::describe(config, b, &recipe)
}
