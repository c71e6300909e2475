"""Answers a file of requests on all machines of a cluster."""

from __future__ import annotations

import asyncio
import io
import json
import os
import posixpath
import sys
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.fs
import pyarrow.parquet
import ray
import ray.data
from ray.data.checkpoint import CheckpointConfig
from ray.data.datasource import BlockBasedFileDatasink, FileBasedDatasource

import forebay
from forebay.ray._settings import model_path

ID = "custom_id"
URL = "/v1/chat/completions"
RESOURCE = "forebay"
"""The custom resource of which each machine has 1, so that it gets one engine."""

PARALLEL = 128
ROWS = 32
"""Requests that are answered and recorded together."""

CHECKPOINT = "checkpoint"
"""The folder, in that of the answers, which records what is answered."""


class Result(NamedTuple):
    """What a batch has come to."""

    answered: int
    refused: int


def batch(
    source: str, out: str, model: str | None = None, *, rows: int = ROWS, resource: str = RESOURCE, **options: Any
) -> Result:
    """Answers the requests of a file, .jsonl or .parquet, and writes .jsonl files to a folder.

    All machines have to reach both. Each machine with the custom resource loads the model once. If the run ends early, the same
    call goes on: each request is answered once. The options are those of forebay.LoadOptions.
    """
    source, out = _place(source), _place(out)
    options.setdefault("parallel", PARALLEL)
    ids = check(source)
    _connect(resource)
    engines = int(ray.cluster_resources().get(resource, 0))
    if engines == 0:
        raise RuntimeError(
            f"no machine of the cluster has the resource {resource!r}: start Ray on each with --resources='{{\"{resource}\": 1}}'"
        )
    context = ray.data.DataContext.get_current()
    checkpoint, bars = context.checkpoint_config, context.enable_progress_bars
    context.checkpoint_config = CheckpointConfig(
        id_column=ID, checkpoint_path=posixpath.join(out, CHECKPOINT), delete_checkpoint_on_success=False
    )
    context.enable_progress_bars = sys.stderr.isatty()
    try:
        requests = (
            ray.data.read_parquet(source) if source.endswith(".parquet") else ray.data.read_datasource(Lines(source))
        )
        # A block is answered, written and recorded as a whole.
        answers = requests.repartition(target_num_rows_per_block=rows).map_batches(
            Answerer,
            batch_size=None,
            batch_format="pyarrow",
            fn_constructor_args=(model_path(model), options, rows),
            compute=ray.data.ActorPoolStrategy(
                min_size=1, max_size=engines, max_concurrent_calls_per_actor=_calls(options["parallel"], rows)
            ),
            resources={resource: 1},
        )
        answers.write_datasink(Answers(out, file_format="jsonl"), ray_remote_args={"num_cpus": 0.1})
    finally:
        context.checkpoint_config, context.enable_progress_bars = checkpoint, bars
    return count(out, ids)


def check(source: str) -> set[str]:
    """The ids of the requests in a file.

    Raises ValueError if a request has none, or that of another one.
    """
    ids: set[str] = set()
    for number, name in enumerate(_names(source), 1):
        if not isinstance(name, str) or not name:
            raise ValueError(f"{source}: request {number} has no {ID}: give it a text of its own")
        if name in ids:
            raise ValueError(f"{source}: request {number} has the {ID} {name!r}, as an earlier one has: each must be different")
        ids.add(name)
    return ids


def count(out: str, ids: set[str]) -> Result:
    """Counts the answers in a folder, and checks that there is one for each of these requests."""
    found: set[str] = set()
    refused = 0
    system, folder = pyarrow.fs.FileSystem.from_uri(out)
    for info in system.get_file_info(pyarrow.fs.FileSelector(folder, allow_not_found=True)):
        if not info.path.endswith(".jsonl"):
            continue
        with system.open_input_stream(info.path) as file:
            for line in io.TextIOWrapper(file, encoding="utf-8"):
                answer = json.loads(line)
                if answer[ID] in found:
                    raise RuntimeError(f"{out} has two answers to {answer[ID]!r}: write to an empty folder")
                found.add(answer[ID])
                refused += answer["response"]["status_code"] != 200
    if foreign := found - ids:
        raise RuntimeError(f"{out} has an answer to {min(foreign)!r}, which is no request of the file: write to an empty folder")
    if missing := ids - found:
        raise RuntimeError(f"{len(missing)} requests have no answer, such as {min(missing)!r}: run the same command again")
    return Result(len(found) - refused, refused)


class Answerer:
    """An engine, which answers several blocks of requests at a time."""

    def __init__(self, model: str | None, options: Any, rows: int) -> None:
        self._llm = forebay.Model(model, progress=False, **options)
        self._server = self._llm.asgi(queue=rows * _calls(options["parallel"], rows))

    async def __call__(self, block: pa.Table) -> pa.Table:
        requests = block.to_pylist()
        answers = await asyncio.gather(*map(self._answer, requests))
        return pa.table({ID: [request[ID] for request in requests], "answer": pa.array(answers, pa.string())})

    async def _answer(self, row: dict[str, Any]) -> str:
        name = row[ID]
        request = json.loads(row["request"]) if "request" in row else row
        body, url = request.get("body"), request.get("url") or URL
        if isinstance(body, str):
            # In a table, it is JSON text.
            body = json.loads(body)
        if isinstance(body, dict):
            # Answers to a file are not streamed, and the same request gets the same answer.
            body = {"seed": seed_of(name), **body} if url.endswith("completions") else dict(body)
            body.pop("stream", None)
        response = await self._server.request("POST", url, json.dumps(body).encode())
        if response.status == 429 or response.status >= 500:
            # That is not the request's fault. What is recorded would not be asked again.
            raise RuntimeError(f"the request {name!r} failed: {response.body.decode(errors='replace')}")
        number = f"batch_req_{number_of(name):016x}"
        answer = {"status_code": response.status, "request_id": number, "body": json.loads(response.body)}
        return json.dumps({"id": number, ID: name, "response": answer, "error": None})


class Lines(FileBasedDatasource):
    """The lines of a file of requests, as they are: a table would give every request the fields of all others."""

    def _read_stream(self, f: pa.NativeFile, path: str) -> Iterator[pa.Table]:
        lines = [line for line in f.readall().decode().splitlines() if line.strip()]
        yield pa.table({ID: [json.loads(line)[ID] for line in lines], "request": lines})


class Answers(BlockBasedFileDatasink):
    """A file with an answer on each line."""

    def write_block_to_file(self, block: Any, file: pa.NativeFile) -> None:
        for answer in block.to_arrow()["answer"].to_pylist():
            file.write(answer.encode() + b"\n")


def number_of(name: str) -> int:
    """A number of 64 bits that follows from a name: FNV-1a, as in `forebay batch`."""
    number = 0xCBF29CE484222325
    for byte in name.encode():
        number = (number ^ byte) * 0x100000001B3 % 2**64
    return number


def seed_of(name: str) -> int:
    """The seed of a request that has none, as in `forebay batch`. In JSON it is a signed number."""
    number = number_of(name)
    return number - 2**64 if number >> 63 else number


def _names(source: str) -> Iterable[Any]:
    system, path = pyarrow.fs.FileSystem.from_uri(source)
    if path.endswith(".parquet"):
        with system.open_input_file(path) as file:
            yield from pyarrow.parquet.read_table(file, columns=[ID])[ID].to_pylist()
        return
    with system.open_input_stream(path) as file:
        for number, line in enumerate(io.TextIOWrapper(file, encoding="utf-8"), 1):
            if line.strip():
                try:
                    yield json.loads(line).get(ID)
                except (ValueError, AttributeError) as error:
                    raise ValueError(f"{source}: line {number} is no JSON object: {error}") from error


def _calls(parallel: int, rows: int) -> int:
    """Blocks that an engine answers at a time: enough that there is always another request, when one of a block takes long."""
    return max(2, -(-2 * parallel // rows))


def _place(path: str) -> str:
    return path if "://" in path else os.path.abspath(path)


def _connect(resource: str) -> None:
    """Connects to the cluster of this machine, or starts Ray on this machine alone."""
    if ray.is_initialized():
        return
    try:
        ray.init(address="auto")
    except ConnectionError:
        ray.init(resources={resource: 1}, include_dashboard=False)
