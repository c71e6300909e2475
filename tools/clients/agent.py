"""A growing conversation like an agent's: each turn must be computed only from the end of the last one."""

import json

from with_openai import client, look_tool, sit_tool

CHECKS = []

TURNS = 20
TOOLS = [{"type": "function", "function": tool} for tool in [look_tool(), sit_tool()]]


def check(function):
    CHECKS.append(function)
    return function


@check
def twenty_turns_with_tools(server, model):
    """Every other turn the model has to call a tool. What was in the last prompt must come from the cache, and mostly what
    was answered, too: a template may write that differently, as it does here with calls that have blank lines around."""
    asking = client(server)
    messages = [{"role": "user", "content": "Look at the cat."}]
    before, answered, computed, calls, kept = 0, 0, [], 0, 0
    for turn in range(TURNS):
        must_call = turn % 2 == 0
        answer = asking.chat.completions.create(
            model=model,
            messages=messages,
            tools=TOOLS,
            tool_choice="required" if must_call else "auto",
            parallel_tool_calls=False,
            temperature=0,
            max_tokens=80 if must_call else 8,
        )
        usage = answer.usage
        cached = usage.prompt_tokens_details.cached_tokens
        assert cached >= before, f"turn {turn}: {cached} of {usage.prompt_tokens} cached, of which {before} were known"
        # The last token of an answer is never computed, because nothing follows it.
        kept += turn > 0 and cached >= before + answered - 1
        computed.append(usage.prompt_tokens - cached)
        before, answered = usage.prompt_tokens, usage.completion_tokens
        message = answer.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if message.tool_calls:
            calls += 1
            [call] = message.tool_calls
            json.loads(call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": f"It is {turn}."})
        else:
            messages.append({"role": "user", "content": "Go on."})
    assert calls >= TURNS // 2
    assert kept >= TURNS // 4, f"only {kept} answers were kept"
    return f"{before} tokens in the end, {sum(computed)} of {TURNS} prompts computed, at most {max(computed)} in a turn"
