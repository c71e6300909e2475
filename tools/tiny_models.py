#!/usr/bin/env python3
"""Makes tiny models with features that the other tiny models lack, and their logits by transformers in f32.

- `qwen2`: the dense Llama with biases, as a folder and a GGUF file
- `llama3`: the dense Llama with rope scaled as in Llama 3.1, as a folder and a GGUF file
- `gpt_oss-mxfp4`: gpt-oss with MXFP4 experts, as published, a folder; its context is several windows and pages long
- `dots1`: GLM-4.5 without biases, with norms of queries and keys, and with all channels rotated, as a folder and a GGUF file
- `glm4moe-mtp`: GLM-4.5 whose last layer predicts further tokens instead, a folder

    tools/golden unpack && tools/tiny_models.py && tools/golden pack qwen2 llama3 gpt_oss dots1 glm4moe

Made with torch 2.15.0 (on the CPU), transformers 5.22.2, accelerate 1.15.0, gguf 0.19.0, numpy 2.4.6, safetensors 0.8.0.
"""

import json
import shutil
from pathlib import Path

import gguf
import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

GOLDEN = Path(__file__).resolve().parent.parent / "crates/engine/tests/data/golden"
VOCAB = 512
# Logits take more space than the models, so only the last positions of long contexts are kept.
LONG, KEPT = 200, 24
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
BF16 = gguf.GGMLQuantizationType.BF16
Tensors = dict[str, torch.Tensor]


def main() -> None:
    make_qwen2()
    make_llama3()
    make_gpt_oss()
    make_glm4moe()
    make_dots1()


def make_qwen2() -> None:
    tensors, config = source("llama")
    random = torch.Generator().manual_seed(2)
    widths = {"q": 64, "k": 32, "v": 32}
    for layer in range(config["num_hidden_layers"]):
        for part, width in widths.items():
            bias = torch.randn(width, generator=random) * 0.5
            tensors[f"model.layers.{layer}.self_attn.{part}_proj.bias"] = bias.bfloat16()
    config |= {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
    for key in ["attention_bias", "mlp_bias", "pretraining_tp"]:
        del config[key]
    write_folder("qwen2", "llama", tensors, config)
    writer = gguf_like("llama", "qwen2", "qwen2")
    for name, values in tensors.items():
        kind = BF16 if values.dim() == 2 else gguf.GGMLQuantizationType.F32
        values = gguf.quants.quantize(values.float().numpy(), kind)
        writer.add_tensor(gguf_name(name), values, raw_dtype=kind)
    finish(writer)
    write_logits("qwen2", load_file(GOLDEN / "llama.logits.safetensors")["tokens"])


def make_llama3() -> None:
    tensors, config = source("llama")
    config["rope_parameters"] = {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    }
    write_folder("llama3", "llama", tensors, config)
    # The same weights as the Llama's.
    weights = GOLDEN / "llama3" / "model.safetensors"
    weights.unlink()
    weights.symlink_to("../llama/model.safetensors")
    model = write_logits("llama3", long_context())

    # GGUF files have what transformers makes of these settings as divisors.
    stretched, _ = ROPE_INIT_FUNCTIONS["llama3"](model.config, "cpu")
    plain = 10000.0 ** -(torch.arange(0, 16, 2).double() / 16)
    divisors = (plain / stretched).float().numpy()
    assert ((divisors > 1.1) & (divisors < 3.9)).any(), divisors
    writer = gguf_like("llama", "llama3", "llama")
    writer.add_tensor("rope_freqs.weight", divisors)
    for tensor in gguf.GGUFReader(GOLDEN / "llama.gguf").tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    finish(writer)


def make_gpt_oss() -> None:
    tensors, config = source("gpt_oss")
    layers = 3
    config |= {"num_hidden_layers": layers, "layer_types": config["layer_types"][:layers]}
    config["quantization_config"] = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
    }
    tensors = {name: values for name, values in tensors.items() if layer_of(name) < layers}
    random = torch.Generator().manual_seed(4)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj")) and ".experts." in name]:
        experts, columns, rows = tensors.pop(name).shape
        # Any codes, and scales of 2^-5 to 2^-2.
        blocks = torch.randint(0, 256, (experts, rows, columns // 32, 16), generator=random, dtype=torch.uint8)
        scales = torch.randint(122, 126, (experts, rows, columns // 32), generator=random, dtype=torch.uint8)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    write_folder("gpt_oss-mxfp4", "gpt_oss", tensors, config)
    write_logits("gpt_oss-mxfp4", long_context())


def make_glm4moe() -> None:
    tensors, config = source("glm4moe")
    last = config["num_hidden_layers"] - 1
    config |= {"num_hidden_layers": last, "num_nextn_predict_layers": 1}
    random = torch.Generator().manual_seed(5)
    hidden = config["hidden_size"]
    for name, shape in [
        ("eh_proj", (hidden, 2 * hidden)),
        ("enorm", (hidden,)),
        ("hnorm", (hidden,)),
        ("shared_head.norm", (hidden,)),
    ]:
        tensors[f"model.layers.{last}.{name}.weight"] = torch.randn(shape, generator=random).bfloat16()
    write_folder("glm4moe-mtp", "glm4moe", tensors, config)
    write_logits("glm4moe-mtp", load_file(GOLDEN / "glm4moe.logits.safetensors")["tokens"])


def make_dots1() -> None:
    tensors, config = source("glm4moe")
    tensors = {name: values for name, values in tensors.items() if not name.endswith("_proj.bias")}
    random = torch.Generator().manual_seed(6)
    width = config["head_dim"]
    for layer in range(config["num_hidden_layers"]):
        for part in "qk":
            norm = 1 + torch.randn(width, generator=random) * 0.2
            tensors[f"model.layers.{layer}.self_attn.{part}_norm.weight"] = norm.bfloat16()
    config |= {"architectures": ["Dots1ForCausalLM"], "model_type": "dots1", "attention_bias": False}
    config["rope_parameters"] = {"rope_theta": 10000.0, "rope_type": "default"}
    config["layer_types"] = ["full_attention"] * config["num_hidden_layers"]
    config["sliding_window"] = None
    for key in ["use_qk_norm", "partial_rotary_factor"]:
        config.pop(key, None)
    write_folder("dots1", "glm4moe", tensors, config)
    writer = gguf_like("glm4moe", "dots1", "dots1", {"rope.dimension_count": width, "rope.freq_base": 10000.0})
    for tensor in gguf.GGUFReader(GOLDEN / "glm4moe.gguf").tensors:
        name = tensor.name.replace("post_attention_norm", "ffn_norm")
        others = (".attn_q.bias", ".attn_k.bias", ".attn_v.bias", ".attn_q_norm.weight", ".attn_k_norm.weight")
        if not name.endswith(others):
            writer.add_tensor(name, tensor.data, raw_dtype=tensor.tensor_type)
    for name, values in tensors.items():
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            layer, part = name.split(".")[2], name.split(".")[4]
            writer.add_tensor(f"blk.{layer}.attn_{part}.weight", values.float().numpy())
    finish(writer)
    write_logits("dots1", load_file(GOLDEN / "glm4moe.logits.safetensors")["tokens"])


def source(family: str) -> tuple[Tensors, dict]:
    """A tiny model to start from: its weights and its configuration."""
    folder = GOLDEN / family
    return load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())


def layer_of(name: str) -> int:
    return int(name.split(".")[2]) if name.startswith("model.layers.") else -1


def long_context() -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(3).integers(0, VOCAB, LONG, np.int32))


def write_folder(name: str, family: str, tensors: Tensors, config: dict) -> None:
    shutil.rmtree(GOLDEN / name, ignore_errors=True)
    # The tokenizer is a link to that of another tiny model.
    shutil.copytree(GOLDEN / family, GOLDEN / name, symlinks=True)
    tensors = {name: values.contiguous() for name, values in sorted(tensors.items())}
    save_file(tensors, GOLDEN / name / "model.safetensors", {"format": "pt"})
    (GOLDEN / name / "config.json").write_text(json.dumps(config, indent=1) + "\n")


def write_logits(name: str, tokens: torch.Tensor) -> torch.nn.Module:
    model = AutoModelForCausalLM.from_pretrained(GOLDEN / name, dtype=torch.float32, attn_implementation="eager")
    model = model.float().eval()
    with torch.no_grad():
        logits = model(tokens[None].long()).logits[0]
    logits = logits[-KEPT:] if len(tokens) == LONG else logits
    save_file({"tokens": tokens, "logits": logits.contiguous()}, GOLDEN / f"{name}.logits.safetensors")
    return model


def gguf_name(name: str) -> str:
    stem, kind = name.rsplit(".", 1)
    if stem.startswith("model.layers."):
        layer, stem = stem.removeprefix("model.layers.").split(".", 1)
        return f"blk.{layer}.{GGUF_NAMES[stem]}.{kind}"
    return f"{GGUF_NAMES[stem]}.{kind}"


def gguf_like(family: str, name: str, architecture: str, others: dict = {}) -> gguf.GGUFWriter:
    """A GGUF file with most settings of another file, and no tensors yet."""
    writer = gguf.GGUFWriter(GOLDEN / f"{name}.gguf", architecture)
    for key, field in gguf.GGUFReader(GOLDEN / f"{family}.gguf").fields.items():
        if key.startswith("GGUF.") or key == "general.architecture":
            continue
        kind = field.types[0]
        inner = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        value = others.get(key.removeprefix(f"{family}."), field.contents())
        writer.add_key_value(key.replace(f"{family}.", f"{architecture}."), value, kind, inner)
    return writer


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main()
