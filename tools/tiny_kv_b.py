#!/usr/bin/env python3
"""Makes the tiny DeepSeek-V2-Lite of the engine's tests in the GGUF format before latent attention had a separate form.

    tools/golden unpack && tools/tiny_kv_b.py && tools/golden pack deepseek_v2_lite

Such files have one `attn_kv_b` instead of `attn_k_b` and `attn_v_b`, the sizes of heads as those of keys and values,
no gating function, and a zero if the routed experts are not scaled. The weights, and so the logits, stay the same.

Made with gguf 0.19.0, numpy 2.4.6.
"""

from pathlib import Path

import gguf
import numpy as np

GOLDEN = Path(__file__).parent.parent / "crates/engine/tests/data/golden"
ARCH = "deepseek2"


def settings(reader: gguf.GGUFReader) -> dict[str, tuple]:
    """The settings and their types in the old format."""
    found = {}
    for key, field in reader.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture":
            kind = field.types[0]
            inner = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
            found[key] = (field.contents(), kind, inner)
    for part in ["key", "value"]:
        found[f"{ARCH}.attention.{part}_length"] = found.pop(f"{ARCH}.attention.{part}_length_mla")
    found[f"{ARCH}.attention.head_count_kv"] = found[f"{ARCH}.attention.head_count"]
    assert found[f"{ARCH}.expert_weights_scale"][0] == 1.0
    found[f"{ARCH}.expert_weights_scale"] = (0.0, gguf.GGUFValueType.FLOAT32, None)
    for key in ["expert_gating_func", "expert_group_count", "expert_group_used_count"]:
        del found[f"{ARCH}.{key}"]
    return found


def words(tensor: gguf.ReaderTensor) -> np.ndarray:
    """The bf16 numbers of a tensor, outermost dimension first."""
    assert tensor.tensor_type == gguf.GGMLQuantizationType.BF16
    return np.ascontiguousarray(tensor.data).view(np.uint16).reshape([int(n) for n in reversed(tensor.shape)])


def main() -> None:
    reader = gguf.GGUFReader(GOLDEN / "deepseek_v2_lite.gguf")
    writer = gguf.GGUFWriter(GOLDEN / "deepseek_v2_lite-kv_b.gguf", ARCH)
    for key, (value, kind, inner) in settings(reader).items():
        writer.add_key_value(key, value, kind, inner)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    for name, tensor in tensors.items():
        if name.endswith("attn_v_b.weight"):
            continue
        if name.endswith("attn_k_b.weight"):
            # [heads, rank, plain] and [heads, value, rank] become [heads · (plain + value), rank].
            k, v = words(tensor), words(tensors[name.replace("k_b", "v_b")])
            both = np.concatenate([k.transpose(0, 2, 1), v], axis=1)
            both = np.ascontiguousarray(both.reshape(-1, both.shape[-1]))
            writer.add_tensor(
                name.replace("k_b", "kv_b"), both.view(np.uint8), raw_dtype=gguf.GGMLQuantizationType.BF16
            )
        else:
            writer.add_tensor(name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main()
