"""Checks `forebay serve` with the official Python clients: what they send is understood, and what they get they can read.

Prints a line for each check, and ends with 1 if one of them fails. `run` installs what this needs.
"""

import argparse
import os
import sys
import time
import traceback
from pathlib import Path

import agent
import with_anthropic
import with_openai
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
    parser.add_argument("--only", default="", metavar="WORDS", help="run the checks whose names hold this")
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


class Runner:
    def __init__(self, only):
        self.only = only
        self.done = 0
        self.failed = []
        self.start = time.monotonic()

    def run(self, group, checks, server, model):
        for check in checks:
            name = f"{group}: {check.__name__.replace('_', ' ')}"
            if self.only not in name:
                continue
            start = time.monotonic()
            self.done += 1
            try:
                note = check(server, model)
            except Exception:
                self.failed.append(name)
                print(f"FAIL  {name}\n{traceback.format_exc()}", flush=True)
                print("the server said:\n" + "".join(server.log[-10:]), flush=True)
            else:
                seconds = time.monotonic() - start
                print(f"ok    {name} ({seconds:.1f} s)" + (f": {note}" if note else ""), flush=True)

    def end(self):
        seconds = time.monotonic() - self.start
        print(f"{self.done} checks in {seconds:.0f} s, {len(self.failed)} failed")
        for name in self.failed:
            print(f"  {name}")
        return 1 if self.failed or not self.done else 0


if __name__ == "__main__":
    main()
