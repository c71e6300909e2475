#!/usr/bin/env python3
"""Runs many clients of `forebay serve` at once. Needs only Python.

  serve_load.py soak MODEL [--clients 32] [--seconds 120]
      Starts the server and records some answers one at a time. Then many clients ask for them at once, and a third of
      the clients disconnect in the middle. Checks that every complete answer equals the recorded one, that no client
      waits long, that memory use stays constant, and that no request is left at the end.

  serve_load.py speed MODEL [--clients 1,8,32] [--tokens 32] [--rounds 1]
      Measures the tokens per second of all clients together, each with its own prompt, and compares them with
      `forebay run` for the same prompts one after another.

Arguments after `--` go to the server (and, for `speed`, to `run`): serve_load.py speed m.gguf -- --memory 7G
"""
import argparse
import asyncio
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import threading
import time

HERE = os.path.dirname(os.path.abspath(__file__))
THINGS = "cat dog boat kite dragon garden river clock lamp star tree fox bear ship bell hat road wind snow bird".split()
PLACES = "by the sea|in a deep forest|on a high hill|in an old town|under a bridge|behind the moon|in a small kitchen".split("|")


def prompt(number):
    """A prompt that differs from all others from its first words on."""
    chance = random.Random(number)
    thing, other, place = chance.choice(THINGS), chance.choice(THINGS), chance.choice(PLACES)
    return f"Number {number}: once upon a time a {thing} and a {other} lived {place}, and every day they"


class Server:
    def __init__(self, binary, model, flags):
        command = [binary, "serve", model, "--port", "0", *flags]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        said = []
        for line in self.process.stderr:
            said.append(line)
            if address := re.search(r"http://([^:/]+):(\d+)", line):
                break
        else:
            sys.exit("the server did not start: " + "".join(said))
        self.host, self.port = address[1], int(address[2])
        # Later output is not needed, but must be read so that the server does not block.
        threading.Thread(target=self.process.stderr.read, daemon=True).start()

    def memory(self):
        """Resident bytes now, and the peak."""
        status = dict(line.split(":", 1) for line in open(f"/proc/{self.process.pid}/status") if ":" in line)
        return int(status["VmRSS"].split()[0]) * 1024, int(status["VmHWM"].split()[0]) * 1024

    def stop(self):
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)


class Answer:
    def __init__(self):
        self.text, self.tokens, self.finish = "", 0, None
        self.times = []
        self.usage = {}


async def request(server, method, path, body=None):
    reader, writer = await asyncio.open_connection(server.host, server.port, limit=1 << 24)
    data = json.dumps(body).encode() if body is not None else b""
    head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\nConnection: close\r\n\r\n"
    writer.write(head.encode() + data)
    await writer.drain()
    return reader, writer


async def get(server, path):
    reader, writer = await request(server, "GET", path)
    data = await reader.read()
    writer.close()
    head, _, body = data.partition(b"\r\n\r\n")
    if b"transfer-encoding: chunked" in head.lower():
        pieces, rest = [], body
        while rest:
            size, _, rest = rest.partition(b"\r\n")
            if int(size, 16) == 0:
                break
            pieces.append(rest[: int(size, 16)])
            rest = rest[int(size, 16) + 2 :]
        body = b"".join(pieces)
    return int(head.split()[1]), body.decode()


async def ask(server, number, tokens, leave_after=None):
    """One streamed answer; the client disconnects after `leave` pieces, if given."""
    body = {
        "prompt": prompt(number), "max_tokens": tokens, "temperature": 0.9, "seed": number,
        "stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True,
    }
    answer = Answer()
    answer.times.append(time.monotonic())
    reader, writer = await request(server, "POST", "/v1/completions", body)
    try:
        status = await reader.readline()
        if b" 200 " not in status:
            raise RuntimeError(f"{status!r} {(await reader.read())[-300:]!r}")
        while True:
            line = await asyncio.wait_for(reader.readline(), 300)
            if not line:
                raise RuntimeError("the stream ended early")
            if not line.startswith(b"data: "):
                continue
            if line.strip() == b"data: [DONE]":
                return answer
            chunk = json.loads(line[6:])
            if "error" in chunk:
                raise RuntimeError(chunk["error"])
            answer.usage = chunk.get("usage") or answer.usage
            for choice in chunk["choices"]:
                if choice.get("text"):
                    answer.text += choice["text"]
                    answer.times.append(time.monotonic())
                answer.finish = choice.get("finish_reason") or answer.finish
            if leave_after is not None and len(answer.times) > leave_after:
                return None
    finally:
        writer.close()


async def metric(server, name):
    _, text = await get(server, "/metrics")
    values = [float(line.split()[-1]) for line in text.splitlines() if line.startswith(name) and line[len(name)] in " {"]
    return sum(values)


async def soak(server, args):
    known = {}
    for number in range(args.answers):
        known[number] = (await ask(server, number, args.tokens)).text
    first, _ = server.memory()
    end = time.monotonic() + args.seconds
    counts = {"whole": 0, "left": 0}
    gaps, problems, sizes = [], [], []

    async def client(seed):
        chance = random.Random(seed)
        while time.monotonic() < end:
            number = chance.randrange(args.answers)
            leave = chance.randrange(args.tokens) if chance.random() < 1 / 3 else None
            answer = await ask(server, number, args.tokens, leave)
            if answer is None:
                counts["left"] += 1
                continue
            counts["whole"] += 1
            gaps.append(max(b - a for a, b in zip(answer.times, answer.times[1:])))
            if answer.text != known[number]:
                problems.append(f"answer {number} is {answer.text!r}, alone it was {known[number]!r}")

    async def watch():
        while time.monotonic() < end:
            sizes.append(server.memory()[0])
            await asyncio.sleep(1)

    await asyncio.gather(watch(), *(client(1000 + i) for i in range(args.clients)))
    for _ in range(50):
        running = await metric(server, args.running)
        waiting = await metric(server, args.waiting)
        if running == waiting == 0:
            break
        await asyncio.sleep(0.1)
    third = len(sizes) // 3
    early, late = statistics.median(sizes[third : 2 * third]), statistics.median(sizes[2 * third :])
    print(f"{counts['whole']} whole answers, {counts['left']} clients disconnected")
    print(f"longest wait between two pieces: median {statistics.median(gaps):.2f} s, most {max(gaps):.2f} s")
    print(f"resident: {first >> 20} MiB before, {int(early) >> 20} MiB in the middle, {int(late) >> 20} MiB at the end")
    print(f"running {running:.0f}, waiting {waiting:.0f} after the last answer")
    print(f"{len(problems)} answers differ from the answers given alone")
    for problem in problems[:5]:
        print(problem)
    return not problems and running == waiting == 0 and late < early * 1.05


async def speed(server, args):
    results = {}
    number = 0
    # The first answers after a start are slower, because the expert cache is cold.
    for i in range(args.warm_up):
        await ask(server, 30_000 + i, args.tokens)
    for _ in range(args.rounds):
        for clients in args.clients:
            start = time.monotonic()
            answers = await asyncio.gather(*(ask(server, 10_000 + number + i, args.tokens) for i in range(clients)))
            seconds = time.monotonic() - start
            number += clients
            written = sum(a.usage.get("completion_tokens", 0) for a in answers)
            # All clients generated from the end of the last prompt to the end of the first answer.
            begin, close = max(a.times[1] for a in answers), min(a.times[-1] for a in answers)
            inside = sum(1 for a in answers for t in a.times[1:] if begin < t <= close)
            steady = inside / (close - begin) if close > begin else float("nan")
            results.setdefault(clients, []).append((written / seconds, steady))
            print(f"{clients} clients: {written} tokens in {seconds:.1f} s, {written / seconds:.2f} tok/s with prompts, {steady:.2f} while all generated", flush=True)
    return {clients: tuple(statistics.median(column) for column in zip(*rows)) for clients, rows in results.items()}


def run_speed(args):
    """`forebay run` with prompts of the same kind."""
    rates = []
    for number in range(args.rounds + 1):
        command = [args.forebay, "run", args.model, "--raw", "-p", prompt(20_000 + number), "-n", str(args.tokens), "--ignore-eos",
                   "--temp", "0.9", "--seed", "1", "--json", *args.flags]
        stats = json.loads(subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True).stdout)["stats"]
        rates.append(stats["decode_steps"] / stats["decode_seconds"])
        print(f"run: {rates[-1]:.2f} tok/s generation", flush=True)
    return rates


def main():
    argv, flags = sys.argv[1:], []
    if "--" in argv:
        at = argv.index("--")
        argv, flags = argv[:at], argv[at + 1 :]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["soak", "speed"])
    parser.add_argument("model")
    parser.add_argument("--forebay", default=os.path.join(HERE, "..", "target", "release", "forebay"))
    parser.add_argument("--clients", default=None)
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--answers", type=int, default=24, help="number of different answers in a soak")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--warm-up", type=int, default=2, help="answers before the measurement")
    parser.add_argument("--serve-flags", default="", help="more flags for the server only")
    parser.add_argument("--running", default="forebay_requests_running")
    parser.add_argument("--waiting", default="forebay_requests_waiting")
    args = parser.parse_args(argv)
    args.flags = flags
    # Before and after, because the heat file lives from one start to the next.
    alone = run_speed(args) if args.what == "speed" else []
    server = Server(args.forebay, args.model, flags + args.serve_flags.split())
    try:
        while asyncio.run(get(server, "/ready"))[0] != 200:
            time.sleep(0.2)
        if args.what == "soak":
            args.clients = int(args.clients or 32)
            good = asyncio.run(soak(server, args))
        else:
            args.clients = [int(n) for n in (args.clients or "1,8,32").split(",")]
            rates = asyncio.run(speed(server, args))
            good = True
        print(f"most resident: {server.memory()[1] >> 20} MiB")
    finally:
        code = server.stop()
    if args.what == "speed":
        alone = statistics.median(alone[1:] + run_speed(args))
        one = rates.get(1, (float("nan"),) * 2)[1]
        for clients, (_, steady) in rates.items():
            print(f"{clients} clients: {steady:.2f} tok/s, {steady / one:.2f} × one, {steady / alone:.2f} × run")
    sys.exit(0 if good and code == 0 else 1)


if __name__ == "__main__":
    main()
