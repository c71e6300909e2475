"""Prints how far the logits of one run are from those of another.

Each file is a safetensors file with "tokens", i32 [n], and "logits", f32 [n, vocab]. The difference is
relative to the second file, the reference: ‖a−b‖ / ‖b‖, over all positions and at the worst one.

Usage: python tools/logits_diff.py A B
"""

import sys

import numpy as np
from safetensors.numpy import load_file


def main() -> None:
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    a, b = (load(path) for path in sys.argv[1:])
    if not np.array_equal(a["tokens"], b["tokens"]):
        sys.exit("the two files hold logits for different tokens")
    if a["logits"].shape != b["logits"].shape:
        sys.exit(f"the shapes differ: {a['logits'].shape} and {b['logits'].shape}")

    # In f64, so that the sums add no error.
    x, y = (f["logits"].astype(np.float64) for f in (a, b))
    by_position = relative(x, y, axis=1)
    # argmax returns the position of a NaN, which a reader should see.
    worst = int(np.argmax(by_position))
    same_top = np.count_nonzero(x.argmax(axis=1) == y.argmax(axis=1))
    print(f"all:       {relative(x, y, axis=None):.3e} over {len(x)} positions")
    print(f"worst:     {by_position[worst]:.3e} at position {worst}, token {a['tokens'][worst]}")
    print(f"same top:  {same_top} of {len(x)} positions")


def load(path: str) -> dict[str, np.ndarray]:
    """The two tensors of a logits file; exits if one is missing."""
    tensors = load_file(path)
    for name, dims in (("tokens", 1), ("logits", 2)):
        if name not in tensors or tensors[name].ndim != dims:
            sys.exit(f"{path}: no tensor '{name}' of {dims} dimension(s)")
    if len(tensors["tokens"]) != len(tensors["logits"]) or tensors["logits"].size == 0:
        sys.exit(f"{path}: {len(tensors['tokens'])} tokens, but logits of shape {tensors['logits'].shape}")
    return tensors


def relative(x: np.ndarray, y: np.ndarray, axis: int | None) -> np.ndarray:
    """‖x−y‖ / ‖y‖ along an axis; zero where both are zero."""
    difference = np.sqrt(np.square(x - y).sum(axis=axis))
    norm = np.sqrt(np.square(y).sum(axis=axis))
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(difference == 0, 0.0, difference / norm)


if __name__ == "__main__":
    main()
