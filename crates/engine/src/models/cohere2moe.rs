//! Command A+ and North: attention and feed-forward block read the same norm, side by side. Layers with a window rotate,
//! the others mostly have no positions. The first layers may be dense, the others are mixtures whose shared experts are
//! averaged with the routed ones.

use super::attention::{self, Grouped};
use super::feed_forward::{self, Dense, FeedForward, Mixture, Shared};
use super::recipe::{BlockNorms, LayerRecipe, Norms, Recipe};
use super::{Arch, Builder, Config, Model, Reference, decoder, keys};
use crate::backend::{RopePairs, Router, Scores};
use crate::blocks::norm::NormKind;
use crate::error::Result;
use crate::format::{Format, Key};

/// The family's entry in the registry.
pub const ARCH: Arch = Arch {
    gguf: "cohere2moe",
    name: "Command A+",
    models: "Command A+, North-Mini-Code",
    mlx: false,
    reference: Reference::Transformers,
    hugging_face: &["Cohere2MoeForCausalLM", "cohere2_moe"],
    describe,
};

/// The epsilon of norms that are not RMS norms.
const LAYER_NORM_EPS: Key = Key { gguf: "attention.layer_norm_epsilon", hugging_face: &["layer_norm_eps"] };
/// Inner channels of dense layers.
const DENSE_INNER: Key =
    Key { gguf: "feed_forward_length", hugging_face: &["prefix_dense_intermediate_size"] };
/// Inner channels of an expert.
const EXPERT_INNER: Key = Key { gguf: "expert_feed_forward_length", hugging_face: &["intermediate_size"] };
/// The distance between dense layers without a window.
const DENSE_PERIOD: Key = Key { gguf: "", hugging_face: &["prefix_dense_sliding_window_pattern"] };
/// How logits become scores.
const SCORES: Key = Key { gguf: "", hugging_face: &["expert_selection_fn"] };
/// A factor of the logits.
const LOGIT_SCALE: Key = Key { gguf: "logit_scale", hugging_face: &["logit_scale"] };
/// How the outputs of shared and routed experts are joined.
const JOINED: Key = Key { gguf: "", hugging_face: &["shared_expert_combination_strategy"] };

fn describe(config: &Config<'_>, b: &mut Builder<'_>) -> Result<Box<dyn Model>> {
    config.refuse_true(keys::QKV_BIAS)?;
    let layers = config.layers()?;
    let dense_layers = feed_forward::dense_layers(config)?;
    let dense_period = config.optional_count(DENSE_PERIOD)?.unwrap_or(1);
    let windows = attention::windows(config, layers, by_default(config, dense_layers, dense_period)?)?;
    let attention = Grouped::read(config)?.with_pairs(RopePairs::Interleaved);
    let mixture = mixture(config)?;
    let layer = |(l, window): (usize, Option<_>)| -> Result<LayerRecipe> {
        let is_dense = l < dense_layers;
        let rotates = window.is_some() || is_dense && dense_period == 1;
        let rotation = attention.rotation.filter(|_| rotates);
        let feed_forward: FeedForward = match is_dense {
            true => Dense::new(config.count(DENSE_INNER)?).into(),
            false => mixture.clone().into(),
        };
        Ok(LayerRecipe {
            ffn_norms: BlockNorms { before: None, after: None },
            parallel: true,
            ..LayerRecipe::new(Grouped { window, rotation, ..attention.clone() }, feed_forward)
        })
    };
    let layers = windows.into_iter().enumerate().map(layer).collect::<Result<_>>()?;
    let recipe = Recipe {
        logit_scale: Some(config.optional_float(LOGIT_SCALE)?.unwrap_or(1.0 / 16.0)),
        ..Recipe::with_norms(layers, norms(config)?)
    };
    decoder::describe(config, b, &recipe)
}

/// Which layers have a window in files that do not say it.
fn by_default(
    config: &Config<'_>,
    dense_layers: usize,
    dense_period: usize,
) -> Result<impl Fn(usize) -> bool> {
    let period = attention::window_period(config, 4)?;
    let is_gguf = config.format() == Format::Gguf;
    Ok(move |l: usize| match l.checked_sub(dense_layers) {
        _ if is_gguf => !l.is_multiple_of(period),
        None => !(l + 1).is_multiple_of(dense_period),
        Some(after) => !(after + 1).is_multiple_of(period),
    })
}

/// RMS norms if the file has an epsilon for them, otherwise layer norms without biases.
fn norms(config: &Config<'_>) -> Result<Norms> {
    Ok(match config.optional_float(keys::NORM_EPS)? {
        Some(eps) => Norms::rms(eps),
        None => Norms {
            kind: NormKind::Layer,
            ..Norms::rms(config.optional_float(LAYER_NORM_EPS)?.unwrap_or(1e-5))
        },
    })
}

fn mixture(config: &Config<'_>) -> Result<Mixture> {
    let (inner, count) = (config.count(EXPERT_INNER)?, config.number(keys::SHARED_EXPERTS)?);
    let joined = match config.optional_text(JOINED)? {
        _ if count == 0 => 1.0,
        None | Some("average") => 0.5,
        Some("sum") => 1.0,
        Some(other) => return Err(config.unsupported(JOINED, other)),
    };
    let scale = joined * config.router_scale()?;
    let shared = Shared::plain(count, inner).map(|shared| Shared { scale: Some(joined), ..shared });
    Ok(Mixture { shared, ..Mixture::new(Router { scale, ..router(config)? }, inner) })
}

/// The router. With a softmax, its weights are always normalised.
fn router(config: &Config<'_>) -> Result<Router> {
    let softmax = match config.format() {
        Format::Gguf => match config.optional_count(keys::ROUTER_FUNCTION)? {
            Some(1) => true,
            None | Some(2) => false,
            Some(other) => return Err(config.unsupported(keys::ROUTER_FUNCTION, &other.to_string())),
        },
        Format::HuggingFace | Format::Mlx => match config.optional_text(SCORES)? {
            None | Some("softmax") => true,
            Some("sigmoid") => false,
            Some(other) => return Err(config.unsupported(SCORES, other)),
        },
    };
    let normalise = config.optional_bool(keys::ROUTER_NORMALISES)?.unwrap_or(config.format() != Format::Gguf);
    let scores = if softmax { Scores::Softmax } else { Scores::Sigmoid };
    Ok(Router { scores, ..feed_forward::softmax_router(config, softmax || normalise)? })
}
