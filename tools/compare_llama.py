"""Measures Forebay and llama.cpp alternately on the same file and tokens.

llama.cpp runs through llama-cpp-python, twice: with and without repacking the weights on load (`use_extra_bufts`).
Every round runs each program once in a separate process, so that other load on the machine affects all alike. The
figures are medians over the rounds of each round's median.

Usage: python tools/compare_llama.py MODEL [--rounds 5] [--threads N] [--forebay target/dist/forebay]
           [--tests pp64,pp512,tg64,tg64@4096] [--repetitions 1]
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

# llama.cpp computes at most this many tokens of a prompt together, as Forebay does.
UBATCH = 512


@dataclass(frozen=True)
class Test:
    """Timed tokens, after `depth` tokens that are not timed."""

    kind: str  # "pp": together; "tg": one after the other
    tokens: int
    depth: int

    @classmethod
    def parse(cls, text: str) -> "Test":
        found = re.fullmatch(r"(pp|tg)([1-9]\d*)(?:@(\d+))?", text)
        if not found:
            raise argparse.ArgumentTypeError(f"{text!r} is not a test; examples are pp512, tg64 and tg64@4096")
        return cls(found[1], int(found[2]), int(found[3] or 0))

    def __str__(self) -> str:
        return f"{self.kind}{self.tokens}" + (f" @ d{self.depth}" if self.depth else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--repetitions", type=int, default=1, help="timed runs of each test per round")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--forebay", type=Path, default=Path("target/dist/forebay"))
    parser.add_argument("--tests", default="pp64,pp512,tg64,tg64@4096")
    # Used when this script starts itself: which llama.cpp to measure, with which tokens.
    parser.add_argument("--llama", choices=["plain", "repack"], help=argparse.SUPPRESS)
    parser.add_argument("--tokens", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    try:
        args.parsed = [Test.parse(test) for test in args.tests.split(",")]
    except argparse.ArgumentTypeError as error:
        parser.error(str(error))
    if args.llama:
        print(json.dumps(run_llama(args)))
    else:
        compare(args)


def compare(args: argparse.Namespace) -> None:
    sides = ["forebay", "llama.cpp", "llama.cpp repack"]
    speeds: dict[tuple[str, str], list[float]] = {(side, str(t)): [] for side in sides for t in args.parsed}
    with tempfile.TemporaryDirectory() as folder:
        args.tokens = Path(folder) / "tokens"
        args.tokens.write_text("\n".join(map(str, tokens(args))) + "\n")
        for number in range(args.rounds):
            for side in sides:
                print(f"round {number + 1} of {args.rounds}: {side}", file=sys.stderr)
                results = run_forebay(args) if side == "forebay" else start_llama(args, side)
                for test, speed in results.items():
                    speeds[side, test].append(speed)

    print(f"{args.model.name}, {args.threads} threads, tokens per second, median of {args.rounds}\n")
    print("| test | forebay | llama.cpp | llama.cpp repack | to llama.cpp | to repack |")
    print("|---|---:|---:|---:|---:|---:|")
    for test in map(str, args.parsed):
        ours, plain, repack = (statistics.median(speeds[side, test]) for side in sides)
        print(f"| {test} | {ours:.1f} | {plain:.1f} | {repack:.1f} | {ours / plain:.2f} | {ours / repack:.2f} |")


def tokens(args: argparse.Namespace) -> list[int]:
    """Pseudo-random tokens of the model's vocabulary: SplitMix64 from the state 0, as in `forebay bench`."""
    inspected = subprocess.run([args.forebay, "inspect", args.model, "--json", "--tensors"],
                               check=True, capture_output=True, text=True)
    tensors = {t["name"]: t["shape"] for t in json.loads(inspected.stdout)["tensor_list"]}
    vocab = tensors["token_embd.weight"][0]
    mask, state, ids = 2**64 - 1, 0, []
    for _ in range(max(t.depth + t.tokens for t in args.parsed)):
        state = (state + 0x9E3779B97F4A7C15) & mask
        z = state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        ids.append(((z ^ (z >> 31)) >> 32) * vocab >> 32)
    return ids


def run_forebay(args: argparse.Namespace) -> dict[str, float]:
    """The speed of each test. Tests of the same depth share a call, and all its results are used."""
    results = {}
    for depth in sorted({t.depth for t in args.parsed}):
        lengths = {
            kind: ",".join(str(t.tokens) for t in args.parsed if (t.kind, t.depth) == (kind, depth)) or "0"
            for kind in ("pp", "tg")
        }
        command = [args.forebay, "bench", args.model, "-p", lengths["pp"], "-n", lengths["tg"], "-d", str(depth),
                   "-r", str(args.repetitions), "--threads", str(args.threads), "--tokens", args.tokens, "-o", "json"]
        for row in json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout):
            results[row["test"]] = row["median"]
    return results


def start_llama(args: argparse.Namespace, side: str) -> dict[str, float]:
    command = [sys.executable, __file__, args.model, "--llama", "repack" if "repack" in side else "plain",
               "--tests", args.tests, "--repetitions", str(args.repetitions), "--threads", str(args.threads),
               "--tokens", args.tokens]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{side} failed:\n{done.stderr}")
    # llama.cpp's own output may come first.
    return json.loads(done.stdout.splitlines()[-1])


def run_llama(args: argparse.Namespace) -> dict[str, float]:
    """The speed of each test in llama.cpp, by the same rules: one untimed run, then the timed ones."""
    from llama_cpp import llama_cpp as llama

    ids = [int(word) for word in args.tokens.read_text().split()]
    llama.llama_backend_init()
    model_params = llama.llama_model_default_params()
    model_params.use_extra_bufts = args.llama == "repack"
    model = llama.llama_model_load_from_file(str(args.model).encode(), model_params)
    if not model:
        sys.exit(f"llama.cpp cannot load {args.model}")
    params = llama.llama_context_default_params()
    # llama.cpp rounds a context up to whole blocks of cells.
    params.n_ctx = -(-len(ids) // 256) * 256
    params.n_batch = params.n_ubatch = UBATCH
    params.n_threads = params.n_threads_batch = args.threads
    context = llama.llama_init_from_model(model, params)
    if not context:
        sys.exit("llama.cpp cannot make a context")

    def decode(batch: list[int]) -> None:
        for start in range(0, len(batch), UBATCH):
            part = batch[start : start + UBATCH]
            array = (llama.llama_token * len(part))(*part)
            if llama.llama_decode(context, llama.llama_batch_get_one(array, len(part))):
                sys.exit("llama.cpp cannot compute")
        llama.llama_synchronize(context)

    memory = llama.llama_get_memory(context)
    results = {}
    for test in args.parsed:
        llama.llama_memory_clear(memory, True)
        decode(ids[: test.depth])
        samples = []
        for _ in range(args.repetitions + 1):
            llama.llama_memory_seq_rm(memory, 0, test.depth, -1)
            timed = ids[test.depth : test.depth + test.tokens]
            start = time.perf_counter()
            for batch in [timed] if test.kind == "pp" else [[token] for token in timed]:
                decode(batch)
            samples.append(test.tokens / (time.perf_counter() - start))
        results[str(test)] = statistics.median(samples[1:])
    return results


if __name__ == "__main__":
    main()
