"""Batches on all nodes."""

import json
import signal
import subprocess
import sys
import time

import pyarrow as pa
import pyarrow.parquet
import pytest
from conftest import DEMO

from forebay.ray import batch
from forebay.ray._batch import check

OPTIONS = {"device": "cpu", "memory": "512M"}


def request(number, **fields):
    body = {"messages": [{"role": "user", "content": f"Tell me a story about {number}."}], "max_tokens": 8, **fields}
    return {"custom_id": f"q{number}", "method": "POST", "url": "/v1/chat/completions", "body": body}


def write(path, requests):
    path.write_text("".join(json.dumps(request) + "\n" for request in requests))
    return path


def answers(out):
    return [json.loads(line) for file in sorted(out.glob("*.jsonl")) for line in file.read_text().splitlines()]


def recorded(out):
    """The files of recorded ids, without those that are not complete."""
    return [file for file in (out / "checkpoint").glob("*.parquet") if "pending" not in file.name]


def test_a_batch_that_was_killed_goes_on(cluster, tmp_path):
    source = write(tmp_path / "in.jsonl", (request(n, max_tokens=300, ignore_eos=True) for n in range(80)))
    out = tmp_path / "out"
    command = [sys.executable, "-m", "forebay.ray", "batch", str(source), "--out", str(out), "--model", str(DEMO)]
    command += ["--rows", "4", "--resource", "batches", "--options", "parallel=4", *(f"{k}={v}" for k, v in OPTIONS.items())]
    log = tmp_path / "log"
    with log.open("w") as file:
        run = subprocess.Popen(command, stdout=file, stderr=file)
        end = time.monotonic() + 120
        while len(recorded(out)) < 3:
            assert run.poll() is None and time.monotonic() < end, log.read_text()
            time.sleep(0.02)
        run.send_signal(signal.SIGKILL)
        run.wait()
    done = [name for file in recorded(out) for name in pa.parquet.read_table(file)["custom_id"].to_pylist()]
    early = [answer for answer in answers(out) if answer["custom_id"] in done]
    assert 0 < len(early) == len(done) < 80, "it was killed too late"
    again = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert again.returncode == 0 and "80 requests answered, 0 refused" in again.stdout, again.stderr
    late = answers(out)
    assert sorted(answer["custom_id"] for answer in late) == sorted(f"q{n}" for n in range(80))
    # Each answer has an id of its own, which another computation would not have.
    assert all(answer in late for answer in early), "what was recorded was answered again"


def test_answers_follow_from_the_requests_in_either_format(cluster, tmp_path):
    requests = [request(n) for n in range(9)]
    requests.append({"custom_id": "refused", "body": {"messages": [], "stream": True}})
    requests.append({"custom_id": "text", "url": "/v1/completions", "body": {"prompt": "Once", "max_tokens": 3}})
    lines = write(tmp_path / "in.jsonl", requests)
    table = {name: [request.get(name) for request in requests] for name in ("custom_id", "url")}
    table["body"] = [json.dumps(request["body"]) for request in requests]
    pa.parquet.write_table(pa.table(table), tmp_path / "in.parquet")
    texts = []
    for source in (lines, tmp_path / "in.parquet"):
        out = tmp_path / f"out-{source.suffix[1:]}"
        result = batch(str(source), str(out), str(DEMO), rows=3, resource="batches", **OPTIONS)
        assert result == (10, 1)
        found = {answer["custom_id"]: answer["response"] for answer in answers(out)}
        assert found["refused"]["status_code"] == 400 and "messages" in found["refused"]["body"]["error"]["message"]
        texts.append({name: response["body"]["choices"] for name, response in found.items() if name != "refused"})
    assert texts[0] == texts[1] and len(texts[0]) == 10
    # What is answered is not asked again.
    assert batch(str(lines), str(tmp_path / "out-jsonl"), str(DEMO), rows=3, resource="batches", **OPTIONS) == (10, 1)


def test_files_that_cannot_be_answered(cluster, tmp_path):
    with pytest.raises(ValueError, match="'q1', as an earlier one"):
        check(str(write(tmp_path / "twice.jsonl", [request(1), request(1)])))
    with pytest.raises(ValueError, match="has no custom_id"):
        check(str(write(tmp_path / "unnamed.jsonl", [{"body": {}}])))
    (tmp_path / "broken.jsonl").write_text('{"custom_id": "a"}\nno JSON\n')
    with pytest.raises(ValueError, match="line 2 is no JSON"):
        check(str(tmp_path / "broken.jsonl"))
    with pytest.raises(RuntimeError, match="--resources"):
        batch(str(write(tmp_path / "in.jsonl", [request(1)])), str(tmp_path / "out"), str(DEMO), resource="nowhere")
