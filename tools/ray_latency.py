#!/usr/bin/env python3
"""Measures the time to the first token and to the last one at addresses of servers, one request after the other.

    tools/ray_latency.py NAME=http://127.0.0.1:8080 NAME=http://127.0.0.1:8000

It prints medians in milliseconds. The rounds alternate between the addresses. It needs httpx.
"""

import json
import statistics
import sys
import time

import httpx

ROUNDS = 200
BODY = {
    "messages": [{"role": "user", "content": "Tell me a story."}],
    "max_tokens": 64,
    "ignore_eos": True,
    "temperature": 0,
    "stream": True,
}


def measure(client, address):
    start = time.perf_counter()
    first = None
    with client.stream("POST", f"{address}/v1/chat/completions", json=BODY) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            if line.startswith("data: {") and first is None:
                choices = json.loads(line.removeprefix("data: "))["choices"]
                if choices and choices[0]["delta"].get("content"):
                    first = time.perf_counter() - start
    return first, time.perf_counter() - start


def main():
    addresses = dict(argument.split("=", 1) for argument in sys.argv[1:])
    if not addresses:
        sys.exit(__doc__)
    times = {name: [] for name in addresses}
    with httpx.Client(timeout=60) as client:
        for turn in range(ROUNDS + 5):
            for name, address in addresses.items():
                taken = measure(client, address)
                # The first rounds warm up.
                if turn >= 5:
                    times[name].append(taken)
    for name, taken in times.items():
        first, whole = (1000 * statistics.median(column) for column in zip(*taken))
        print(f"{name}: first token {first:.1f} ms, all {BODY['max_tokens']} tokens {whole:.1f} ms ({ROUNDS} requests)")


if __name__ == "__main__":
    main()
