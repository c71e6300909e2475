//! What GGUF files may say about settings that no code reads.

use super::Neutral::{self, Any, Factor, Like, OfWindow, Off, On, One, Window};

/// Whether a setting is ignored, whatever its value is. `key` is its name without the architecture.
pub fn is_ignored(arch: &str, key: &str) -> bool {
    matches!(neutral(arch, key), Some(Any))
}

/// The values of a setting that change nothing, if the setting is known.
pub(super) fn neutral(arch: &str, key: &str) -> Option<Neutral> {
    if let Some((.., value)) = COMPUTED.iter().find(|(known, named, _)| *known == arch && *named == key) {
        return Some(Neutral::Is(*value));
    }
    // Files of Granite say here whether there is a rotation at all. In others it is a note about the training.
    if key == "rope.scaling.finetuned" {
        return Some(if arch.starts_with("granite") { On } else { Any });
    }
    // Its files have settings of a rotation, which its attention has not, and the sizes of Mamba2 layers, with which it is
    // refused.
    if arch == "nemotron_h_moe" && (key.starts_with("rope.") || MAMBA_SIZES.contains(&key)) {
        return Some(Any);
    }
    if OTHER_PARTS.iter().any(|part| key.starts_with(part)) {
        return Some(Any);
    }
    KNOWN.iter().find(|(_, keys)| keys.contains(&key)).map(|&(neutral, _)| neutral)
}

/// The sizes of Mamba2 layers.
const MAMBA_SIZES: [&str; 5] =
    ["ssm.conv_kernel", "ssm.state_size", "ssm.group_count", "ssm.inner_size", "ssm.time_step_rank"];

/// All settings that we know and that some family does not read, by what they may be there.
const KNOWN: &[(Neutral, &[&str])] = &[
    // Descriptions, limits of training, and what only embeddings, classifiers and rerankers use.
    (
        Any,
        &[
            "vocab_size",
            "tensor_data_layout",
            "embedding_length_out",
            "pooling_type",
            "classifier.output_labels",
            "classifier.pooling_type",
            "classifier.activation",
        ],
    ),
    // Sizes and the kinds of layers. Families that do not read them take them from other settings or from the tensors,
    // which are all checked: none may be missing, unknown or of another shape.
    (
        Any,
        &[
            "feed_forward_length",
            "expert_feed_forward_length",
            "expert_shared_feed_forward_length",
            "leading_dense_block_count",
            "interleave_moe_layer_step",
            "moe_every_n_layers",
            "full_attention_interval",
            "attention.recurrent_layers",
            "attention.head_count_kv",
            "attention.key_length",
            "attention.value_length",
            "attention.head_dim",
        ],
    ),
    // The epsilon of the other kind of norm than the family has.
    (Any, &["attention.layer_norm_epsilon", "attention.layer_norm_rms_epsilon"]),
    // Images and audio. A text token has the same position in all sections of its rotation.
    (
        Any,
        &[
            "rope.dimension_sections",
            "rope.mrope_section",
            "rope.mrope_interleaved",
            "mrope_sections",
            "n_deepstack_layers",
            "deepstack_mapping",
            "image_token_id",
            "image_token_index",
            "vision_start_token_id",
            "vision_end_token_id",
            "spatial_merge_size",
        ],
    ),
    // Details of YaRN, which `Config::rope_scaling` reads if the rotation is scaled that way. The factor is not read if
    // the rotation is not scaled.
    (
        Any,
        &[
            "rope.scaling.factor",
            "rope.scaling.original_context_length",
            "rope.scaling.yarn_log_multiplier",
            "rope.scaling.yarn_attn_factor",
            "rope.scaling.yarn_ext_factor",
            "rope.scaling.yarn_beta_fast",
            "rope.scaling.yarn_beta_slow",
        ],
    ),
    (
        One,
        &[
            "rope.scale_linear",
            "rope.scaling.alpha",
            "residual_scale",
            "embedding_scale",
            "logit_scale",
            "attention.output_scale",
            "attention.value_scale",
            "expert_weights_scale",
            "expert_group_count",
            "expert_group_used_count",
            "expert_shared_count",
            // Softmax is the first of the functions.
            "expert_gating_func",
        ],
    ),
    (Factor, &["rope.scaling.attn_factor"]),
    (On, &["attention.causal", "attention.rope_pattern"]),
    (Like("rope.dimension_count"), &["rope.dimension_count_swa"]),
    (Like("rope.freq_base"), &["rope.freq_base_swa"]),
    (Like("attention.key_length"), &["attention.key_length_swa"]),
    (Like("attention.value_length"), &["attention.value_length_swa"]),
    (Window, &["attention.sliding_window"]),
    (OfWindow, &["attention.sliding_window_pattern"]),
    // Mechanisms that only some families have.
    (
        Off,
        &[
            "attn_logit_softcapping",
            "router_logit_softcapping",
            "final_logit_softcapping",
            "attention.scale",
            "attention.temperature_length",
            "attention.temperature_scale",
            "attention.clamp_kqv",
            "attention.max_alibi_bias",
            "attention.shared_kv_layers",
            "attention.q_lora_rank",
            "attention.kv_lora_rank",
            "attention.key_length_mla",
            "attention.value_length_mla",
            "attention.kv_lora_rank_swa",
            "attention.key_length_mla_swa",
            "attention.value_length_mla_swa",
            "attention.output_group_count",
            "attention.output_lora_rank",
            "attention.compress_rope_freq_base",
            "attention.compress_ratios",
            "attention.indexer.head_count",
            "attention.indexer.key_length",
            "attention.indexer.top_k",
            "attention.indexer.block_size",
            "attention.indexer.local_blocks",
            "attention.indexer.types",
            "attention.indexer.kpool",
            "attention.indexer.kpool_select_tail",
            "expert_count",
            "expert_used_count",
            "expert_chunk_feed_forward_length",
            "expert_latent_length",
            "expert_group_scale",
            "experts_per_group",
            "moe_latent_size",
            "swiglu_clamp_exp",
            "swiglu_clamp_shexp",
            "use_parallel_residual",
            "nextn_predict_layers",
            "hash_layer_count",
            "hyper_connection.count",
            "hyper_connection.sinkhorn_iterations",
            "hyper_connection.epsilon",
            "hyper_connection.magnitude",
            "hyper_connection.low_rank",
            "embedding_length_per_layer_input",
            "ssm.conv_kernel",
            "ssm.inner_size",
            "ssm.state_size",
            "ssm.time_step_rank",
            "ssm.group_count",
            "ssm.dt_b_c_rms",
            "kda.head_dim",
            "kda.safe_gate",
            "kda.gate_lower_bound",
            "shortconv.l_cache",
        ],
    ),
];

/// Parts of models for images and audio, whose settings some programs write beside those of the text model.
const OTHER_PARTS: [&str; 3] = ["vision.", "audio.", "mm."];

/// What a family computes, whatever the file says: architecture, setting and value.
const COMPUTED: &[(&str, &str, bool)] = &[
    ("llama", "expert_weights_norm", true),
    ("qwen3moe", "expert_weights_norm", true),
    ("qwen2moe", "expert_weights_norm", false),
    ("olmoe", "expert_weights_norm", false),
    ("minimax-m2", "expert_weights_norm", true),
    // Other names in files of Ollama.
    ("qwen3moe", "norm_top_k_prob", true),
    ("qwen35moe", "norm_top_k_prob", true),
    ("qwen35", "ssm.v_head_reordered", true),
    ("qwen35moe", "ssm.v_head_reordered", true),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_known_setting_is_listed_once() {
        let mut names: Vec<_> = KNOWN.iter().flat_map(|(_, keys)| keys.iter()).collect();
        names.sort_unstable();
        let repeated: Vec<_> = names.windows(2).filter(|pair| pair[0] == pair[1]).collect();
        assert!(repeated.is_empty(), "{repeated:?}");
    }
}
