//! dots.llm1: attention with norms of queries and keys; the first layers dense, the others mixtures with shared
//! experts, whose router uses sigmoids and a correction.

use super::attention::{Grouped, QkNorm};
use super::feed_forward::{self, Dense, Mixture, Shared};
use super::recipe::{LayerRecipe, Recipe};
use super::{Arch, Builder, Config, Model, Reference, decoder, keys};
use crate::backend::Router;
use crate::error::Result;

/// The family's entry in the registry.
pub const ARCH: Arch = Arch {
    gguf: "dots1",
    name: "dots.llm1",
    models: "dots.llm1 (142B-A14B)",
    mlx: true,
    reference: Reference::Transformers,
    hugging_face: &["Dots1ForCausalLM", "dots1"],
    describe,
};

fn describe(config: &Config<'_>, b: &mut Builder<'_>) -> Result<Box<dyn Model>> {
    if config.optional_bool(keys::QKV_BIAS)? == Some(true) {
        return Err(config.unsupported(keys::QKV_BIAS, "true"));
    }
    let types = config.optional_texts(keys::LAYER_TYPES)?;
    if let Some(other) = types.and_then(|types| types.iter().find(|&name| name != "full_attention")) {
        return Err(config.unsupported(keys::LAYER_TYPES, other));
    }
    let inner = config.count(keys::EXPERT_INNER)?;
    let router = Router {
        scale: config.router_scale()?,
        normalise: config.optional_bool(keys::ROUTER_NORMALISES)?.unwrap_or(false),
        ..feed_forward::sigmoid_router(config)?
    };
    let mixture = Mixture {
        correction: Some(Mixture::CORRECTION),
        shared: Shared::plain(config.number(keys::SHARED_EXPERTS)?, inner),
        ..Mixture::new(router, inner)
    };
    let attention = Grouped { qk_norm: QkNorm::Head, ..Grouped::read(config)? };
    let dense = LayerRecipe::new(attention.clone(), Dense::new(config.count(keys::INNER)?));
    let mixture = LayerRecipe::new(attention, mixture);
    let dense_layers = config.number(keys::DENSE_LAYERS)?;
    decoder::describe(config, b, &Recipe::dense_first(config, dense_layers, &dense, &mixture)?)
}
