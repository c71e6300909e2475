//! Dense Ministral-3 and Mistral-Medium: like Llama, with queries that are sharpened at late positions.

use super::attention::Grouped;
use super::feed_forward::Dense;
use super::recipe::{LayerRecipe, Recipe};
use super::{Arch, Builder, Config, Model, Reference, decoder, keys};
use crate::backend::RopePairs;
use crate::blocks::rope::{RopeScaling, Yarn};
use crate::error::Result;
use crate::format::Format;

/// The family's entry in the registry.
pub const ARCH: Arch = Arch {
    gguf: "mistral3",
    name: "Ministral-3",
    models: "dense Ministral-3, 3B to 14B",
    mlx: true,
    reference: Reference::Transformers,
    hugging_face: &["Ministral3ForCausalLM", "ministral3"],
    describe,
};

fn describe(config: &Config<'_>, b: &mut Builder<'_>) -> Result<Box<dyn Model>> {
    // GGUF files store the rows of queries and keys in another order.
    let pairs = match config.format() {
        Format::Gguf => RopePairs::Interleaved,
        Format::HuggingFace | Format::Mlx => RopePairs::HalfSplit,
    };
    let mut attention =
        Grouped { temperature: config.temperature()?, ..Grouped::read(config)?.with_pairs(pairs) };
    if let Some(rotation) = &mut attention.rotation
        && let RopeScaling::Yarn(Yarn { factor, mscale_all_dim: Some(m), .. }) = rotation.scaling
        && config.format() == Format::Gguf
    {
        config.refuse_factor(keys::ROPE_ATTENTION)?;
        // Unlike those of other families, these files have the number itself instead of a tenth of it.
        rotation.scale = (Yarn::magnitude(factor, 1.0) / Yarn::magnitude(factor, 0.1 * m)) as f32;
    }
    let layer = LayerRecipe::new(attention, Dense::new(config.count(keys::INNER)?));
    let recipe = Recipe::uniform(config, &layer)?;
    decoder::describe(config, b, &recipe)
}
