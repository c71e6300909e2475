#!/usr/bin/env python3
"""Makes crates/engine/tests/data/tokenizer_tales.json: texts and the tokens that Hugging Face gives.

    pip install tokenizers==0.23.3
    python3 tools/tokenizer_vectors.py TOKENIZER.JSON > crates/engine/tests/data/tokenizer_tales.json

TOKENIZER.JSON is the demo model's tokenizer as its training wrote it. A vector is {"text", "special", "ids"};
`special` says whether control tokens are found in the text. The texts are drawn with a fixed seed.
"""

import json
import random
import sys

from tokenizers import Tokenizer

# What texts are made of. A text joins a few draws, so that every kind meets every other.
WORDS = [
    "Once", "upon", "a", "time", "the", "cat's", "boat", "HELLO", "iPhone", "naïve", "façade",
    "Straße", "ŒUVRE", "Здравствуй", "мир", "Ελλάδα", "שלום", "مرحبا", "العالم", "नमस्ते", "दुनिया",
    "สวัสดี", "ខ្មែរ", "你好", "世界", "こんにちは", "カタカナ", "안녕하세요", "Հայերեն", "ქართული", "አማርኛ", "ไทย",
    "Việt", "𝓬𝓾𝓻𝓼𝓲𝓿𝓮", "𐐷", "ﬁligature", "ǅ",
]
SPACES = [
    " ", "  ", "   ", "\t", "\t\t", "\n", "\n\n", "\r\n", "\r", " \n", "\n ", "  \n  ", "\r\n\r\n",
    "\t\n", "\u00a0", "\u3000", "\u2003 ", "\u2028", "\u0085", "\u200b", "\x0b", "\x0c", "\ufeff",
    " \u00a0 ",
]
NUMBERS = [
    "0", "7", "42", "123", "1234", "3.14", "1,000,000", "0x1F", "1e-9", "٣٤", "४२", "Ⅷ", "½", "²",
    "①", "２０", "10:30",
]
MARKS = [
    "!", "?!", "...", "…", "—", "“quoted”", "«»", "¿", "(", ")]}", "/*", "*/", "==", "!=", "->",
    "::", "#!", "$5", "€", "_", "__init__", "@", "\\", "`", "~", "^", "&&", "|", "<b>", "'", "''",
    '"', "ˈ", "\u0301", "e\u0301", "\x00", "\x7f",
]
CONTRACTIONS = [
    "I'm", "you're", "WE'VE", "she'll", "it's", "IT'S", "'s", "'S", "'t", "can't", "they'd",
    "o'clock", "'re'", "’s", "'\u017f", "a'LL", "'Tis", "y'all'd've",
]
EMOJI = [
    "🦙", "👩‍🚀", "👨‍👩‍👧‍👦", "🏳️‍🌈", "❤️", "👍🏽", "🇩🇪", "🇺🇸🇫🇷", "☃", "✨🎉", "1️⃣",
    "\U0001faf1\U0001f3fb‍\U0001faf2\U0001f3ff",
]
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|im_end|", "<|im_start|>user\n", "<|im_end|>\n"]
KINDS = [WORDS, WORDS, SPACES, SPACES, NUMBERS, MARKS, CONTRACTIONS, EMOJI, CONTROL]

FIXED = [
    "", " ", "a", "\n", "Tell me a story about a cat and a boat.",
    "<|im_start|>user\nTell me a story.<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|><|im_start|><|im_end|><|endoftext|>", "<<|im_end|>>", "<|im_<|im_end|>end|>",
    " " * 100 + "x", "a" * 300, "\n" * 50, "ha" * 80, "7" * 40, " \n" * 20 + "end ",
]


def drawn(rng):
    """One text."""
    if rng.random() < 0.15:  # Any characters at all, below and above the surrogates.
        ranges = rng.choices([(0, 0x80), (0, 0xD800), (0xE000, 0x110000)], k=12)
        return "".join(chr(rng.randrange(*r)) for r in ranges)
    glue = rng.choice(["", "", " "])
    return glue.join(rng.choice(rng.choice(KINDS)) for _ in range(rng.randrange(1, 14)))


def main():
    plain = Tokenizer.from_file(sys.argv[1])
    # Without its added tokens the tokenizer has nothing but BPE: control tokens are plain text.
    document = json.loads(plain.to_str())
    document["added_tokens"] = []
    without = Tokenizer.from_str(json.dumps(document))

    rng = random.Random(20)
    texts = FIXED + [drawn(rng) for _ in range(470)]
    print("[")
    for i, text in enumerate(texts):
        lines = []
        for special, tokenizer in ((True, plain), (False, without)):
            ids = tokenizer.encode(text, add_special_tokens=False).ids
            # The second line says nothing new where there is no control token.
            if special or ids != previous:
                vector = {"text": text, "special": special, "ids": ids}
                lines.append(json.dumps(vector, separators=(",", ":")))
            previous = ids
        print(",\n".join(lines) + ("," if i + 1 < len(texts) else ""))
    print("]")


if __name__ == "__main__":
    main()
