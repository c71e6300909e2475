"""Runs Mixture-of-Experts language models that are larger than memory.

>>> import forebay as fb
>>> with fb.Model() as llm:  # the demo model; or a path, or OWNER/NAME:QUANT of the Hugging Face hub
...     print(llm.generate("Once upon a time", max_tokens=7, temperature=0).text)
, there was a little girl named

The whole description is in docs/python.md of the repository.
"""

from forebay._answers import Answer, Logprob, Message, Piece, Stats, ToolCall
from forebay._asgi import Application, Response, ServerOptions
from forebay._errors import BudgetError, Cancelled, ContextError, FileError, ForebayError, RequestError
from forebay._memory import DevicePlan, MemoryUse, Meters, Plan
from forebay._model import AnswerOptions, ChatOptions, LoadOptions, Model, plan
from forebay._native import Logits, Session, Tokenizer
from forebay._stages import Stage, Transport, split_layers
from forebay._streams import AsyncStream, Stream

__all__ = [
    "Answer",
    "AnswerOptions",
    "Application",
    "AsyncStream",
    "BudgetError",
    "Cancelled",
    "ChatOptions",
    "ContextError",
    "DevicePlan",
    "FileError",
    "ForebayError",
    "LoadOptions",
    "Logits",
    "Logprob",
    "MemoryUse",
    "Message",
    "Meters",
    "Model",
    "Piece",
    "Plan",
    "RequestError",
    "Response",
    "ServerOptions",
    "Session",
    "Stage",
    "Stats",
    "Stream",
    "Tokenizer",
    "ToolCall",
    "Transport",
    "plan",
    "split_layers",
]
