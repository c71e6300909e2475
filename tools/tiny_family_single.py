"""Families of tiny_families.py whose layers are single blocks: attention, or a mixture of experts."""

from tiny_families import COMMON, Family, tensors_set

NEMOTRON_H = COMMON | {
    "layers_block_type": ["moe", "full_attention", "moe", "full_attention", "moe"],
    "moe_intermediate_size": 64,
    "moe_shared_expert_intermediate_size": 96,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "routed_scaling_factor": 2.5,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    # Of the Mamba layers, which there are none of. The converter wants them.
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
}
NEMOTRON_H_OFF = {
    "square": {"mlp_hidden_act": "relu"},
    "router scale": {"routed_scaling_factor": 1.0},
    "normalised weights": {"norm_topk_prob": False},
    "selection bias": tensors_set(0, "e_score_correction_bias"),
    "experts": tensors_set(0, "experts.down_proj"),
    "shared expert": tensors_set(0, "shared_experts.down_proj.weight"),
    "attention": tensors_set(0, "mixer.o_proj.weight"),
}
# As published. New versions of transformers write a list instead.
NEMOTRON_H_PATTERN = {"hybrid_override_pattern": "E*E*E"}

FAMILIES = [
    Family(
        "nemotron_h_moe",
        "NemotronHForCausalLM",
        NEMOTRON_H,
        pre="pixtral",
        published=NEMOTRON_H_PATTERN,
        unpublished=("layers_block_type",),
        exact=("e_score_correction_bias",),
        in_llama_cpp=False,
        off=NEMOTRON_H_OFF,
    ),
    Family(
        "nemotron_h_latent",
        "NemotronHForCausalLM",
        NEMOTRON_H | {"moe_latent_size": 32, "n_group": 4, "topk_group": 2},
        pre="pixtral",
        exact=("e_score_correction_bias",),
        in_llama_cpp=False,
        off=NEMOTRON_H_OFF | {"latent": tensors_set(0, "fc2_latent_proj.weight"), "groups": {"topk_group": 4}},
    ),
]
