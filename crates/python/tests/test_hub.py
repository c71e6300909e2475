"""Models of the hub are downloaded when they are first used."""

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

import forebay
from conftest import DEMO

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(BaseHTTPRequestHandler):
    """A hub with one model."""

    model = DEMO.read_bytes()
    asked: list[str] = []

    def do_GET(self):
        Hub.asked.append(self.path)
        if self.path.startswith("/api/models/someone/tales/"):
            lfs = {"sha256": hashlib.sha256(self.model).hexdigest(), "size": len(self.model)}
            files = [{"rfilename": "tales-Q4_K_M.gguf", "size": len(self.model), "lfs": lfs}]
            self.answer(json.dumps({"sha": COMMIT, "siblings": files}).encode())
        elif self.path == f"/someone/tales/resolve/{COMMIT}/tales-Q4_K_M.gguf":
            self.answer(self.model)
        else:
            self.send_error(404)

    def answer(self, body):
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments):
        pass


@pytest.fixture
def hub(tmp_path, monkeypatch):
    Hub.asked.clear()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    yield Hub.asked
    server.shutdown()
    server.server_close()


def test_a_model_is_downloaded_once(hub):
    told = []

    def progress(doing, done, total):
        assert 0 <= done <= total
        told.append((doing, done, total))

    with forebay.Model("someone/tales:Q4_K_M", device="cpu", progress=progress) as llm:
        assert llm.name == "someone/tales:Q4_K_M"
        assert llm.generate("Once upon", max_tokens=2, temperature=0).text == " a time"
    size = len(Hub.model)
    assert ("downloading", size, size) in told and told[-1][0] == "loading" and told[-1][1] == told[-1][2]
    assert len(hub) == 2
    with forebay.Model("someone/tales:Q4_K_M", device="cpu"):
        assert len(hub) == 2


def test_what_the_hub_does_not_have(hub):
    with pytest.raises(forebay.FileError, match="has no someone/nothing"):
        forebay.Model("someone/nothing")
    with pytest.raises(forebay.FileError, match="does not exist"):
        forebay.Model("someone/tales:Q8_0")
    with pytest.raises(forebay.FileError, match="there is no file"):
        forebay.Model("tales")


def test_nothing_is_downloaded_offline(hub, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(forebay.FileError, match="someone/tales"):
        forebay.Model("someone/tales:Q4_K_M")
    assert hub == []


def test_a_callback_may_end_a_download(hub):
    class Enough(Exception):
        pass

    def progress(doing, done, total):
        raise Enough

    with pytest.raises(Enough):
        forebay.Model("someone/tales:Q4_K_M", device="cpu", progress=progress)


def test_a_plan_needs_no_download(hub, tmp_path):
    plan = forebay.plan("someone/tales:Q4_K_M", memory="1G", device="cpu")
    assert plan.experts == forebay.plan(DEMO, memory="1G", device="cpu").experts
    assert not list(tmp_path.rglob("*.gguf"))
