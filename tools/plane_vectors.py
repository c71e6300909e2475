"""Writes the test vectors of dequantisation from planes.

Affine codes by mlx, for all bits, groups and types of scales; FP8 and MXFP4 numbers by ml_dtypes. Names:
"affine.<bits>.<group>.<scale type>.{codes,scales,biases,values}", "fp8.{codes,scales,values}" (tiles of 4 x 32)
and "mxfp4.{codes,scales,values}".

Made with mlx 0.32.4 (mlx-cpu), ml_dtypes 0.6.0, numpy 2.4.6, safetensors 0.8.0.

Usage: python tools/plane_vectors.py [OUTPUT]
"""

import sys
from pathlib import Path

import ml_dtypes
import mlx.core as mx
import numpy as np
from safetensors.numpy import save_file

OUTPUT = Path(__file__).resolve().parent.parent / "crates/kernels/tests/data/planes.safetensors"
SEED = 0xF0EBA7
FLOATS = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}


def main() -> None:
    output = Path(sys.argv[1]) if len(sys.argv) > 1 else OUTPUT
    rng = np.random.default_rng(SEED)
    tensors = {}
    for bits in (2, 3, 4, 5, 6, 8):
        for group in (32, 64, 128):
            for name, dtype in FLOATS.items():
                add(tensors, f"affine.{bits}.{group}.{name}", affine(rng, bits, group, dtype))
    add(tensors, "fp8", fp8(rng))
    add(tensors, "mxfp4", mxfp4(rng))
    save_file(tensors, output)
    print(f"{output}: {output.stat().st_size} bytes")


def add(tensors: dict, prefix: str, parts: dict) -> None:
    for part, values in parts.items():
        # As bytes, so that readers need only u8 and f32.
        kept = values if part == "values" else np.ascontiguousarray(values).view(np.uint8)
        tensors[f"{prefix}.{part}"] = kept.reshape(-1)


def affine(rng: np.random.Generator, bits: int, group: int, dtype) -> dict:
    """Random codes; scales and biases from tiny to large, of both signs."""
    rows, cols = 2, 2 * group
    codes = rng.integers(0, 2**32, size=(rows, cols * bits // 32), dtype=np.uint32)
    sizes = np.array([[1e-3, 30.0], [1e-7, 0.5]])
    scales = (rng.normal(size=(rows, 2)) * sizes).astype(dtype)
    biases = (rng.normal(size=(rows, 2)) * sizes[::-1]).astype(dtype)
    wide = [mx.array(x.astype(np.float32)) for x in (scales, biases)]
    values = mx.dequantize(mx.array(codes), *wide, group_size=group, bits=bits, stream=mx.cpu)
    assert values.dtype == mx.float32
    return {"codes": codes, "scales": scales, "biases": biases, "values": np.array(values)}


def fp8(rng: np.random.Generator) -> dict:
    """Every code but the NaNs, in [16, 127 · 2 / 16 …] with scales for tiles of 4 x 32."""
    codes = np.array([c for c in range(256) if c & 127 != 127], dtype=np.uint8)
    codes = np.concatenate([codes, rng.permutation(codes), np.zeros(4, np.uint8)]).reshape(8, 64)
    scales = rng.normal(size=(2, 2)).astype(np.float32)
    numbers = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    return {"codes": codes, "scales": scales, "values": numbers * scales.repeat(4, 0).repeat(32, 1)}


def mxfp4(rng: np.random.Generator) -> dict:
    """Random nibbles, and every scale from tiny to huge whose products are floats."""
    codes = rng.integers(0, 256, size=(62, 16 * 4), dtype=np.uint8)
    scales = np.arange(2, 2 + 62 * 4, dtype=np.uint8).reshape(62, 4)
    nibbles = np.stack([codes & 15, codes >> 4], axis=-1).reshape(62, -1)
    numbers = nibbles.view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    powers = scales.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    return {"codes": codes, "scales": scales, "values": numbers * powers.repeat(32, 1)}


if __name__ == "__main__":
    main()
