"""What the tests share: the demo model, the program to compare with, and a model whose prompts take long."""

import json
import os
import struct
import subprocess
from pathlib import Path

import pytest

import forebay

ROOT = Path(__file__).resolve().parents[3]
DEMO = ROOT / "models" / "tales-qwen3moe-Q4_K_M.gguf"
PROMPT = "Once upon a time, in a big house by the sea, there lived"


@pytest.fixture(scope="session", autouse=True)
def folders(tmp_path_factory):
    """Keeps tests out of the user's folders."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("XDG_CACHE_HOME", "HF_HOME"):
            patch.setenv(name, str(tmp_path_factory.mktemp(name)))
        yield


@pytest.fixture(scope="session")
def llm():
    with forebay.Model(DEMO, device="cpu") as model:
        yield model


@pytest.fixture(scope="session")
def program():
    """Runs the program `forebay`."""
    target = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
    path = target / "debug" / "forebay"
    assert path.is_file(), f"there is no {path}: tools/python_test builds it"

    def run(*arguments):
        command = [path, *map(str, arguments)]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


@pytest.fixture(scope="session")
def slow(program, tmp_path_factory):
    """The path of a model with random weights, and a prompt that it reads for minutes."""
    path = tmp_path_factory.mktemp("models") / "slow.gguf"
    shape = "--family qwen3moe --layers 16 --hidden 512 --inter 256 --experts 16 --top-k 8 --vocab 4096 --ctx 65536"
    program("synth", path, *shape.split())
    return path, [1 + n % 4000 for n in range(60_000)]


def read_logits(path):
    """The tensor `logits` of a file that `forebay logits` has written: a list of rows of bytes."""
    data = path.read_bytes()
    [length] = struct.unpack_from("<Q", data)
    tensor = json.loads(data[8 : 8 + length])["logits"]
    rows, columns = tensor["shape"]
    start = 8 + length + tensor["data_offsets"][0]
    return [data[start + 4 * columns * row : start + 4 * columns * (row + 1)] for row in range(rows)]
