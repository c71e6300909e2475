//! The pre-tokenisers of GGUF files.

use super::normalise::{Form, Normalise};
use super::split::Splitter;
use super::vocabulary::{SPACE, Spelling};

/// The meaning of a value of `tokenizer.ggml.pre`.
#[derive(Debug)]
pub(super) struct Pre {
    /// The values.
    names: &'static [&'static str],
    /// The steps of a [`Splitter`], as the models' own files have them.
    steps: &'static [&'static str],
    /// Steps that cut the text after it is spelled in the byte alphabet.
    spelled_steps: &'static [&'static str],
    /// How the vocabulary spells text.
    pub(super) spelling: Spelling,
    /// Whether a text starts with the BOS token, if the file does not say.
    pub(super) adds_bos: bool,
    /// Whether a piece that is a token becomes that token without merging.
    pub(super) ignores_merges: bool,
    /// Whether the models' own files compose characters (NFC) before cutting, which GGUF files cannot express.
    composes: bool,
}

/// The value for files that have none.
pub(super) const DEFAULT: &str = "default";

/// The value for Gemma 4, whose files have it as the tokenizer's name instead.
pub(super) const GEMMA_4: &str = "gemma4";

/// Every published model that composes characters has at least this many tokens. A file with fewer has its own
/// vocabulary, like the demo model, and uses only the cutting.
const PUBLISHED: usize = 50_000;

/// The expression of GPT-2, which byte-level pre-tokenisers use by default.
pub(super) const GPT_2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
// Expressions of steps that files refer to by name.
pub(super) const DIGIT: &str = r"\p{N}";
pub(super) const DIGITS: &str = r"\p{N}+";
pub(super) const PUNCTUATION_MARK: &str = r"[\p{P}!-/:-@\[-`{-~]";
pub(super) const PUNCTUATION: &str = r"[\p{P}!-/:-@\[-`{-~]+";

/// Words with one mark before them; digits one at a time.
const QWEN2: &str = concat!(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}",
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
);
/// Like Qwen2, but with up to three digits together.
const LLAMA_3: &str = concat!(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}",
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
);
/// Also cuts words where a capital follows a small letter.
const GPT_4O: &str = concat!(
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
);

/// Words of one script, and words with an ASCII mark before them.
const DEEPSEEK_3: &str = concat!(
    r"[!-/:-~&&[^\p{L}\p{N}]][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+",
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
);

/// The common settings of most entries.
const PLAIN: Pre = Pre {
    names: &[],
    steps: &[],
    spelled_steps: &[],
    spelling: Spelling::ByteAlphabet,
    adds_bos: false,
    ignores_merges: false,
    composes: false,
};

/// All supported pre-tokenisers. A new one is a new entry here.
const PRES: &[Pre] = &[
    Pre { names: &[DEFAULT], steps: &[r"[\p{P}\$\+<=>\^~\|]+", GPT_2, DIGITS, "[0-9][0-9][0-9]"], ..PLAIN },
    Pre {
        names: &[
            "gpt-2",
            "phi-2",
            "jais",
            "trillion",
            "gigachat",
            "mellum",
            "a.x-4.0",
            "exaone4",
            "granite-docling",
        ],
        steps: &[GPT_2],
        ..PLAIN
    },
    // Both have the tokenizer of GPT-NeoX.
    Pre { names: &["mpt", "olmo"], steps: &[GPT_2], composes: true, ..PLAIN },
    Pre {
        names: &["starcoder", "refact", "smollm", "codeshell", "exaone", "minerva-7b", "mellum2"],
        steps: &[DIGIT, GPT_2],
        ..PLAIN
    },
    Pre { names: &["command-r"], steps: &[DIGIT, GPT_2], composes: true, ..PLAIN },
    Pre {
        names: &["falcon"],
        steps: &[PUNCTUATION, GPT_2],
        // In the byte alphabet, six bytes above 0x7f are characters that count as digits, such as `²`.
        spelled_steps: &[DIGITS, "[0-9][0-9][0-9]"],
        ..PLAIN
    },
    Pre {
        names: &["qwen2", "deepseek-r1-qwen", "stablelm2", "f2llmv2"],
        steps: &[QWEN2],
        composes: true,
        ..PLAIN
    },
    Pre { names: &["megrez", "kormo", "hunyuan", "grok-2", "solar-open"], steps: &[QWEN2], ..PLAIN },
    Pre {
        names: &["qwen35"],
        steps: &[concat!(
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}",
            r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
        )],
        composes: true,
        ..PLAIN
    },
    Pre {
        names: &["llama-bpe", "llama-v3", "llama3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"],
        steps: &[LLAMA_3],
        adds_bos: true,
        ignores_merges: true,
        ..PLAIN
    },
    Pre { names: &["glm4", "glm5"], steps: &[LLAMA_3], ignores_merges: true, ..PLAIN },
    Pre { names: &["chatglm-bpe", "dbrx", "smaug-bpe"], steps: &[LLAMA_3], ..PLAIN },
    Pre { names: &["gpt-4o", "llama4", "kanana2", "minimax-m2", "talkie"], steps: &[GPT_4O], ..PLAIN },
    Pre {
        names: &["cohere2moe", "tiny_aya"],
        steps: &[r"\d{1,3}(?=(?:\d{3})*\b)", GPT_4O],
        composes: true,
        ..PLAIN
    },
    Pre {
        names: &["youtu"],
        steps: &[
            concat!(
                r"[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，\u{3001}-\u{303F}\u{FE30}-\u{FE4F}]+",
                r"|[ㄅ-ㄯ]+|[一-龥\u{3040}-ゟ゠-ヿ]+"
            ),
            concat!(
                r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
                r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])?",
                r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*",
                r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])?",
                r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
            ),
        ],
        ignores_merges: true,
        ..PLAIN
    },
    Pre {
        names: &["tekken"],
        steps: &[concat!(
            r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
            r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*",
            r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
        )],
        adds_bos: true,
        ignores_merges: true,
        ..PLAIN
    },
    Pre {
        names: &["kimi-k2"],
        steps: &[concat!(
            r"[\p{Han}]+",
            r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*",
            r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
            r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+",
            r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
            r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
        )],
        ..PLAIN
    },
    Pre {
        names: &["bailingmoe", "bailingmoe2", "llada-moe"],
        steps: &[concat!(
            r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}",
            r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
        )],
        ..PLAIN
    },
    Pre {
        names: &["deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"],
        steps: &[r"\p{N}{1,3}", r"[一-龥\u{3040}-ゟ゠-ヿ]+", DEEPSEEK_3],
        ..PLAIN
    },
    Pre {
        names: &["afmoe"],
        steps: &[
            r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))",
            concat!(
                r"[\u{0e40}-\u{0eff}\u{1000}-\u{109f}\u{1100}-\u{11ff}\u{1780}-\u{17ff}\u{2f00}-\u{2fdf}",
                r"\u{3040}-\u{30ff}\u{3400}-\u{4dbf}\u{4e00}-\u{faff}\u{ff65}-\u{ff9f}]+"
            ),
            DEEPSEEK_3,
        ],
        ..PLAIN
    },
    Pre { names: &["laguna"], steps: &[r"\n+", QWEN2], ..PLAIN },
    Pre {
        names: &["exaone-moe"],
        // Words with spaces between them are one piece.
        steps: &[concat!(
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}",
            r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
        )],
        ..PLAIN
    },
    Pre {
        names: &["minicpm5"],
        steps: &[
            r"\p{N}{1,3}",
            concat!(
                r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}+",
                r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
            ),
        ],
        ignores_merges: true,
        ..PLAIN
    },
    Pre {
        names: &["deepseek-coder"],
        steps: &[r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[一-龥ࠀ-一가-\u{D7FF}]+", DIGIT],
        ..PLAIN
    },
    Pre {
        names: &["deepseek-llm"],
        steps: &[
            r"[\r\n]",
            concat!(
                r"\s?[A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿ",
                r"ᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-\u{1F7D}ᾀ-ᾴᾶ-ᾼ\u{1FBE}ῂ-ῄῆ-ῌῐ-\u{1FD3}ῖ-\u{1FDB}ῠ-Ῥῲ-ῴῶ-ῼ",
                r"ℂℇℊ-ℓℕℙ-ℝℤ\u{2126}ℨ\u{212A}-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ",
                r"𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃]+"
            ),
            r"\s?[!-/:-~！-／：-～‘-‟\u{3000}-。]+",
            r"\s+$",
            r"[一-龥ࠀ-一가-\u{D7FF}]+",
            DIGIT,
        ],
        ..PLAIN
    },
    // Nothing is cut: merges cross words and lines.
    Pre { names: &[GEMMA_4], spelling: Spelling::Metaspace, adds_bos: true, ..PLAIN },
];

impl Pre {
    /// The entry with this name.
    pub(super) fn named(name: &str) -> Option<&'static Pre> {
        PRES.iter().find(|pre| pre.names.contains(&name))
    }

    /// All names, for messages.
    pub(super) fn names() -> String {
        PRES.iter().flat_map(|pre| pre.names).copied().collect::<Vec<_>>().join(", ")
    }

    /// The normalisation before a text is cut, for a vocabulary of `tokens` tokens.
    pub(super) fn normaliser(&self, tokens: usize) -> Vec<Normalise> {
        match self.spelling {
            Spelling::Metaspace => vec![Normalise::Replace { from: " ".to_owned(), to: SPACE.to_string() }],
            Spelling::ByteAlphabet if self.composes && tokens >= PUBLISHED => {
                vec![Normalise::Form(Form::Nfc)]
            }
            Spelling::ByteAlphabet => vec![],
        }
    }

    /// Compiles the steps that cut the text.
    pub(super) fn splitter(&self) -> Splitter {
        Splitter::new(self.steps.iter().copied()).expect("the tests compile every entry of the table")
    }

    /// Compiles the steps that cut the spelled text.
    pub(super) fn spelled_splitter(&self) -> Splitter {
        Splitter::new(self.spelled_steps.iter().copied()).expect("the tests compile every entry of the table")
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn split<'t>(name: &str, text: &'t str) -> Vec<&'t str> {
        Pre::named(name).unwrap().splitter().split(text).unwrap()
    }

    #[test]
    fn every_entry_compiles_to_linear_steps() {
        for pre in PRES {
            assert!(pre.splitter().is_linear() && pre.spelled_splitter().is_linear(), "{:?}", pre.names);
        }
    }

    #[test]
    fn names_are_unique() {
        let mut names: Vec<_> = PRES.iter().flat_map(|pre| pre.names).collect();
        names.sort_unstable();
        assert!(names.is_sorted_by(|a, b| a < b), "{names:?}");
    }

    #[test]
    fn the_last_space_belongs_to_the_word() {
        assert_eq!(split("gpt-2", "a   b \t c  "), ["a", "  ", " b", " \t", " c", "  "]);
        assert_eq!(split("gpt-2", "\n\nx\u{3000}\u{3000}y"), ["\n", "\n", "x", "\u{3000}", "\u{3000}", "y"]);
        assert_eq!(split("qwen2", "a  \n \n b  12"), ["a", "  \n \n", " b", " ", " ", "1", "2"]);
    }

    #[test]
    fn models_with_the_same_pre_tokeniser_cut_alike() {
        for (name, same) in [
            ("solar-open", "qwen2"),
            ("kanana2", "gpt-4o"),
            ("joyai-llm", "deepseek-v3"),
            ("hy_v4", "deepseek-v3"),
            ("mellum2", "starcoder"),
        ] {
            assert_eq!(Pre::named(name).unwrap().steps, Pre::named(same).unwrap().steps, "{name}");
        }
        let ignores_merges = |name: &str| Pre::named(name).unwrap().ignores_merges;
        assert!(ignores_merges("glm4") && ignores_merges("youtu") && !ignores_merges("chatglm-bpe"));
    }

    #[test]
    fn contractions_are_cut_off() {
        assert_eq!(split("gpt-2", "I'll we'D"), ["I", "'ll", " we", "'", "D"]);
        assert_eq!(split("qwen2", "I'll we'D a'ſ"), ["I", "'ll", " we", "'D", " a", "'ſ"]);
    }

    #[test]
    fn each_step_cuts_the_pieces_of_the_step_before() {
        assert_eq!(
            split("deepseek-llm", "Hi, 你好 abc42\r\n  x "),
            ["Hi", ",", " ", "你好", " abc", "4", "2", "\r", "\n", " ", " x", " "]
        );
    }

    #[test]
    fn a_long_run_is_cut_as_a_short_one() {
        // A multiple of the short runs' length, and of three, because digits are cut in threes.
        const SHORT: usize = 3000;
        const N: usize = 100 * SHORT;
        for pre in PRES {
            let splitter = pre.splitter();
            for unit in ["a", " ", "7", "\n", "\r\n", "é", "你", "!", "\u{3000}", "🦙"] {
                // The word after the run shows whether the run was cut to its end.
                let cut = |n: usize| splitter.split(&format!("{} b", unit.repeat(n))).unwrap().len();
                let short = (cut(SHORT), cut(2 * SHORT));
                let expected = short.0 + (short.1 - short.0) * (N / SHORT - 1);
                assert_eq!(cut(N), expected, "{:?} on a run of {unit:?}", pre.names);
            }
        }
    }

    proptest! {
        #[test]
        fn pieces_join_to_the_text(text in "[ \\t\\r\\n\u{3000}a-cé你'1!🦙]{0,40}|\\PC{0,40}") {
            for pre in PRES {
                let pieces = pre.splitter().split(&text).unwrap();
                prop_assert!(pieces.iter().all(|p| !p.is_empty()));
                prop_assert_eq!(pieces.concat(), &*text);
            }
        }
    }
}
