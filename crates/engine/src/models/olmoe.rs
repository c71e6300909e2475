//! OLMoE: attention with norms over all heads of queries and keys; every layer is a mixture of experts.

use super::attention::{Grouped, QkNorm};
use super::feed_forward::{self, Mixture};
use super::recipe::{LayerRecipe, Recipe};
use super::{Arch, Builder, Config, Model, Reference, decoder, keys};
use crate::error::Result;
use crate::format::Format;

/// The family's entry in the registry.
pub const ARCH: Arch = Arch {
    gguf: "olmoe",
    name: "OLMoE",
    models: "OLMoE-1B-7B",
    mlx: true,
    reference: Reference::Transformers,
    hugging_face: &["OlmoeForCausalLM", "olmoe"],
    describe,
};

fn describe(config: &Config<'_>, b: &mut Builder<'_>) -> Result<Box<dyn Model>> {
    // GGUF files do not have this setting; their weights are not normalised.
    let normalise = match config.format() {
        Format::Gguf => false,
        Format::HuggingFace | Format::Mlx => config.optional_bool(keys::ROUTER_NORMALISES)?.unwrap_or(false),
    };
    let router = feed_forward::softmax_router(config, normalise)?;
    let mixture = Mixture::new(router, config.count(keys::INNER)?);
    let attention = Grouped { qk_norm: QkNorm::Projection, ..Grouped::read(config)? };
    decoder::describe(config, b, &Recipe::uniform(config, &LayerRecipe::new(attention, mixture))?)
}
