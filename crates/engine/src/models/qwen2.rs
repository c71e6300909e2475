//! Dense Qwen2 and Qwen2.5: grouped-query attention with biases.

use super::decoder::{self, FeedForward, Recipe};
use super::{Arch, Builder, Config, Model, keys};
use crate::error::Result;

/// The family's entry in the registry.
pub const ARCH: Arch = Arch { gguf: "qwen2", hugging_face: &["Qwen2ForCausalLM", "qwen2"], describe };

fn describe(config: &Config<'_>, b: &mut Builder<'_>) -> Result<Box<dyn Model>> {
    let dense = FeedForward::Dense(config.count(keys::INNER)?);
    let recipe = Recipe { qkv_bias: true, ..Recipe::new(dense) };
    decoder::describe(config, b, &recipe)
}
