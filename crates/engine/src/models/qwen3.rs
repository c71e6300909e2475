//! Dense Qwen3: grouped-query attention with norms of queries and keys.

use super::attention::{Grouped, QkNorm};
use super::feed_forward::Dense;
use super::recipe::{LayerRecipe, Recipe};
use super::{Arch, Builder, Config, Model, Reference, decoder, keys};
use crate::error::Result;

/// The family's entry in the registry.
pub const ARCH: Arch = Arch {
    gguf: "qwen3",
    name: "Qwen3, dense",
    models: "Qwen3, 0.6B to 32B",
    mlx: true,
    reference: Reference::Transformers,
    hugging_face: &["Qwen3ForCausalLM", "qwen3"],
    describe,
};

fn describe(config: &Config<'_>, b: &mut Builder<'_>) -> Result<Box<dyn Model>> {
    let attention = Grouped { qk_norm: QkNorm::Head, ..Grouped::read(config)? };
    let layer = LayerRecipe::new(attention, Dense::new(config.count(keys::INNER)?));
    decoder::describe(config, b, &Recipe::uniform(config, &layer)?)
}
