#!/usr/bin/env python3
"""Compares Forebay with transformers on files that llama.cpp's converter writes: with fused queries, keys and values, and
with NVFP4 weights.

    pip install torch==2.15.0 transformers==5.22.2 safetensors==0.8.0 numpy==2.4.6 sentencepiece==0.2.2
    tools/golden unpack
    python3 tools/converted.py LLAMA_CPP FOREBAY

LLAMA_CPP is llama.cpp's source folder (for example from the source package xllamacpp 2026.10.11549), FOREBAY the binary. A
random Qwen3-MoE is saved three times: unchanged, with its matrices in ModelOpt's NVFP4, and with the values of those NVFP4
weights. The first two are converted. The references are the logits of the first and the third by transformers. The script
fails if a relative error is above 1e-5.
"""

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

GOLDEN = Path(__file__).parent.parent / "crates/engine/tests/data/golden/qwen3moe"
TOKENS = list(range(3, 35))
MAGNITUDES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def converter(llama_cpp):
    """Runs the converter, with a patch because it does not know the tiny model's tokenizer."""
    sys.path[:0] = [str(llama_cpp), str(llama_cpp / "gguf-py")]
    import conversion.base
    import convert_hf_to_gguf

    conversion.base.TextModel.get_vocab_base_pre = lambda self, tokenizer: "qwen2"

    def convert(folder, out, *args):
        sys.argv = ["convert_hf_to_gguf.py", str(folder), "--outfile", str(out), *args]
        convert_hf_to_gguf.main()

    return convert


def save(folder, tensors, **settings):
    """A checkpoint like the golden one, with these tensors and settings."""
    shutil.copytree(GOLDEN, folder)
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    return folder


def random_model(folder):
    """The weights of a model whose rows are all long enough for NVFP4, its experts one by one."""
    config = AutoConfig.from_pretrained(GOLDEN)
    config.moe_intermediate_size = 64
    torch.manual_seed(5)
    AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(folder)
    tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        # Larger than transformers draws them, so that every matrix matters.
        tensor = 3 * tensor if "_proj" in name else tensor
        stem, _, last = name.rpartition(".experts.")
        parts = {"gate_up_proj": ["gate_proj", "up_proj"], "down_proj": ["down_proj"]}.get(last, [])
        for expert in range(len(tensor) if parts else 0):
            for part, matrix in zip(parts, tensor[expert].chunk(len(parts))):
                tensors[f"{stem}.experts.{expert}.{part}.weight"] = matrix
        if not parts:
            tensors[name] = tensor
    return tensors


def nvfp4(weight):
    """Codes, scales of 16 weights and the overall scale, as ModelOpt writes them; and the values of the weights."""
    groups = weight.float().unflatten(1, (-1, 16))
    # Differs from the usual choice, so that no scale is near one.
    whole = groups.abs().max() / 600
    scales = (groups.abs().amax(-1) / 6 / whole).clamp(1e-3, 448).to(torch.float8_e4m3fn)
    steps = (scales.float() * whole).unsqueeze(-1)
    codes = ((groups / steps).abs().unsqueeze(-1) - MAGNITUDES).abs().argmin(-1) + 8 * (groups < 0)
    values = MAGNITUDES[codes & 7] * torch.where(codes >= 8, -1.0, 1.0) * steps
    codes = codes.flatten(1)
    packed = (codes[:, 0::2] | codes[:, 1::2] << 4).to(torch.uint8)
    return packed, scales, whole, values.flatten(1)


def in_nvfp4(tensors):
    """The tensors with all projections in NVFP4, and the tensors with their values."""
    coded, plain = dict(tensors), dict(tensors)
    for name, tensor in tensors.items():
        if name.endswith("_proj.weight"):
            stem = name.removesuffix("weight")
            coded[name], coded[stem + "weight_scale"], coded[stem + "weight_scale_2"], plain[name] = nvfp4(tensor)
            coded[stem + "input_scale"] = torch.tensor(0.01)
    return coded, plain


def reference(folder):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(torch.tensor([TOKENS])).logits[0]


def main():
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    llama_cpp, forebay = Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve()
    convert = converter(llama_cpp)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        tensors = random_model(folder / "drawn")
        coded, plain = in_nvfp4(tensors)
        wide = {"moe_intermediate_size": 64}
        modelopt = {"quant_algo": "NVFP4", "quant_method": "modelopt"}
        original = save(folder / "original", tensors, **wide)
        quantised = save(folder / "quantised", coded, quantization_config=modelopt, **wide)
        dequantised = save(folder / "dequantised", {k: v.float() for k, v in plain.items()}, **wide)
        convert(original, folder / "fused.gguf", "--fuse-qkv", "--outtype", "bf16")
        convert(quantised, folder / "nvfp4.gguf", "--outtype", "f32")
        errors = {}
        for name, truth in [("fused", reference(original)), ("nvfp4", reference(dequantised))]:
            out = folder / f"{name}.safetensors"
            options = ["--exact", "--device", "cpu", "--tokens", ",".join(map(str, TOKENS)), "--out", out]
            subprocess.run([forebay, "logits", folder / f"{name}.gguf", *options], check=True)
            ours = load_file(out)["logits"]
            errors[name] = float((ours - truth).norm() / truth.norm())
        print("relative errors:", errors)
        if not all(error < 1e-5 for error in errors.values()):
            sys.exit(1)


if __name__ == "__main__":
    main()
