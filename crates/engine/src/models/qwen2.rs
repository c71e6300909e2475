//! Dense Qwen2 and Qwen2.5: grouped-query attention with biases.

use super::attention::Grouped;
use super::feed_forward::Dense;
use super::recipe::{LayerRecipe, Recipe};
use super::{Arch, Builder, Config, Model, Reference, decoder, keys};
use crate::error::Result;

/// The family's entry in the registry.
pub const ARCH: Arch = Arch {
    gguf: "qwen2",
    name: "Qwen2, dense",
    models: "Qwen2 and Qwen2.5, 0.5B to 72B",
    mlx: true,
    reference: Reference::Transformers,
    hugging_face: &["Qwen2ForCausalLM", "qwen2"],
    describe,
};

fn describe(config: &Config<'_>, b: &mut Builder<'_>) -> Result<Box<dyn Model>> {
    let attention = Grouped { qkv_bias: true, ..Grouped::read(config)? };
    let layer = LayerRecipe::new(attention, Dense::new(config.count(keys::INNER)?));
    decoder::describe(config, b, &Recipe::uniform(config, &layer)?)
}
