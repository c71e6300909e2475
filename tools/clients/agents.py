"""Checks `forebay serve` with Codex and Claude Code, with the chat templates of several models.

Each program asks a question, calls a tool of an MCP server and reads the result. The model has random weights and a long
context; a proxy (steering.py) makes it call the tool and end its answer. The check is that no request is refused, that the
tool is called, and that the program ends with the expected answer. Prints a line for each check, and exits with 1 if one of
them fails. `run agents` installs what this needs; this script downloads nothing.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from checks import Runner
from server import ROOT, Server
from steering import NAMESPACE, SENTENCE, TOOL, Steering

WEATHER = Path(__file__).resolve().parent / "weather.py"
TEMPLATES = ROOT.parent / "shared" / "templates"
MODELS = {
    "Qwen3": "Qwen-Qwen3-0.6B.jinja",
    "Qwen3.5": "Qwen3.5-4B.jinja",
    "GLM-4.6": "GLM-4.6.jinja",
    "gpt-oss": "openai-gpt-oss-120b.jinja",
    "DeepSeek": "deepseek-ai-DeepSeek-V3.1.jinja",
}
CONTEXT = 200_000
QUESTION = "What is the weather in Oslo?"


def main():
    target = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("binary", nargs="?", type=Path, default=target / "debug" / "forebay")
    parser.add_argument("--programs", type=Path, required=True, metavar="FOLDER", help="the folder with codex and claude")
    parser.add_argument("--only", default="", metavar="WORDS", help="run only checks whose names contain this")
    args = parser.parse_args()
    if not args.binary.is_file():
        raise SystemExit(f"there is no {args.binary}: build it, or name another")
    runner = Runner(args.only)
    checks = [agent_check("codex", codex, args), agent_check("claude", claude, args)]
    with tempfile.TemporaryDirectory() as folder:
        model = random_model(args.binary, Path(folder))
        for name, file in MODELS.items():
            template = TEMPLATES / file
            if not any(args.only in f"{name}: {check.__name__}" for check in checks):
                continue
            if not template.is_file():
                print(f"skipped: {name}: there is no {template}")
                continue
            flags = ["--ctx", CONTEXT, "--memory", "2G", "--prefix-cache", "memory", "--max-tokens", 1000]
            with Server(args.binary, model, *flags, template=template) as server:
                runner.run(name, checks, server, model)
    sys.exit(runner.end())


def random_model(binary, folder):
    """A model with fast prompt processing: one layer, whose time is linear in the length of the prompt."""
    model = folder / "random.gguf"
    shape = "--family qwen35moe --layers 1 --hidden 256 --inter 64 --experts 4 --top-k 2 --vocab 8192".split()
    subprocess.run([binary, "synth", model, *shape, "--ctx", str(CONTEXT)], check=True, capture_output=True)
    return model


def agent_check(name, session, args):
    def check(server, model):
        with Steering(server) as steering, tempfile.TemporaryDirectory() as folder:
            agent = Agent(args, model, steering.port, Path(folder))
            said = session(agent)
            refused = [answered for answered in steering.answered if answered[1] >= 400]
            assert not refused, refused
            assert len(steering.answered) >= 2, "the program did not come back after the call"
            assert agent.calls.is_file(), f"the tool was not called; the program said:\n{said}"
            assert SENTENCE in said, said
            return f"{len(steering.answered)} requests"

    check.__name__ = name
    return check


class Agent:
    """A program with separate home and working directories."""

    def __init__(self, args, model, port, folder):
        self.programs = args.programs
        self.folder = folder
        self.calls = folder / "calls"
        self.work = folder / "work"
        self.work.mkdir()
        self.printed = [args.binary, "serve", model, "--port", str(port), "--ctx", str(CONTEXT), "--print-config"]

    def configuration(self, client):
        """The settings that the server prints for this client."""
        return subprocess.run([*self.printed, client], check=True, capture_output=True, text=True).stdout

    def run(self, *command, **environment):
        # Settings in the caller's environment must not affect the program.
        environment = {"PATH": os.environ["PATH"], "HOME": str(self.folder), "LANG": "C.UTF-8", **environment}
        done = subprocess.run(
            [self.programs / command[0], *command[1:]],
            cwd=self.work,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=1200,
        )
        assert done.returncode == 0, f"it ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
        return done.stdout


def codex(agent):
    home = agent.folder / "codex"
    home.mkdir()
    retries = "request_max_retries = 0\nstream_max_retries = 0\n"
    weather = json.dumps([str(WEATHER), str(agent.calls)])
    tools = f"\n[mcp_servers.weather]\ncommand = {json.dumps(sys.executable)}\nargs = {weather}\n"
    (home / "config.toml").write_text(agent.configuration("codex") + retries + tools)
    flags = ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
    return agent.run("codex", "exec", *flags, QUESTION, CODEX_HOME=str(home))


def claude(agent):
    environment = json.loads(agent.configuration("claude-code"))["env"]
    weather = {"command": sys.executable, "args": [str(WEATHER), str(agent.calls)]}
    tools = json.dumps({"mcpServers": {"weather": weather}})
    flags = ["--mcp-config", tools, "--strict-mcp-config", "--allowedTools", f"{NAMESPACE}__{TOOL}"]
    return agent.run("claude", "-p", QUESTION, *flags, **environment)


if __name__ == "__main__":
    main()
