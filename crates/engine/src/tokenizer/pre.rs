//! The pre-tokenisers that model files name.

use super::normalise::{Form, Normalise};
use super::split::Splitter;

/// What a model file means by a value of `tokenizer.ggml.pre`.
#[derive(Debug)]
pub(super) struct Pre {
    /// The values.
    names: &'static [&'static str],
    /// The steps of a [`Splitter`], as the models' own files write them.
    steps: &'static [&'static str],
    /// Steps that cut the text after it was spelled in the byte alphabet.
    spelled_steps: &'static [&'static str],
    /// Whether a text starts with the BOS token where the file does not say.
    pub(super) adds_bos: bool,
    /// Whether a piece that is a token is that token, whatever the merges would make of it.
    pub(super) ignores_merges: bool,
    /// Whether the models' own files compose characters (NFC) before they cut. A GGUF file has no place to say so.
    composes: bool,
}

/// What a file without a name means.
pub(super) const DEFAULT: &str = "default";

/// Tokens that the vocabulary of every published model has whose files compose. A file with fewer has a vocabulary of
/// its own, like the demo model, and has borrowed no more than the way of cutting.
const PUBLISHED: usize = 50_000;

/// The expression of GPT-2, which byte-level pre-tokenisers use where they bring none of their own.
pub(super) const GPT_2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
// The steps that files write without an expression.
pub(super) const DIGIT: &str = r"\p{N}";
pub(super) const DIGITS: &str = r"\p{N}+";
pub(super) const PUNCTUATION_MARK: &str = r"[\p{P}!-/:-@\[-`{-~]";
pub(super) const PUNCTUATION: &str = r"[\p{P}!-/:-@\[-`{-~]+";

/// Words with one mark before them, one digit at a time.
const QWEN2: &str = concat!(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}",
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
);
/// As Qwen2, but up to three digits together.
const LLAMA_3: &str = concat!(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}",
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
);
/// Words are cut where small letters are followed by capitals.
const GPT_4O: &str = concat!(
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
);

/// What most entries have in common.
const PLAIN: Pre = Pre {
    names: &[],
    steps: &[],
    spelled_steps: &[],
    adds_bos: false,
    ignores_merges: false,
    composes: false,
};

/// All that are supported. A new one is a new entry here.
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
        names: &["starcoder", "refact", "smollm", "codeshell", "exaone", "minerva-7b"],
        steps: &[DIGIT, GPT_2],
        ..PLAIN
    },
    Pre { names: &["command-r"], steps: &[DIGIT, GPT_2], composes: true, ..PLAIN },
    Pre {
        names: &["falcon"],
        steps: &[PUNCTUATION, GPT_2],
        // In the alphabet six bytes above 0x7f are characters that count as digits, such as `²`.
        spelled_steps: &[DIGITS, "[0-9][0-9][0-9]"],
        ..PLAIN
    },
    Pre { names: &["qwen2", "deepseek-r1-qwen", "stablelm2"], steps: &[QWEN2], composes: true, ..PLAIN },
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
    Pre { names: &["gpt-4o", "llama4", "kanana2", "minimax-m2"], steps: &[GPT_4O], ..PLAIN },
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
        names: &["deepseek-v3", "hunyuan-dense", "joyai-llm"],
        steps: &[
            r"\p{N}{1,3}",
            r"[一-龥\u{3040}-ゟ゠-ヿ]+",
            concat!(
                r"[!-/:-~&&[^\p{L}\p{N}]][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+",
                r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
            ),
        ],
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
];

impl Pre {
    /// The entry of that name.
    pub(super) fn named(name: &str) -> Option<&'static Pre> {
        PRES.iter().find(|pre| pre.names.contains(&name))
    }

    /// All names, for people.
    pub(super) fn names() -> String {
        PRES.iter().flat_map(|pre| pre.names).copied().collect::<Vec<_>>().join(", ")
    }

    /// What is done to a text before it is cut, with a vocabulary of `tokens` tokens.
    pub(super) fn normaliser(&self, tokens: usize) -> Vec<Normalise> {
        if self.composes && tokens >= PUBLISHED { vec![Normalise::Form(Form::Nfc)] } else { vec![] }
    }

    /// Compiles what cuts the text.
    pub(super) fn splitter(&self) -> Splitter {
        Splitter::new(self.steps.iter().copied()).expect("the tests compile every entry of the table")
    }

    /// Compiles what cuts the spelled text.
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
    fn the_last_space_goes_with_the_word() {
        assert_eq!(split("gpt-2", "a   b \t c  "), ["a", "  ", " b", " \t", " c", "  "]);
        assert_eq!(split("gpt-2", "\n\nx\u{3000}\u{3000}y"), ["\n", "\n", "x", "\u{3000}", "\u{3000}", "y"]);
        assert_eq!(split("qwen2", "a  \n \n b  12"), ["a", "  \n \n", " b", " ", " ", "1", "2"]);
    }

    #[test]
    fn models_that_borrow_a_pre_tokeniser_cut_alike() {
        for (name, same) in [("solar-open", "qwen2"), ("kanana2", "gpt-4o"), ("joyai-llm", "deepseek-v3")] {
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
    fn steps_cut_what_the_steps_before_left() {
        assert_eq!(
            split("deepseek-llm", "Hi, 你好 abc42\r\n  x "),
            ["Hi", ",", " ", "你好", " abc", "4", "2", "\r", "\n", " ", " x", " "]
        );
    }

    #[test]
    fn a_long_run_is_cut_as_a_short_one() {
        // A multiple of the short runs, and of three: digits are cut in threes.
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
