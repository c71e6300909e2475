#!/usr/bin/env python3
"""Makes the tokenizer vectors in crates/engine/tests/data: texts and their tokens by other libraries.

    pip install tokenizers==0.23.1 sentencepiece==0.2.2
    python3 tools/tokenizer_vectors.py tales TOKENIZER.JSON > crates/engine/tests/data/tokenizer_tales.json
    python3 tools/tokenizer_vectors.py pre > crates/engine/tests/data/tokenizer_pre.json
    python3 tools/tokenizer_vectors.py sentencepiece > crates/engine/tests/data/tokenizer_sentencepiece.json
    python3 tools/tokenizer_vectors.py gemma > crates/engine/tests/data/tokenizer_gemma.json

tales: TOKENIZER.JSON is the demo model's original tokenizer. A vector is {"text", "special", "ids"}; `special` says
whether control tokens in the text are recognised.

pre: one small vocabulary, trained here, and for each pre-tokeniser its steps in the format of
tokenizer.json, and the tokens of many texts. The vocabulary was trained without a pre-tokeniser, so its merges cross
every place at which one may split. So a missing split and an extra split both change the tokens.

sentencepiece: a small vocabulary trained here by SentencePiece, as in a GGUF file (scores and types) and as a
tokenizer.json, and the tokens of many texts. Both libraries must agree.

gemma: a small vocabulary trained here with the steps of Gemma's tokenizer.json, and the tokens of many texts. Its merges
cross words and lines.
"""

import json
import random
import sys
import tempfile

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from tokenizer_texts import SENTENCES, corpus, texts, uncomposed

CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
USER_DEFINED = ["<tool>", "   "]

QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
UPPER, LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"


def cased(upper, lower, suffix, digits, marks):
    """An expression that cuts words where small letters are followed by capitals."""
    return (
        rf"[^\r\n\p{{L}}\p{{N}}]?[{upper}]*[{lower}]+{suffix}|[^\r\n\p{{L}}\p{{N}}]?[{upper}]+[{lower}]*{suffix}"
        rf"|{digits}| ?[^\s\p{{L}}\p{{N}}]+[{marks}]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


def split(expression):
    return {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": False}


def byte_level(use_regex):
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


DIGITS = {"type": "Digits", "individual_digits": True}
CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
CJK = "[一-龥ࠀ-一가-\ud7ff]+"
NOT_HAN = r"&&[^\p{Han}]"
# The letters of DeepSeek's first tokenizers, as ranges.
LETTERS = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-\u1f7dᾀ-ᾴᾶ-ᾼ"
    "\u1fbeῂ-ῄῆ-ῌῐ-\u1fd3ῖ-\u1fdbῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\u2126ℨ\u212a-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ"
    "𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)

DEEPSEEK_3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# The steps of each pre-tokeniser.
PRE = {
    "gpt-2": [byte_level(True)],
    "starcoder": [DIGITS, byte_level(True)],
    "falcon": [
        {"type": "Punctuation", "behavior": "Contiguous"},
        byte_level(True),
        {"type": "Digits", "individual_digits": False},
        split("[0-9][0-9][0-9]"),
    ],
    # Not of any model: llama.cpp's default for files that name none.
    "default": [
        split(r"[\p{P}\$\+<=>\^~\|]+"),
        split(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"),
        split(r"\p{N}+"),
        split("[0-9][0-9][0-9]"),
        byte_level(False),
    ],
    "qwen2": [split(QWEN2), byte_level(False)],
    "qwen35": [
        split(QWEN2.replace(r"\p{L}+", r"[\p{L}\p{M}]+").replace(r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]")),
        byte_level(False),
    ],
    "llama-bpe": [split(QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|")), byte_level(False)],
    "chatglm-bpe": [split(QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|")), byte_level(False)],
    "gpt-4o": [split(cased(UPPER, LOWER, CONTRACTION + "?", r"\p{N}{1,3}", r"\r\n/")), byte_level(False)],
    "youtu": [
        split("[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，\u3001-\u303f\ufe30-\ufe4f]+|[ㄅ-ㄯ]+|[一-龥\u3040-ゟ゠-ヿ]+"),
        split(cased(UPPER, LOWER, "(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])?", r"\p{N}", r"\r\n/")),
        byte_level(False),
    ],
    "tekken": [split(cased(UPPER, LOWER, "", r"\p{N}", r"\r\n/")), byte_level(False)],
    "kimi-k2": [
        split(r"[\p{Han}]+|" + cased(UPPER + NOT_HAN, LOWER + NOT_HAN, CONTRACTION + "?", r"\p{N}{1,3}", r"\r\n")),
        byte_level(False),
    ],
    "bailingmoe": [
        split(
            r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]"
            r"|\s+(?!\S)|\s+"
        ),
        byte_level(False),
    ],
    "deepseek-v3": [
        split(r"\p{N}{1,3}"), split("[一-龥\u3040-ゟ゠-ヿ]+"), split(DEEPSEEK_3), byte_level(False),
    ],
    "cohere2moe": [
        split(r"\d{1,3}(?=(?:\d{3})*\b)"),
        split(cased(UPPER, LOWER, CONTRACTION + "?", r"\p{N}{1,3}", r"\r\n/")),
        byte_level(False),
    ],
    "afmoe": [
        split(r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))"),
        split(
            "[\u4e00-\u9fff\u3400-\u4dbf\u8c48-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f\u2f00-\u2fdf\u0e40-\u0e7f"
            "\u0e80-\u0eff\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af\u1100-\u11ff]+"
        ),
        split(DEEPSEEK_3),
        byte_level(False),
    ],
    "laguna": [split(r"[^\n]+|[\n]+"), split(QWEN2), byte_level(False)],
    "exaone-moe": [
        split(
            QWEN2.replace(r"\p{L}+", r"(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+")
            .replace(r"[\r\n]*|\s*[\r\n]+", r"[\r\n/]?|\s*[\r\n]")
        ),
        byte_level(False),
    ],
    "minicpm5": [split(r"\p{N}{1,3}"), split(QWEN2.replace(r"|\p{N}|", r"|\p{N}+|")), byte_level(False)],
    "deepseek-coder": [split("[\r\n]"), split(r"\s?\p{L}+"), split(r"\s?\p{P}+"), split(CJK), DIGITS, byte_level(False)],
    "deepseek-llm": [
        split("[\r\n]"),
        split(rf"\s?[{LETTERS}]+"),
        split(r"\s?[!-/:-~！-／：-～‘-‟\u3000-。]+".replace(r"\u3000", "\u3000")),
        split(r"\s+$"),
        split(CJK),
        DIGITS,
        byte_level(False),
    ],
}
IGNORES_MERGES = {"llama-bpe", "tekken", "youtu", "minicpm5"}
NFC = {"type": "NFC"}
# Other names of the same steps, with the normaliser of the models' own files, which GGUF files do not name.
NAMES = [
    (["gpt-2"], "gpt-2", None),
    (["mpt", "olmo"], "gpt-2", NFC),
    (["starcoder", "refact", "smollm", "mellum2"], "starcoder", None),
    (["command-r"], "starcoder", NFC),
    (["qwen2", "deepseek-r1-qwen", "stablelm2"], "qwen2", NFC),
    (["qwen35"], "qwen35", NFC),
    (["llama-bpe", "glm4"], "llama-bpe", None),
    (["chatglm-bpe"], "chatglm-bpe", None),
    (["gpt-4o", "kanana2", "minimax-m2", "llama4"], "gpt-4o", None),
    *(([name], name, None) for name in [
        "default", "falcon", "tekken", "kimi-k2", "bailingmoe", "deepseek-coder", "deepseek-llm", "youtu",
        "afmoe", "laguna", "exaone-moe", "minicpm5",
    ]),
    (["deepseek-v3", "joyai-llm", "hy_v4"], "deepseek-v3", None),
    (["cohere2moe", "tiny_aya"], "cohere2moe", NFC),
]


def vector_lines(vectors):
    return ",\n".join(json.dumps(v, separators=(",", ":")) for v in vectors)


def without_added_tokens(tokenizer):
    """Without its added tokens a tokenizer has nothing but BPE: control tokens are plain text."""
    document = json.loads(tokenizer.to_str())
    document["added_tokens"] = []
    return Tokenizer.from_str(json.dumps(document))


def tales(path):
    plain = Tokenizer.from_file(path)
    without = without_added_tokens(plain)
    vectors = []
    for text in texts(random.Random(20), 470):
        ids = plain.encode(text, add_special_tokens=False).ids
        vectors.append({"text": text, "special": True, "ids": ids})
        plain_ids = without.encode(text, add_special_tokens=False).ids
        # The second vector says nothing new where there is no control token.
        if plain_ids != ids:
            vectors.append({"text": text, "special": False, "ids": plain_ids})
    print(f"[\n{vector_lines(vectors)}\n]")


def pre():
    rng = random.Random(7)
    # The vocabulary: long runs of anything may be merged.
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=2200,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=12,
        show_progress=False,
    )
    bpe.train_from_iterator(corpus(rng), trainer)
    bpe.add_tokens([AddedToken(text, normalized=False) for text in USER_DEFINED])
    bpe.add_special_tokens([AddedToken(text, normalized=False) for text in CONTROL])
    base = json.loads(bpe.to_str())
    base["pre_tokenizer"] = None

    all_texts = texts(rng, 260) + uncomposed()
    entries = [
        {"names": names, "ignore_merges": steps in IGNORES_MERGES, "normalizer": normalizer, "steps": PRE[steps]}
        for names, steps, normalizer in NAMES
    ]
    for entry in entries:
        document = dict(base, pre_tokenizer={"type": "Sequence", "pretokenizers": entry["steps"]})
        document["normalizer"] = entry["normalizer"]
        document["model"] = dict(base["model"], ignore_merges=entry["ignore_merges"])
        tokenizer = Tokenizer.from_str(json.dumps(document))
        entry["ids"] = [tokenizer.encode(text, add_special_tokens=False).ids for text in all_texts]
    print('{"tokenizer":')
    print(json.dumps(base, separators=(",", ":"), ensure_ascii=False) + ',\n"texts":')
    print(json.dumps(all_texts, separators=(",", ":"), ensure_ascii=False) + ',\n"pre":[')
    print(vector_lines(entries) + "\n]}")


def sentencepiece():
    import sentencepiece as spm

    rng = random.Random(8)
    with tempfile.TemporaryDirectory() as folder:
        spm.SentencePieceTrainer.train(
            sentence_iterator=iter(line for text in SENTENCES * 8 for line in text.split("\n")),
            model_prefix=f"{folder}/m",
            model_type="bpe",
            vocab_size=1000,
            byte_fallback=True,
            character_coverage=0.98,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            split_digits=True,
            minloglevel=2,
        )
        pieces = spm.SentencePieceProcessor(model_file=f"{folder}/m.model")
    count = pieces.get_piece_size()
    tokens = [pieces.id_to_piece(i) for i in range(count)]
    scores = [pieces.get_score(i) for i in range(count)]
    kinds = [
        2 if pieces.is_unknown(i) else 3 if pieces.is_control(i) else 6 if pieces.is_byte(i) else 1 for i in range(count)
    ]
    # As the converters of Llama 2 make it: every pair of tokens that joins to a token is a merge, best score first.
    words = {token: i for i, token in enumerate(tokens)}
    merges = []
    for token, i in words.items():
        cuts = [(token[:at], token[at:]) for at in range(1, len(token))]
        pairs = [(left, right) for left, right in cuts if left in words and right in words and kinds[i] == 1]
        pairs.sort(key=lambda pair: (words[pair[0]], words[pair[1]]))
        merges += [(scores[i], pair) for pair in pairs]
    merges = [pair for _, pair in sorted(merges, key=lambda merge: -merge[0])]
    added = [
        {"id": i, "content": tokens[i], "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
         "special": True}
        for i in range(3)
    ]
    space = {"String": " "}
    document = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": {
            "type": "Sequence",
            "normalizers": [
                {"type": "Prepend", "prepend": "▁"},
                {"type": "Replace", "pattern": space, "content": "▁"},
            ],
        },
        "pre_tokenizer": None,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
        },
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 1, "stop": 0},
            ],
        },
        "model": {
            "type": "BPE", "dropout": None, "unk_token": "<unk>", "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": True, "byte_fallback": True, "ignore_merges": False,
            "vocab": words, "merges": merges,
        },
    }
    tokenizer = Tokenizer.from_str(json.dumps(document))
    metaspace = dict(document, normalizer=None)
    metaspace["pre_tokenizer"] = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False}
    first = Tokenizer.from_str(json.dumps(metaspace))
    vectors = []
    for text in texts(rng, 260):
        # A null ends a text for SentencePiece.
        text = text.replace("\x00", "")
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert without_added_tokens(tokenizer).encode(text, add_special_tokens=False).ids == pieces.encode(text), text
        vectors.append({"text": text, "special": True, "ids": ids})
        text = text.replace("<|im_end|>", "</s>").replace("<|im_start|>", "<s>")
        if "s>" in text:
            ids = tokenizer.encode(text, add_special_tokens=False).ids
            ids_first = first.encode(text, add_special_tokens=False).ids
            vectors.append({"text": text, "special": True, "ids": ids, "prepend_first": ids_first})
            vectors.append({"text": text, "special": False, "ids": pieces.encode(text)})
    gguf = {"tokens": tokens, "scores": scores, "types": kinds}
    print('{"gguf":' + json.dumps(gguf, separators=(",", ":")) + ',\n"tokenizer":')
    print(json.dumps(document, separators=(",", ":")) + ',\n"vectors":[')
    print(vector_lines(vectors) + "\n]}")


# The control tokens of Gemma 4, as far as they matter, and one that is text.
GEMMA_CONTROL = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<|turn>", "<turn|>", "<|tool_call>", "<tool_call|>"]
GEMMA_TEXT = "[multimodal]"


def gemma():
    rng = random.Random(9)
    bpe = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    bpe.normalizer = normalizers.Replace(" ", "▁")
    bpe.pre_tokenizer = pre_tokenizers.Split(" ", behavior="merged_with_previous")
    bpe.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        limit_alphabet=120,
        max_token_length=12,
        special_tokens=[*GEMMA_CONTROL, GEMMA_TEXT, *(f"<0x{byte:02X}>" for byte in range(256))],
        show_progress=False,
    )
    # Words that merge into a token that looks like a control token occur in no real vocabulary.
    lines = [text for text in corpus(rng) if "<|" not in text]
    bpe.train_from_iterator(lines + ["\n" * n for n in range(2, 9)] * 200, trainer)
    document = json.loads(bpe.to_str())
    document["added_tokens"] = [
        dict(token, special=token["content"] != GEMMA_TEXT)
        for token in document["added_tokens"]
        if not token["content"].startswith("<0x")
    ]
    tokenizer, plain = (Tokenizer.from_str(json.dumps(document)) for _ in range(2))
    plain.encode_special_tokens = True
    vectors = []
    for text in texts(rng, 180):
        text = text.replace("<|im_start|>", "<|turn>").replace("<|im_end|>", "<turn|>").replace("<b>", GEMMA_TEXT)
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        vectors.append({"text": text, "special": True, "ids": ids})
        plain_ids = plain.encode(text, add_special_tokens=False).ids
        if plain_ids != ids:
            vectors.append({"text": text, "special": False, "ids": plain_ids})
    print('{"tokenizer":' + json.dumps(document, separators=(",", ":"), ensure_ascii=False) + ',\n"vectors":[')
    print(vector_lines(vectors) + "\n]}")


if __name__ == "__main__":
    modes = {"tales": tales, "pre": pre, "sentencepiece": sentencepiece, "gemma": gemma}
    modes[sys.argv[1]](*sys.argv[2:])
