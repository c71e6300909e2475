"""Random texts with a fixed seed, for comparing tokenizers. They combine all kinds of characters."""

import unicodedata

# Parts of texts. A text joins a few random parts, so that all kinds are combined.
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


def texts(rng, count):
    """The fixed texts and `count` drawn ones."""
    return FIXED + [drawn(rng) for _ in range(count)]


# Training texts for small vocabularies: everyday sentences, which lead to many kinds of merges.
SENTENCES = [
    "The quick brown fox jumps over the lazy dog, doesn't it? It's 12:30, and we've got 1234 reasons.",
    "I'd say they'll arrive at 7 o'clock; you're early, I'm late, SHE'S NEVER HERE, and that isn't news.",
    "def area(width, height):\n    # comment\n    return width * height\n\n\nprint(area(3, 4) == 12)\n",
    "for (int i = 0; i < 100; ++i) {\n\tsum += values[i] != 0 ? values[i] : -1;\n}\r\n",
    "Heute ist schönes Wetter, übermorgen regnet es. Straße und Fußgänger, 3,5 Kilometer.",
    "Le garçon mange une pomme à l'école. C'est l'été, n'est-ce pas ? « Bonjour ! »",
    "El niño corrió por la montaña. ¿Dónde está el baño? ¡Qué alegría!",
    "Сегодня хорошая погода, завтра будет дождь. Привет, мир! 25 рублей.",
    "Ο ήλιος λάμπει πάνω από τη θάλασσα. Καλημέρα κόσμε!",
    "שלום עולם, היום יום יפה. مرحبا بالعالم، الطقس جميل اليوم ٣٤٥.",
    "आज मौसम अच्छा है और हम बाहर जा रहे हैं। नमस्ते दुनिया १२३",
    "วันนี้อากาศดีมาก เราไปเดินเล่นกันเถอะ",
    "今天天气很好，我们一起去公园吧。你好，世界！价格是1234元。",
    "今日はとても良い天気です。カタカナとひらがなと漢字。こんにちは世界！",
    "오늘은 날씨가 좋아요. 안녕하세요 세계!",
    "Hôm nay trời đẹp. Tiếng Việt có nhiều dấu: ế, ộ, ữ.",
    "🦙 llamas 👩‍🚀 and 👍🏽 flags 🇩🇪🇫🇷 … “quotes” — dashes–here ½ ² ① Ⅷ",
    "| a | b |\n|---|---|\n| 1 | 22 | 333 | 4444 |\n    indented\n\t\ttabs   and   spaces  \n",
]

# Text that normalisation changes: decomposed Hangul, marks in any order, characters that look like others, marks
# without a letter.
UNCOMPOSED = [
    "\u1112\u1161\u11ab\u1100\u1173\u11af", "\uac00\u11a8 \u1100\u1161", "\u11a8\uac00", "Vie\u0323\u0302t Vie\u0302\u0323t",
    "a\u0308\u0301 a\u0301\u0308", "\u212b \u2126 \u212a", "\u0915\u093c \u0958", "\ufb1d \ufb2e", "\uf900 \U0002f800",
    "\u0301a", "<|im_end|>\u0301e", "e<|im_end|>\u0301", "cafe\u0301's", "1\u0301 2\u20e3", "\u3046\u3099 \u304b\u3099",
    "q\u0307\u0323", "\u0344", "\u1100" * 40 + "\u1161", "e" + "\u0301" * 40,
]


def uncomposed():
    """Texts that are not in NFC."""
    return UNCOMPOSED + [unicodedata.normalize("NFD", text) for text in SENTENCES[4:]]


def corpus(rng):
    """Texts to train on: the sentences and many draws of the same words."""
    return SENTENCES * 8 + [drawn(rng) for _ in range(4000)]
