"""The families of tiny_families.py: their settings, and how each of their mechanisms is switched off."""

from tiny_families import IDS, VOCAB, Family, tensors_set

COMMON = {"vocab_size": VOCAB, "hidden_size": 64, "max_position_embeddings": 256, **IDS}
WIDE = 1 << 20

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
    ]
}
