//! Dense Qwen3: grouped-query attention with norms of queries and keys.

use super::decoder::{self, FeedForward, NormSpan, Recipe};
use super::{Arch, Builder, Config, Model, keys};
use crate::error::Result;

/// The family's entry in the registry.
pub const ARCH: Arch = Arch { gguf: "qwen3", hugging_face: &["Qwen3ForCausalLM", "qwen3"], describe };

fn describe(config: &Config<'_>, b: &mut Builder<'_>) -> Result<Box<dyn Model>> {
    let dense = FeedForward::Dense(config.count(keys::INNER)?);
    let recipe = Recipe { qk_norm: Some(NormSpan::Head), ..Recipe::new(dense) };
    decoder::describe(config, b, &recipe)
}
