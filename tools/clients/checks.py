"""Helpers for the checks of all clients."""

import time
import traceback

STORY = [{"role": "user", "content": "Tell me a story about a cat."}]


def collected():
    """A list, and a decorator that puts functions into it."""
    functions = []

    def collect(function):
        functions.append(function)
        return function

    return functions, collect


class Runner:
    """Runs checks, prints a line for each, and counts those that fail."""

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
