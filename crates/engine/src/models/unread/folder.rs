//! Settings of `config.json` that change the arithmetic in some families, and what they may say in those that do not
//! read them.

use super::Neutral::{self, Empty, Off, On, One, Words};
use crate::error::Result;
use crate::format::Key;
use crate::models::{Config, keys};

/// The values of a setting that change nothing, if the setting is known to change the arithmetic.
pub(super) fn neutral(name: &str) -> Option<Neutral> {
    KNOWN.iter().find(|(_, names)| names.contains(&name)).map(|&(neutral, _)| neutral)
}

/// Refuses a model without a setting whose default depends on the family in transformers. Published models have it.
///
/// # Errors
/// If it is missing.
pub(super) fn require(arch: &str, config: &Config<'_>) -> Result<()> {
    let is_mixtral = arch == "llama" && config.optional_count(keys::EXPERTS)?.is_some();
    let required: &[Key] = match arch {
        "minimax-m2" | "gpt-oss" => &[keys::ROPE_BASE],
        "glm4moe" => &[keys::ROPE_SHARE],
        _ if is_mixtral => &[keys::ROPE_BASE],
        _ => &[],
    };
    required.iter().try_for_each(|&key| config.float(key).map(drop))
}

const KNOWN: &[(Neutral, &[&str])] = &[
    (
        Off,
        &[
            // Scores, logits and queries.
            "attn_logit_softcapping",
            "router_logit_softcapping",
            "final_logit_softcapping",
            "attention_multiplier",
            "query_pre_attn_scalar",
            "rope_parameters.llama_4_scaling_beta",
            "llama_4_scaling.beta",
            "attn_temperature_tuning",
            "clip_qkv",
            // What a token sees, and the keys and values that layers share.
            "use_sliding_window",
            "attention_chunk_size",
            "use_bidirectional_attention",
            "index_topk",
            "num_kv_shared_layers",
            // Rotations that differ from layer to layer.
            "rope_local_base_freq",
            "rope_parameters.full_attention.rope_theta",
            "rope_parameters.sliding_attention.rope_theta",
            "no_rope_layer_interval",
            // Feed-forward blocks.
            "swiglu_limit",
            "swiglu_limits",
            "swiglu_limits_shared",
            "hidden_size_per_layer_input",
            "use_parallel_residual",
        ],
    ),
    (Empty, &["mlp_only_layers"]),
    (
        One,
        &[
            "decoder_sparse_step",
            "moe_layer_freq",
            "n_group",
            "topk_group",
            "routed_scaling_factor",
            "logit_scale",
            "logits_scaling",
            "lm_head_multiplier",
            "embedding_multiplier",
            "residual_multiplier",
            "hc_mult",
        ],
    ),
    // For each layer, whether it has softmax attention, and whether it rotates.
    (On, &["attn_type_list", "no_rope_layers", "is_causal"]),
    // Layers with linear attention have other tensors.
    (Words(&["full_attention", "linear_attention"]), &["layer_types"]),
    (Words(&["softmax"]), &["scoring_func"]),
    (Words(&["rope", "rotary"]), &["position_embedding_type"]),
];
