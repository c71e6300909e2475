//! Llama 4: attention in chunks with norms after the rotation and, in every fourth layer, over all positions without a
//! rotation, where late queries are sharpened. Dense layers and mixtures may alternate; a mixture's only chosen expert
//! reads its input times its weight.

use super::attention::{Grouped, QkNorm};
use super::feed_forward::{self, Dense, FeedForward, Mixture, Shared};
use super::recipe::{LayerRecipe, Recipe};
use super::{Arch, Builder, Config, ExpertNames, Fused, LayerKind, Model, Name, Reference, decoder, keys};
use crate::backend::{RopePairs, Window};
use crate::blocks::positions::Temperature;
use crate::error::Result;
use crate::format::{Format, Key};

/// The family's entry in the registry.
pub const ARCH: Arch = Arch {
    gguf: "llama4",
    name: "Llama 4",
    models: "Llama-4-Scout (109B-A17B), Maverick (400B-A17B)",
    mlx: true,
    reference: Reference::Transformers,
    hugging_face: &["Llama4ForCausalLM", "Llama4ForConditionalGeneration", "llama4", "llama4_text"],
    describe,
};

const ROUTER: Name = Name::new("ffn_gate_inp.weight", "feed_forward.router.weight");
const EXPERTS: ExpertNames =
    ExpertNames { module: "feed_forward", fused: Fused::Columns, ..ExpertNames::USUAL };
const SHARED: [Name; 3] = [
    Name::new("ffn_gate_shexp.weight", "feed_forward.shared_expert.gate_proj.weight"),
    Name::new("ffn_up_shexp.weight", "feed_forward.shared_expert.up_proj.weight"),
    Name::new("ffn_down_shexp.weight", "feed_forward.shared_expert.down_proj.weight"),
];
const DENSE: [Name; 3] = [
    Name::new("ffn_gate.weight", "feed_forward.gate_proj.weight"),
    Name::new("ffn_up.weight", "feed_forward.up_proj.weight"),
    Name::new("ffn_down.weight", "feed_forward.down_proj.weight"),
];

/// Inner channels of an expert, and of a dense block.
const EXPERT_INNER: Key = Key { gguf: "expert_feed_forward_length", hugging_face: &["intermediate_size"] };
const DENSE_INNER: Key = Key { gguf: "feed_forward_length", hugging_face: &["intermediate_size_mlp"] };
/// The number of positions of a chunk.
const CHUNK: Key = Key { gguf: "", hugging_face: &["attention_chunk_size"] };
/// Whether late queries are sharpened, how many positions share a factor, and how much.
const SHARPENS: Key = Key { gguf: "", hugging_face: &["attn_temperature_tuning"] };
const SHARPENED_LENGTH: Key = Key { gguf: "", hugging_face: &["floor_scale"] };
const SHARPENED_STRENGTH: Key = Key { gguf: "", hugging_face: &["attn_scale"] };
/// For each layer, whether it has a rotation, despite the name.
const ROTATES: Key = Key { gguf: "", hugging_face: &["no_rope_layers"] };
/// The distance between layers without a rotation.
const INTERVAL: Key = Key { gguf: "", hugging_face: &["no_rope_layer_interval"] };

/// What GGUF files do not say: the length of chunks and the sharpening of queries are those of the published models,
/// whose rotating layers are those with chunks.
const LENGTH: usize = 8192;
const STRENGTH: f32 = 0.1;
/// The published model with this many experts has no norms of queries and keys.
const EXPERTS_WITHOUT_NORMS: usize = 128;

fn describe(config: &Config<'_>, b: &mut Builder<'_>) -> Result<Box<dyn Model>> {
    // GGUF files without chunks say that they have no window.
    if let Some(other) = config.optional_count(keys::WINDOW)?.filter(|&length| length != LENGTH) {
        return Err(config.unsupported(keys::WINDOW, &other.to_string()));
    }
    let inner = config.count(EXPERT_INNER)?;
    // The weight multiplies the expert's input, so that of its output is one.
    let router = feed_forward::softmax_router(config, true)?;
    if router.top_k != 1 {
        return Err(config.unsupported(keys::EXPERTS_USED, &router.top_k.to_string()));
    }
    let mixture = Mixture {
        gate: ROUTER,
        names: EXPERTS,
        weighs_input: true,
        shared: Some(Shared::named(inner, SHARED)),
        ..Mixture::new(router, inner)
    };
    let dense = Dense { names: DENSE, ..Dense::new(config.count(DENSE_INNER)?) };
    let layer = |l: usize| -> Result<LayerRecipe> {
        // Folders and GGUF files have different settings for this, but the same tensors.
        let feed_forward: FeedForward =
            if b.has(ROUTER.of_layer(l)) { mixture.clone().into() } else { dense.into() };
        Ok(LayerRecipe::new(attention(config, l)?, feed_forward))
    };
    let layers = (0..config.layers()?).map(layer).collect::<Result<_>>()?;
    decoder::describe(config, b, &Recipe::new(config, layers)?)
}

/// The attention of layer `l`.
fn attention(config: &Config<'_>, l: usize) -> Result<Grouped> {
    let attention = Grouped::read(config)?.with_pairs(RopePairs::Interleaved);
    let temperature = temperature(config)?;
    let interval = config.optional_count(INTERVAL)?.unwrap_or(4);
    let own = config.of_layer(l, LayerKind::Full).optional_bool(ROTATES)?;
    let rotates = own.unwrap_or_else(|| !(l + 1).is_multiple_of(interval));
    Ok(Grouped {
        window: window(config, l, rotates)?,
        qk_norm: if rotates && has_norms(config)? { QkNorm::RotatedHead } else { QkNorm::None },
        rotation: attention.rotation.filter(|_| rotates),
        temperature: temperature.filter(|_| !rotates),
        ..attention
    })
}

/// The chunks of layer `l`, if it has any.
fn window(config: &Config<'_>, l: usize, rotates: bool) -> Result<Option<Window>> {
    let types = config.optional_texts(keys::LAYER_TYPES)?;
    let chunked = match types.map(|types| types.get(l)) {
        None => rotates,
        Some(Some("chunked_attention")) => true,
        Some(Some("full_attention")) => false,
        Some(other) => return Err(config.unsupported(keys::LAYER_TYPES, other.unwrap_or("too few"))),
    };
    let length = match config.format() {
        Format::Gguf => Some(LENGTH),
        Format::HuggingFace | Format::Mlx => config.optional_count(CHUNK)?,
    };
    match length {
        Some(length) => Ok(chunked.then_some(Window::Chunk(length))),
        None if chunked => Err(config.missing(CHUNK)),
        None => Ok(None),
    }
}

fn has_norms(config: &Config<'_>) -> Result<bool> {
    match config.format() {
        Format::Gguf => Ok(config.count(keys::EXPERTS)? != EXPERTS_WITHOUT_NORMS),
        Format::HuggingFace | Format::Mlx => Ok(config.optional_bool(keys::QK_NORM)?.unwrap_or(true)),
    }
}

/// The sharpening of late queries.
fn temperature(config: &Config<'_>) -> Result<Option<Temperature>> {
    if !config.optional_bool(SHARPENS)?.unwrap_or(true) {
        return Ok(None);
    }
    let length = config.optional_count(SHARPENED_LENGTH)?.unwrap_or(LENGTH);
    let strength = config.optional_float(SHARPENED_STRENGTH)?.unwrap_or(STRENGTH);
    Ok(Some(Temperature { strength, length, ahead: 1 }))
}
