"""The questions that clients ask through four APIs, and how the answers are read.

Every question has one right answer, because its temperature is 0 or it has a seed: the answer that a lone client gets.
"""

import dataclasses
import json

THINGS = "cat dog boat kite dragon garden river clock lamp star tree fox bear ship bell hat road wind snow bird".split()
PLACES = ["by the sea", "in a deep forest", "on a high hill", "in an old town", "under a bridge", "behind the moon"]
CITY = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 12}}, "required": ["city"]}
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}, "tame": {"type": "boolean"}},
    "required": ["name", "age", "tame"],
    "additionalProperties": False,
}


class Failed(Exception):
    """The answer is an error."""


class Malformed(Exception):
    """The answer violates its API."""


@dataclasses.dataclass
class Answer:
    """The comparable parts of an answer: texts, calls and finish reasons of all choices, and their numbers of tokens."""

    choices: list
    prompt_tokens: int
    completion_tokens: int


@dataclasses.dataclass(frozen=True)
class Question:
    name: str
    api: "Api"
    fields: dict
    # Answers to each prompt, and to all of them together.
    n: int = 1
    answers: int = 1

    def body(self, stream):
        return json.dumps({**self.fields, **(self.api.streamed if stream else {})}).encode()

    @property
    def most_tokens(self):
        """The most tokens that all answers together can have."""
        return self.answers * next(self.fields[name] for name in ("max_tokens", "max_output_tokens") if name in self.fields)


class Api:
    """Reads an API's answers. `path` is its path; `streamed` is the field that requests a stream."""

    streamed = {"stream": True}

    def whole(self, answer):
        raise NotImplementedError

    async def stream(self, events):
        raise NotImplementedError


class OpenAi(Api):
    """Chat completions and completions."""

    streamed = {"stream": True, "stream_options": {"include_usage": True}}

    def __init__(self, path, part):
        self.path, self.part = path, part

    def whole(self, answer):
        choices = []
        for choice in sorted(answer["choices"], key=lambda choice: choice["index"]):
            message = choice["message"] if self.part == "delta" else {"content": choice["text"]}
            calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls") or []]
            choices.append((message["content"] or "", calls, choice["finish_reason"]))
        return Answer(choices, answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"])

    async def stream(self, events):
        texts, calls, ends, usage = {}, {}, {}, None
        async for event in events:
            if event is None:
                break
            if "error" in event:
                raise Failed(event["error"]["message"])
            usage = event.get("usage") or usage
            for choice in event["choices"]:
                index = choice["index"]
                delta = choice.get("delta", choice)
                texts[index] = texts.get(index, "") + (delta.get("content", delta.get("text")) or "")
                for call in delta.get("tool_calls") or []:
                    made = calls.setdefault(index, [])
                    if call["index"] == len(made):
                        made.append([call["function"]["name"], ""])
                    made[call["index"]][1] += call["function"]["arguments"]
                ends[index] = choice["finish_reason"] or ends.get(index)
        else:
            raise Malformed("the stream ended without [DONE]")
        if usage is None or None in ends.values():
            raise Malformed("the stream ended without usage or finish_reason")
        choices = [(texts[i], [tuple(call) for call in calls.get(i, [])], ends[i]) for i in sorted(texts)]
        return Answer(choices, usage["prompt_tokens"], usage["completion_tokens"])


class Responses(Api):
    path = "/v1/responses"

    def whole(self, answer):
        if answer["status"] == "failed":
            raise Failed(str(answer["error"]))
        text, calls = "", []
        for item in answer["output"]:
            if item["type"] == "message":
                text += "".join(part["text"] for part in item["content"])
            elif item["type"] == "function_call":
                calls.append((item["name"], item["arguments"]))
        usage = answer["usage"]
        return Answer([(text, calls, answer["status"])], usage["input_tokens"], usage["output_tokens"])

    async def stream(self, events):
        text = ""
        async for event in events:
            if event is None:
                continue
            if event["type"] == "response.output_text.delta":
                text += event["delta"]
            if event["type"] == "error":
                raise Failed(event["message"])
            if event["type"] in ("response.completed", "response.incomplete", "response.failed"):
                answer = self.whole(event["response"])
                if text != answer.choices[0][0]:
                    raise Malformed(f"the deltas are {text!r}, the whole is {answer.choices[0][0]!r}")
                return answer
        raise Malformed("the stream ended without response.completed")


class Messages(Api):
    path = "/v1/messages"

    def whole(self, answer):
        text = "".join(block["text"] for block in answer["content"] if block["type"] == "text")
        calls = [(block["name"], block["input"]) for block in answer["content"] if block["type"] == "tool_use"]
        return self.answer(text, calls, answer["stop_reason"], answer["usage"])

    def answer(self, text, calls, end, usage):
        # Only a stream shows a call that was cut off: its input is not JSON.
        return Answer([(text, [] if end == "max_tokens" else calls, end)], *self.tokens(usage))

    def tokens(self, usage):
        return usage["input_tokens"] + usage.get("cache_read_input_tokens", 0), usage["output_tokens"]

    async def stream(self, events):
        text, calls, end, usage = "", [], None, None
        async for event in events:
            kind = event["type"]
            if kind == "error":
                raise Failed(event["error"]["message"])
            if kind == "content_block_start" and event["content_block"]["type"] == "tool_use":
                calls.append([event["content_block"]["name"], ""])
            if kind == "content_block_delta":
                text += event["delta"].get("text", "")
                if "partial_json" in event["delta"]:
                    calls[-1][1] += event["delta"]["partial_json"]
            if kind == "message_delta":
                end, usage = event["delta"]["stop_reason"], event["usage"]
            if kind == "message_stop":
                if end != "max_tokens":
                    calls = [(name, json.loads(arguments or "{}")) for name, arguments in calls]
                return self.answer(text, calls, end, usage)
        raise Malformed("the stream ended without message_stop")


CHAT = OpenAi("/v1/chat/completions", "delta")
COMPLETIONS = OpenAi("/v1/completions", "text")
RESPONSES = Responses()
MESSAGES = Messages()


def words(chance, count):
    """A text that is almost certainly unique."""
    return " ".join(f"the {chance.choice(THINGS)} {chance.choice(PLACES)} and" for _ in range(max(1, count // 6)))


def user(text):
    return [{"role": "user", "content": text}]


def make(chance):
    """The questions of a run: alone, in families that share a beginning, and of every form."""
    questions = []

    def add(name, api, fields, n=1, prompts=1):
        fields = {"temperature": 0, **fields, **({"n": n} if n > 1 else {})}
        questions.append(Question(f"{len(questions)}:{name}", api, fields, n, n * prompts))

    def story():
        return f"Tell me about a {chance.choice(THINGS)} {chance.choice(PLACES)}."

    length = lambda: chance.randint(4, 48)
    tool = {"name": "weather", "description": "The weather", "parameters": CITY}
    for _ in range(4):
        add("chat", CHAT, {"messages": user(story()), "max_tokens": length()})
        add("text", COMPLETIONS, {"prompt": f"Once a {chance.choice(THINGS)}", "max_tokens": length()})
        add("response", RESPONSES, {"input": story(), "max_output_tokens": length()})
        add("message", MESSAGES, {"messages": user(story()), "max_tokens": length()})
    add("long chat", CHAT, {"messages": user(words(chance, 500)), "max_tokens": 100})
    add("seeded", CHAT, {"messages": user(story()), "max_tokens": 32, "temperature": 0.9, "seed": 7}, n=3)
    add("stop", COMPLETIONS, {"prompt": "Once upon a time", "max_tokens": 64, "stop": [".", "\n"]})
    add("probabilities", CHAT, {"messages": user(story()), "max_tokens": 12, "logprobs": True, "top_logprobs": 3})
    add("texts", COMPLETIONS, {"prompt": ["A fox", "A bear", "A ship"], "max_tokens": 16}, n=2, prompts=3)
    schema = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}
    add("schema", CHAT, {"messages": user(story()), "max_tokens": 64, "response_format": schema})
    form = {"format": {"type": "json_schema", "name": "person", "schema": PERSON}}
    add("response schema", RESPONSES, {"input": story(), "max_output_tokens": 64, "text": form})
    required = {"tools": [{"type": "function", "function": tool}], "tool_choice": "required"}
    add("tools", CHAT, {"messages": user(story()), "max_tokens": 64, **required}, n=2)
    flat = {"tools": [{"type": "function", **tool}], "tool_choice": "required"}
    add("response tools", RESPONSES, {"input": story(), "max_output_tokens": 64, **flat})
    anthropic = {"tools": [{"name": "weather", "input_schema": CITY}], "tool_choice": {"type": "any"}}
    add("message tools", MESSAGES, {"messages": user(story()), "max_tokens": 64, **anthropic})
    for number in range(3):
        questions += family(chance, f"{len(questions)}:family {number}")
    return questions


def family(chance, name):
    """Questions that begin with the same text of hundreds of tokens and end differently."""
    beginning = words(chance, 400)

    def member(number, n):
        text = f"{beginning} {words(chance, chance.choice((60, 150, 240)))}"
        fields = {"temperature": 0, "prompt": text, "max_tokens": chance.randint(4, 24), "n": n}
        return Question(f"{name}.{number}", COMPLETIONS, fields, n, n)

    return [member(number, n) for number, n in enumerate((1, 1, 2, 2, 3))]


def filler(chance, name):
    """A long text that shares nothing with others."""
    fields = {"temperature": 0, "prompt": words(chance, 700), "max_tokens": 8}
    return Question(name, COMPLETIONS, fields)


def families(questions):
    """Groups of questions that begin with the same text."""
    groups = {}
    for question in questions:
        name, _, member = question.name.rpartition(".")
        if member:
            groups.setdefault(name, []).append(question)
    return [group for name, group in groups.items() if name]
