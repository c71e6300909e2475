"""Makes tiny quantised folders of the golden Qwen3-MoE, with the logits that mlx-lm computes from them in f32.

- `qwen3moe-mlx`: MLX's affine quantisation, with other bits and groups for most tensors than by default, in two files
- `qwen3moe-fp8`: FP8 in blocks, as DeepSeek and Qwen publish it, but with small blocks; experts one by one

Their settings have the older, flat format; those of the source folder have the newer one.

Made with mlx 0.32.4 (mlx-cpu), mlx-lm 0.32.2, ml_dtypes 0.6.0, numpy 2.4.6, safetensors 0.8.0.

Usage: tools/golden unpack && python tools/tiny_folders.py && tools/golden pack qwen3moe
"""

import json
import shutil
from pathlib import Path

import ml_dtypes
import mlx.core as mx
import numpy as np
from mlx_lm.models import qwen3_moe
from mlx_lm.utils import load_model
from safetensors.numpy import load_file, save_file

GOLDEN = Path(__file__).resolve().parent.parent / "crates/engine/tests/data/golden"
SOURCE = GOLDEN / "qwen3moe"
BESIDE = ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"]
GENERATION = {"eos_token_id": [511, 510], "temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.0}

# Rows and columns of an FP8 block: small, so that matrices have several blocks, and partial ones.
BLOCK = (24, 40)


def main() -> None:
    mx.set_default_device(mx.cpu)
    config = json.loads((SOURCE / "config.json").read_text())
    config["num_experts"] = config.pop("num_local_experts")
    config["rope_theta"] = config.pop("rope_parameters")["rope_theta"]
    config["rope_scaling"] = None
    weights = load_file(SOURCE / "model.safetensors")
    tokens = load_file(GOLDEN / "qwen3moe.logits.safetensors")["tokens"]

    folder = prepare("qwen3moe-mlx")
    make_mlx(folder, dict(config), weights)
    model, _ = load_model(folder)
    model.set_dtype(mx.float32)
    save_logits(folder, model, tokens)

    folder = prepare("qwen3moe-fp8")
    meant = make_fp8(folder, dict(config), weights)
    model = qwen3_moe.Model(qwen3_moe.ModelArgs.from_dict(config))
    model.load_weights(list(model.sanitize({k: mx.array(v) for k, v in meant.items()}).items()))
    save_logits(folder, model, tokens)


def prepare(name: str) -> Path:
    folder = GOLDEN / name
    folder.mkdir(exist_ok=True)
    for file in BESIDE:
        (folder / file).unlink(missing_ok=True)
        # The tokenizer is a link to that of another tiny model.
        shutil.copyfile(SOURCE / file, folder / file, follow_symlinks=False)
    (folder / "generation_config.json").write_text(json.dumps(GENERATION, indent=1) + "\n")
    return folder


def make_mlx(folder: Path, config: dict, weights: dict) -> None:
    model = qwen3_moe.Model(qwen3_moe.ModelArgs.from_dict(config))
    stacked = model.sanitize({k: mx.array(v.astype(np.float32)).astype(mx.bfloat16) for k, v in weights.items()})
    quantization = {"group_size": 32, "bits": 4, "mode": "affine"}
    choices = [(2, 32), (3, 64), (4, 32), (5, 64), (6, 32), (8, 64), (4, 64), (8, 32), (3, 32), (6, 64)]
    tensors = {}
    for i, (name, value) in enumerate(sorted(stacked.items())):
        if value.ndim == 1:
            tensors[name] = value
            continue
        module = name.removesuffix(".weight")
        bits, group = choices[i % len(choices)]
        # Columns that are not a multiple of a group use a smaller group; one matrix is wide enough for the largest.
        group = 128 if value.shape[-1] == 128 else min(group, value.shape[-1])
        if (bits, group) != (4, 32):
            quantization[module] = {"group_size": group, "bits": bits}
        # Some files have scales in half precision.
        value = value.astype(mx.float16) if ".layers.1." in name else value
        parts = mx.quantize(value, group_size=group, bits=bits)
        for part, plane in zip(("weight", "scales", "biases"), parts):
            tensors[f"{module}.{part}"] = plane
    config["quantization"] = config["quantization_config"] = quantization
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    names = sorted(tensors)
    halves = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, part in halves.items():
        mx.save_safetensors(str(folder / file), {name: tensors[name] for name in part}, metadata={"format": "mlx"})
    weight_map = {name: file for file, part in halves.items() for name in part}
    index = {"metadata": {}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=0) + "\n")


def make_fp8(folder: Path, config: dict, weights: dict) -> dict:
    """Writes the folder; returns the values of its weights in f32."""
    tensors, meant = {}, {}
    for name, value in weights.items():
        wide = value.astype(np.float32)
        if value.ndim == 1 or "embed" in name or "lm_head" in name or "mlp.gate." in name:
            tensors[name], meant[name] = value, wide
            continue
        rows, cols = value.shape
        tiles = (-(-rows // BLOCK[0]), -(-cols // BLOCK[1]))
        largest = np.zeros(tiles, np.float32)
        for r in range(tiles[0]):
            for c in range(tiles[1]):
                largest[r, c] = abs(tile(wide, r, c)).max()
        # The attention's scales are f32, the experts' bf16; both occur in published checkpoints.
        scale = largest / 448 if "self_attn" in name else (largest / 440).astype(ml_dtypes.bfloat16)
        spread = scale.astype(np.float32).repeat(BLOCK[0], 0).repeat(BLOCK[1], 1)[:rows, :cols]
        codes = (wide / spread).astype(ml_dtypes.float8_e4m3fn)
        tensors[name], tensors[f"{name}_scale_inv"] = codes, scale
        meant[name] = codes.astype(np.float32) * spread
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config["quantization_config"] = {
        "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": list(BLOCK),
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    return meant


def tile(values: np.ndarray, r: int, c: int) -> np.ndarray:
    return values[r * BLOCK[0] : (r + 1) * BLOCK[0], c * BLOCK[1] : (c + 1) * BLOCK[1]]


def save_logits(folder: Path, model, tokens: np.ndarray) -> None:
    logits = model(mx.array(tokens)[None])[0]
    assert logits.dtype == mx.float32
    save_file({"tokens": tokens, "logits": np.array(logits)}, GOLDEN / f"{folder.name}.logits.safetensors")


if __name__ == "__main__":
    main()
