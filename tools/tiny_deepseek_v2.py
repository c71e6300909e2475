#!/usr/bin/env python3
"""Makes a tiny random DeepSeek-V2 whose router chooses groups of experts first, as a folder with its logits.

    pip install torch==2.15.0 transformers==5.22.2
    tools/tiny_deepseek_v2.py

Weights are bf16, computed in f32. The tokenizer is that of the tiny DeepSeek-V2-Lite.
"""

import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

GOLDEN = Path(__file__).parent.parent / "crates/engine/tests/data/golden"
NAME = "deepseek_v2-groups"


def model() -> DeepseekV2ForCausalLM:
    torch.manual_seed(6)
    config = DeepseekV2Config(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=96,
        moe_intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        n_shared_experts=1,
        n_routed_experts=12,
        num_experts_per_tok=3,
        first_k_dense_replace=1,
        kv_lora_rank=32,
        q_lora_rank=48,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=16,
        topk_method="group_limited_greedy",
        n_group=4,
        topk_group=2,
        norm_topk_prob=False,
        routed_scaling_factor=1.5,
        max_position_embeddings=256,
        initializer_range=0.1,
        bos_token_id=509,
        eos_token_id=511,
        pad_token_id=509,
    )
    made = DeepseekV2ForCausalLM(config)
    with torch.no_grad():
        for name, weight in made.named_parameters():
            if name.endswith("mlp.gate.weight"):
                # Clear choices, so that roundings do not decide.
                weight.normal_(0, 0.5)
            elif weight.dim() == 1:
                weight.uniform_(0.8, 1.2)
    return made.to(torch.bfloat16)


def main() -> None:
    folder = GOLDEN / NAME
    model().save_pretrained(folder)
    for name in ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"]:
        shutil.copy(GOLDEN / "deepseek_v2_lite" / name, folder / name)
    tokens = load_file(GOLDEN / "deepseek_v2_lite.logits.safetensors")["tokens"]
    loaded = DeepseekV2ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        logits = loaded(tokens.long()[None]).logits[0]
    save_file({"tokens": tokens, "logits": logits.contiguous()}, GOLDEN / f"{NAME}.logits.safetensors")


if __name__ == "__main__":
    main()
