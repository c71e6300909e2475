//! Cuts a text into the pieces that BPE may not merge across.

use regex_automata::Input;
use regex_automata::meta::Regex;

use crate::error::Error;

/// A compiled pre-tokeniser.
#[derive(Debug)]
pub(super) struct Splitter {
    steps: Vec<Step>,
}

impl Splitter {
    /// Compiles regular expressions in the form in which models publish them. Each in turn cuts every piece
    /// that the one before it left: a match is a piece, and so is what lies between two matches. Fails with the
    /// reason where one is no expression.
    pub(super) fn new<'e>(expressions: impl IntoIterator<Item = &'e str>) -> Result<Splitter, String> {
        let steps = expressions.into_iter().map(Step::new).collect::<Result<_, _>>()?;
        Ok(Splitter { steps })
    }

    /// Hands the pieces of `text` to `take`, one after the other, so that no list of them takes memory. Joined, they are
    /// the text; none is empty. Fails where `take` does, or where a backtracking expression gives up.
    pub(super) fn each<'t>(
        &self,
        text: &'t str,
        take: &mut dyn FnMut(&'t str) -> crate::Result<()>,
    ) -> crate::Result<()> {
        Splitter::each_of(&self.steps, text, take)
    }

    fn each_of<'t>(
        steps: &[Step],
        text: &'t str,
        take: &mut dyn FnMut(&'t str) -> crate::Result<()>,
    ) -> crate::Result<()> {
        match steps.split_first() {
            None if text.is_empty() => Ok(()),
            None => take(text),
            Some((step, finer)) => step.each(text, &mut |piece| Splitter::each_of(finer, piece, take)),
        }
    }

    /// The pieces of `text`.
    #[cfg(test)]
    pub(super) fn split<'t>(&self, text: &'t str) -> crate::Result<Vec<&'t str>> {
        let mut pieces = Vec::new();
        self.each(text, &mut |piece| {
            pieces.push(piece);
            Ok(())
        })?;
        Ok(pieces)
    }

    /// Whether all steps take time in proportion to the text.
    #[cfg(test)]
    pub(super) fn is_linear(&self) -> bool {
        self.steps.iter().all(|step| !matches!(step, Step::Backtracking(_)))
    }
}

/// One regular expression of a pre-tokeniser.
///
/// Most end in `\s+(?!\S)|\s+`: white space up to, but without, the last one before a word. A backtracking
/// engine, which such a look-ahead seems to need, gives up on a run of a million characters. So the tail
/// becomes a pattern of its own, `\s+`, for a linear automaton, which knows no look-ahead, and a match of it
/// that stops before a word gives its last character back.
#[derive(Debug)]
enum Step {
    Linear(Regex),
    /// Pattern 0 is the expression without the tail, pattern 1 the tail's `\s+`; as in an alternation,
    /// pattern 0 has precedence.
    LinearWithTail(Regex),
    /// What no automaton can do: other look-arounds and possessive repetitions.
    Backtracking(Box<fancy_regex::Regex>),
}

/// The look-ahead with which most pre-tokenisers end, in the ways in which they write it.
const TAILS: [&str; 2] = [r"|\s+(?!\S)|\s+", r"|\s+(?!\S)|\s"];

/// Possessive repetitions that published expressions use, and the greedy ones that match the same: what is
/// given back could not start what follows.
const POSSESSIVE: [(&str, &str); 3] = [
    (r"[^\r\n\p{L}\p{N}]?+\p{L}+", r"[^\r\n\p{L}\p{N}]?\p{L}+"),
    (r" ?[^\s\p{L}\p{N}]++[\r\n]*|", r" ?[^\s\p{L}\p{N}]+[\r\n]*|"),
    (r" ?[^\s\p{L}\p{N}]++[\r\n/]*|", r" ?[^\s\p{L}\p{N}]+[\r\n/]*|"),
];

/// The longest expression that is compiled. Published ones have under a thousand characters.
const MAX_EXPRESSION: usize = 1 << 14;

impl Step {
    fn new(expression: &str) -> Result<Step, String> {
        if expression.len() > MAX_EXPRESSION {
            return Err(format!("a regular expression of {} bytes is too long", expression.len()));
        }
        let mut greedy = expression.to_owned();
        for (possessive, same) in POSSESSIVE {
            greedy = greedy.replace(possessive, same);
        }
        // An automaton would read `x?+` as `(x?)+`.
        if !has_possessive(&greedy) {
            let tail = TAILS.iter().find_map(|tail| greedy.strip_suffix(tail));
            if let Some(head) = tail
                && let Ok(regex) = Regex::new_many(&[head, r"\s+"])
            {
                return Ok(Step::LinearWithTail(regex));
            }
            if let Ok(regex) = Regex::new(&greedy) {
                return Ok(Step::Linear(regex));
            }
        }
        match fancy_regex::Regex::new(expression) {
            Ok(regex) => Ok(Step::Backtracking(Box::new(regex))),
            Err(e) => Err(format!("the regular expression `{expression}` does not compile: {e}")),
        }
    }

    fn each<'t>(
        &self,
        text: &'t str,
        take: &mut dyn FnMut(&'t str) -> crate::Result<()>,
    ) -> crate::Result<()> {
        let mut cutter = Cutter { text, at: 0, take };
        // An empty match is a cut, and the search goes on behind the next character.
        let mut from = 0;
        while from <= text.len() {
            let (start, end) = match self {
                Step::Linear(regex) => match regex.find(Input::new(text).range(from..)) {
                    Some(found) => (found.start(), found.end()),
                    None => break,
                },
                Step::LinearWithTail(regex) => match regex.find(Input::new(text).range(from..)) {
                    Some(found) if found.pattern().as_usize() == 0 => (found.start(), found.end()),
                    Some(found) => (found.start(), end_of_white_space(text, found.range())),
                    None => break,
                },
                Step::Backtracking(regex) => match regex.find_from_pos(text, from) {
                    Ok(Some(found)) => (found.start(), found.end()),
                    Ok(None) => break,
                    Err(e) => {
                        return Err(Error::Invalid(format!("the pre-tokeniser gives up on the text: {e}")));
                    }
                },
            };
            cutter.cut(start)?;
            cutter.cut(end)?;
            from = if start < end { end } else { end + char_at(text, end) };
        }
        cutter.cut(text.len())
    }
}

/// Takes pieces from the front of a text.
struct Cutter<'a, 't> {
    text: &'t str,
    at: usize,
    take: &'a mut dyn FnMut(&'t str) -> crate::Result<()>,
}

impl Cutter<'_, '_> {
    fn cut(&mut self, to: usize) -> crate::Result<()> {
        if self.at < to {
            (self.take)(&self.text[self.at..to])?;
            self.at = to;
        }
        Ok(())
    }
}

/// The length of the character at `at`; 1 at the end of the text, so that a search moves past it.
fn char_at(text: &str, at: usize) -> usize {
    text[at..].chars().next().map_or(1, char::len_utf8)
}

/// Where `\s+(?!\S)|\s+` ends if the white space at its start is all of `run`: the last character belongs to
/// the word that follows, unless no word follows or the run is that one character.
fn end_of_white_space(text: &str, run: std::ops::Range<usize>) -> usize {
    let last = text[run.clone()].char_indices().next_back().map_or(0, |(i, _)| run.start + i);
    if run.end == text.len() || last == run.start { run.end } else { last }
}

/// Whether a repetition in `expression` is possessive: `?+`, `*+`, `++` or `}+`.
fn has_possessive(expression: &str) -> bool {
    let mut chars = expression.chars().peekable();
    let mut class_depth = 0usize;
    while let Some(c) = chars.next() {
        let repeats = match c {
            '\\' => {
                let escaped = chars.next();
                // The braces of `\p{L}` repeat nothing.
                if matches!(escaped, Some('p' | 'P' | 'x' | 'u' | 'U')) && chars.peek() == Some(&'{') {
                    chars.by_ref().find(|&c| c == '}');
                }
                false
            }
            '[' => {
                class_depth += 1;
                false
            }
            ']' => {
                class_depth = class_depth.saturating_sub(1);
                false
            }
            '?' | '*' | '+' | '}' => class_depth == 0,
            _ => false,
        };
        if repeats && chars.peek() == Some(&'+') {
            return true;
        }
    }
    false
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn split<'t>(expression: &str, text: &'t str) -> Vec<&'t str> {
        Splitter::new([expression]).unwrap().split(text).unwrap()
    }

    #[test]
    fn published_possessive_repetitions_are_linear() {
        let expression = concat!(
            r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*",
            r"|\s*[\r\n]|\s+(?!\S)|\s+"
        );
        let ours = Splitter::new([expression]).unwrap();
        assert!(ours.is_linear());
        let theirs = fancy_regex::Regex::new(expression).unwrap();
        let text = "it's !?\n\n  a-b 12  ...\r\n\t x  ";
        let found: Vec<_> = theirs.find_iter(text).map(|m| m.unwrap().as_str()).collect();
        assert_eq!(ours.split(text).unwrap(), found);
    }

    #[test]
    fn possessive_repetitions_are_told_from_greedy_ones() {
        for expression in ["a?+", "a*+b", "(?:a)++", "a{1,3}+", r"\+++", r"[a]?+"] {
            assert!(has_possessive(expression), "{expression}");
        }
        for expression in
            [r"\p{L}+", r"\x{20}+", "a?b+", r"\++", r"\++\++", "[?+]", r"[\]?+]+", "a{1,3}b+", "[[a]*+]"]
        {
            assert!(!has_possessive(expression), "{expression}");
        }
    }

    #[test]
    fn look_arounds_are_backtracked_and_an_empty_match_is_a_cut() {
        assert_eq!(split(r"(?=(\d{3})+(?!\d))", "1234567 1"), ["1", "234", "567 1"]);
        assert_eq!(split("x*", "axxb"), ["a", "xx", "b"]);
    }

    #[test]
    fn a_backtracking_expression_that_gives_up_is_an_error() {
        let splitter = Splitter::new([r"(?:(?!b)(?:a|aa))+c"]).unwrap();
        assert!(splitter.split(&"a".repeat(100)).unwrap_err().to_string().contains("gives up"));
    }

    #[test]
    fn what_is_no_expression_is_told() {
        assert!(Splitter::new(["(a"]).unwrap_err().contains("`(a`"));
        assert!(Splitter::new([&*"a".repeat(MAX_EXPRESSION + 1)]).is_err());
        assert!(Splitter::new([r"(?:(?:\w{1000}){1000}){1000}"]).is_err());
    }

    proptest! {
        #[test]
        fn the_tail_is_what_the_look_ahead_says(text in "[ \\t\\r\\n\u{3000}ab'1!]{0,30}") {
            // A run of white space of n characters before a word: n - 1 of them, then the one that is left.
            let splitter = Splitter::new([r"\S+|\s+(?!\S)|\s+"]).unwrap();
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
            prop_assert_eq!(splitter.split(&text).unwrap(), expected);
        }
    }
}
