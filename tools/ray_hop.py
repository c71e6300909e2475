#!/usr/bin/env python3
"""Measures what the way to an actor and back costs: tokens of the demo model in one process, and in two stages.

    target/python/ray/bin/python tools/ray_hop.py

It starts Ray on this machine, and prints the median time of a token in milliseconds. The rounds alternate. It needs forebay[ray].
"""

import statistics
import time

import ray

import forebay
from forebay.ray import staged

ROUNDS = 20
TOKENS = 50
OPTIONS = {"device": "cpu", "memory": "512M", "threads": 1}


class Here:
    """A stage in this process."""

    def __init__(self, layers):
        self.call = forebay.Stage(layers=layers, **OPTIONS).handle

    def restart(self):
        raise RuntimeError("it cannot be lost")


def measure(llm, prompt):
    """The times of tokens after a prompt."""
    times = []
    with llm.session() as session:
        session.extend(prompt)
        for token in range(100, 100 + TOKENS):
            start = time.perf_counter()
            session.push(token)
            times.append(time.perf_counter() - start)
    return times


def main():
    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=100 << 20)
    first, _ = forebay.split_layers(stages=2)
    models = {
        "one process": forebay.Model(**OPTIONS),
        "two stages in one process": forebay.Model(stages=[Here(first)], **OPTIONS),
        "two stages, one in an actor": staged(stages=2, **OPTIONS),
    }
    prompt = models["one process"].tokenizer.encode("Once upon a time")
    times = {name: [] for name in models}
    for turn in range(ROUNDS + 1):
        for name, model in models.items():
            taken = measure(model, prompt)
            # The first round warms up.
            if turn > 0:
                times[name] += taken
    for name, taken in times.items():
        print(f"{name}: {1000 * statistics.median(taken):.2f} ms ({len(taken)} tokens)")
    for model in models.values():
        model.close()


if __name__ == "__main__":
    main()
