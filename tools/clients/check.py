"""Checks `forebay serve` with the official Python clients: the server accepts their requests, and they can parse its answers.

Prints a line for each check, and ends with 1 if one of them fails. `run` installs what this needs.
"""

import argparse
import os
import sys
from pathlib import Path

import agent
import with_anthropic
import with_openai
from checks import Runner
from server import ROOT, Server

# A name with slashes, as downloads have.
MODEL = "someone/tales:Q4_K_M"
KEY = "open sesame"
DEMO = ROOT / "models" / "tales-qwen3moe-Q4_K_M.gguf"
RECURRENT = ROOT.parent / "shared" / "models" / "tales-qwen35moe-Q4_K_M.gguf"


def main():
    target = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("binary", nargs="?", type=Path, default=target / "debug" / "forebay")
    parser.add_argument("--only", default="", metavar="WORDS", help="run only checks whose names contain this")
    args = parser.parse_args()
    if not args.binary.is_file():
        raise SystemExit(f"there is no {args.binary}: build it, or name another")
    runner = Runner(args.only)
    with Server(args.binary, DEMO, "--alias", MODEL) as server:
        runner.run("openai", with_openai.CHECKS, server, MODEL)
        runner.run("anthropic", with_anthropic.CHECKS, server, MODEL)
    with Server(args.binary, DEMO, "--alias", MODEL, "--parallel", 1, "--queue", 0, key=KEY) as server:
        runner.run("openai, keys and limits", with_openai.LIMITS, server, MODEL)
        runner.run("anthropic, keys and limits", with_anthropic.LIMITS, server, MODEL)
    for path in [DEMO, RECURRENT]:
        if not path.is_file():
            print(f"skip  {path.name}: there is no {path}")
            continue
        with Server(args.binary, path, "--alias", MODEL) as server:
            runner.run(path.stem, agent.CHECKS, server, MODEL)
    sys.exit(runner.end())


if __name__ == "__main__":
    main()
