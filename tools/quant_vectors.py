"""Writes the vectors that the dequantisation kernels are tested against.

For each type the file holds two tensors: "<TYPE>.blocks", u8 [n, block_bytes], raw blocks as a weight file
has them, and "<TYPE>.values", f32 [n, block_len], what the gguf package makes of them. A zero scale times a
negative quant gives -0.0 there, so compare values and not bits.

Usage: python tools/quant_vectors.py [OUTPUT]
"""

import sys
import zlib
from pathlib import Path

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from safetensors.numpy import save_file

# To cover another type, add its name.
TYPES = ["F16", "BF16", "Q8_0", "Q4_K", "Q5_K", "Q6_K"]

OUTPUT = Path(__file__).resolve().parent.parent / "crates/kernels/tests/data/quants.safetensors"
SEED = 0xF0EBA7
BLOCKS = 24
# A block of a plain type is one element, so more of them are needed to meet every exponent.
PLAIN_BLOCKS = 1024

# Where the f16 scales of a block lie, in bytes. Random bytes alone would rarely hit the scales worth testing.
SCALES = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,),
    "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,),
    "IQ1_S": (0,), "IQ2_XXS": (0,), "IQ2_XS": (0,), "IQ2_S": (0,), "IQ3_XXS": (0,), "IQ3_S": (0,),
    "IQ4_NL": (0,), "IQ4_XS": (0,), "TQ1_0": (52,), "TQ2_0": (64,),
}  # fmt: skip

# Bits of ±zero, the smallest and the largest subnormal, the smallest normal and ±max.
EDGES = {
    "F16": [0x0000, 0x8000, 0x0001, 0x83FF, 0x0400, 0x7BFF, 0xFBFF],
    "BF16": [0x0000, 0x8000, 0x0001, 0x807F, 0x0080, 0x7F7F, 0xFF7F],
}


def main() -> None:
    output = Path(sys.argv[1]) if len(sys.argv) > 1 else OUTPUT
    tensors = {}
    for name in TYPES:
        blocks, values = vectors(name)
        tensors[f"{name}.blocks"] = blocks
        tensors[f"{name}.values"] = values
        print(f"{name:8} {blocks.shape[0]:5} blocks of {blocks.shape[1]:3} bytes, {values.shape[1]:3} values")
    output.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, output)
    print(f"{output}: {output.stat().st_size} bytes")


def vectors(name: str) -> tuple[np.ndarray, np.ndarray]:
    """Blocks of one type, u8 [n, block_bytes], and their values, f32 [n, block_len]; all are finite."""
    qtype = GGMLQuantizationType[name]
    block_len, block_bytes = GGML_QUANT_SIZES[qtype]
    # A generator of its own for each type: adding one leaves the vectors of the others as they are.
    rng = np.random.default_rng([SEED, zlib.crc32(name.encode())])

    n = PLAIN_BLOCKS if block_len == 1 else BLOCKS
    blocks = rng.integers(0, 256, size=(n, block_bytes), dtype=np.uint8)
    for offset in SCALES.get(name, ()):
        blocks[:, offset : offset + 2] = scales(rng, n).view(np.uint8).reshape(n, 2)
    edges = np.array(EDGES.get(name, []), dtype="<u2")
    blocks[: len(edges)] = edges.view(np.uint8).reshape(len(edges), block_bytes)

    # Where random bytes alone make a scale or a value, some are infinite or NaN; those are drawn again.
    while True:
        with np.errstate(over="ignore", invalid="ignore"):
            values = dequantize(blocks, qtype).reshape(n, block_len)
        bad = ~np.isfinite(values).all(axis=1)
        if not bad.any():
            return blocks, values
        blocks[bad] = rng.integers(0, 256, size=(bad.sum(), block_bytes), dtype=np.uint8)


def scales(rng: np.random.Generator, n: int) -> np.ndarray:
    """A mix of f16 scales in random order: every kind is in it once n reaches the number of kinds."""
    normal = rng.normal(scale=0.05, size=n).astype("<f2")
    subnormal = rng.integers(1, 0x400, size=n).astype("<u2").view("<f2")
    largest = np.full(n, 65504, dtype="<f2")
    zero = np.zeros(n, dtype="<f2")
    kinds = [abs(normal), -abs(normal), zero, subnormal, -subnormal, normal, largest, -largest]
    mixed = np.array([kinds[i % len(kinds)][i] for i in range(n)], dtype="<f2")
    return rng.permutation(mixed)


if __name__ == "__main__":
    main()
