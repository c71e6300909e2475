#!/usr/bin/env python3
"""Makes tiny random models with latent attention, as folders with their logits.

    pip install torch==2.15.0 transformers==5.22.2
    tools/golden unpack && tools/tiny_latent.py && tools/golden pack deepseek_v2 glm4_moe_lite

`deepseek_v2-groups` is a DeepSeek-V2 whose router chooses groups of experts first, `glm4_moe_lite` is built like
GLM-4.7-Flash. Weights are bf16, computed in f32. The tokenizer is that of the tiny DeepSeek-V2-Lite.
"""

import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import DeepseekV2Config, DeepseekV2ForCausalLM, Glm4MoeLiteConfig, Glm4MoeLiteForCausalLM

GOLDEN = Path(__file__).parent.parent / "crates/engine/tests/data/golden"
SIZES = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "kv_lora_rank": 32,
    "q_lora_rank": 48,
    "qk_rope_head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.1,
    "bos_token_id": 509,
    "eos_token_id": 511,
    "pad_token_id": 509,
}
DEEPSEEK = DeepseekV2Config(
    **SIZES,
    num_hidden_layers=3,
    n_routed_experts=12,
    first_k_dense_replace=1,
    qk_nope_head_dim=16,
    v_head_dim=16,
    topk_method="group_limited_greedy",
    n_group=4,
    topk_group=2,
    norm_topk_prob=False,
    routed_scaling_factor=1.5,
)
GLM = Glm4MoeLiteConfig(
    **SIZES,
    num_hidden_layers=2,
    n_routed_experts=6,
    qk_nope_head_dim=24,
    v_head_dim=32,
    routed_scaling_factor=1.8,
)


def fill(model: torch.nn.Module) -> None:
    with torch.no_grad():
        for name, weight in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith("mlp.gate.weight"):
                # Clear choices, so that rounding does not change them.
                weight.normal_(0, 0.5)
            elif name.endswith("e_score_correction_bias"):
                weight.normal_(0, 0.1)
            elif name.endswith("norm.weight"):
                weight.uniform_(0.8, 1.2)


def make(name: str, kind: type, config) -> None:
    torch.manual_seed(6)
    model = kind(config)
    fill(model)
    folder = GOLDEN / name
    model.to(torch.bfloat16).save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)
    for file in ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"]:
        # The tokenizer is a file of `deepseek_v2-groups`, to which the other tiny models link.
        if not (folder / file).exists():
            shutil.copy(GOLDEN / "deepseek_v2_lite" / file, folder / file, follow_symlinks=False)
    tokens = load_file(GOLDEN / "deepseek_v2_lite.logits.safetensors")["tokens"]
    loaded = kind.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        logits = loaded(tokens.long()[None]).logits[0]
    save_file({"tokens": tokens, "logits": logits.contiguous()}, GOLDEN / f"{name}.logits.safetensors")


if __name__ == "__main__":
    make("deepseek_v2-groups", DeepseekV2ForCausalLM, DEEPSEEK)
    make("glm4_moe_lite", Glm4MoeLiteForCausalLM, GLM)
