#!/usr/bin/env python3
"""Makes the tiny dense Qwen2 of the engine's tests: a GGUF file, a folder, and its logits by llama.cpp in f32.

    tools/tiny_qwen2.py

It is the tiny dense Llama with random biases. Weights are f32, so that llama.cpp rounds no activation.

Made with gguf 0.19.0, llama-cpp-python 0.3.36, numpy 2.4.6, safetensors 0.8.0.
"""

import json
import shutil
from pathlib import Path

import gguf
import numpy as np
from llama_cpp import Llama
from safetensors.numpy import load_file, save_file

GOLDEN = Path(__file__).parent.parent / "crates/engine/tests/data/golden"
LAYERS, Q, KV, VOCAB = 2, 64, 32, 512
GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def bf16_tensors(path: Path) -> dict[str, np.ndarray]:
    """The bf16 tensors of a safetensors file, widened to f32."""
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    tensors = {}
    for name, entry in json.loads(data[8:start]).items():
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            words = np.frombuffer(data[start + begin : start + end], np.uint16).astype(np.uint32)
            assert entry["dtype"] == "BF16"
            tensors[name] = (words << 16).view(np.float32).reshape(entry["shape"])
    return tensors


def gguf_name(name: str) -> str:
    stem, kind = name.rsplit(".", 1)
    if stem.startswith("model.layers."):
        layer, stem = stem.removeprefix("model.layers.").split(".", 1)
        return f"blk.{layer}.{GGUF_NAMES[stem]}.{kind}"
    return f"{GGUF_NAMES[stem]}.{kind}"


def weights() -> dict[str, np.ndarray]:
    random = np.random.default_rng(2)
    tensors = bf16_tensors(GOLDEN / "llama/model.safetensors")
    for layer in range(LAYERS):
        for part, width in [("q", Q), ("k", KV), ("v", KV)]:
            name = f"model.layers.{layer}.self_attn.{part}_proj.bias"
            tensors[name] = random.normal(0, 0.5, width).astype(np.float32)
    return tensors


def write_folder(tensors: dict[str, np.ndarray]) -> None:
    shutil.copytree(GOLDEN / "llama", GOLDEN / "qwen2", dirs_exist_ok=True)
    save_file(tensors, GOLDEN / "qwen2/model.safetensors", {"format": "pt"})
    path = GOLDEN / "qwen2/config.json"
    config = json.loads(path.read_text())
    config |= {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "dtype": "float32"}
    for key in ["attention_bias", "mlp_bias", "pretraining_tp", "transformers_version"]:
        del config[key]
    path.write_text(json.dumps(config, indent=2) + "\n")


def write_gguf(tensors: dict[str, np.ndarray]) -> None:
    reader = gguf.GGUFReader(GOLDEN / "llama.gguf")
    writer = gguf.GGUFWriter(GOLDEN / "qwen2.gguf", "qwen2")
    for key, field in reader.fields.items():
        if key.startswith("GGUF.") or key in ("general.architecture", "general.file_type"):
            continue
        kind = field.types[0]
        inner = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(key.replace("llama.", "qwen2."), field.contents(), kind, inner)
    for name, values in tensors.items():
        writer.add_tensor(gguf_name(name), values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_logits() -> None:
    tokens = load_file(GOLDEN / "llama.logits.safetensors")["tokens"]
    f32 = int(gguf.GGMLQuantizationType.F32)
    model = Llama(
        str(GOLDEN / "qwen2.gguf"), n_ctx=64, logits_all=True, type_k=f32, type_v=f32, flash_attn=False, verbose=False
    )
    model.eval(tokens.tolist())
    logits = np.array(model.scores[: len(tokens)], np.float32)
    assert logits.shape == (len(tokens), VOCAB)
    save_file({"tokens": tokens, "logits": logits}, GOLDEN / "qwen2.logits.safetensors")


if __name__ == "__main__":
    made = weights()
    write_folder(made)
    write_gguf(made)
    write_logits()
