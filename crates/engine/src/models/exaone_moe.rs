//! EXAONE-MoE: attention with norms of queries and keys, in most layers with a window and in the others without
//! positions; the first layers dense, the others mixtures with shared experts, whose router uses sigmoids and a
//! correction.

use super::attention::{self, Grouped, QkNorm};
use super::feed_forward::{self, Dense, FeedForward, Mixture, Shared};
use super::recipe::{LayerRecipe, Recipe};
use super::{Arch, Builder, Config, Model, Name, Reference, decoder, keys};
use crate::backend::Router;
use crate::error::Result;
use crate::format::{Format, Key};

/// The family's entry in the registry.
pub const ARCH: Arch = Arch {
    gguf: "exaone-moe",
    name: "EXAONE-MoE",
    models: "K-EXAONE-236B-A23B",
    mlx: true,
    reference: Reference::Transformers,
    hugging_face: &["ExaoneMoeForCausalLM", "exaone_moe"],
    describe,
};

const CORRECTION: Name = Name::new("exp_probs_b.bias", "mlp.e_score_correction_bias");
const SHARED_EXPERTS: Key = Key { gguf: "expert_shared_count", hugging_face: &["num_shared_experts"] };

fn describe(config: &Config<'_>, b: &mut Builder<'_>) -> Result<Box<dyn Model>> {
    config.refuse_true(keys::QKV_BIAS)?;
    let inner = config.count(keys::EXPERT_INNER)?;
    let router = Router {
        scale: config.router_scale()?,
        normalise: config.optional_bool(keys::ROUTER_NORMALISES)?.unwrap_or(true),
        ..feed_forward::sigmoid_router(config)?
    };
    let mixture = Mixture {
        // mlx-lm stores it where most families have it.
        correction: Some(if config.format() == Format::Mlx { Mixture::CORRECTION } else { CORRECTION }),
        shared: Shared::plain(config.number(SHARED_EXPERTS)?, inner),
        ..Mixture::new(router, inner)
    };
    let dense = Dense::new(config.count(keys::INNER)?);
    let dense_layers = feed_forward::dense_layers(config)?;
    let attention = Grouped { qk_norm: QkNorm::Head, ..Grouped::read(config)? };
    // Every fourth layer sees everything, unless the file says otherwise.
    let period = attention::window_period(config, 4)?;
    // A model without windows has positions in all layers.
    let has_windows = config.number(keys::WINDOW)? > 0;
    let windows =
        attention::windows(config, config.layers()?, |l| has_windows && !(l + 1).is_multiple_of(period))?;
    let layer = |(l, window): (usize, Option<_>)| {
        let rotation = attention.rotation.filter(|_| !has_windows || window.is_some());
        let feed_forward: FeedForward = if l < dense_layers { dense.into() } else { mixture.clone().into() };
        LayerRecipe::new(Grouped { window, rotation, ..attention.clone() }, feed_forward)
    };
    let layers = windows.into_iter().enumerate().map(layer).collect();
    decoder::describe(config, b, &Recipe::new(config, layers)?)
}
