#!/usr/bin/env python3
"""Renders answers with reasoning and calls with chat templates, as input for the parser of dialects.

    pip install jinja2==3.1.6
    python3 tools/dialect_vectors.py TEMPLATES > OUT.json
    FOREBAY_DIALECT_VECTORS=OUT.json cargo test -p forebay-engine --test suite dialect::published

TEMPLATES is a folder of published templates. The output must not be committed. A vector has the template, the prompt, the
answer as the template renders it, and the answer's parts.
"""

import datetime
import json
import pathlib
import re
import sys

import jinja2
import jinja2.ext
import jinja2.sandbox

# Ends of an answer, in all formats.
END = re.compile(
    r"<\|im_end\|>|\[e~\[|<｜end▁of▁sentence｜>|<\|call\|>|<\|return\|>|<\|eot_id\|>|<\|eom_id\|>|<\|user\|>"
    r"|<\|eot\|>|<\|eom\|>|<\|eos\|>|<turn\|>|<\|tool_response>|<\|END_OF_TURN_TOKEN\|>|<｜hy_eos:opensource｜>|<\|end_of_text\|>"
    r"|$(?![\s\S])"
)

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


# How many characters of a prompt may differ between asking for an answer and rendering it.
MOST_DIFFERENT = 40

# Marks of reasoning, in all formats.
REASONING = ("<think>", "[THINK]", "<|think|>", "<|channel|>", "<|channel>", "<|START_THINKING|>", "<think{}>")


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


class Generation(jinja2.ext.Extension):
    """Blocks that mark what a model writes, as transformers has them: what is in them is written."""

    tags = {"generation"}

    def parse(self, parser):
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def raise_exception(message):
    raise jinja2.exceptions.TemplateError(message)


def environment():
    env = jinja2.sandbox.SandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", Generation]
    )
    env.filters["tojson"] = lambda value, ensure_ascii=False, indent=None, **_: json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent
    )
    env.globals["raise_exception"] = raise_exception
    env.globals["strftime_now"] = lambda form: datetime.datetime(2024, 7, 26).strftime(form)
    return env


def vector(template, source, thinking, reasoning, content, calls):
    if calls and '"%s" | format' in source:
        raise jinja2.exceptions.TemplateError("it renders strings without quotes")
    if "\"'\" + arg_value" in source and "\\\\" in json.dumps(calls):
        raise jinja2.exceptions.TemplateError("it renders backslashes that look like escapes")
    user = {"role": "user", "content": "Hello"}

    def answer(content, calls, spell_id):
        message = {"role": "assistant", "content": content}
        if reasoning:
            message |= {"reasoning_content": reasoning, "reasoning": reasoning, "thinking": reasoning}
        if calls:
            message["tool_calls"] = [
                {"id": spell_id(name, i), "type": "function", "function": {"name": name, "arguments": arguments}}
                for i, (name, arguments) in enumerate(calls)
            ]
        return message

    def render(messages, prompt):
        return template.render(
            messages=messages, tools=TOOLS, add_generation_prompt=prompt, bos_token="", eos_token="",
            enable_thinking=thinking, thinking=thinking,
        )

    prompt = render([user], True)
    try:
        whole = render([user, answer(content, calls, lambda name, i: f"functions.{name}:{i}")], False)
    except jinja2.exceptions.TemplateError:
        # Mistral's have nine characters.
        whole = render([user, answer(content, calls, lambda _, i: f"{i:09}")], False)
    if reasoning and reasoning in whole and not any(tag in source for tag in REASONING):
        raise jinja2.exceptions.TemplateError("it has no tags for reasoning")
    # Text that the template renders after an answer does not belong to it.
    after = render([user, answer("ANSWER", [], None)], False).rpartition("ANSWER")[2]
    whole = whole.removesuffix(after)
    # If the prompts differ, the parser gets their common beginning.
    same = next((i for i, (a, b) in enumerate(zip(prompt, whole)) if a != b), min(len(prompt), len(whole)))
    if len(prompt) - same > MOST_DIFFERENT:
        raise jinja2.exceptions.TemplateError("it renders the question differently")
    # No tag is cut, and what ends reasoning that was not asked for is asked for, and so is white space.
    tag = whole.rfind("<", 0, same)
    if tag >= 0 and ">" not in whole[tag:same]:
        same = tag
    same += len(re.match(r"(</think>)?\s*", whole[same:]).group())
    text = whole[same:]
    text = text[: END.search(text).start()]
    # Some templates render only one call, or no text beside it, or render the text as reasoning.
    as_reasoning = calls and f"<|channel|>analysis<|message|>{content}" in text and content
    missing = any(text.count(name) < [name for name, _ in calls].count(name) for name, _ in calls)
    if content not in text or as_reasoning or missing:
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
        vectors = []
        try:
            template = environment().from_string(source)
        except jinja2.exceptions.TemplateError as error:
            print(f"{path.name}: {error}", file=sys.stderr)
            continue
        for name, answer in ANSWERS.items():
            for thinking in (True, False):
                try:
                    vectors.append({"name": name, **vector(template, source, thinking, *answer)})
                except (jinja2.exceptions.TemplateError, TypeError) as error:
                    print(f"{path.name}: {name}: {error}", file=sys.stderr)
        entries.append({"template": path.name, "source": source, "vectors": vectors})
    json.dump({"tools": TOOLS, "templates": entries}, sys.stdout, ensure_ascii=False, indent=1)


if __name__ == "__main__":
    main()
