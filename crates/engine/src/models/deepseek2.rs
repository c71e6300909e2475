//! DeepSeek-V2, V3, V3.1 and R1, and the families that share their architecture, Kimi-K2, GLM-4.7-Flash and
//! Mistral-Large-3: latent attention; the first layers dense, the others mixtures with shared experts, whose router may choose groups of
//! experts first.

use super::feed_forward::{self, Dense, Mixture, Shared};
use super::latent::Latent;
use super::recipe::{LayerRecipe, Recipe};
use super::{Arch, Builder, Config, Model, Reference, decoder, keys};
use crate::backend::{GroupScore, Groups, RopePairs, Router, Scores};
use crate::error::Result;
use crate::format::Format;

/// The family's entry in the registry.
pub const ARCH: Arch = Arch {
    gguf: "deepseek2",
    name: "DeepSeek-V2 and V3",
    models: "DeepSeek-V2, V3, V3.1, R1 (671B-A37B), Kimi-K2 (1T-A32B), GLM-4.7-Flash, Mistral-Large-3 (GGUF)",
    mlx: true,
    reference: Reference::Transformers,
    hugging_face: &[
        "DeepseekV3ForCausalLM",
        "DeepseekV2ForCausalLM",
        "Glm4MoeLiteForCausalLM",
        "deepseek_v3",
        "deepseek_v2",
        "kimi_k2",
        "glm4_moe_lite",
    ],
    describe,
};

fn describe(config: &Config<'_>, b: &mut Builder<'_>) -> Result<Box<dyn Model>> {
    if config.optional_bool(keys::QKV_BIAS)? == Some(true) {
        return Err(config.unsupported(keys::QKV_BIAS, "true"));
    }
    if let Some(other) = config.optional_count(keys::MIXTURE_INTERVAL)?.filter(|&every| every != 1) {
        return Err(config.unsupported(keys::MIXTURE_INTERVAL, &other.to_string()));
    }
    let layers = feed_forward::dense_layers(config)?;
    let inner = config.count(keys::EXPERT_INNER)?;
    // Routers with a correction have this tensor in all layers.
    let corrected = b.has(Mixture::CORRECTION.of_layer(layers));
    let mixture = Mixture {
        correction: corrected.then_some(Mixture::CORRECTION),
        shared: Shared::plain(config.number(keys::SHARED_EXPERTS)?, inner),
        ..Mixture::new(router(config, corrected)?, inner)
    };
    let pairs = match config.optional_bool(keys::ROPE_INTERLEAVED)? {
        Some(false) => RopePairs::HalfSplit,
        Some(true) | None => RopePairs::Interleaved,
    };
    let attention = Latent::read(config, pairs)?.with_temperature(config.temperature()?);
    let dense = LayerRecipe::new(attention.clone(), Dense::new(config.count(keys::INNER)?));
    let mixture = LayerRecipe::new(attention, mixture);
    let recipe = Recipe::dense_first(config, layers, &dense, &mixture)?;
    decoder::describe(config, b, &recipe)
}

/// V3's router uses sigmoids with a correction, V2's a softmax without one.
fn router(config: &Config<'_>, corrected: bool) -> Result<Router> {
    let gguf = config.format() == Format::Gguf;
    let scores =
        match (config.optional_count(keys::ROUTER_FUNCTION)?, config.optional_text(keys::ROUTER_SCORES)?) {
            (Some(1), _) | (None, Some("softmax")) => Scores::Softmax,
            (Some(2), _) | (None, Some("sigmoid")) => Scores::Sigmoid,
            (Some(other), _) => return Err(config.unsupported(keys::ROUTER_FUNCTION, &other.to_string())),
            (None, Some(other)) => return Err(config.unsupported(keys::ROUTER_SCORES, other)),
            (None, None) if corrected && !gguf => Scores::Sigmoid,
            (None, None) => Scores::Softmax,
        };
    let normalise = config.optional_bool(keys::ROUTER_NORMALISES)?;
    if normalise == Some(true) && scores == Scores::Softmax && !gguf {
        // The published code and the implementation in general use disagree about its meaning.
        return Err(config.unsupported(keys::ROUTER_NORMALISES, "true"));
    }
    let normalise = normalise.unwrap_or(scores == Scores::Sigmoid && !gguf);
    let score = match config.optional_text(keys::ROUTER_METHOD)? {
        Some("greedy") => None,
        Some("group_limited_greedy") => Some(GroupScore::Best),
        Some("noaux_tc") => Some(GroupScore::BestTwo),
        Some(other) => return Err(config.unsupported(keys::ROUTER_METHOD, other)),
        None if corrected => Some(GroupScore::BestTwo),
        None => gguf.then_some(GroupScore::Best),
    };
    let router =
        Router { scores, scale: config.router_scale()?, ..feed_forward::softmax_router(config, normalise)? };
    Ok(Router { groups: score.map(|score| groups(config, &router, score)).transpose()?.flatten(), ..router })
}

/// The groups that a token chooses experts from; `None` if it chooses from all.
///
/// # Errors
/// If the settings are inconsistent.
pub fn groups(config: &Config<'_>, router: &Router, score: GroupScore) -> Result<Option<Groups>> {
    let count = config.number(keys::ROUTER_GROUPS)?.max(1);
    let used = config.optional_count(keys::ROUTER_GROUPS_USED)?.unwrap_or(count);
    if !router.experts.is_multiple_of(count) {
        return Err(config.error(keys::ROUTER_GROUPS, "does not divide the number of experts"));
    }
    if used > count {
        return Err(config.error(keys::ROUTER_GROUPS_USED, "is larger than the number of groups"));
    }
    if router.top_k > router.experts / count * used {
        return Err(config.error(keys::ROUTER_GROUPS_USED, "leaves fewer experts than a token uses"));
    }
    Ok((used < count).then_some(Groups { count, used, score }))
}
