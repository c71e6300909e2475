"""The families of tiny_families.py: their settings, and how each of their mechanisms is switched off."""

from tiny_families import IDS, VOCAB, Family, tensors_set

COMMON = {"tie_word_embeddings": False, "vocab_size": VOCAB, "hidden_size": 64, "max_position_embeddings": 256, **IDS}
WIDE = 1 << 20
# Placeholders for images and videos.
MARKS = {"image_token_id": 500, "video_token_id": 501, "vision_start_token_id": 502, "vision_end_token_id": 503}
QWEN_VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "num_position_embeddings": 16,
    "patch_size": 2,
    "spatial_merge_size": 2,
    "temporal_patch_size": 1,
}
GEMMA_IDS = {"bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0}
GEMMA4 = {
    "tie_word_embeddings": True,
    "hidden_size_per_layer_input": 0,
    "num_kv_shared_layers": 0,
    "attention_k_eq_v": True,
    "sliding_window": 9,
    "final_logit_softcapping": 3.0,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        "full_attention": {"rope_type": "proportional", "rope_theta": 50000.0, "partial_rotary_factor": 0.5},
    },
}


def without_convolution(model) -> None:
    """Lets convolutions see the newest value only."""
    for name, weight in model.named_parameters():
        if "conv" in name and weight.dim() == 3 and weight.shape[-1] > 1:
            weight[..., :-1] = 0


def experts_transposed(tensors):
    """Experts as [expert, input, output], as published. Transformers writes them the other way round."""
    return {
        name: values.transpose(1, 2) if name.endswith(("experts.gate_up_proj", "experts.down_proj")) else values
        for name, values in tensors.items()
    }


FAMILIES = {
    family.name: family
    for family in [
        Family(
            "hy_v3",
            "HYV3ForCausalLM",
            COMMON
            | {
                "num_hidden_layers": 3,
                "mlp_layer_types": ["dense", "sparse", "sparse"],
                "intermediate_size": 128,
                "moe_intermediate_size": 32,
                "num_experts": 6,
                "num_experts_per_tok": 2,
                "num_shared_experts": 2,
                "num_attention_heads": 6,
                "num_key_value_heads": 3,
                "head_dim": 16,
                "router_scaling_factor": 1.75,
                "rope_parameters": {"rope_type": "default", "rope_theta": 50000.0},
            },
            pre="hunyuan-dense",
            published={"route_norm": True, "num_nextn_predict_layers": 0},
            exact=("expert_bias",),
            off={
                "router scale": {"router_scaling_factor": 1.0},
                "selection bias": tensors_set(0, "e_score_correction_bias"),
                "norms of queries and keys": tensors_set(1, "q_norm.weight", "k_norm.weight"),
                "shared expert": tensors_set(0, "shared_experts.down_proj.weight"),
                "rope": {"rope_parameters.rope_theta": 1e9},
            },
        ),
        Family(
            "exaone_moe",
            "ExaoneMoeForCausalLM",
            COMMON
            | {
                "num_hidden_layers": 4,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
                "sliding_window_pattern": 2,
                "mlp_layer_types": ["dense", "dense", "sparse", "sparse"],
                "first_k_dense_replace": 2,
                "intermediate_size": 64,
                "moe_intermediate_size": 32,
                "num_experts": 6,
                "num_experts_per_tok": 2,
                "num_shared_experts": 2,
                "num_attention_heads": 6,
                "num_key_value_heads": 2,
                "head_dim": 16,
                "sliding_window": 9,
                "routed_scaling_factor": 1.5,
                "rope_parameters": {"rope_type": "default", "rope_theta": 50000.0},
            },
            pre="exaone-moe",
            published={"scoring_func": "sigmoid", "num_nextn_predict_layers": 0},
            exact=("e_score_correction_bias",),
            off={
                "window": {"sliding_window": WIDE},
                "window of 8": {"sliding_window": 8},
                "full layers": {"layer_types": ["sliding_attention"] * 4},
                "router scale": {"routed_scaling_factor": 1.0},
                "selection bias": tensors_set(0, "e_score_correction_bias"),
                "norms of queries and keys": tensors_set(1, "q_norm.weight", "k_norm.weight"),
                "shared expert": tensors_set(0, "shared_experts.down_proj.weight"),
            },
        ),
        Family(
            "afmoe",
            "AfmoeForCausalLM",
            COMMON
            | {
                "num_hidden_layers": 5,
                "layer_types": ["sliding_attention"] * 3 + ["full_attention", "sliding_attention"],
                "num_dense_layers": 2,
                "intermediate_size": 64,
                "moe_intermediate_size": 32,
                "num_experts": 6,
                "num_experts_per_tok": 2,
                "num_shared_experts": 2,
                "num_attention_heads": 6,
                "num_key_value_heads": 2,
                "head_dim": 16,
                "sliding_window": 9,
                "route_scale": 1.5,
                "mup_enabled": True,
                "rope_parameters": {"rope_type": "default", "rope_theta": 50000.0},
            },
            pre="afmoe",
            published={
                "route_norm": True,
                "score_func": "sigmoid",
                "n_group": 1,
                "topk_group": 1,
                "rope_theta": 50000.0,
            },
            # Embeddings are multiplied by 8, the root of the width.
            weights={"embed_tokens.weight": (0, 0.125)},
            off={
                "window": {"sliding_window": WIDE},
                "window of 8": {"sliding_window": 8},
                "full layer": {"layer_types": ["sliding_attention"] * 5},
                "scale of embeddings": {"mup_enabled": False},
                "router scale": {"route_scale": 1.0},
                "selection bias": tensors_set(0, "expert_bias"),
                "gate": tensors_set(0, "self_attn.gate_proj.weight"),
                "norms of queries and keys": tensors_set(1, "q_norm.weight", "k_norm.weight"),
                "norms after blocks": tensors_set(1, "post_attention_layernorm.weight", "post_mlp_layernorm.weight"),
                "shared expert": tensors_set(0, "shared_experts.down_proj.weight"),
            },
        ),
        Family(
            "ernie4_5_moe",
            "Ernie4_5_MoeForCausalLM",
            COMMON
            | {
                "hidden_size": 96,
                "num_hidden_layers": 4,
                "moe_layer_start_index": 2,
                "moe_layer_interval": 1,
                # The converter takes the width of shared experts to be this, divided by the heads of keys.
                "intermediate_size": 96,
                "moe_intermediate_size": 32,
                "moe_num_experts": 5,
                "moe_k": 2,
                "moe_num_shared_experts": 1,
                "num_attention_heads": 6,
                "num_key_value_heads": 3,
                "tie_word_embeddings": True,
                "rope_parameters": {"rope_type": "default", "rope_theta": 50000.0},
            },
            pre="qwen2",
            weights={"e_score_correction_bias": (0, 0.08)},
            off={
                "selection bias": tensors_set(0, "e_score_correction_bias"),
                "shared expert": tensors_set(0, "shared_experts.down_proj.weight"),
                "rope": {"rope_parameters.rope_theta": 1e9},
            },
        ),
        Family(
            "hunyuan_v1_moe",
            "HunYuanMoEV1ForCausalLM",
            COMMON
            | {
                "num_hidden_layers": 3,
                "intermediate_size": 64,
                "num_experts": 6,
                "moe_topk": [2, 2, 2],
                "moe_intermediate_size": [64, 64, 64],
                "num_attention_heads": 6,
                "num_key_value_heads": 3,
                "head_dim": 16,
                "tie_word_embeddings": True,
                "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            },
            pre="hunyuan",
            published={
                "moe_intermediate_size": [64, 64, 64],
                "num_shared_expert": [1, 1, 1],
                "use_qk_norm": True,
                "use_mixed_mlp_moe": True,
            },
            # As published. The converter accepts it for heads of 128 only.
            variant=(
                "alpha",
                {
                    "rope_parameters": None,
                    "rope_theta": 10000.0,
                    "rope_scaling": {
                        "type": "dynamic",
                        "alpha": 1000.0,
                        "factor": 1.0,
                        "beta_fast": 32,
                        "beta_slow": 1,
                        "mscale": 1.0,
                        "mscale_all_dim": 1.0,
                    },
                },
            ),
            off={
                "shared expert": tensors_set(0, "shared_mlp.down_proj.weight"),
                "norms of queries and keys": tensors_set(1, "query_layernorm.weight", "key_layernorm.weight"),
                "rope": {"rope_parameters.rope_theta": 1e9},
            },
        ),
        Family(
            "solar_open",
            "SolarOpenForCausalLM",
            COMMON
            | {
                "num_hidden_layers": 3,
                "moe_intermediate_size": 32,
                "n_routed_experts": 6,
                "num_experts_per_tok": 2,
                "n_shared_experts": 2,
                "routed_scaling_factor": 1.5,
                "num_attention_heads": 6,
                "num_key_value_heads": 2,
                "head_dim": 16,
                "rope_parameters": {
                    "rope_type": "yarn",
                    "rope_theta": 50000.0,
                    "factor": 4.0,
                    "original_max_position_embeddings": 64,
                    # Without it the converter rotates half of the channels.
                    "partial_rotary_factor": 1.0,
                },
            },
            pre="solar-open",
            published={
                "first_k_dense_replace": 0,
                "intermediate_size": 64,
                "use_qk_norm": False,
                "num_nextn_predict_layers": 0,
                "partial_rotary_factor": 1.0,
            },
            exact=("e_score_correction_bias",),
            off={
                "selection bias": tensors_set(0, "e_score_correction_bias"),
                "router scale": {"routed_scaling_factor": 1.0},
                "YaRN": {"rope_parameters": {"rope_type": "default", "rope_theta": 50000.0}},
                "factor of YaRN": {"rope_parameters.attention_factor": 1.0},
                "shared experts": tensors_set(0, "shared_experts.down_proj.weight"),
            },
        ),
        Family(
            "qwen3_5",
            "Qwen3_5ForConditionalGeneration",
            MARKS
            | {
                "text_config": COMMON
                | {
                    "num_hidden_layers": 4,
                    "layer_types": ["linear_attention", "full_attention"] * 2,
                    "full_attention_interval": 2,
                    "intermediate_size": 128,
                    "num_attention_heads": 6,
                    "num_key_value_heads": 2,
                    "head_dim": 32,
                    "linear_num_key_heads": 2,
                    "linear_num_value_heads": 6,
                    "linear_key_head_dim": 16,
                    "linear_value_head_dim": 16,
                    "rope_parameters": {
                        "rope_type": "default",
                        "rope_theta": 50000.0,
                        "partial_rotary_factor": 0.5,
                        "mrope_section": [3, 3, 2],
                        "mrope_interleaved": True,
                    },
                },
                "vision_config": QWEN_VISION | {"out_hidden_size": 64, "deepstack_visual_indexes": []},
            },
            pre="qwen35",
            weights={"A_log": (-1, 0.5), "dt_bias": (-1, 0.5)},
            arguments=("--no-mtp",),
            off={
                "memory": tensors_set(9, "A_log"),
                "decay": tensors_set(-20, "A_log"),
                "convolution": without_convolution,
                "gate of the memory's output": tensors_set(0, "in_proj_z.weight"),
                "norms of queries and keys": tensors_set(0, "q_norm.weight", "k_norm.weight"),
                "unrotated channels": {"text_config.rope_parameters.partial_rotary_factor": 1.0},
            },
        ),
        Family(
            "qwen3_vl_moe",
            "Qwen3VLMoeForConditionalGeneration",
            MARKS
            | {
                "text_config": COMMON
                | {
                    "num_hidden_layers": 2,
                    "intermediate_size": 64,
                    "moe_intermediate_size": 96,
                    "num_experts": 4,
                    "num_experts_per_tok": 2,
                    "num_attention_heads": 6,
                    "num_key_value_heads": 2,
                    "head_dim": 16,
                    "rope_parameters": {
                        "rope_type": "default",
                        "rope_theta": 50000.0,
                        "mrope_section": [3, 3, 2],
                        "mrope_interleaved": True,
                    },
                },
                "vision_config": QWEN_VISION | {"out_hidden_size": 64, "deepstack_visual_indexes": [0]},
            },
            pre="qwen2",
            rename=experts_transposed,
            off={
                "norms of queries and keys": tensors_set(1, "q_norm.weight", "k_norm.weight"),
                "experts": tensors_set(0, "experts.down_proj"),
                "rope": {"text_config.rope_parameters.rope_theta": 1e9},
            },
        ),
        Family(
            "mistral4",
            "Mistral3ForConditionalGeneration",
            {
                "text_config": COMMON
                | {
                    "model_type": "mistral4",
                    "num_hidden_layers": 3,
                    "first_k_dense_replace": 1,
                    "intermediate_size": 128,
                    "moe_intermediate_size": 32,
                    "n_routed_experts": 6,
                    "num_experts_per_tok": 2,
                    "n_shared_experts": 2,
                    "num_attention_heads": 3,
                    "num_key_value_heads": 3,
                    "q_lora_rank": 32,
                    "kv_lora_rank": 64,
                    "qk_nope_head_dim": 24,
                    "qk_rope_head_dim": 8,
                    "v_head_dim": 32,
                    "rope_parameters": {
                        "rope_type": "yarn",
                        "rope_theta": 10000.0,
                        "factor": 4.0,
                        "original_max_position_embeddings": 16,
                        "max_position_embeddings": 256,
                        "beta_fast": 32.0,
                        "beta_slow": 1.0,
                        "mscale": 1.0,
                        "mscale_all_dim": 1.0,
                        "llama_4_scaling_beta": 0.25,
                    },
                },
                "vision_config": {
                    "model_type": "pixtral",
                    "hidden_size": 16,
                    "intermediate_size": 16,
                    "num_hidden_layers": 1,
                    "num_attention_heads": 2,
                    "image_size": 16,
                    "patch_size": 4,
                },
                "image_token_index": 500,
                "tie_word_embeddings": False,
            },
            pre="tekken",
            gguf={
                "{arch}.attention.temperature_scale": 0.25,
                "{arch}.attention.temperature_length": 16,
            },
            off={
                "temperature": {"text_config.rope_parameters.llama_4_scaling_beta": 0.0},
                "YaRN": {"text_config.rope_parameters.factor": 1.0},
                "norms of latents": tensors_set(1, "q_a_layernorm.weight", "kv_a_layernorm.weight"),
                "shared experts": tensors_set(0, "shared_experts.down_proj.weight"),
            },
        ),
        Family(
            "gemma4",
            "Gemma4ForConditionalGeneration",
            {
                "text_config": COMMON
                | GEMMA_IDS
                | GEMMA4
                | {
                    "num_hidden_layers": 4,
                    "layer_types": ["sliding_attention", "full_attention"] * 2,
                    "intermediate_size": 96,
                    "enable_moe_block": True,
                    "num_experts": 5,
                    "top_k_experts": 2,
                    "moe_intermediate_size": 32,
                    "num_attention_heads": 4,
                    "num_key_value_heads": 2,
                    "head_dim": 16,
                    "global_head_dim": 32,
                    "num_global_key_value_heads": 1,
                },
                "vision_config": {
                    "hidden_size": 16,
                    "intermediate_size": 16,
                    "num_hidden_layers": 1,
                    "num_attention_heads": 2,
                    "num_key_value_heads": 2,
                    "head_dim": 8,
                    "patch_size": 2,
                    "position_embedding_size": 16,
                },
                "audio_config": None,
                "image_token_id": 500,
                "video_token_id": 501,
                "audio_token_id": 502,
                "boi_token_id": 503,
                "eoi_token_id": 504,
                "boa_token_id": 505,
                "eoa_token_index": 506,
                "tie_word_embeddings": True,
            },
            pre="gemma4",
            tokenizer="gemma4",
            # Embeddings are multiplied by 8, the root of the width.
            weights={"embed_tokens.weight": (0, 0.125)},
            # As published. Transformers writes the settings of each layer instead.
            published={"text_config": {"global_head_dim": 32, "num_global_key_value_heads": 1}},
            unpublished=("text_config.per_layer_config",),
            off={
                "window": {"text_config.sliding_window": WIDE},
                "window of 8": {"text_config.sliding_window": 8},
                "softcap": {"text_config.final_logit_softcapping": None},
                "unrotated channels": {"text_config.rope_parameters.full_attention.partial_rotary_factor": 1.0},
                "scale of layers": tensors_set(1, "layer_scalar"),
                "scale of the router": tensors_set(1, "router.scale"),
                "scale of experts": tensors_set(1, "per_expert_scale"),
                "experts": tensors_set(0, "experts.down_proj"),
                "dense block beside experts": tensors_set(0, "mlp.down_proj.weight"),
                "norms of queries and keys": tensors_set(1, "q_norm.weight", "k_norm.weight"),
                "norms after blocks": tensors_set(
                    1,
                    "post_attention_layernorm.weight",
                    "post_feedforward_layernorm.weight",
                    "post_feedforward_layernorm_1.weight",
                    "post_feedforward_layernorm_2.weight",
                ),
            },
        ),
        Family(
            "gemma4_dense",
            "Gemma4ForCausalLM",
            COMMON
            | GEMMA_IDS
            | GEMMA4
            | {
                "num_hidden_layers": 3,
                "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
                "intermediate_size": 128,
                "num_attention_heads": 4,
                "num_key_value_heads": 4,
                "head_dim": 32,
                "global_head_dim": 48,
                "num_global_key_value_heads": 2,
            },
            pre="gemma4",
            tokenizer="gemma4",
            weights={"embed_tokens.weight": (0, 0.125)},
            published={"global_head_dim": 48, "num_global_key_value_heads": 2},
            unpublished=("per_layer_config",),
            off={
                "window": {"sliding_window": WIDE},
                "window of 8": {"sliding_window": 8},
                "softcap": {"final_logit_softcapping": None},
                "unrotated channels": {"rope_parameters.full_attention.partial_rotary_factor": 1.0},
                "scale of layers": tensors_set(1, "layer_scalar"),
                "norms of queries and keys": tensors_set(1, "q_norm.weight", "k_norm.weight"),
            },
        ),
    ]
}
