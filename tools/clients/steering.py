"""A proxy that makes a model with random weights call a tool and then end its answer.

The proxy forwards a client's requests and sets some fields of the server's API in them: at first those that require a call
of the tool, then those that require a fixed sentence as the answer.
"""

import http.client
import http.server
import json
import threading
from urllib.parse import urlsplit

SENTENCE = "The weather is fine."
TOOL = "forecast"
NAMESPACE = "mcp__weather"


class Steering:
    """Listens until the end of a `with` block."""

    def __init__(self, server):
        self.server = urlsplit(server.address)
        # Path, status and, of a refusal, the body.
        self.answered = []
        self.called = False
        steering = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                steering.forward(self, None)

            def do_POST(self):
                body = self.rfile.read(int(self.headers["content-length"]))
                steering.forward(self, steering.steer(self.path, body))

            def log_message(self, *_):
                pass

        self.http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self.http.server_port

    def __enter__(self):
        threading.Thread(target=self.http.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_):
        self.http.shutdown()

    def steer(self, path, body):
        path = urlsplit(path).path
        if path not in ("/v1/responses", "/v1/messages"):
            return body
        fields = json.loads(body)
        # An untrained model never ends its reasoning.
        fields["thinking_budget"] = 8
        if self.called or not fields.get("tools"):
            fields["json_schema"] = {"const": SENTENCE}
            fields["tool_choice"] = "none" if path == "/v1/responses" else {"type": "none"}
        elif path == "/v1/responses":
            fields["tool_choice"] = {"type": "function", "namespace": NAMESPACE, "name": TOOL}
        else:
            fields["tool_choice"] = {"type": "tool", "name": f"{NAMESPACE}__{TOOL}"}
        self.called = self.called or bool(fields.get("tools"))
        return json.dumps(fields).encode()

    def forward(self, client, body):
        asking = http.client.HTTPConnection(self.server.hostname, self.server.port, timeout=600)
        headers = {name: value for name, value in client.headers.items() if name.lower() not in ("host", "content-length")}
        asking.request(client.command, client.path, body, headers)
        answer = asking.getresponse()
        client.send_response_only(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in ("transfer-encoding", "connection"):
                client.send_header(name, value)
        client.end_headers()
        text = b""
        while piece := answer.read1(65536):
            client.wfile.write(piece)
            client.wfile.flush()
            text += piece if answer.status >= 400 else b""
        self.answered.append((client.path, answer.status, text.decode()))
