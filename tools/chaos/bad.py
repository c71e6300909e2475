"""Malformed and oversized requests, and the statuses that the server may answer them with."""

import functools
import json
import random

from questions import words

CHAT, TEXT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
HELLO = [{"role": "user", "content": "Hello"}]


def nested(depth):
    return b'{"messages": ' + b"[" * depth + b"]" * depth + b"}"


# Method, path and body of invalid requests. The server must refuse each with a status from 400 to 499.
MALFORMED = [
    ("POST", CHAT, b""),
    ("POST", CHAT, b"{"),
    ("POST", CHAT, b"\xff\xfe\x00"),
    ("POST", CHAT, b"[]"),
    ("POST", CHAT, b"null"),
    ("POST", CHAT, b'{"messages": []}'),
    ("POST", CHAT, b'{"messages": "hello"}'),
    ("POST", CHAT, b'{"messages": [{"role": "user"}, 7]}'),
    ("POST", CHAT, nested(100)),
    ("POST", CHAT, nested(100_000)),
    ("POST", CHAT, json.dumps({"messages": HELLO, "n": 0}).encode()),
    ("POST", CHAT, json.dumps({"messages": HELLO, "n": -1}).encode()),
    ("POST", CHAT, json.dumps({"messages": HELLO, "max_tokens": 0}).encode()),
    ("POST", CHAT, json.dumps({"messages": HELLO, "temperature": "hot"}).encode()),
    ("POST", CHAT, json.dumps({"messages": HELLO, "tools": [{"type": "function"}]}).encode()),
    ("POST", CHAT, json.dumps({"messages": HELLO, "response_format": {"type": "poem"}}).encode()),
    ("POST", CHAT, json.dumps({"messages": [{"role": "user", "content": "ho " * 3000}]}).encode()),
    ("POST", TEXT, b'{"prompt": {}}'),
    ("POST", TEXT, b'{"prompt": [1, "a"]}'),
    ("POST", TEXT, b'{"prompt": [99999999]}'),
    ("POST", TEXT, b'{"prompt": "a", "stop": 7}'),
    ("POST", TEXT, json.dumps({"prompt": "a", "stop": [str(i) for i in range(50)]}).encode()),
    ("POST", RESPONSES, b"{}"),
    ("POST", RESPONSES, b'{"input": [{"type": "item_reference", "id": "x"}]}'),
    ("POST", RESPONSES, b'{"input": "a", "previous_response_id": "x"}'),
    ("POST", MESSAGES, json.dumps({"messages": HELLO}).encode()),
    ("POST", MESSAGES, json.dumps({"messages": [{"role": "user", "content": [{"type": "image"}]}], "max_tokens": 4}).encode()),
    ("POST", "/tokenize", b'{"content": 7}'),
    ("POST", "/detokenize", b'{"tokens": [-1]}'),
    ("POST", "/apply-template", b'{"messages": 7}'),
    ("POST", "/v1/nothing", b"{}"),
    ("GET", CHAT, b""),
    ("POST", "/health", b""),
]

# Bytes that are not a request. The server may answer 4xx or close the connection.
GARBAGE = [
    b"\r\n\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200),
    b"GET / HTTP/9.9\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: -5\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n123456",
    b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nx: " + b"a" * 600_000 + b"\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n" + b"".join(b"x%d: y\r\n" % i for i in range(5000)) + b"\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
]

# Bodies with a valid beginning and no end, and the paths that they are sent to.
UNFINISHED = [CHAT, TEXT, RESPONSES, MESSAGES, "/tokenize"]


def huge(chance):
    """A request that is large in some way: its name, path and body. It may be answered or refused, but not with a 5xx."""
    kind = chance.choice(sorted(HUGE))
    return kind, *_body(kind)


@functools.cache
def _body(kind):
    path, fields = HUGE[kind]()
    return path, fields if isinstance(fields, bytes) else json.dumps(fields).encode()


def _tool(parameters):
    return [{"type": "function", "function": {"name": "f", "parameters": parameters}}]


def _zeros():
    return CHAT, {"messages": HELLO, "max_tokens": 2, "n": 96, "tools": _tool({"type": "object", "enum": [0] * 100_000})}


def _kwargs():
    many = {f"k{i}": [0] * 20 for i in range(40_000)}
    return CHAT, {"messages": HELLO, "max_tokens": 2, "chat_template_kwargs": many}


def _keys():
    return CHAT, {"messages": [{"role": "user", "content": "Hello", **{f"k{i}": 0 for i in range(40_000)}}], "max_tokens": 2}


def _items():
    item = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "a"}]}
    return RESPONSES, {"input": [item] * 40_000, "max_output_tokens": 2}


def _blocks():
    return MESSAGES, {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * 40_000}], "max_tokens": 2}


def _messages():
    return CHAT, {"messages": [{"role": "user", "content": "a"}] * 40_000, "max_tokens": 2}


def _word():
    return "/tokenize", {"content": "a" * 2_000_000}


def _letter():
    return TEXT, {"prompt": "a" * 15_000_000, "max_tokens": 2}


def _prose():
    return CHAT, {"messages": [{"role": "user", "content": words(random.Random(0), 300_000)}], "max_tokens": 2}


def _biases():
    pairs = ", ".join(f'"{i % 4000}": 0' for i in range(200_000))
    return CHAT, ('{"messages": [{"role": "user", "content": "a"}], "max_tokens": 24, "logit_bias": {%s}}' % pairs).encode()


def _schema():
    fields = {f"f{i}": {"type": "string", "pattern": f"^a{{{i % 50}}}(b|c)*$"} for i in range(2000)}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object", "properties": fields}}}
    return CHAT, {"messages": HELLO, "max_tokens": 4, "response_format": form}


def _stops():
    return TEXT, {"prompt": "a", "max_tokens": 8, "stop": ["x" * 500_000] * 4}


def _answers():
    return TEXT, {"prompt": "Once", "max_tokens": 8, "n": 96}


def _prompts():
    return TEXT, {"prompt": ["a"] * 100_000, "max_tokens": 1}


def _too_large():
    return TEXT, {"prompt": "a" * (17 << 20), "max_tokens": 1}


HUGE = {
    "schema of zeros, n 96": _zeros, "template arguments": _kwargs, "keys of a message": _keys, "input items": _items,
    "blocks": _blocks, "messages": _messages, "one word": _word, "one letter": _letter, "prose": _prose, "biases": _biases,
    "schema of patterns": _schema, "stop strings": _stops, "n 96": _answers, "prompts": _prompts, "body too large": _too_large,
}
