//! Mistral-Small-4: latent attention whose queries are sharpened at late positions; mixtures with shared experts, whose
//! router uses a softmax. (Mistral-Large-3 is in [`deepseek2`].)

use super::feed_forward::{self, Dense, Mixture, Shared};
use super::latent::Latent;
use super::recipe::{LayerRecipe, Recipe};
use super::{Arch, Builder, Config, Model, Reference, decoder, deepseek2, keys};
use crate::backend::{GroupScore, RopePairs, Router};
use crate::blocks::positions::Temperature;
use crate::error::Result;
use crate::format::Format;

/// The family's entry in the registry.
pub const ARCH: Arch = Arch {
    gguf: "mistral4",
    name: "Mistral-Small-4",
    models: "Mistral-Small-4 (119B-A6.5B)",
    mlx: true,
    reference: Reference::Transformers,
    hugging_face: &["Mistral4ForCausalLM", "mistral4"],
    describe,
};

fn describe(config: &Config<'_>, b: &mut Builder<'_>) -> Result<Box<dyn Model>> {
    for key in [keys::QKV_BIAS, keys::MLP_BIAS] {
        config.refuse_true(key)?;
    }
    config.refuse_false(keys::ROPE_INTERLEAVED)?;
    let normalise = config.optional_bool(keys::ROUTER_NORMALISES)?.unwrap_or(true);
    let router = Router { scale: config.router_scale()?, ..feed_forward::softmax_router(config, normalise)? };
    let groups = deepseek2::groups(config, &router, GroupScore::BestTwo)?;
    let inner = config.count(keys::EXPERT_INNER)?;
    let mixture = Mixture {
        shared: Shared::plain(config.number(keys::SHARED_EXPERTS)?, inner),
        ..Mixture::new(Router { groups, ..router }, inner)
    };
    let temperature = match config.temperature()? {
        // GGUF files made from folders lack it, but all published models have it.
        None if config.format() == Format::Gguf => {
            Some(Temperature { strength: 0.1, length: config.count(keys::ROPE_ORIGINAL)?, ahead: 0 })
        }
        given => given,
    };
    let attention = Latent::read(config, RopePairs::Interleaved)?.with_temperature(temperature);
    let dense = LayerRecipe::new(attention.clone(), Dense::new(config.count(keys::INNER)?));
    let dense_layers = feed_forward::dense_layers(config)?;
    let recipe = Recipe::dense_first(config, dense_layers, &dense, &LayerRecipe::new(attention, mixture))?;
    decoder::describe(config, b, &recipe)
}
