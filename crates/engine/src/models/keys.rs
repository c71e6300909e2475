//! The settings that many families share: their names in GGUF files and in `config.json`. Older versions of the
//! latter are flat, newer ones nest some settings.

use crate::format::Key;

const fn key(gguf: &'static str, hugging_face: &'static [&'static str]) -> Key {
    Key { gguf, hugging_face }
}

/// The longest context of the model.
pub const CONTEXT: Key = key("context_length", &["max_position_embeddings", "max_seq_len"]);
/// The number of layers.
pub const LAYERS: Key = key("block_count", &["num_hidden_layers"]);
/// Channels of the residual stream.
pub const HIDDEN: Key = key("embedding_length", &["hidden_size"]);
/// The number of query heads.
pub const HEADS: Key = key("attention.head_count", &["num_attention_heads"]);
/// The number of key heads.
pub const KV_HEADS: Key = key("attention.head_count_kv", &["num_key_value_heads", "num_attention_groups"]);
/// Channels of a key.
pub const KEY_DIM: Key = key("attention.key_length", &["head_dim"]);
/// Channels of a value.
pub const VALUE_DIM: Key = key("attention.value_length", &["v_head_dim"]);
/// Channels of the latent from which keys and values are derived.
pub const KV_RANK: Key = key("attention.kv_lora_rank", &["kv_lora_rank"]);
/// Channels of the latent from which queries are derived.
pub const Q_RANK: Key = key("attention.q_lora_rank", &["q_lora_rank"]);
/// Channels of a head's key, if keys are derived from latents.
pub const HEAD_KEY_DIM: Key = key("attention.key_length_mla", &[]);
/// Channels of a head's value, if values are derived from latents.
pub const HEAD_VALUE_DIM: Key = key("attention.value_length_mla", &[]);
/// Channels of a head's key that do not rotate.
pub const PLAIN_DIM: Key = key("", &["qk_nope_head_dim"]);
/// Channels of a head's key that rotate.
pub const ROTATED_DIM: Key = key("rope.dimension_count", &["qk_rope_head_dim"]);
/// Whether neighbouring channels rotate together.
pub const ROPE_INTERLEAVED: Key = key("", &["rope_interleave"]);
/// The epsilon of the norms.
pub const NORM_EPS: Key =
    key("attention.layer_norm_rms_epsilon", &["rms_norm_eps", "norm_eps", "layernorm_epsilon"]);
/// The base of the rotation's frequencies.
pub const ROPE_BASE: Key =
    key("rope.freq_base", &["rope_parameters.rope_theta", "rope_theta", "rope_scaling.rope_theta"]);
/// The number of channels that rotate.
pub const ROPE_DIM: Key = key("rope.dimension_count", &["rotary_dim"]);
/// The share of the channels that rotate.
pub const ROPE_SHARE: Key =
    key("", &["rope_parameters.partial_rotary_factor", "partial_rotary_factor", "partial_rotary_factors"]);
/// The kind of scaling of the rotation for longer contexts.
pub const ROPE_SCALING: Key = key(
    "rope.scaling.type",
    &["rope_parameters.rope_type", "rope_parameters.type", "rope_scaling.rope_type", "rope_scaling.type"],
);
/// The factor of the scaling.
pub const ROPE_FACTOR: Key = key("rope.scaling.factor", &["rope_parameters.factor", "rope_scaling.factor"]);
/// The factor by which a raised base divides the slowest frequency.
pub const ROPE_ALPHA: Key = key("", &["rope_parameters.alpha", "rope_scaling.alpha"]);
/// The factor of the scaling, in older GGUF files.
pub const ROPE_LINEAR: Key = key("rope.scale_linear", &[]);
/// The context length of the first training.
pub const ROPE_ORIGINAL: Key = key(
    "rope.scaling.original_context_length",
    &[
        "original_max_position_embeddings",
        "rope_parameters.original_max_position_embeddings",
        "rope_scaling.original_max_position_embeddings",
    ],
);
/// Rotations in the original context below which Llama 3 scales fully.
pub const ROPE_LOW: Key = key("", &["rope_parameters.low_freq_factor", "rope_scaling.low_freq_factor"]);
/// Rotations in the original context above which Llama 3 does not scale.
pub const ROPE_HIGH: Key = key("", &["rope_parameters.high_freq_factor", "rope_scaling.high_freq_factor"]);
/// Rotations in the original context above which YaRN does not scale.
pub const ROPE_BETA_FAST: Key =
    key("rope.scaling.yarn_beta_fast", &["rope_parameters.beta_fast", "rope_scaling.beta_fast"]);
/// Rotations in the original context below which YaRN scales fully.
pub const ROPE_BETA_SLOW: Key =
    key("rope.scaling.yarn_beta_slow", &["rope_parameters.beta_slow", "rope_scaling.beta_slow"]);
/// Whether YaRN rounds the boundaries between the two.
pub const ROPE_TRUNCATE: Key = key("", &["rope_parameters.truncate", "rope_scaling.truncate"]);
/// YaRN's factor of cosine and sine.
pub const ROPE_ATTENTION: Key = key(
    "rope.scaling.yarn_attn_factor",
    &["rope_parameters.attention_factor", "rope_scaling.attention_factor"],
);
/// LongRoPE's factor of cosine and sine up to the original context.
pub const ROPE_SHORT_SCALE: Key = key("", &["rope_parameters.short_mscale", "rope_scaling.short_mscale"]);
/// LongRoPE's divisors of the frequencies up to the original context.
pub const ROPE_SHORT_DIVISORS: Key = key("", &["rope_parameters.short_factor", "rope_scaling.short_factor"]);
/// How strongly YaRN scales cosine and sine.
pub const ROPE_MSCALE: Key = key("", &["rope_parameters.mscale", "rope_scaling.mscale"]);
/// How strongly YaRN scales the scores instead; GGUF files have a tenth of it.
pub const ROPE_MSCALE_ALL_DIM: Key = key(
    "rope.scaling.yarn_log_multiplier",
    &["rope_parameters.mscale_all_dim", "rope_scaling.mscale_all_dim"],
);
/// Another factor of cosine and sine.
pub const ROPE_ATTENTION_MULTIPLIER: Key = key("rope.scaling.attn_factor", &[]);
/// The share of YaRN in a mix with linear scaling.
pub const ROPE_EXTRAPOLATION: Key = key("rope.scaling.yarn_ext_factor", &[]);
/// The number of routed experts of a layer.
pub const EXPERTS: Key =
    key("expert_count", &["num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"]);
/// The number of experts that a token uses.
pub const EXPERTS_USED: Key =
    key("expert_used_count", &["num_experts_per_tok", "top_k_experts", "moe_top_k"]);
/// Inner channels of an expert.
pub const EXPERT_INNER: Key = key("expert_feed_forward_length", &["moe_intermediate_size"]);
/// Inner channels of a dense feed-forward block and, in some families, of an expert.
pub const INNER: Key = key("feed_forward_length", &["intermediate_size"]);
/// Inner channels of the shared expert.
pub const SHARED_INNER: Key = key(
    "expert_shared_feed_forward_length",
    &["shared_expert_intermediate_size", "share_expert_dim", "share_expert_dims"],
);
/// Whether the weights of the chosen experts are normalised to sum to one.
pub const ROUTER_NORMALISES: Key = key("expert_weights_norm", &["norm_topk_prob", "norm_expert_weight"]);
/// How scores are computed from the router's logits: 1 softmax, 2 sigmoid, 3 softmax over the chosen experts.
pub const ROUTER_FUNCTION: Key = key("expert_gating_func", &[]);
/// How scores are computed from the router's logits.
pub const ROUTER_SCORES: Key = key("", &["scoring_func", "moe_router_activation", "moe_router_score_func"]);
/// The factor of the weights of the chosen experts.
pub const ROUTER_SCALE: Key = key(
    "expert_weights_scale",
    &["routed_scaling_factor", "moe_router_scaling_factor", "moe_routed_scaling_factor"],
);
/// The number of groups of experts.
pub const ROUTER_GROUPS: Key = key("expert_group_count", &["n_group"]);
/// The number of groups that a token uses.
pub const ROUTER_GROUPS_USED: Key = key("expert_group_used_count", &["topk_group"]);
/// How the router chooses groups.
pub const ROUTER_METHOD: Key = key("", &["topk_method"]);
/// The distance between layers with experts.
pub const MIXTURE_INTERVAL: Key = key("", &["moe_layer_freq"]);
/// The number of shared experts.
pub const SHARED_EXPERTS: Key = key("expert_shared_count", &["n_shared_experts", "num_shared_experts"]);
/// The number of layers without experts at the start.
pub const DENSE_LAYERS: Key = key("leading_dense_block_count", &["first_k_dense_replace"]);
/// For each layer, whether it has experts.
pub const FEED_FORWARD_TYPES: Key = key("", &["mlp_layer_types"]);
/// Whether queries and keys have norms.
pub const QK_NORM: Key = key("", &["use_qk_norm"]);
/// Whether queries, keys and values have biases.
pub const QKV_BIAS: Key = key("", &["attention_bias"]);
/// The number of layers for multi-token prediction, after those of the model.
pub const EXTRA_LAYERS: Key =
    key("nextn_predict_layers", &["num_nextn_predict_layers", "mtp_num_hidden_layers"]);
/// The activation function of experts.
pub const ACTIVATION: Key = key("", &["hidden_act"]);
/// The activation function of feed-forward blocks, in families with another default than SiLU.
pub const HIDDEN_ACTIVATION: Key = key("", &["hidden_activation"]);
/// Whether the embedding is also the output matrix.
pub const TIED: Key = key("", &["tie_word_embeddings"]);
/// The number of positions of the window.
pub const WINDOW: Key = key("attention.sliding_window", &["sliding_window"]);
/// For each layer, whether it has a window, in GGUF files that do not have the period instead, and in some folders.
pub const WINDOW_PATTERN: Key = key("attention.sliding_window_pattern", &["hybrid_layer_pattern"]);
/// The distance between layers without a window.
pub const WINDOW_PERIOD: Key = key("attention.sliding_window_pattern", &["sliding_window_pattern"]);
/// For each layer, whether it has a window.
pub const LAYER_TYPES: Key = key("", &["layer_types"]);
/// The block of each layer, if layers are single blocks: a list of words, or a letter for each.
pub const BLOCKS: Key = key("", &["layers_block_type", "hybrid_override_pattern"]);
/// The steepness of the sigmoid in an expert.
pub const SWIGLU_ALPHA: Key = key("", &["swiglu_alpha"]);
/// The bound of gate and up in an expert.
pub const SWIGLU_LIMIT: Key = key("", &["swiglu_limit"]);
/// The bound of the logits, which become `bound · tanh(logit / bound)`.
pub const LOGIT_SOFTCAP: Key = key("final_logit_softcapping", &["final_logit_softcapping"]);
/// Which tokens see those after them.
pub const BIDIRECTIONAL: Key = key("", &["use_bidirectional_attention"]);
/// How much queries at late positions are sharpened.
pub const TEMPERATURE: Key =
    key("attention.temperature_scale", &["rope_parameters.llama_4_scaling_beta", "llama_4_scaling.beta"]);
/// How many positions share a factor of queries; without it, the context length of the first training.
pub const TEMPERATURE_LENGTH: Key = key("attention.temperature_length", &[]);
/// Whether dense feed-forward blocks have biases.
pub const MLP_BIAS: Key = key("", &["mlp_bias"]);
