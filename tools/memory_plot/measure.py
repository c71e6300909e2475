"""Measures how fast Forebay and llama.cpp write with less and less memory: the same file, turn by turn.

Each measurement runs in a memory control group of its own, with an empty page cache, so that a limit of 8 GiB means what a
machine with 8 GiB free means. Neither program is told about the limit: Forebay asks the control group, llama.cpp maps the
file. The tokens are random, and differ from step to step. Forebay writes 256 tokens right after loading, with no experts in memory
unless all fit. llama.cpp writes one token that is not timed, then twice 8 tokens (64 where the limit is at least 16 GiB), and the better pass counts. Where the
limit is above the size of the model, llama.cpp runs with and without repacking; below it, repacking is killed for memory. A program that
is killed, or not done in time, has no speed.

Needs root, memory control groups (version 1), forebay, and llama-bench:

    forebay synth s48.gguf
    python tools/memory_plot/measure.py s48.gguf --llama-bench build/bin/llama-bench --out docs/images/memory.json
    python tools/memory_plot/plot.py docs/images/memory.json docs/images/memory.svg
"""

import argparse
import json
import os
import platform
import re
import subprocess
import sys
from pathlib import Path

GROUP = Path("/sys/fs/cgroup/memory/forebay-plot")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--forebay", type=Path, default=Path("target/release/forebay"))
    parser.add_argument("--llama-bench", type=Path, required=True)
    parser.add_argument("--gib", default="4,8,12,16,20", help="limits, in GiB")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--append", action="store_true", help="keep what --out holds: another hour's rounds beside this one's")
    parser.add_argument("--patience", type=int, default=180, help="seconds that one run of llama-bench may take")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()

    limits = [float(limit) for limit in args.gib.split(",")]
    rows = json.loads(args.out.read_text())["rows"] if args.append else []
    first = max((row["round"] for row in rows), default=0) + 1
    for number in range(first, first + args.rounds):
        for limit in limits:
            for side, measure in SIDES.items():
                if "repacked" in side and limit * 2**30 < args.model.stat().st_size:
                    continue
                row = {"round": number, "gib": limit, "program": side, **measure(args, limit)}
                print(row, file=sys.stderr, flush=True)
                rows.append(row)
                # Written after every row: an interrupted run keeps what it measured.
                args.out.write_text(json.dumps({"machine": machine(args), "rows": rows}, indent=1) + "\n")


def machine(args: argparse.Namespace) -> dict:
    inspected = json.loads(run([args.forebay, "inspect", args.model, "--json"]).stdout)
    with open("/proc/cpuinfo") as file:
        cpu = next((line.split(":")[1].strip() for line in file if line.startswith("model name")), platform.machine())
    llama = subprocess.run([args.llama_bench, "--version"], capture_output=True, text=True)
    return {
        "cpu": cpu,
        "threads": args.threads,
        "model": args.model.name,
        "model_bytes": args.model.stat().st_size,
        "architecture": inspected.get("architecture"),
        "forebay": run([args.forebay, "--version"]).stdout.strip(),
        "llama.cpp": (llama.stdout + llama.stderr).strip().splitlines()[:1],
    }


def forebay(args: argparse.Namespace, limit: float) -> dict:
    done = run_in_group(
        limit, None,
        [args.forebay, "bench", args.model, "-p", "0", "-n", "256", "-r", "1", "--threads", str(args.threads),
         "--heat", "off", "--device", "cpu", "-o", "json"])
    if done is None or done.returncode:
        return {"tok_per_s": None, "why": reason(done)}
    rows = json.loads(done.stdout)
    first = next((row for row in rows if row["cache"] == "cold"), rows[0])
    return {"tok_per_s": first["median"], "hit_rate": first["hit_rate"]}


def llama(repack: str):
    def measure(args: argparse.Namespace, limit: float) -> dict:
        tokens = "64" if limit >= 16 else "8"
        done = run_in_group(
            limit, args.patience,
            [args.llama_bench, "-m", args.model, "-p", "0", "-n", tokens, "-r", "2", "-t", str(args.threads), "-lm", "mmap",
             "--repack", repack, "-o", "json"])
        if done is None or done.returncode:
            return {"tok_per_s": None, "why": reason(done)}
        return {"tok_per_s": max(json.loads(done.stdout)[0]["samples_ts"])}

    return measure


SIDES = {"forebay": forebay, "llama.cpp": llama("0"), "llama.cpp, repacked": llama("1")}


def reason(done: subprocess.CompletedProcess | None) -> str:
    if done is None:
        return "not done in time"
    if done.returncode == -9:
        return "killed for memory"
    return re.sub(r"\s+", " ", done.stderr.strip())[-200:]


def run(command: list) -> subprocess.CompletedProcess:
    return subprocess.run(command, check=True, capture_output=True, text=True)


def run_in_group(limit: float, seconds: int | None, command: list) -> subprocess.CompletedProcess | None:
    """Runs a command that may use this many GiB, page cache included; none if it takes too long."""
    subprocess.run(["sync"], check=True)
    Path("/proc/sys/vm/drop_caches").write_text("3\n")
    GROUP.mkdir(exist_ok=True)
    (GROUP / "memory.limit_in_bytes").write_text(str(int(limit * 2**30)))

    def enter() -> None:
        (GROUP / "cgroup.procs").write_text(str(os.getpid()))

    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=seconds, preexec_fn=enter)
    except subprocess.TimeoutExpired:
        return None
    finally:
        (GROUP / "memory.force_empty").write_text("0\n")
        GROUP.rmdir()


if __name__ == "__main__":
    main()
