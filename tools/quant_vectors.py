"""Writes the test vectors of the dequantisation kernels.

For each type a file holds two tensors: "<TYPE>.blocks", u8 [n, block_bytes], raw blocks of a
weight file, and "<TYPE>.values", f32 [n, block_len], their values according to the gguf package. Blocks are random, with
all kinds of extreme scales that the format allows. Further blocks use every entry of the type's tables.

The IQ types have large tables and a separate file.

Usage: python tools/quant_vectors.py [FOLDER]
"""

import sys
import zlib
from pathlib import Path

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from safetensors.numpy import save_file

# To cover another type, add its name.
TYPES = [
    "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K",
    "IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS", "MXFP4", "NVFP4",
]  # fmt: skip

OUTPUT = Path(__file__).resolve().parent.parent / "crates/kernels/tests/data"
SEED = 0xF0EBA7
BLOCKS = 24
# A block of a plain type is one element, so more blocks are needed to cover every exponent.
PLAIN_BLOCKS = 1024

# Offsets of the f16 scales in a block. Random bytes alone would rarely give scales that are worth testing.
SCALES = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,),
    "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,),
    "IQ1_S": (0,), "IQ2_XXS": (0,), "IQ2_XS": (0,), "IQ2_S": (0,), "IQ3_XXS": (0,), "IQ3_S": (0,),
    "IQ4_NL": (0,), "IQ4_XS": (0,), "TQ1_0": (52,), "TQ2_0": (64,),
}  # fmt: skip

# Bits of ±zero, the smallest and the largest subnormal, the smallest normal, ±max, infinity and NaN.
EDGES = {
    "F16": [0x0000, 0x8000, 0x0001, 0x83FF, 0x0400, 0x7BFF, 0xFBFF, 0x7C00, 0x7E00],
    "BF16": [0x0000, 0x8000, 0x0001, 0x807F, 0x0080, 0x7F7F, 0xFF7F, 0x7F80, 0x7FC0],
}

# Points of the grid that a type refers to by number.
GRIDS = {"IQ1_S": 2048, "IQ2_XXS": 256, "IQ2_XS": 512, "IQ2_S": 1024, "IQ3_XXS": 256, "IQ3_S": 512}


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else OUTPUT
    folder.mkdir(parents=True, exist_ok=True)
    files = {"quants": {}, "iq": {}}
    for name in TYPES:
        blocks, values = vectors(name)
        tensors = files["iq" if name.startswith("IQ") else "quants"]
        tensors[f"{name}.blocks"] = blocks
        tensors[f"{name}.values"] = values
        print(f"{name:8} {blocks.shape[0]:5} blocks of {blocks.shape[1]:3} bytes, {values.shape[1]:3} values")
    for name, tensors in files.items():
        path = folder / f"{name}.safetensors"
        save_file(tensors, path)
        print(f"{path}: {path.stat().st_size} bytes")


def vectors(name: str) -> tuple[np.ndarray, np.ndarray]:
    """Blocks of one type, u8 [n, block_bytes], and their values, f32 [n, block_len]."""
    qtype = GGMLQuantizationType[name]
    block_len, block_bytes = GGML_QUANT_SIZES[qtype]
    # A separate generator for each type, so that adding a type does not change the other vectors.
    rng = np.random.default_rng([SEED, zlib.crc32(name.encode())])

    n = PLAIN_BLOCKS if block_len == 1 else BLOCKS
    blocks = rng.integers(0, 256, size=(n, block_bytes), dtype=np.uint8)
    for offset in SCALES.get(name, ()):
        blocks[:, offset : offset + 2] = scales(rng, n).view(np.uint8).reshape(n, 2)
    if name == "IQ1_M":
        set_scattered_scale(blocks, scales(rng, n))
    edges = np.array(EDGES.get(name, []), dtype="<u2")
    blocks[: len(edges)] = edges.view(np.uint8).reshape(len(edges), block_bytes)
    if name in GRIDS:
        blocks = np.concatenate([blocks, every_point(name, rng, block_bytes)])
    if name in ("MXFP4", "NVFP4"):
        blocks = np.concatenate([blocks, every_scale(name, rng, block_bytes)])

    with np.errstate(over="ignore", invalid="ignore"):
        return blocks, dequantize(blocks, qtype).reshape(-1, block_len)


def set_scattered_scale(blocks: np.ndarray, d: np.ndarray) -> None:
    """IQ1_M holds a nibble of its scale on top of each of four words."""
    words = blocks[:, 48:56].copy().view("<u2")
    nibbles = d.view("<u2")[:, None] >> np.array([0, 4, 8, 12], dtype="<u2") & 15
    blocks[:, 48:56] = ((words & 0x0FFF) | nibbles << 12).astype("<u2").view(np.uint8)


def every_point(name: str, rng: np.random.Generator, block_bytes: int) -> np.ndarray:
    """Blocks with a scale of one that refer to every point of a grid, and to every combination of seven signs."""
    points = np.arange(GRIDS[name], dtype="<u2")
    in_block = 64 if name.startswith("IQ3") else 32
    points = points.reshape(-1, in_block)
    n = len(points)
    blocks = rng.integers(0, 256, size=(n, block_bytes), dtype=np.uint8)
    blocks[:, 0:2] = np.ones(n, dtype="<f2").view(np.uint8).reshape(n, 2)
    low, high = (points & 255).astype(np.uint8), (points >> 8).astype(np.uint8)
    signs = (np.arange(n * 32, dtype="<u4") % 128).reshape(n, 8, 4)
    four_signs = (signs << np.array([0, 7, 14, 21], dtype="<u4")).sum(axis=2).astype("<u4")
    four_signs |= rng.integers(0, 16, size=(n, 8)).astype("<u4") << 28
    match name:
        case "IQ1_S":
            blocks[:, 2:34] = low
            top = (high.reshape(n, 8, 4).astype("<u2") << np.array([0, 3, 6, 9], dtype="<u2")).sum(axis=2)
            rest = rng.integers(0, 16, size=(n, 8)).astype("<u2") << 12
            blocks[:, 34:50] = (top.astype("<u2") | rest).view(np.uint8)
        case "IQ2_XXS":
            parts = np.stack([low.view("<u4"), four_signs], axis=2)
            blocks[:, 2:66] = parts.reshape(n, 16).view(np.uint8)
        case "IQ2_XS":
            packed = points | signs.reshape(n, 32).astype("<u2") << 9
            blocks[:, 2:66] = packed.astype("<u2").view(np.uint8)
        case "IQ2_S":
            blocks[:, 2:34] = low
            blocks[:, 66:74] = (high.reshape(n, 8, 4) << np.array([0, 2, 4, 6], dtype=np.uint8)).sum(axis=2)
        case "IQ3_XXS":
            blocks[:, 2:66] = low
            blocks[:, 66:98] = four_signs.view(np.uint8)
        case "IQ3_S":
            blocks[:, 2:66] = low
            blocks[:, 66:74] = np.packbits(high.reshape(n, 8, 8), axis=2, bitorder="little").reshape(n, 8)
    return blocks


def every_scale(name: str, rng: np.random.Generator, block_bytes: int) -> np.ndarray:
    """Blocks of a type of four-bit floats with every possible byte of a scale."""
    count = {"MXFP4": 1, "NVFP4": 4}[name]
    n = 256 // count
    blocks = rng.integers(0, 256, size=(n, block_bytes), dtype=np.uint8)
    blocks[:, :count] = np.arange(256, dtype=np.uint8).reshape(n, count)
    return blocks


def scales(rng: np.random.Generator, n: int) -> np.ndarray:
    """A mix of f16 scales in random order: every kind is in it once n reaches the number of kinds."""
    normal = rng.normal(scale=0.05, size=n).astype("<f2")
    subnormal = rng.integers(1, 0x400, size=n).astype("<u2").view("<f2")
    largest = np.full(n, 65504, dtype="<f2")
    zero = np.zeros(n, dtype="<f2")
    infinite = np.full(n, np.inf, dtype="<f2")
    nan = np.full(n, np.nan, dtype="<f2")
    kinds = [abs(normal), -abs(normal), zero, subnormal, -subnormal, normal]
    kinds += [largest, -largest, infinite, -infinite, nan, -zero]
    mixed = np.array([kinds[i % len(kinds)][i] for i in range(n)], dtype="<f2")
    return rng.permutation(mixed)


if __name__ == "__main__":
    main()
