"""Starts `forebay serve` and reads its state."""

import os
import re
import signal
import subprocess
import tempfile
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TEMPLATE = Path(__file__).resolve().parent / "tools.jinja"


class Server:
    """A server that is ready, until the end of a `with` block."""

    def __init__(self, binary, *args, key=None, template=TEMPLATE):
        self.key = key
        self.cache = tempfile.TemporaryDirectory()
        environment = dict(os.environ, XDG_CACHE_HOME=self.cache.name, XDG_CONFIG_HOME="/nonexistent")
        command = [str(binary), "serve", "--port", "0", "--chat-template-file", str(template), *map(str, args)]
        if key:
            command += ["--api-key", key]
        self.process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment
        )
        first = self.process.stderr.readline()
        found = re.match(r"Listening at (http://\S+)", first)
        if not found:
            raise SystemExit(f"the server does not start: {first}{self.process.stderr.read()}")
        self.address = found[1]
        self.log = [first]
        # The output must be read, or the server would block.
        threading.Thread(target=lambda: self.log.extend(self.process.stderr), daemon=True).start()

    def __enter__(self):
        end = time.monotonic() + 60
        while time.monotonic() < end and self.process.poll() is None:
            try:
                self.text("/ready")
                return self
            except urllib.error.URLError:
                time.sleep(0.05)
        self.__exit__()
        raise SystemExit("the server is not ready:\n" + "".join(self.log))

    def __exit__(self, *_):
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.cache.cleanup()

    def text(self, path):
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        request = urllib.request.Request(f"{self.address}{path}", headers=headers)
        return urllib.request.urlopen(request).read().decode()

    def metric(self, name):
        found = re.search(rf"^{name} (\S+)$", self.text("/metrics"), re.MULTILINE)
        assert found, f"there is no metric {name}"
        return float(found[1])
