//! The shapes of real models, one for each family, as settings of GGUF files.

use super::types::Types;

/// A family, and the default shape of its models.
pub struct Family {
    /// `general.architecture`.
    pub name: &'static str,
    /// The model with that shape.
    pub model: &'static str,
    /// `KEY=VALUE`; the keys are without the family's name.
    pub(super) settings: &'static str,
    /// Settings that are only written if they are given.
    pub(super) if_given: &'static [&'static str],
    /// Optional tensors that this model has, without the layer's prefix.
    pub(super) optional: &'static [&'static str],
    /// The types of its matrices.
    pub(super) types: Types,
}

const PLAIN: Family = Family {
    name: "",
    model: "",
    settings: "",
    if_given: &[],
    optional: &["output.weight"],
    types: Types::Q4_K_M,
};

/// All families. The first is the default.
pub const FAMILIES: &[Family] = &[
    Family {
        name: "qwen3moe",
        model: "Qwen3-30B-A3B",
        settings: "block_count=48 context_length=32768 embedding_length=2048 feed_forward_length=6144
            attention.head_count=32 attention.head_count_kv=4 attention.key_length=128 attention.value_length=128
            attention.layer_norm_rms_epsilon=1e-6 rope.freq_base=1e6
            expert_count=128 expert_used_count=8 expert_feed_forward_length=768",
        ..PLAIN
    },
    Family {
        name: "qwen2",
        model: "Qwen2.5-7B",
        settings: "block_count=28 context_length=32768 embedding_length=3584 feed_forward_length=18944
            attention.head_count=28 attention.head_count_kv=4 attention.key_length=128 attention.value_length=128
            attention.layer_norm_rms_epsilon=1e-6 rope.freq_base=1e6",
        ..PLAIN
    },
    Family {
        name: "qwen3",
        model: "Qwen3-8B",
        settings: "block_count=36 context_length=40960 embedding_length=4096 feed_forward_length=12288
            attention.head_count=32 attention.head_count_kv=8 attention.key_length=128 attention.value_length=128
            attention.layer_norm_rms_epsilon=1e-6 rope.freq_base=1e6",
        ..PLAIN
    },
    Family {
        name: "llama",
        model: "Llama-3.1-8B; with 8 experts, 2 used, Mixtral-8x7B",
        settings: "block_count=32 context_length=32768 embedding_length=4096 feed_forward_length=14336
            attention.head_count=32 attention.head_count_kv=8 attention.key_length=128 attention.value_length=128
            attention.layer_norm_rms_epsilon=1e-5 rope.freq_base=5e5 rope.dimension_count=128",
        if_given: &["expert_count", "expert_used_count"],
        ..PLAIN
    },
    Family {
        name: "olmoe",
        model: "OLMoE-1B-7B",
        settings: "block_count=16 context_length=4096 embedding_length=2048 feed_forward_length=1024
            attention.head_count=16 attention.head_count_kv=16 attention.key_length=128 attention.value_length=128
            attention.layer_norm_rms_epsilon=1e-5 rope.freq_base=1e4
            expert_count=64 expert_used_count=8",
        ..PLAIN
    },
    Family {
        name: "qwen2moe",
        model: "Qwen1.5-MoE-A2.7B",
        settings: "block_count=24 context_length=8192 embedding_length=2048 feed_forward_length=5632
            attention.head_count=16 attention.head_count_kv=16 attention.key_length=128 attention.value_length=128
            attention.layer_norm_rms_epsilon=1e-6 rope.freq_base=1e6
            expert_count=60 expert_used_count=4 expert_feed_forward_length=1408
            expert_shared_feed_forward_length=5632",
        ..PLAIN
    },
    Family {
        name: "minimax-m2",
        model: "MiniMax-M2",
        settings: "block_count=62 context_length=196608 embedding_length=3072 feed_forward_length=1536
            attention.head_count=48 attention.head_count_kv=8 attention.key_length=128 attention.value_length=128
            attention.layer_norm_rms_epsilon=1e-6 rope.freq_base=5e6 rope.dimension_count=64
            expert_count=256 expert_used_count=8 expert_feed_forward_length=1536 expert_gating_func=2",
        ..PLAIN
    },
    Family {
        name: "glm4moe",
        model: "GLM-4.5-Air",
        settings: "block_count=46 context_length=131072 embedding_length=4096 feed_forward_length=10944
            attention.head_count=96 attention.head_count_kv=8 attention.key_length=128 attention.value_length=128
            attention.layer_norm_rms_epsilon=1e-5 rope.freq_base=1e6 rope.dimension_count=64
            expert_count=128 expert_used_count=8 expert_feed_forward_length=1408 expert_shared_count=1
            leading_dense_block_count=1 expert_gating_func=2 expert_weights_norm=true expert_weights_scale=1.0",
        optional: &["output.weight", "attn_q.bias"],
        ..PLAIN
    },
    Family {
        name: "qwen35moe",
        model: "Qwen3.5-35B-A3B",
        settings: "rope.dimension_sections=11,11,10,0 block_count=40 context_length=262144 embedding_length=2048
            attention.head_count=16 attention.head_count_kv=2 attention.key_length=256 attention.value_length=256
            attention.layer_norm_rms_epsilon=1e-6 rope.freq_base=1e7 rope.dimension_count=64
            expert_count=256 expert_used_count=8 expert_feed_forward_length=512
            expert_shared_feed_forward_length=512 full_attention_interval=4
            ssm.conv_kernel=4 ssm.state_size=128 ssm.group_count=16 ssm.time_step_rank=32 ssm.inner_size=4096",
        optional: &["output.weight", "ssm_conv1d.weight"],
        ..PLAIN
    },
    Family {
        name: "qwen3next",
        model: "Qwen3-Next-80B-A3B",
        settings: "block_count=48 context_length=262144 embedding_length=2048 feed_forward_length=5120
            attention.head_count=16 attention.head_count_kv=2 attention.key_length=256 attention.value_length=256
            attention.layer_norm_rms_epsilon=1e-6 rope.freq_base=1e7 rope.dimension_count=64
            expert_count=512 expert_used_count=10 expert_feed_forward_length=512
            expert_shared_feed_forward_length=512 full_attention_interval=4
            ssm.conv_kernel=4 ssm.state_size=128 ssm.group_count=16 ssm.time_step_rank=32 ssm.inner_size=4096",
        optional: &["output.weight", "ssm_conv1d.weight", "ssm_ba.weight"],
        ..PLAIN
    },
    Family {
        name: "gpt-oss",
        model: "gpt-oss-20b",
        settings: "block_count=24 context_length=131072 embedding_length=2880 feed_forward_length=2880
            attention.head_count=64 attention.head_count_kv=8 attention.key_length=64 attention.value_length=64
            attention.layer_norm_rms_epsilon=1e-5 attention.sliding_window=128
            rope.freq_base=150000.0 rope.scaling.type=yarn rope.scaling.factor=32.0
            rope.scaling.original_context_length=4096
            expert_count=32 expert_used_count=4 expert_feed_forward_length=2880",
        types: Types::GPT_OSS,
        ..PLAIN
    },
    Family {
        name: "deepseek2",
        model: "DeepSeek-V2-Lite",
        settings: "block_count=27 context_length=32768 embedding_length=2048 feed_forward_length=10944
            attention.head_count=16 attention.head_count_kv=1 attention.key_length=576 attention.value_length=512
            attention.key_length_mla=192 attention.value_length_mla=128 attention.kv_lora_rank=512
            attention.layer_norm_rms_epsilon=1e-6 rope.freq_base=1e4 rope.dimension_count=64
            expert_count=64 expert_used_count=6 expert_feed_forward_length=1408 expert_shared_count=2
            leading_dense_block_count=1 expert_gating_func=1 expert_weights_norm=false expert_weights_scale=1.0",
        // With sigmoids instead of a softmax, as in V3, the router has a correction.
        optional: &["output.weight", "attn_k_b.weight", "exp_probs_b.bias"],
        ..PLAIN
    },
    Family {
        name: "dots1",
        model: "dots.llm1",
        settings: "block_count=62 context_length=32768 embedding_length=4096 feed_forward_length=10944
            attention.head_count=32 attention.head_count_kv=32 attention.key_length=128 attention.value_length=128
            attention.layer_norm_rms_epsilon=1e-5 rope.freq_base=1e7 rope.dimension_count=128
            expert_count=128 expert_used_count=6 expert_feed_forward_length=1408 expert_shared_count=2
            leading_dense_block_count=1 expert_gating_func=2 expert_weights_norm=true expert_weights_scale=2.5",
        ..PLAIN
    },
    Family {
        name: "hy_v3",
        model: "Hy3",
        settings: "block_count=80 context_length=262144 embedding_length=4096 feed_forward_length=13312
            attention.head_count=64 attention.head_count_kv=8 attention.key_length=128 attention.value_length=128
            attention.layer_norm_rms_epsilon=1e-5 rope.freq_base=11158840.0
            expert_count=192 expert_used_count=8 expert_feed_forward_length=1536
            expert_shared_feed_forward_length=1536 leading_dense_block_count=1
            expert_gating_func=2 expert_weights_norm=true expert_weights_scale=2.826",
        optional: &["output.weight", "ffn_gate_inp.weight"],
        ..PLAIN
    },
    Family {
        name: "exaone-moe",
        model: "K-EXAONE-236B-A23B",
        settings: "block_count=48 context_length=262144 embedding_length=6144 feed_forward_length=18432
            attention.head_count=64 attention.head_count_kv=8 attention.key_length=128 attention.value_length=128
            attention.layer_norm_rms_epsilon=1e-5 attention.sliding_window=128 rope.freq_base=1e6
            expert_count=128 expert_used_count=8 expert_feed_forward_length=2048 expert_shared_count=1
            leading_dense_block_count=1 expert_gating_func=2 expert_weights_norm=true expert_weights_scale=2.5",
        ..PLAIN
    },
    Family {
        name: "afmoe",
        model: "Trinity-Mini",
        settings: "block_count=32 context_length=131072 embedding_length=2048 feed_forward_length=6144
            attention.head_count=32 attention.head_count_kv=4 attention.key_length=128 attention.value_length=128
            attention.layer_norm_rms_epsilon=1e-5 attention.sliding_window=2048 rope.freq_base=1e4
            expert_count=128 expert_used_count=8 expert_feed_forward_length=1024 expert_shared_count=1
            leading_dense_block_count=2 expert_gating_func=2 expert_weights_norm=true expert_weights_scale=2.826",
        ..PLAIN
    },
    Family {
        name: "ernie4_5-moe",
        model: "ERNIE-4.5-21B-A3B",
        settings: "block_count=28 context_length=131072 embedding_length=2560 feed_forward_length=12288
            attention.head_count=20 attention.head_count_kv=4 attention.key_length=128 attention.value_length=128
            attention.layer_norm_rms_epsilon=1e-5 rope.freq_base=5e5
            expert_count=64 expert_used_count=6 expert_feed_forward_length=1536 expert_shared_count=2
            leading_dense_block_count=1 interleave_moe_layer_step=1",
        optional: &["exp_probs_b.bias"],
        ..PLAIN
    },
    Family {
        name: "hunyuan-moe",
        model: "Hunyuan-A13B",
        settings: "block_count=32 context_length=262144 embedding_length=4096 feed_forward_length=3072
            attention.head_count=32 attention.head_count_kv=8 attention.key_length=128 attention.value_length=128
            attention.layer_norm_rms_epsilon=1e-5 rope.freq_base=11158840.0
            expert_count=64 expert_used_count=8 expert_feed_forward_length=3072
            expert_shared_feed_forward_length=3072",
        optional: &[],
        ..PLAIN
    },
    Family {
        name: "mistral3",
        model: "Ministral-3-8B",
        settings: "block_count=34 context_length=262144 embedding_length=4096 feed_forward_length=14336
            attention.head_count=32 attention.head_count_kv=8 attention.key_length=128 attention.value_length=128
            attention.layer_norm_rms_epsilon=1e-5 attention.temperature_scale=0.1 rope.freq_base=1e6
            rope.dimension_count=128 rope.scaling.type=yarn rope.scaling.factor=16.0
            rope.scaling.original_context_length=16384 rope.scaling.yarn_log_multiplier=1.0",
        ..PLAIN
    },
    Family {
        name: "mistral4",
        model: "Mistral-Small-4",
        settings: "block_count=36 context_length=1048576 embedding_length=4096 feed_forward_length=12288
            attention.head_count=32 attention.head_count_kv=1 attention.key_length=320 attention.value_length=256
            attention.key_length_mla=128 attention.value_length_mla=128
            attention.q_lora_rank=1024 attention.kv_lora_rank=256
            attention.layer_norm_rms_epsilon=1e-6 attention.temperature_scale=0.1
            rope.freq_base=1e4 rope.dimension_count=64 rope.scaling.type=yarn rope.scaling.factor=128.0
            rope.scaling.original_context_length=8192 rope.scaling.yarn_log_multiplier=0.1
            expert_count=128 expert_used_count=4 expert_feed_forward_length=2048 expert_shared_count=1
            leading_dense_block_count=0 expert_weights_norm=true",
        optional: &["output.weight", "attn_k_b.weight"],
        ..PLAIN
    },
    Family {
        name: "qwen35",
        model: "Qwen3.5-9B",
        settings: "rope.dimension_sections=11,11,10,0 block_count=32 context_length=262144 embedding_length=4096
            feed_forward_length=12288 attention.head_count=16 attention.head_count_kv=4
            attention.key_length=256 attention.value_length=256
            attention.layer_norm_rms_epsilon=1e-6 rope.freq_base=1e7 rope.dimension_count=64 full_attention_interval=4
            ssm.conv_kernel=4 ssm.state_size=128 ssm.group_count=16 ssm.time_step_rank=32 ssm.inner_size=4096",
        optional: &["output.weight", "ssm_conv1d.weight"],
        ..PLAIN
    },
    Family {
        name: "qwen3vlmoe",
        model: "Qwen3-VL-30B-A3B, without its vision part",
        settings: "rope.dimension_sections=24,20,20,0 block_count=48 context_length=262144 embedding_length=2048
            feed_forward_length=6144
            attention.head_count=32 attention.head_count_kv=4 attention.key_length=128 attention.value_length=128
            attention.layer_norm_rms_epsilon=1e-6 rope.freq_base=5e6
            expert_count=128 expert_used_count=8 expert_feed_forward_length=768",
        ..PLAIN
    },
    Family {
        name: "lfm2moe",
        model: "LFM2-8B-A1B",
        settings: "block_count=24 context_length=128000 embedding_length=2048 feed_forward_length=7168
            attention.head_count=32 attention.head_count_kv=0,0,8,0,0,0,8,0,0,0,8,0,0,0,8,0,0,0,8,0,0,8,0,0
            attention.layer_norm_rms_epsilon=1e-5 rope.freq_base=1e6 shortconv.l_cache=3
            expert_count=32 expert_used_count=4 expert_feed_forward_length=1792
            leading_dense_block_count=2 expert_gating_func=2",
        optional: &[],
        ..PLAIN
    },
    Family {
        name: "granitemoe",
        model: "Granite-3.1-3B-A800M",
        settings: "block_count=32 context_length=131072 embedding_length=1536 feed_forward_length=512
            attention.head_count=24 attention.head_count_kv=8 rope.dimension_count=64
            attention.layer_norm_rms_epsilon=1e-6 rope.freq_base=1.5e6
            attention.scale=0.015625 embedding_scale=12.0 residual_scale=0.22 logit_scale=6.0
            expert_count=40 expert_used_count=8",
        optional: &[],
        ..PLAIN
    },
    Family {
        name: "granite",
        model: "Granite-3.3-8B",
        settings: "block_count=40 context_length=131072 embedding_length=4096 feed_forward_length=12800
            attention.head_count=32 attention.head_count_kv=8 rope.dimension_count=128
            attention.layer_norm_rms_epsilon=1e-5 rope.freq_base=1e7
            attention.scale=0.0078125 embedding_scale=12.0 residual_scale=0.22 logit_scale=16.0",
        optional: &[],
        ..PLAIN
    },
    Family {
        name: "bailingmoe",
        model: "Ling-lite",
        settings: "block_count=28 context_length=16384 embedding_length=2048 feed_forward_length=5632
            attention.head_count=16 attention.head_count_kv=4 attention.key_length=128 attention.value_length=128
            attention.layer_norm_rms_epsilon=1e-6 rope.freq_base=6e5 rope.dimension_count=128
            expert_count=64 expert_used_count=6 expert_feed_forward_length=1408 expert_shared_count=2
            leading_dense_block_count=0 expert_weights_norm=true expert_weights_scale=1.0",
        ..PLAIN
    },
    Family {
        name: "bailingmoe2",
        model: "Ling-mini-2.0",
        settings: "block_count=20 context_length=32768 embedding_length=2048 feed_forward_length=5120
            attention.head_count=16 attention.head_count_kv=4 attention.key_length=128 attention.value_length=128
            attention.layer_norm_rms_epsilon=1e-6 rope.freq_base=6e5 rope.dimension_count=64
            expert_count=256 expert_used_count=8 expert_feed_forward_length=512 expert_shared_count=1
            expert_shared_feed_forward_length=512 expert_group_count=8 expert_group_used_count=4
            leading_dense_block_count=1 expert_gating_func=2 expert_weights_norm=true expert_weights_scale=2.5",
        optional: &["output.weight", "attn_q_norm.weight", "attn_qkv.weight", "exp_probs_b.bias"],
        ..PLAIN
    },
    Family {
        name: "smallthinker",
        model: "SmallThinker-21B-A3B",
        settings: "block_count=52 context_length=16384 embedding_length=2560 feed_forward_length=768
            attention.head_count=28 attention.head_count_kv=4 attention.key_length=128 attention.value_length=128
            attention.layer_norm_rms_epsilon=1e-6 rope.freq_base=1.5e6 attention.sliding_window=4096
            expert_count=64 expert_used_count=6 expert_feed_forward_length=768 expert_gating_func=2",
        ..PLAIN
    },
    Family {
        name: "grovemoe",
        model: "GroveMoE-Inst",
        settings: "block_count=48 context_length=40960 embedding_length=2048 feed_forward_length=6144
            attention.head_count=32 attention.head_count_kv=4 attention.key_length=128 attention.value_length=128
            attention.layer_norm_rms_epsilon=1e-6 rope.freq_base=1e6
            expert_count=128 expert_used_count=8 expert_feed_forward_length=768
            expert_chunk_feed_forward_length=128 experts_per_group=2 expert_group_scale=0.05",
        ..PLAIN
    },
    Family {
        name: "nemotron_h_moe",
        model: "Nemotron-3-Super, without its Mamba2 layers",
        settings: "block_count=48 context_length=262144 embedding_length=4096
            attention.head_count=32
            attention.head_count_kv=0,0,2,0,0,0,0,0,2,0,0,0,0,0,2,0,0,0,0,0,2,0,0,0,0,0,2,0,0,0,0,0,2,0,0,0,0,0,2,0,0,0,0,0,2,0,0,0
            feed_forward_length=2688,2688,0,2688,2688,2688,2688,2688,0,2688,2688,2688,2688,2688,0,2688,2688,2688,2688,2688,0,2688,2688,2688,2688,2688,0,2688,2688,2688,2688,2688,0,2688,2688,2688,2688,2688,0,2688,2688,2688,2688,2688,0,2688,2688,2688
            attention.key_length=128 attention.value_length=128 attention.layer_norm_rms_epsilon=1e-5
            expert_count=512 expert_used_count=22 expert_feed_forward_length=2688 moe_latent_size=1024
            expert_shared_count=1 expert_shared_feed_forward_length=5376
            expert_group_count=1 expert_group_used_count=1 expert_weights_norm=true expert_weights_scale=5.0",
        ..PLAIN
    },
    Family {
        name: "step35",
        model: "Step-3.5-Flash",
        settings: "block_count=45 context_length=262144 embedding_length=4096 feed_forward_length=11264
            attention.head_count=64,96,96,96,64,96,96,96,64,96,96,96,64,96,96,96,64,96,96,96,64,96,96,96,64,96,96,96,64,96,96,96,64,96,96,96,64,96,96,96,64,96,96,96,64
            attention.head_count_kv=8 attention.key_length=128 attention.value_length=128
            attention.sliding_window=512
            attention.sliding_window_pattern=0,1,1,1,0,1,1,1,0,1,1,1,0,1,1,1,0,1,1,1,0,1,1,1,0,1,1,1,0,1,1,1,0,1,1,1,0,1,1,1,0,1,1,1,0
            attention.layer_norm_rms_epsilon=1e-5 rope.freq_base=5e6 rope.freq_base_swa=1e4
            expert_count=288 expert_used_count=8 expert_feed_forward_length=1280
            expert_shared_feed_forward_length=1280 leading_dense_block_count=3
            expert_gating_func=2 expert_weights_norm=true expert_weights_scale=3.0
            swiglu_clamp_exp=0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,7,7
            swiglu_clamp_shexp=0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,16,16",
        optional: &["output.weight", "ffn_gate_inp.weight"],
        ..PLAIN
    },
    Family {
        name: "mimo2",
        model: "MiMo-V2-Flash",
        settings: "block_count=48 context_length=262144 embedding_length=4096 feed_forward_length=16384
            attention.head_count=64
            attention.head_count_kv=4,8,8,8,8,4,8,8,8,8,8,4,8,8,8,8,8,4,8,8,8,8,8,4,8,8,8,8,8,4,8,8,8,8,8,4,8,8,8,8,8,4,8,8,8,8,8,4
            attention.key_length=192 attention.value_length=128 attention.value_scale=0.707
            attention.sliding_window=128
            attention.sliding_window_pattern=0,1,1,1,1,0,1,1,1,1,1,0,1,1,1,1,1,0,1,1,1,1,1,0,1,1,1,1,1,0,1,1,1,1,1,0,1,1,1,1,1,0,1,1,1,1,1,0
            attention.layer_norm_rms_epsilon=1e-5
            rope.dimension_count=64 rope.freq_base=5e6 rope.freq_base_swa=1e4
            expert_count=256 expert_used_count=8 expert_feed_forward_length=2048
            leading_dense_block_count=1 expert_gating_func=2",
        optional: &["output.weight", "ffn_gate_inp.weight"],
        ..PLAIN
    },
    Family {
        name: "laguna",
        model: "Laguna-XS.2",
        settings: "block_count=40 context_length=131072 embedding_length=2048 feed_forward_length=8192
            attention.head_count=48,64,64,64,48,64,64,64,48,64,64,64,48,64,64,64,48,64,64,64,48,64,64,64,48,64,64,64,48,64,64,64,48,64,64,64,48,64,64,64
            attention.head_count_kv=8 attention.key_length=128 attention.value_length=128
            attention.sliding_window=512 attention.layer_norm_rms_epsilon=1e-6
            rope.dimension_count=64 rope.dimension_count_swa=128 rope.freq_base=5e5 rope.freq_base_swa=1e4
            rope.scaling.type=yarn rope.scaling.factor=32.0 rope.scaling.original_context_length=4096
            rope.scaling.yarn_beta_fast=64.0 rope.scaling.yarn_beta_slow=1.0
            expert_count=256 expert_used_count=8 expert_feed_forward_length=512
            expert_shared_feed_forward_length=512 leading_dense_block_count=1
            expert_gating_func=2 expert_weights_norm=true expert_weights_scale=2.5",
        optional: &["output.weight", "ffn_gate_inp.weight"],
        ..PLAIN
    },
    Family {
        name: "llama4",
        model: "Llama-4-Scout",
        settings: "block_count=48 context_length=10485760 embedding_length=5120 feed_forward_length=16384
            attention.head_count=40 attention.head_count_kv=8 attention.key_length=128 attention.value_length=128
            attention.layer_norm_rms_epsilon=1e-5 rope.freq_base=5e5 rope.dimension_count=128
            expert_count=16 expert_used_count=1 expert_feed_forward_length=8192
            leading_dense_block_count=0 interleave_moe_layer_step=1",
        optional: &["output.weight", "ffn_gate_inp.weight"],
        ..PLAIN
    },
    Family {
        name: "gemma4",
        model: "Gemma-4-26B-A4B; without experts, Gemma-4-31B",
        settings: "block_count=30 context_length=262144 embedding_length=2816 feed_forward_length=2112
            attention.head_count=16
            attention.head_count_kv=8,8,8,8,8,2,8,8,8,8,8,2,8,8,8,8,8,2,8,8,8,8,8,2,8,8,8,8,8,2
            attention.key_length=512 attention.value_length=512
            attention.key_length_swa=256 attention.value_length_swa=256
            attention.layer_norm_rms_epsilon=1e-6 rope.freq_base=1e6 rope.freq_base_swa=1e4
            rope.dimension_count=512 rope.dimension_count_swa=256
            attention.sliding_window=1024
            attention.sliding_window_pattern=1,1,1,1,1,0,1,1,1,1,1,0,1,1,1,1,1,0,1,1,1,1,1,0,1,1,1,1,1,0
            attention.shared_kv_layers=0 embedding_length_per_layer_input=0 final_logit_softcapping=30.0
            expert_count=128 expert_used_count=8 expert_feed_forward_length=704",
        optional: &[
            "attn_v.weight",
            "layer_output_scale.weight",
            "rope_freqs.weight",
            "ffn_gate_up_exps.weight",
        ],
        ..PLAIN
    },
    Family {
        name: "gemma3",
        model: "Gemma-3-12B",
        settings: "block_count=48 context_length=131072 embedding_length=3840 feed_forward_length=15360
            attention.head_count=16 attention.head_count_kv=8 attention.key_length=256 attention.value_length=256
            attention.layer_norm_rms_epsilon=1e-6 attention.sliding_window=1024
            rope.freq_base=1e6 rope.freq_base_swa=1e4 rope.scaling.type=linear rope.scaling.factor=8.0",
        optional: &[],
        ..PLAIN
    },
    Family {
        name: "cohere2moe",
        model: "Command A+",
        settings: "block_count=32 context_length=131072 embedding_length=4096 feed_forward_length=4096
            attention.head_count=128 attention.head_count_kv=8 attention.key_length=128 attention.value_length=128
            attention.layer_norm_epsilon=1e-5 attention.sliding_window=4096 rope.freq_base=1e4
            rope.dimension_count=128 rope.scaling.type=none logit_scale=0.0625
            expert_count=128 expert_used_count=8 expert_feed_forward_length=4096 expert_shared_count=4
            leading_dense_block_count=0 expert_gating_func=2 expert_weights_norm=true",
        optional: &[],
        ..PLAIN
    },
    Family {
        name: "phimoe",
        model: "Phi-3.5-MoE",
        settings: "block_count=32 context_length=131072 embedding_length=4096 feed_forward_length=6400
            attention.head_count=32 attention.head_count_kv=8 attention.layer_norm_rms_epsilon=1e-5
            attention.sliding_window=131072 rope.dimension_count=128 rope.freq_base=1e4
            rope.scaling.original_context_length=4096 expert_count=16 expert_used_count=2",
        optional: &[
            "output.weight",
            "output.bias",
            "attn_q.bias",
            "rope_factors_short.weight",
            "rope_factors_long.weight",
        ],
        ..PLAIN
    },
];
