#!/usr/bin/env python3
"""Tries to make requests of a running server wait for each other for ever (a deadlock).

    forebay serve --device cpu --threads 1 --memory 256M --parallel 32 &
    tools/chaos/deadlock.py --times 200

Each round keeps the server busy with other requests and sends a request L. Then it sends a request that begins like L and
asks for two answers: the first answer waits for L's prompt, the second for the first's. L's client leaves while L's prompt is
being read. Both answers must still come, with the same text (the temperature is 0). After the last round, the server must have
no open request.

The server must have no other client, whose requests would change the timing. Needs only Python's standard library.
"""

import argparse
import http.client
import json
import random
import sys
import threading
import time
from urllib.parse import urlsplit


def connect(url, timeout):
    return http.client.HTTPConnection(url.hostname, url.port or 80, timeout=timeout)


def headers(key):
    named = {"Content-Type": "application/json"}
    return named | {"Authorization": f"Bearer {key}"} if key else named


def post(args, body):
    """Sends a request to continue tokens. Returns the connection, from which the answer can be read."""
    connection = connect(args.url, args.patience)
    connection.request("POST", "/v1/completions", json.dumps(body), headers(args.key))
    return connection


def get(args, path):
    connection = connect(args.url, args.patience)
    connection.request("GET", path, headers=headers(args.key))
    response = connection.getresponse()
    text = response.read().decode()
    connection.close()
    return response.status, text


def metric(args, name):
    for line in get(args, "/metrics")[1].splitlines():
        if line.startswith(name + " "):
            return float(line.split()[1])
    raise SystemExit(f"the server has no metric {name}")


def tokens(generator, count, vocabulary):
    return [generator.randrange(vocabulary) for _ in range(count)]


def play(args, seed):
    """One round. Returns an error message, or None."""
    generator = random.Random(seed)

    def body(prompt, **more):
        return {"prompt": prompt, "max_tokens": 4, "temperature": 0, **more}

    shared = tokens(generator, args.shared, args.vocabulary)
    leader = body(shared + tokens(generator, 300, args.vocabulary), stream=True)
    twins = body(shared + tokens(generator, 300, args.vocabulary), n=2)
    fillers = [post(args, body(tokens(generator, 1000, args.vocabulary))) for _ in range(args.fillers)]
    leaves = post(args, leader)
    result = {}

    def ask():
        try:
            connection = post(args, twins)
            response = connection.getresponse()
            result["status"], result["answer"] = response.status, json.loads(response.read())
            connection.close()
        except (OSError, http.client.HTTPException, ValueError) as error:
            result["error"] = repr(error)

    asking = threading.Thread(target=ask)
    asking.start()
    time.sleep(args.leave_after)
    leaves.sock.close()
    leaves.close()
    asking.join()
    if "error" in result:
        return f"the two answers did not come: {result['error']}"
    if result["status"] != 200:
        return f"the two answers were refused: {result['answer']}"
    texts = [choice["text"] for choice in result["answer"]["choices"]]
    if len(texts) != 2 or texts[0] != texts[1]:
        return f"two answers to one prompt differ: {texts}"
    for filler in fillers:
        try:
            response = filler.getresponse()
            response.read()
            if response.status != 200:
                return f"a filler was answered with {response.status}"
        except (OSError, http.client.HTTPException) as error:
            return f"a filler was not answered: {error!r}"
        filler.close()
    return None


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", type=urlsplit, default=urlsplit("http://127.0.0.1:8080"))
    parser.add_argument("--key", help="a key of the server, if it has keys")
    parser.add_argument("--times", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--fillers", type=int, default=10)
    parser.add_argument("--shared", type=int, default=600, help="tokens that L and the two answers have in common")
    parser.add_argument("--leave-after", type=float, default=0.15, help="seconds after which L's client leaves")
    parser.add_argument("--patience", type=float, default=60, help="seconds after which an answer will never come")
    parser.add_argument("--vocabulary", type=int, default=4096, help="tokens are chosen below this number")
    args = parser.parse_args()
    start, played, failed = time.monotonic(), 0, 0
    for round_ in range(args.times):
        wrong = play(args, args.seed * 100_000 + round_)
        played += 1
        if wrong:
            failed += 1
            print(f"round {round_}: {wrong}", flush=True)
            if failed == 3:
                break
    # Requests whose clients left are noticed with the next step.
    for _ in range(50):
        still_open = metric(args, "forebay_requests_open")
        if not still_open:
            break
        time.sleep(0.1)
    ready = get(args, "/ready")[0]
    seconds = time.monotonic() - start
    print(f"{played} rounds in {seconds:.0f} s: {failed} failed; {still_open:.0f} requests open; /ready says {ready}")
    sys.exit(1 if failed or still_open or ready != 200 else 0)


if __name__ == "__main__":
    main()
