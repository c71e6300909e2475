//! Pre-tokenisers: how a text is cut into the pieces that BPE may not merge across.

use regex_automata::Input;
use regex_automata::meta::Regex;

/// What a model file means by a value of `tokenizer.ggml.pre`.
#[derive(Debug)]
pub(super) struct Pre {
    /// The value.
    name: &'static str,
    /// Regular expressions in the form in which models publish them. Each in turn cuts every piece that the
    /// one before it left: a match is a piece, and so is what lies between two matches.
    steps: &'static [&'static str],
    /// Whether a text starts with the BOS token where the file does not say.
    pub(super) adds_bos: bool,
}

/// All that are supported. A new one is a new entry here.
const PRES: &[Pre] = &[
    Pre {
        name: "gpt-2",
        steps: &[r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"],
        adds_bos: false,
    },
    Pre {
        name: "qwen2",
        steps: &[concat!(
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}",
            r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
        )],
        adds_bos: false,
    },
    Pre {
        name: "deepseek-llm",
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
            r"\p{N}",
        ],
        adds_bos: false,
    },
];

impl Pre {
    /// The entry of that name.
    pub(super) fn named(name: &str) -> Option<&'static Pre> {
        PRES.iter().find(|pre| pre.name == name)
    }

    /// All names, for people.
    pub(super) fn names() -> String {
        PRES.iter().map(|pre| pre.name).collect::<Vec<_>>().join(", ")
    }

    /// Compiles it.
    pub(super) fn splitter(&self) -> Splitter {
        Splitter { steps: self.steps.iter().map(|step| Step::new(step)).collect() }
    }
}

/// A compiled pre-tokeniser.
#[derive(Debug)]
pub(super) struct Splitter {
    steps: Vec<Step>,
}

impl Splitter {
    /// Cuts `text` into its pieces. Joined, they are the text; none is empty.
    pub(super) fn split<'t>(&self, text: &'t str) -> Vec<&'t str> {
        let mut pieces = if text.is_empty() { vec![] } else { vec![text] };
        for step in &self.steps {
            let mut finer = Vec::with_capacity(pieces.len());
            for piece in pieces {
                step.split(piece, &mut finer);
            }
            pieces = finer;
        }
        pieces
    }
}

/// One regular expression of a pre-tokeniser.
///
/// Most end in `\s+(?!\S)|\s+`: white space up to, but without, the last one before a word. A backtracking
/// engine, which such a look-ahead seems to need, gives up on a run of a million characters, and the text
/// after it would go uncut. All engines here are linear automata instead, and know no look-ahead. So the tail
/// becomes a pattern of its own, `\s+`, and a match of it that stops before a word gives its last character
/// back.
#[derive(Debug)]
struct Step {
    /// Pattern 0 is the expression without the tail, pattern 1 the tail's `\s+`; as in an alternation,
    /// pattern 0 has precedence.
    regex: Regex,
}

/// The one look-ahead that pre-tokenisers use, as they write it.
const TAIL: &str = r"|\s+(?!\S)|\s+";

impl Step {
    fn new(expression: &str) -> Step {
        let regex = match expression.strip_suffix(TAIL) {
            Some(head) => Regex::new_many(&[head, r"\s+"]),
            None => Regex::new(expression),
        };
        Step { regex: regex.expect("the tests compile every entry of the table") }
    }

    fn split<'t>(&self, text: &'t str, pieces: &mut Vec<&'t str>) {
        let mut at = 0;
        while at < text.len() {
            let Some(found) = self.regex.find(Input::new(text).range(at..)) else {
                pieces.push(&text[at..]);
                return;
            };
            if at < found.start() {
                pieces.push(&text[at..found.start()]);
            }
            let is_tail = found.pattern().as_usize() == 1;
            let end = if is_tail { end_of_white_space(text, found.range()) } else { found.end() };
            pieces.push(&text[found.start()..end]);
            at = end;
        }
    }
}

/// Where `\s+(?!\S)|\s+` ends if the white space at its start is all of `run`: the last character belongs to
/// the word that follows, unless no word follows or the run is that one character.
fn end_of_white_space(text: &str, run: std::ops::Range<usize>) -> usize {
    let last = text[run.clone()].char_indices().next_back().map_or(0, |(i, _)| run.start + i);
    if run.end == text.len() || last == run.start { run.end } else { last }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn split<'t>(name: &str, text: &'t str) -> Vec<&'t str> {
        Pre::named(name).unwrap().splitter().split(text)
    }

    #[test]
    fn every_entry_compiles_and_never_matches_nothing() {
        for pre in PRES {
            for step in pre.splitter().steps {
                // An empty match would not move on.
                assert!(!step.regex.is_match(""), "{}", pre.name);
            }
        }
    }

    #[test]
    fn names_are_unique() {
        for pre in PRES {
            assert_eq!(PRES.iter().filter(|other| other.name == pre.name).count(), 1, "{}", pre.name);
        }
    }

    #[test]
    fn the_last_space_goes_with_the_word() {
        assert_eq!(split("gpt-2", "a   b \t c  "), ["a", "  ", " b", " \t", " c", "  "]);
        assert_eq!(split("gpt-2", "\n\nx\u{3000}\u{3000}y"), ["\n", "\n", "x", "\u{3000}", "\u{3000}", "y"]);
        assert_eq!(split("qwen2", "a  \n \n b  12"), ["a", "  \n \n", " b", " ", " ", "1", "2"]);
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
    fn a_run_of_a_megabyte_is_cut_as_a_short_one() {
        const N: usize = 1 << 20;
        for pre in PRES {
            let splitter = pre.splitter();
            for unit in ["a", " ", "7", "\n", "\r\n", "é", "你", "!", "\u{3000}", "🦙"] {
                // The word after the run shows whether the run was cut to its end.
                let cut = |n: usize| splitter.split(&format!("{} b", unit.repeat(n))).len();
                let short = (cut(1000), cut(2000));
                let expected = short.0 + (short.1 - short.0) * (N - 1000) / 1000;
                assert_eq!(cut(N), expected, "{} on a run of {unit:?}", pre.name);
            }
        }
    }

    proptest! {
        #[test]
        fn pieces_join_to_the_text(text in "[ \\t\\r\\n\u{3000}a-cé你'1!🦙]{0,40}|\\PC{0,40}") {
            for pre in PRES {
                let pieces = pre.splitter().split(&text);
                prop_assert!(pieces.iter().all(|p| !p.is_empty()));
                prop_assert_eq!(pieces.concat(), &*text);
            }
        }

        #[test]
        fn the_tail_is_what_the_look_ahead_says(text in "[ \\t\\r\\n\u{3000}ab'1!]{0,30}") {
            // A run of white space of n characters before a word: n - 1 of them, then the one that is left.
            let splitter = Splitter { steps: vec![Step::new(r"\S+|\s+(?!\S)|\s+")] };
            let mut expected = Vec::new();
            let mut rest = &*text;
            while let Some(first) = rest.chars().next() {
                let space = first.is_whitespace();
                let run = rest.find(|c: char| c.is_whitespace() != space).unwrap_or(rest.len());
                let last = rest[..run].char_indices().next_back().unwrap().0;
                let cut = if space && run < rest.len() && last > 0 { last } else { run };
                expected.push(&rest[..cut]);
                rest = &rest[cut..];
            }
            prop_assert_eq!(splitter.split(&text), expected);
        }
    }
}
