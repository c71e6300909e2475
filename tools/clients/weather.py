"""An MCP server with one tool. It communicates through its standard input and output. For each call, it appends a line to
the file that its first argument names."""

import json
import sys

TOOL = {
    "name": "forecast",
    "description": "The weather in a city.",
    "inputSchema": {
        "type": "object",
        "properties": {"city": {"type": "string", "enum": ["Oslo", "Bergen"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


def answer(method, params):
    if method == "initialize":
        return {
            "protocolVersion": params["protocolVersion"],
            "capabilities": {"tools": {}},
            "serverInfo": {"name": "weather", "version": "1"},
        }
    if method == "tools/list":
        return {"tools": [TOOL]}
    if method == "tools/call":
        with open(sys.argv[1], "a") as calls:
            calls.write(json.dumps(params["arguments"]) + "\n")
        return {"content": [{"type": "text", "text": "Rain in the evening."}]}
    return {}


for line in sys.stdin:
    message = json.loads(line)
    if "id" in message:
        result = answer(message["method"], message.get("params", {}))
        print(json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": result}), flush=True)
