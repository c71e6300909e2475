//! Ling and Ring, versions 1 and 2: queries, keys and values in one tensor; all layers are mixtures with shared experts,
//! in version 2 after some dense ones. Version 2 also has norms of queries and keys, rotates some channels, and has a
//! router that uses sigmoids, a correction and groups.

use super::attention::{AttentionNames, Grouped, QkNorm};
use super::feed_forward::{self, Dense, Mixture, Shared};
use super::recipe::{LayerRecipe, Recipe};
use super::{Arch, Builder, Config, Model, Name, Reference, decoder, deepseek2, keys};
use crate::backend::{GroupScore, RopePairs, Router, Scores};
use crate::error::Result;
use crate::format::{Format, Key};

/// Version 1's entry in the registry.
pub const ARCH: Arch = Arch {
    gguf: "bailingmoe",
    name: "Ling 1",
    models: "Ling-lite (16.8B-A2.75B), Ling-plus (290B-A28.8B)",
    mlx: true,
    reference: Reference::Formulas,
    hugging_face: &["BailingMoeForCausalLM"],
    describe: |config, b| {
        // GGUF files of this version store the rows of queries and keys in another order.
        let pairs = match config.format() {
            Format::Gguf => RopePairs::Interleaved,
            Format::HuggingFace | Format::Mlx => RopePairs::HalfSplit,
        };
        describe(config, b, pairs)
    },
};

/// Version 2's entry in the registry.
pub const V2: Arch = Arch {
    gguf: "bailingmoe2",
    name: "Ling 2, Ring",
    models: "Ling-mini-2.0 (16B-A1.4B), Ling-flash-2.0 (100B-A6B), Ling-1T, Ring-1T",
    mlx: true,
    reference: Reference::Formulas,
    hugging_face: &["BailingMoeV2ForCausalLM"],
    describe: |config, b| {
        if config.format() != Format::Gguf && config.optional_count(keys::ROPE_DIM)?.is_none() {
            // Without this setting all channels would rotate, which is wrong for this version.
            config.float(keys::ROPE_SHARE)?;
        }
        describe(config, b, RopePairs::HalfSplit)
    },
};

const SCORE_FUNCTION: Key = Key { gguf: "", hugging_face: &["score_function"] };
const CORRECTS: Key = Key { gguf: "", hugging_face: &["moe_router_enable_expert_bias"] };
const SHARED_EXPERTS: Key = Key { gguf: "expert_shared_count", hugging_face: &["num_shared_experts"] };
const SHARED_INNER: Key =
    Key { gguf: "expert_shared_feed_forward_length", hugging_face: &["moe_shared_expert_intermediate_size"] };
const HAS_SHARED: Key = Key { gguf: "", hugging_face: &["moe_router_enable_shared_expert"] };
const HAS_BIASES: Key = Key { gguf: "", hugging_face: &["use_bias"] };
const HAS_QKV_BIASES: Key = Key { gguf: "", hugging_face: &["use_qkv_bias"] };
const NORMALISES_OUTPUT: Key = Key { gguf: "", hugging_face: &["norm_head"] };
const NORMALISES_LOGITS: Key = Key { gguf: "", hugging_face: &["norm_softmax"] };

const EMBED: Name = Name::new("token_embd.weight", "model.word_embeddings.weight");
const QKV: &str = "attention.query_key_value.weight";
const NAMES: AttentionNames = AttentionNames {
    q: Name::new("attn_q.weight", QKV),
    k: Name::new("attn_k.weight", QKV),
    v: Name::new("attn_v.weight", QKV),
    qkv: Name::new("attn_qkv.weight", QKV),
    out: Name::new("attn_output.weight", "attention.dense.weight"),
    q_norm: Name::new("attn_q_norm.weight", "attention.query_layernorm.weight"),
    k_norm: Name::new("attn_k_norm.weight", "attention.key_layernorm.weight"),
};
const ROUTER_OF_MLX: Name = Name::new("", "mlp.gate.gate_proj.weight");
const CORRECTION: Name = Name::new("exp_probs_b.bias", "mlp.gate.expert_bias");

fn describe(config: &Config<'_>, b: &mut Builder<'_>, pairs: RopePairs) -> Result<Box<dyn Model>> {
    config.refuse_true(HAS_BIASES)?;
    config.refuse_true(NORMALISES_LOGITS)?;
    // GGUF files have settings neither for these two nor for the correction, but the tensors.
    let has_norm = config.optional_bool(keys::QK_NORM)?.unwrap_or_else(|| b.has(NAMES.q_norm.of_layer(0)));
    let qkv_bias = config.optional_bool(HAS_QKV_BIASES)?.unwrap_or_else(|| NAMES.have_qkv_bias(b, 0));
    let attention = Grouped {
        qkv_bias,
        qk_norm: if has_norm { QkNorm::Head } else { QkNorm::None },
        names: NAMES,
        ..Grouped::read_partial(config)?.with_pairs(pairs)
    };
    let dense_layers = config.number(keys::DENSE_LAYERS)?;
    let corrects = config.optional_bool(CORRECTS)?;
    let corrects = corrects.unwrap_or_else(|| b.has(CORRECTION.of_layer(dense_layers)));
    let inner = config.count(keys::EXPERT_INNER)?;
    let mixture = Mixture {
        gate: if b.format() == Format::Mlx { ROUTER_OF_MLX } else { Mixture::GATE },
        correction: corrects.then_some(CORRECTION),
        shared: shared(config, inner)?,
        ..Mixture::new(router(config)?, inner)
    };
    let dense = LayerRecipe::new(attention.clone(), Dense::new(config.count(keys::INNER)?));
    let recipe = Recipe::dense_first(config, dense_layers, &dense, &LayerRecipe::new(attention, mixture))?;
    // Converters to GGUF and MLX normalise the output matrix.
    let normalises =
        config.format() == Format::HuggingFace && config.optional_bool(NORMALISES_OUTPUT)? == Some(true);
    decoder::describe(config, b, &Recipe { embed: EMBED, normalises_output: normalises, ..recipe })
}

fn shared(config: &Config<'_>, inner: usize) -> Result<Option<Shared>> {
    if config.optional_bool(HAS_SHARED)? == Some(false) {
        return Ok(None);
    }
    let inner = config.optional_count(SHARED_INNER)?.unwrap_or(inner);
    Ok(Shared::plain(config.number(SHARED_EXPERTS)?, inner))
}

fn router(config: &Config<'_>) -> Result<Router> {
    let normalise = config.optional_bool(keys::ROUTER_NORMALISES)?.unwrap_or(false);
    let scores = match (config.optional_count(keys::ROUTER_FUNCTION)?, config.optional_text(SCORE_FUNCTION)?)
    {
        (None | Some(1), None) | (None, Some("softmax")) => Scores::Softmax,
        (Some(2), _) | (None, Some("sigmoid")) => Scores::Sigmoid,
        (Some(other), _) => return Err(config.unsupported(keys::ROUTER_FUNCTION, &other.to_string())),
        (None, Some(other)) => return Err(config.unsupported(SCORE_FUNCTION, other)),
    };
    let router =
        Router { scores, scale: config.router_scale()?, ..feed_forward::softmax_router(config, normalise)? };
    Ok(Router { groups: deepseek2::groups(config, &router, GroupScore::BestTwo)?, ..router })
}
