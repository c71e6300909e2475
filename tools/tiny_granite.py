#!/usr/bin/env python3
"""Makes the tiny dense Granite of the engine's tests from the tiny Llama.

    tools/golden unpack && tools/tiny_granite.py && tools/golden pack granite

Granite is Llama with four factors. Here they are powers of two, and the weights that they multiply are divided by
them, which changes no other bit. So the logits are those of the tiny Llama, which transformers computed.

Made with gguf 0.19.0, numpy 2.4.6.
"""

import json
import shutil
from pathlib import Path

import gguf
import numpy as np

GOLDEN = Path(__file__).parent.parent / "crates/engine/tests/data/golden"
# The usual factor of scores is a quarter, because heads have 16 channels.
EMBEDDING, SCORES, RESIDUAL, LOGITS = 4.0, 0.5, 0.5, 16.0
# What the weights are multiplied by, by the ends of their names.
FACTORS = {
    ("token_embd.weight", "embed_tokens.weight"): 1 / EMBEDDING,
    ("attn_q.weight", "q_proj.weight"): 0.25 / SCORES,
    ("attn_output.weight", "ffn_down.weight", "o_proj.weight", "down_proj.weight"): 1 / RESIDUAL,
    # The setting divides logits.
    (".output.weight", "lm_head.weight"): LOGITS,
}


def scaled(name: str, words: np.ndarray) -> np.ndarray:
    """The bf16 numbers of a tensor, multiplied by its factor."""
    for ends, factor in FACTORS.items():
        if f".{name}".endswith(ends):
            wide = words.astype(np.uint32) << 16
            product = (wide.view(np.float32) * np.float32(factor)).view(np.uint32)
            assert not (product & 0xFFFF).any()
            return (product >> 16).astype(np.uint16)
    return words


def write_folder() -> None:
    old, new = GOLDEN / "llama", GOLDEN / "granite"
    shutil.rmtree(new, ignore_errors=True)
    shutil.copytree(old, new)
    config = json.loads((old / "config.json").read_text())
    config |= {"architectures": ["GraniteForCausalLM"], "model_type": "granite"}
    config |= {"embedding_multiplier": EMBEDDING, "attention_multiplier": SCORES}
    config |= {"residual_multiplier": RESIDUAL, "logits_scaling": LOGITS}
    (new / "config.json").write_text(json.dumps(config, indent=1))
    data = bytearray((old / "model.safetensors").read_bytes())
    start = 8 + int.from_bytes(data[:8], "little")
    for name, tensor in json.loads(data[8:start]).items():
        if name != "__metadata__":
            assert tensor["dtype"] == "BF16"
            place = slice(*(start + offset for offset in tensor["data_offsets"]))
            data[place] = scaled(name, np.frombuffer(data[place], np.uint16)).tobytes()
    (new / "model.safetensors").write_bytes(data)


def write_gguf() -> None:
    reader = gguf.GGUFReader(GOLDEN / "llama.gguf")
    writer = gguf.GGUFWriter(GOLDEN / "granite.gguf", "granite")
    for key, field in reader.fields.items():
        if key.startswith("GGUF.") or key == "general.architecture":
            continue
        kind = field.types[0]
        inner = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        value = "granite" if key == "general.name" else field.contents()
        writer.add_key_value(key.replace("llama.", "granite."), value, kind, inner)
    writer.add_embedding_scale(EMBEDDING)
    writer.add_attention_scale(SCORES)
    writer.add_residual_scale(RESIDUAL)
    writer.add_logit_scale(LOGITS)
    for tensor in reader.tensors:
        data = np.ascontiguousarray(tensor.data)
        if tensor.tensor_type == gguf.GGMLQuantizationType.BF16:
            data = scaled(tensor.name, data.view(np.uint16)).view(np.uint8)
        writer.add_tensor(tensor.name, data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    write_folder()
    write_gguf()
    shutil.copy(GOLDEN / "llama.logits.safetensors", GOLDEN / "granite.logits.safetensors")


if __name__ == "__main__":
    main()
