"""Records the routing of a model that Forebay cannot run yet, with llama.cpp, as a file for `forebay simulate`.

Generates an answer as `forebay trace --ignore-eos` does and writes the choices of every router. llama.cpp may compute
the last layer only for the prompt's last token; then this token's choice is written for the whole prompt.

Usage: python tools/llama_trace.py MODEL OUT --prompt TEXT [--raw] [--tokens 900] [--seed 1] [--temp 0.8]
"""

import argparse
import ctypes
import struct

import llama_cpp
import numpy as np
from gguf import GGUFReader

MAGIC, VERSION = b"FOREBAYROUTING\r\n", 1
PROMPT, ANSWER, END = 0, 1, 2
CONTEXT = 1024


class Tensor(ctypes.Structure):
    """The struct `ggml_tensor` of llama-cpp-python 0.3.36."""

    _fields_ = [
        ("type", ctypes.c_int),
        ("buffer", ctypes.c_void_p),
        ("ne", ctypes.c_int64 * 4),
        ("nb", ctypes.c_size_t * 4),
        ("op", ctypes.c_int),
        ("op_params", ctypes.c_int32 * 16),
        ("flags", ctypes.c_int32),
        ("src", ctypes.c_void_p * 10),
        ("view_src", ctypes.c_void_p),
        ("view_offs", ctypes.c_size_t),
        ("data", ctypes.c_void_p),
        ("name", ctypes.c_char * 64),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("out")
    parser.add_argument("--prompt", required=True)
    parser.add_argument("--raw", action="store_true")
    parser.add_argument("--tokens", type=int, default=900)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--temp", type=float, default=0.8)
    args = parser.parse_args()

    layers = routed_layers(args.model)
    chosen: dict[int, np.ndarray] = {}
    llama = load(args.model, args.seed, chosen)
    text = args.prompt
    if not args.raw:
        text = f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
    prompt = llama.tokenize(text.encode(), add_bos=False, special=True)
    ends = [llama.token_eos(), *llama.tokenize(b"<|im_end|>", add_bos=False, special=True)]

    def without_end(_ids, scores):
        scores[ends] = -np.inf
        return scores

    llama.eval(prompt)
    out = header(layers) + batch(PROMPT, len(prompt), layers, chosen)
    # The last token of the answer is sampled but not computed.
    for _ in range(min(args.tokens, CONTEXT - len(prompt)) - 1):
        token = llama.sample(
            temp=args.temp,
            top_k=40,
            top_p=0.95,
            min_p=0.05,
            repeat_penalty=1.0,
            logits_processor=llama_cpp.LogitsProcessorList([without_end]),
        )
        llama.eval([token])
        out += batch(ANSWER, 1, layers, chosen)
    out += bytes([END])
    with open(args.out, "wb") as file:
        file.write(out + struct.pack("<Q", checksum(out)))


def routed_layers(path: str) -> list[tuple[int, int, int]]:
    """For each layer the experts, how many of them a token uses, and the bytes of one."""
    reader = GGUFReader(path)
    arch = reader.fields["general.architecture"].contents()
    count = lambda key: int(reader.fields[f"{arch}.{key}"].contents())
    experts, used = count("expert_count"), count("expert_used_count")
    sizes = [0] * count("block_count")
    for tensor in reader.tensors:
        if "_exps.weight" in tensor.name:
            sizes[int(tensor.name.split(".")[1])] += int(tensor.n_bytes) // experts
    return [(experts, used, size) if size else (0, 0, 0) for size in sizes]


def load(path: str, seed: int, chosen: dict[int, np.ndarray]) -> llama_cpp.Llama:
    """The model; whenever it computes, `chosen` gets each layer's choices, [tokens, used]."""

    def on_tensor(pointer, ask, _user):
        tensor = ctypes.cast(pointer, ctypes.POINTER(Tensor)).contents
        name, _, layer = tensor.name.decode(errors="replace").partition("-")
        if name != "ffn_moe_topk":
            return not ask
        if not ask:
            rows = np.zeros((tensor.ne[1], tensor.ne[0]), np.int32)
            for i, row in enumerate(rows):
                ctypes.memmove(row.ctypes.data, tensor.data + i * tensor.nb[1], row.nbytes)
            chosen[int(layer)] = rows
        return True

    callback = llama_cpp.ggml_backend_sched_eval_callback(on_tensor)
    defaults = llama_cpp.llama_context_default_params

    def with_callback():
        params = defaults()
        params.cb_eval = callback
        return params

    # The class has no option for a callback, so the function that provides its defaults is replaced.
    llama_cpp.llama.llama_cpp.llama_context_default_params = with_callback
    llama = llama_cpp.Llama(path, n_ctx=CONTEXT, n_batch=512, n_ubatch=512, seed=seed, verbose=False)
    llama.routing_callback = callback  # Python must not free what llama.cpp calls.
    return llama


def header(layers: list[tuple[int, int, int]]) -> bytes:
    return MAGIC + struct.pack("<II", VERSION, len(layers)) + b"".join(struct.pack("<IIQ", *l) for l in layers)


def batch(tag: int, tokens: int, layers: list[tuple[int, int, int]], chosen: dict[int, np.ndarray]) -> bytes:
    """One batch of the file; `chosen` is emptied for the next."""
    out = bytes([tag]) + struct.pack("<I", tokens)
    for layer, (experts, used, _) in enumerate(layers):
        if experts:
            rows = chosen.pop(layer)
            if len(rows) != tokens:
                rows = np.repeat(rows[-1:], tokens, axis=0)
            assert rows.shape == (tokens, used)
            out += rows.astype("u1" if experts <= 256 else "<u2").tobytes()
    return out


def checksum(data: bytes) -> int:
    value = 0xCBF29CE484222325
    for byte in data:
        value = ((value ^ byte) * 0x100000001B3) & (2**64 - 1)
    return value


if __name__ == "__main__":
    main()
