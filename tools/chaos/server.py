"""The server under test: starts it, observes its process from outside, and ends it."""

import os
import re
import signal
import subprocess
import time
from pathlib import Path

TEMPLATE = Path(__file__).resolve().parents[1] / "clients" / "tools.jinja"
START_SECONDS = 120
TICKS = os.sysconf("SC_CLK_TCK")


class Server:
    """A `forebay serve` on a loopback address, with a separate home directory."""

    def __init__(self, binary, model, folder):
        self.command = [
            str(binary), "serve", str(model), "--host", "127.0.0.1", "--port", "0",
            "--device", "cpu", "--chat-template-file", str(TEMPLATE),
        ]
        self.folder = Path(folder)
        self.log = self.folder / "server.log"
        self.process = None
        self.port = None

    def start(self, flags):
        environment = dict(os.environ, XDG_CACHE_HOME=str(self.folder / "cache"), XDG_CONFIG_HOME="/nonexistent")
        print(" ".join(self.command + flags), flush=True)
        # Earlier servers of the same run wrote to the same log.
        self.begin = self.log.stat().st_size if self.log.exists() else 0
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(
                self.command + flags, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment
            )
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline and self.process.poll() is None:
            if found := re.search(r"Listening at http://127\.0\.0\.1:(\d+)", self.said()):
                self.port = int(found[1])
                return
            time.sleep(0.05)
        self.kill()
        raise SystemExit(f"the server does not start: {' '.join(self.command + flags)}\n{self.said()[-2000:]}")

    def said(self):
        """What the running server has logged."""
        with open(self.log, "rb") as log:
            log.seek(self.begin)
            return log.read().decode(errors="replace")

    def is_alive(self):
        return self.process.poll() is None

    def resident(self):
        """Resident bytes now, and the most since `forget_peak`."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return tuple(int(re.search(rf"{name}:\s+(\d+)", status)[1]) * 1024 for name in ("VmRSS", "VmHWM"))

    def forget_peak(self):
        """The peak of resident memory is counted anew from now on."""
        Path(f"/proc/{self.process.pid}/clear_refs").write_text("5")

    def processor_seconds(self):
        """Processor time that the process has used."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS

    def busy_threads(self):
        """Names of threads that are running at this moment, for reports."""
        names = []
        for task in Path(f"/proc/{self.process.pid}/task").iterdir():
            try:
                head, _, rest = (task / "stat").read_text().rpartition(")")
            except OSError:
                continue  # It has ended.
            if rest.split()[0] == "R":
                names.append(head.partition("(")[2])
        return names

    def ask_to_leave(self):
        self.process.send_signal(signal.SIGTERM)

    def kill(self):
        if self.process and self.is_alive():
            self.process.kill()
        if self.process:
            self.process.wait()


def metrics(text):
    """Prometheus's text as a dictionary: the name with its labels, and the number."""
    lines = (line.rpartition(" ") for line in text.splitlines() if line and not line.startswith("#"))
    return {name: float(value) for name, _, value in lines}


def requests_by_route(numbers):
    """Of these numbers, the requests that were counted, by (route, status)."""
    pattern = re.compile(r'forebay_requests_total\{path="([^"]*)",status="(\d+)"\}')
    found = ((pattern.fullmatch(name), value) for name, value in numbers.items())
    return {(match[1], int(match[2])): int(value) for match, value in found if match}
