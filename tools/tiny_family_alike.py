"""Families of tiny_families.py whose layers are all alike, but for dense ones at the start."""

import torch
from tiny_by_hand import Bailing, Bailing2, Grove
from tiny_families import BY_HAND, COMMON, MARKS, QWEN_VISION, WIDE, Family, tensors_set

PIXTRAL = {
    "model_type": "pixtral",
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
}
GRANITE = {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.1,
    "residual_multiplier": 0.5,
    "logits_scaling": 4.0,
}


def phimoe_as_llama_cpp(model) -> None:
    """RMS norms, and weights that are normalised scores."""

    class Norm(torch.nn.LayerNorm):
        def forward(self, x):
            return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight + self.bias

    def route(self, x):
        scores = torch.nn.functional.linear(x, self.weight).softmax(-1)
        weights, chosen = scores.topk(self.top_k, -1)
        return None, weights / weights.sum(-1, keepdim=True), chosen

    for module in model.modules():
        if isinstance(module, torch.nn.LayerNorm):
            module.__class__ = Norm
        elif hasattr(module, "router_jitter_noise"):
            module.__class__ = type("Router", (type(module),), {"forward": route})


def experts_transposed(tensors):
    """Experts as [expert, input, output], as published. Transformers writes them the other way round."""
    return {
        name: values.transpose(1, 2) if name.endswith(("experts.gate_up_proj", "experts.down_proj")) else values
        for name, values in tensors.items()
    }


FAMILIES = [
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
            "vision_config": PIXTRAL,
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
        "granitemoe",
        "GraniteMoeSharedForCausalLM",
        COMMON
        | GRANITE
        | {
            "num_hidden_layers": 3,
            "intermediate_size": 32,
            "shared_intermediate_size": 64,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 50000.0},
        },
        pre="gpt-2",
        off={
            "scale of embeddings": {"embedding_multiplier": 1.0},
            "scale of residuals": {"residual_multiplier": 1.0},
            "scale of attention": {"attention_multiplier": 0.25},
            "scale of logits": {"logits_scaling": 1.0},
            "shared expert": tensors_set(0, "shared_mlp.output_linear.weight"),
            "experts": tensors_set(0, "experts.down_proj"),
        },
    ),
    Family(
        "phimoe",
        "PhimoeForCausalLM",
        COMMON
        | {
            "num_hidden_layers": 3,
            "intermediate_size": 64,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "attention_bias": True,
            "lm_head_bias": True,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 50000.0,
                "original_max_position_embeddings": 256,
            },
        },
        pre="gpt-2",
        published={"architectures": ["PhiMoEForCausalLM"]},
        # As published: other factors for long contexts, and factors of the rotated values of their own.
        variant=(
            "longrope",
            {
                "rope_parameters": None,
                "rope_theta": 50000.0,
                "original_max_position_embeddings": 128,
                "rope_scaling": {
                    "type": "longrope",
                    "short_factor": [1.0, 1.0, 1.1, 1.2, 1.3, 1.5, 1.75, 2.0],
                    "long_factor": [1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0],
                    "short_mscale": 1.25,
                    "long_mscale": 1.5,
                    "original_max_position_embeddings": 128,
                },
            },
        ),
        misread=phimoe_as_llama_cpp,
        off={
            "biases of attention": tensors_set(0, "q_proj.bias", "k_proj.bias", "v_proj.bias", "o_proj.bias"),
            "biases of norms": tensors_set(0, "norm.bias"),
            "bias of logits": tensors_set(0, "lm_head.bias"),
            "alike experts": {"router_jitter_noise": 0.0},
            "unlike experts": {"router_jitter_noise": 1e9},
        },
    ),
    Family(
        "ministral3",
        "Mistral3ForConditionalGeneration",
        {
            "text_config": COMMON
            | {
                "model_type": "ministral3",
                "num_hidden_layers": 3,
                "intermediate_size": 128,
                "num_attention_heads": 6,
                "num_key_value_heads": 2,
                "head_dim": 16,
                "rope_parameters": {
                    "rope_type": "yarn",
                    "rope_theta": 50000.0,
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
            "vision_config": PIXTRAL,
            "image_token_index": 500,
            "tie_word_embeddings": False,
        },
        pre="tekken",
        off={
            "temperature": {"text_config.rope_parameters.llama_4_scaling_beta": 0.0},
            "temperature at 17": {"text_config.rope_parameters.original_max_position_embeddings": 17},
            "YaRN": {"text_config.rope_parameters.factor": 1.0},
        },
    ),
    Family(
        "mistral",
        "MistralForCausalLM",
        COMMON
        | {
            "num_hidden_layers": 3,
            "intermediate_size": 96,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "sliding_window": 9,
            "rope_parameters": {"rope_type": "default", "rope_theta": 50000.0},
        },
        pre="default",
        # GGUF files do not say that there is a window.
        built_in={"sliding_window": WIDE},
        off={"window": {"sliding_window": WIDE}, "window of 8": {"sliding_window": 8}},
    ),
    Family(
        "bailingmoe",
        Bailing,
        COMMON
        | BY_HAND
        | {
            "model_type": "bailing_moe",
            "num_hidden_layers": 3,
            "first_k_dense_replace": 0,
            "intermediate_size": 64,
            "moe_intermediate_size": 32,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "num_shared_experts": 2,
            "norm_topk_prob": True,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "use_bias": False,
            "use_qkv_bias": False,
            "norm_head": False,
            "norm_softmax": False,
        },
        pre="bailingmoe",
        raw=True,
        # As in some published models. GGUF files have the divided weights.
        variant=("head", {"norm_head": True}),
        off={
            "normalised weights": {"norm_topk_prob": False},
            "shared experts": tensors_set(0, "shared_experts.down_proj.weight"),
            "rope": {"rope_theta": 1e9},
        },
    ),
    Family(
        "bailingmoe2",
        Bailing2,
        COMMON
        | BY_HAND
        | {
            "model_type": "bailing_moe",
            "num_hidden_layers": 3,
            "first_k_dense_replace": 1,
            "intermediate_size": 128,
            "moe_intermediate_size": 32,
            "moe_shared_expert_intermediate_size": 32,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "num_shared_experts": 1,
            "n_group": 4,
            "topk_group": 2,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.5,
            "moe_router_enable_expert_bias": True,
            "score_function": "sigmoid",
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "partial_rotary_factor": 0.5,
            "rotary_dim": 8,
            "use_qk_norm": True,
            "use_bias": False,
            "use_qkv_bias": False,
            "norm_head": False,
            "norm_softmax": False,
            "num_nextn_predict_layers": 0,
        },
        pre="bailingmoe2",
        raw=True,
        exact=("expert_bias",),
        off={
            "groups": {"topk_group": 4},
            "selection bias": tensors_set(0, "expert_bias"),
            "router scale": {"routed_scaling_factor": 1.0},
            "norms of queries and keys": tensors_set(1, "query_layernorm.weight", "key_layernorm.weight"),
            "unrotated channels": {"partial_rotary_factor": 1.0},
            "shared expert": tensors_set(0, "shared_experts.down_proj.weight"),
        },
    ),
    Family(
        "grovemoe",
        Grove,
        COMMON
        | BY_HAND
        | {
            "model_type": "grove_moe",
            "num_hidden_layers": 2,
            "intermediate_size": 128,
            "moe_intermediate_size": 64,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "norm_topk_prob": True,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "attention_bias": False,
        },
        pre="qwen2",
        raw=True,
        # Wide enough that a twentieth of the small experts matters.
        weights={"chunk_experts.down_proj.weight": (0, 2)},
        misread={"as_llama_cpp": True},
        off={
            "small experts": tensors_set(0, *(f"chunk_experts.{index}.down_proj.weight" for index in range(3))),
            "norms of queries and keys": tensors_set(1, "q_norm.weight", "k_norm.weight"),
            "rope": {"rope_theta": 1e9},
        },
    ),
]
