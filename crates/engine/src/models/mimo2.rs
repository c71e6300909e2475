//! MiMo-V2-Flash and, as GGUF files, MiMo-V2.5: attention whose values are shorter than its keys and are scaled. Most
//! layers have a window, and then sinks, another number of key heads and another rotation. The first layers are dense,
//! the others mixtures, whose router uses sigmoids and a correction.

use super::attention::{self, Grouped};
use super::config::LayerKind;
use super::feed_forward::{self, Dense, FeedForward, Mixture};
use super::positions::Rotating;
use super::recipe::{LayerRecipe, Recipe};
use super::{Arch, Builder, Config, Model, Name, Reference, decoder, keys};
use crate::backend::{Router, Window};
use crate::error::Result;
use crate::format::{Format, Key};

/// The family's entry in the registry.
pub const ARCH: Arch = Arch {
    gguf: "mimo2",
    name: "MiMo-V2",
    models: "MiMo-V2-Flash (309B-A15B), MiMo-V2.5",
    mlx: true,
    reference: Reference::Transformers,
    hugging_face: &["MiMoV2FlashForCausalLM", "mimo_v2_flash"],
    describe,
};

const SINKS: Name = Name::new("attn_sinks.weight", "self_attn.attention_sink_bias");

const VALUE_SCALE: Key = Key { gguf: "attention.value_scale", hugging_face: &["attention_value_scale"] };
/// How many positions before its own a query sees.
const BEFORE: Key = Key { gguf: "", hugging_face: &["sliding_window_size"] };
/// Settings of layers with a window, in folders.
const WINDOWED_KV_HEADS: Key = Key { gguf: "", hugging_face: &["swa_num_key_value_heads"] };
const WINDOWED_BASE: Key = Key { gguf: "", hugging_face: &["rope_parameters.rope_theta", "swa_rope_theta"] };
/// Settings that repeat others in every published model.
const ALIKE: [(Key, Key); 4] = [
    (Key { gguf: "", hugging_face: &["attention_chunk_size"] }, keys::WINDOW),
    (Key { gguf: "", hugging_face: &["swa_num_attention_heads"] }, keys::HEADS),
    (Key { gguf: "", hugging_face: &["swa_head_dim"] }, keys::KEY_DIM),
    (Key { gguf: "", hugging_face: &["swa_v_head_dim"] }, keys::VALUE_DIM),
];

fn describe(config: &Config<'_>, b: &mut Builder<'_>) -> Result<Box<dyn Model>> {
    for (repeated, key) in ALIKE {
        let count = config.optional_count(key)?;
        if let Some(other) = config.optional_count(repeated)?.filter(|&other| count != Some(other)) {
            return Err(config.unsupported(repeated, &other.to_string()));
        }
    }
    let normalise = config.optional_bool(keys::ROUTER_NORMALISES)?.unwrap_or(true);
    let scale = config.router_scale()?;
    let router = Router { scale, normalise, ..feed_forward::sigmoid_router(config)? };
    let mixture = Mixture {
        correction: Some(Mixture::CORRECTION),
        ..Mixture::new(router, config.count(keys::EXPERT_INNER)?)
    };
    let dense = Dense::new(config.count(keys::INNER)?);
    let layers = config.layers()?;
    // GGUF files and newer folders do not have this setting, but all have the tensors.
    let mixtures = config.optional_bools(keys::MIXTURE_INTERVAL, layers)?;
    let kinds = attention::layer_kinds(config, layers, |l| l > 0 && (l + 1) % 6 != 0)?;
    let layer = |(l, windowed): (usize, bool)| -> Result<LayerRecipe> {
        let attention = attention(config, b, l, windowed)?;
        let mixes = b.has(Mixture::GATE.of_layer(l));
        if mixtures.as_ref().is_some_and(|mixtures| mixtures[l] != mixes) {
            let problem = format!("does not fit the tensors of layer {l}");
            return Err(config.error(keys::MIXTURE_INTERVAL, &problem));
        }
        let feed_forward: FeedForward = if mixes { mixture.clone().into() } else { dense.into() };
        Ok(LayerRecipe::new(attention, feed_forward))
    };
    let layers = kinds.into_iter().enumerate().map(layer).collect::<Result<_>>()?;
    decoder::describe(config, b, &Recipe::new(config, layers)?)
}

/// The attention of layer `l`.
fn attention(config: &Config<'_>, b: &Builder<'_>, l: usize, windowed: bool) -> Result<Grouped> {
    let kind = if windowed { LayerKind::Windowed } else { LayerKind::Full };
    let config = &config.of_layer(l, kind);
    let (heads, all) = (config.count(keys::HEADS)?, config.count(keys::KV_HEADS)?);
    let kv_heads = match config.format() {
        Format::HuggingFace | Format::Mlx if windowed => {
            config.optional_count(WINDOWED_KV_HEADS)?.unwrap_or(2 * all)
        }
        _ => all,
    };
    let dim = config.count(keys::KEY_DIM)?;
    Ok(Grouped {
        value_dim: config.count(keys::VALUE_DIM)?,
        window: if windowed { Some(Window::Last(window(config)?)) } else { None },
        rotation: Some(rotation(config, windowed, dim)?),
        value_scale: config.optional_float(VALUE_SCALE)?,
        // Published models have sinks in all layers with a window and in no others.
        sinks: (windowed || b.has(SINKS.of_layer(l))).then_some(SINKS),
        ..Grouped::of(config, [heads, kv_heads], dim)?
    })
}

/// The number of positions that a query sees, with its own. Published models were trained with one more than both
/// `sliding_window` and the setting of GGUF files say. Transformers computes so; llama.cpp follows the file.
fn window(config: &Config<'_>) -> Result<usize> {
    match config.optional_count(BEFORE)? {
        Some(before) => Ok(before + 1),
        None => config.count(keys::WINDOW),
    }
}

fn rotation(config: &Config<'_>, windowed: bool, dim: usize) -> Result<Rotating> {
    if config.format() == Format::Gguf {
        return Rotating::read(config, dim);
    }
    // Without these settings all channels would rotate, with another base.
    config.float(keys::ROPE_SHARE)?;
    let base = config.float(if windowed { WINDOWED_BASE } else { keys::ROPE_BASE })?;
    Ok(Rotating { base, ..Rotating::read(config, dim)? })
}
