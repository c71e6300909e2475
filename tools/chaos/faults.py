"""Switches the faults of `drive.py` on and off, and records when reads could fail."""

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

# Faults of a drive. `slow`, `short` and `error` are the shares of reads that they affect.
PLANS = {
    "slow": {"slow": 0.02, "delay": 0.5},
    "short": {"short": 0.5},
    "error": {"error": 0.002},
    "all": {"slow": 0.01, "delay": 1.0, "short": 0.2, "error": 0.002},
    "dead": {"error": 1.0},
}

# The faults of a round: none, those that only cost time, failing reads, and everything.
WEATHER = [(), ("slow", "short"), ("error",), ("slow", "short", "error", "all", "dead")]


class Faults:
    """A drive with the model on it. If it cannot be mounted, `skipped` says why and the model's own path is used."""

    def __init__(self, model, seed):
        self.model = Path(model).resolve()
        self.skipped = None
        self.process = None
        self.counts = {}
        # Whether reads may be short. After a short direct read from FUSE, io_uring of Linux 6.18 reads the rest from the
        # wrong place, whatever program asks; `pread` does not.
        self.may_shorten = False
        # Times at which reads began and ceased to fail.
        self.windows = []
        self.folder = tempfile.mkdtemp(prefix="forebay-chaos-drive-")
        self.start(seed)

    def start(self, seed):
        if not os.path.exists("/dev/fuse"):
            self.skipped = "there is no /dev/fuse"
            return
        script = Path(__file__).with_name("drive.py")
        self.process = subprocess.Popen(
            [sys.executable, str(script), str(self.model), self.folder, str(seed)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        first = self.process.stdout.readline()
        if not first:
            reason = self.process.stderr.read().strip().splitlines()[-1]
            self.skipped = f"a FUSE file system cannot be mounted here ({reason}); root may"
            self.process = None

    @property
    def path(self):
        """The path of the model for the server."""
        return self.model if self.skipped else Path(self.folder) / self.model.name

    def set(self, name):
        """Sets the faults; `None` ends them."""
        if self.skipped:
            return
        plan = dict(PLANS[name] if name else {})
        if not self.may_shorten:
            plan.pop("short", None)
        self.process.stdin.write(json.dumps(plan) + "\n")
        self.process.stdin.flush()
        self.counts = json.loads(self.process.stdout.readline())
        now = time.monotonic()
        if self.windows and self.windows[-1][1] is None:
            self.windows[-1][1] = now
        if plan.get("error"):
            self.windows.append([now, None])

    async def come_and_go(self, chance, names, until):
        """Faults for some seconds, then none for some, until an event is set."""
        try:
            while not until.is_set():
                for name in (None, chance.choice(names)):
                    self.set(name)
                    await wait(until, chance.uniform(1, 5))
        finally:
            self.set(None)

    def could_fail(self, start, end):
        """Whether reads failed at some time between the two."""
        return any(begun <= end and (ended is None or start <= ended) for begun, ended in self.windows)

    def close(self):
        if self.process:
            # The end of its input ends the drive, and its faults.
            self.process.stdin.close()
            self.process.wait()
        os.rmdir(self.folder)


async def wait(event, seconds):
    """Waits for an event, for at most this many seconds."""
    try:
        await asyncio.wait_for(event.wait(), seconds)
    except asyncio.TimeoutError:
        pass
