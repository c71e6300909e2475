"""Forebay on a Ray cluster: replicas of a model behind one address, batches on all machines, and models split over machines.

    serve run forebay.ray:app model=/models/model.gguf replicas=4
    python -m forebay.ray serve /models/model.gguf --replicas 4
    python -m forebay.ray batch questions.jsonl --out answers --model /models/model.gguf
    llm = forebay.ray.staged("/models/model.gguf", stages=4, resource="forebay", memory="60G")

It needs Ray 2.60: `pip install "forebay[ray]"`. docs/cluster.md of the repository describes it.
"""

from __future__ import annotations

RAY = "2.60."
"""The versions of Ray that this is written for: interfaces that it uses change between minor versions."""

try:
    import ray
    from ray import data, serve  # noqa: F401
except ImportError as error:
    raise ImportError(f'forebay.ray needs Ray {RAY}*: pip install "forebay[ray]" ({error})') from error
if not ray.__version__.startswith(RAY):
    raise ImportError(f'forebay.ray needs Ray {RAY}*, and this is Ray {ray.__version__}: pip install "forebay[ray]"')

from forebay.ray._batch import batch
from forebay.ray._serving import app
from forebay.ray._stages import staged

__all__ = ["app", "batch", "staged"]
