"""The command `python -m forebay.ray`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from ray import serve

from forebay.ray import _batch
from forebay.ray._serving import app
from forebay.ray._settings import pairs

MODEL = "a path that each machine has, or OWNER/NAME:QUANT; the demo model by default"
OPTIONS = "options of the model, such as memory=24G; forebay.LoadOptions lists them"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command, and returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m forebay.ray", description="Forebay on a Ray cluster.")
    commands = parser.add_subparsers(dest="command", required=True)

    serving = commands.add_parser("serve", help="serve replicas of a model over the APIs of OpenAI and Anthropic")
    serving.add_argument("model", nargs="?", help=MODEL)
    serving.add_argument("--replicas", type=int, default=1, metavar="N", help="at most one on each machine (default: 1)")
    serving.add_argument("--resource", metavar="NAME", help="a custom resource of Ray, of which each replica takes 1")
    serving.add_argument("--host", default="127.0.0.1", help="address that each machine listens on (default: 127.0.0.1)")
    serving.add_argument("--port", type=int, default=8000, metavar="N", help="default: 8000")
    serving.add_argument("--options", nargs="*", default=[], metavar="NAME=VALUE", help=OPTIONS + ", and forebay.ServerOptions")

    batch = commands.add_parser("batch", help="answer a file of requests on all machines")
    batch.add_argument("source", metavar="IN", help=".jsonl as for `forebay batch`, or .parquet")
    batch.add_argument("--out", required=True, metavar="DIR", help="folder for the answers; those that it has are kept")
    batch.add_argument("--model", help=MODEL)
    batch.add_argument("--rows", type=int, default=_batch.ROWS, metavar="N", help="requests recorded together (default: 32)")
    batch.add_argument("--resource", default=_batch.RESOURCE, metavar="NAME", help="default: %(default)s")
    batch.add_argument("--options", nargs="*", default=[], metavar="NAME=VALUE", help=OPTIONS)

    args = parser.parse_args(arguments)
    try:
        options = pairs(args.options)
        if args.command == "serve":
            named = {"model": args.model, "replicas": args.replicas, "resource": args.resource}
            application = app({**options, **named})
            serve.start(proxy_location="EveryNode", http_options={"host": args.host, "port": args.port})
            serve.run(application, name="forebay", blocking=True)
            return 0
        result = _batch.batch(
            args.source, args.out, args.model, rows=args.rows, resource=args.resource, **options
        )
    except (ValueError, OSError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{result.answered} requests answered, {result.refused} refused")
    return 1 if result.refused else 0


if __name__ == "__main__":
    sys.exit(main())
