//! Dense Qwen3: grouped-query attention with normed queries and keys.

use forebay_kernels::RopePairs;

use super::decoder::{self, FeedForward, NormSpan, Recipe};
use super::{Arch, Builder, Config, Model, keys};
use crate::error::Result;

/// The family's entry in the registry.
pub const ARCH: Arch = Arch { gguf: "qwen3", hugging_face: &["Qwen3ForCausalLM", "qwen3"], describe };

fn describe(config: &Config<'_>, b: &mut Builder<'_>) -> Result<Box<dyn Model>> {
    let recipe = Recipe {
        pairs: RopePairs::HalfSplit,
        qkv_bias: false,
        qk_norm: Some(NormSpan::Head),
        feed_forward: FeedForward::Dense(config.count(keys::INNER)?),
    };
    decoder::describe(config, b, &recipe)
}
