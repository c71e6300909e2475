#!/usr/bin/env python3
"""Has chat templates write answers with reasoning and calls, for the parser to read back.

    pip install jinja2==3.1.6
    python3 tools/dialect_vectors.py TEMPLATES > OUT.json
    FOREBAY_DIALECT_VECTORS=OUT.json cargo test -p forebay-engine --test dialect published

TEMPLATES is a folder of other people's templates: what comes of those may not be committed. A vector has the template,
the prompt, the answer as the template writes it, and what was put in.
"""

import datetime
import json
import pathlib
import re
import sys

import jinja2
import jinja2.sandbox

# What ends an answer, in any of the formats.
END = re.compile(r"<\|im_end\|>|\[e~\[|<｜end▁of▁sentence｜>|<\|call\|>|<\|return\|>|<\|eot_id\|>|<\|eom_id\|>|<\|user\|>|$(?![\s\S])")

PROPERTIES = {
    "text": {"type": "string"},
    "path": {"type": "string"},
    "count": {"type": "integer"},
    "ratio": {"type": "number"},
    "deep": {"type": "boolean"},
    "limit": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
    "list": {"type": "array", "items": {"type": "string"}},
    "options": {"type": "object"},
}


def tool(name, properties):
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "description": f"Does {name}.", "parameters": parameters}}


TOOLS = [tool("search", PROPERTIES), tool("write_file", PROPERTIES), tool("now", {})]

SEARCH = ("search", {"text": "Zürich & \"more\"", "count": 3, "ratio": 0.5, "deep": True, "limit": None})
WRITE = ("write_file", {"path": "/tmp/a b.py", "text": "\n\nif a < b and c > d:\n\tprint('<tag>', \"\\n\")\n# 東京 🦙\n\n"})
LISTS = ("search", {"text": "null", "list": ["a", "b, c", "</x>"], "options": {"b": [1, {"c": None}], "a": "é"}, "deep": False})
NOW = ("now", {})

ANSWERS = {
    "text": ("", "Hello.\n\n- one\n- two: `a < b`", []),
    "reasoning": ("I think\n\nso.", "Yes.", []),
    "one call": ("", "", [SEARCH]),
    "text and a call": ("", "Let me look.", [WRITE]),
    "reasoning and a call": ("Which one?\nThis one.", "", [LISTS]),
    "no arguments": ("", "", [NOW]),
    "two calls": ("", "Two.", [SEARCH, NOW]),
    "three calls": ("Hm.", "", [LISTS, WRITE, LISTS]),
}


def raise_exception(message):
    raise jinja2.exceptions.TemplateError(message)


def environment():
    env = jinja2.sandbox.SandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    env.filters["tojson"] = lambda value, ensure_ascii=False, indent=None, **_: json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent
    )
    env.globals["raise_exception"] = raise_exception
    env.globals["strftime_now"] = lambda form: datetime.datetime(2024, 7, 26).strftime(form)
    return env


def vector(template, thinking, reasoning, content, calls):
    user = {"role": "user", "content": "Hello"}
    answer = {"role": "assistant", "content": content}
    if reasoning:
        answer |= {"reasoning_content": reasoning, "thinking": reasoning}
    if calls:
        answer["tool_calls"] = [
            {"id": f"functions.{name}:{i}", "type": "function", "function": {"name": name, "arguments": arguments}}
            for i, (name, arguments) in enumerate(calls)
        ]

    def render(messages, prompt):
        return template.render(
            messages=messages, tools=TOOLS, add_generation_prompt=prompt, bos_token="", eos_token="",
            enable_thinking=thinking, thinking=thinking,
        )

    prompt, whole = render([user], True), render([user, answer], False)
    # Where an answer is written otherwise than it is asked for, the parser gets what they have in common.
    same = next((i for i, (a, b) in enumerate(zip(prompt, whole)) if a != b), min(len(prompt), len(whole)))
    text = whole[same:]
    text = text[: END.search(text).start()]
    # Some templates write one call only, or no text beside it, or write it as reasoning.
    as_reasoning = calls and f"<|channel|>analysis<|message|>{content}" in text and content
    if content not in text or as_reasoning or len(calls) > 1 and text.count("to=functions.") == 1:
        raise jinja2.exceptions.TemplateError("it leaves something out")
    return {
        "prompt": whole[:same],
        "text": text,
        "reasoning": reasoning if reasoning and reasoning in whole else "",
        "content": content,
        "calls": [{"name": name, "arguments": arguments} for name, arguments in calls],
    }


def main():
    entries = []
    for path in sorted(pathlib.Path(sys.argv[1]).glob("*.jinja")):
        source = path.read_text()
        template = environment().from_string(source)
        vectors = []
        for name, answer in ANSWERS.items():
            for thinking in (True, False):
                try:
                    vectors.append({"name": name, **vector(template, thinking, *answer)})
                except jinja2.exceptions.TemplateError as error:
                    print(f"{path.name}: {name}: {error}", file=sys.stderr)
        entries.append({"template": path.name, "source": source, "vectors": vectors})
    json.dump({"tools": TOOLS, "templates": entries}, sys.stdout, ensure_ascii=False, indent=1)


if __name__ == "__main__":
    main()
