#!/usr/bin/env python3
"""Writes rope frequencies that transformers computes for many settings, for the engine's tests.

    tools/rope_vectors.py

Made with torch 2.15.0 (on the CPU), transformers 5.22.2.
"""

import json
from pathlib import Path

from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

OUT = Path(__file__).resolve().parent.parent / "crates/engine/tests/data/rope.json"
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
# Channels of a head, the longest context, the base, and the settings.
CASES = [
    (128, 16384, 1e4, {"rope_type": "linear", "factor": 4.0}),
    (128, 131072, 5e5, {"rope_type": "llama3", "factor": 8.0, **LLAMA3}),
    (64, 131072, 5e5, {"rope_type": "llama3", "factor": 32.0, **LLAMA3}),
    # Qwen3, gpt-oss, DeepSeek-V2-Lite, DeepSeek-V3, Kimi-K2.
    (128, 131072, 1e6, {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}),
    (
        64,
        131072,
        1.5e5,
        {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "original_max_position_embeddings": 4096,
            "truncate": False,
        },
    ),
    *[
        (
            64,
            int(4096 * factor),
            base,
            {
                "rope_type": "yarn",
                "factor": factor,
                "beta_fast": beta_fast,
                "beta_slow": 1.0,
                "mscale": mscale,
                "mscale_all_dim": all_dim,
                "original_max_position_embeddings": 4096,
            },
        )
        for factor, base, beta_fast, mscale, all_dim in [
            (40.0, 1e4, 32.0, 0.707, 0.707),
            (40.0, 1e4, 32.0, 1.0, 1.0),
            (32.0, 5e4, 1.0, 1.0, 1.0),
            (40.0, 1e4, 32.0, 1.0, 0.5),
            (40.0, 1e4, 32.0, 0.5, 0.0),
        ]
    ],
    (
        64,
        8192,
        1e4,
        {"rope_type": "yarn", "factor": 4.0, "attention_factor": 0.9, "original_max_position_embeddings": 2048},
    ),
]


def main() -> None:
    cases = []
    for channels, context, base, rope in CASES:
        settings = {"max_position_embeddings": context, "rope_parameters": {"rope_theta": base, **rope}}
        config = LlamaConfig(head_dim=channels, **json.loads(json.dumps(settings)))
        frequencies, scale = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, "cpu")
        cases.append({"channels": channels, "settings": settings, "frequencies": frequencies.tolist(), "scale": scale})
    OUT.write_text("[\n" + ",\n".join(json.dumps(case) for case in cases) + "\n]\n")


if __name__ == "__main__":
    main()
