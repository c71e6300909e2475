//! Cuts a text into the pieces within which BPE merges.

use regex_automata::Input;
use regex_automata::meta::Regex;

use crate::error::Error;

/// A compiled pre-tokeniser.
#[derive(Debug)]
pub(super) struct Splitter {
    steps: Vec<Step>,
}

impl Splitter {
    /// Compiles regular expressions as models publish them. Each one in turn cuts every piece of the one before:
    /// matches become pieces, and so does the text between them. Returns the reason if one is not a valid expression.
    pub(super) fn new<'e>(expressions: impl IntoIterator<Item = &'e str>) -> Result<Splitter, String> {
        let steps = expressions.into_iter().map(Step::new).collect::<Result<_, _>>()?;
        Ok(Splitter { steps })
    }

    /// Passes the pieces of `text` to `take` one by one, so that they need no list. Joined they are the text; none is
    /// empty. Fails if `take` fails, or if a backtracking expression gives up.
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

    /// Whether all steps take time in proportion to the length of the text.
    #[cfg(test)]
    pub(super) fn is_linear(&self) -> bool {
        self.steps.iter().all(|step| !matches!(step, Step::Backtracking(_)))
    }
}

/// One regular expression of a pre-tokeniser.
///
/// Most end in `\s+(?!\S)|\s+`: white space except the last character before a word. A backtracking engine, which
/// such a look-ahead seems to need, gives up on a run of a million characters. So the tail becomes a separate pattern
/// `\s+` for a linear automaton without look-ahead, and a match that ends before a word gives back its last
/// character.
#[derive(Debug)]
enum Step {
    Linear(Regex),
    /// Pattern 0 is the expression without the tail, pattern 1 the tail's `\s+`. Pattern 0 has precedence, as in an
    /// alternation.
    LinearWithTail(Regex),
    /// Finds numbers, whose digits are grouped in threes from the right.
    Grouped(Regex),
    /// For features that no automaton has: other look-arounds and possessive repetitions.
    Backtracking(Box<fancy_regex::Regex>),
}

/// The two spellings of the look-ahead with which most pre-tokenisers end.
const TAILS: [&str; 2] = [r"|\s+(?!\S)|\s+", r"|\s+(?!\S)|\s"];

/// Possessive repetitions in published expressions, and greedy ones that match the same, because what they could give
/// back cannot start what follows.
const POSSESSIVE: [(&str, &str); 3] = [
    (r"[^\r\n\p{L}\p{N}]?+\p{L}+", r"[^\r\n\p{L}\p{N}]?\p{L}+"),
    (r" ?[^\s\p{L}\p{N}]++[\r\n]*|", r" ?[^\s\p{L}\p{N}]+[\r\n]*|"),
    (r" ?[^\s\p{L}\p{N}]++[\r\n/]*|", r" ?[^\s\p{L}\p{N}]+[\r\n/]*|"),
];

/// Published expressions for groups of three digits, counted from the right, and expressions for all digits of a number.
/// From each group on, the published ones look ahead to the end of the number. Numbers that the second expression does
/// not match are not cut.
const GROUPED: [(&str, &str); 2] =
    [(r"\d{1,3}(?=(?:\d{3})*\b)", r"\d+\b"), (r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))", r"\p{N}+")];

/// The longest expression that is compiled, in bytes. Published ones have less than a thousand characters.
const MAX_EXPRESSION: usize = 1 << 14;

impl Step {
    fn new(expression: &str) -> Result<Step, String> {
        if expression.len() > MAX_EXPRESSION {
            return Err(format!("a regular expression of {} bytes is too long", expression.len()));
        }
        if let Some((_, number)) = GROUPED.iter().find(|(published, _)| *published == expression)
            && let Ok(regex) = Regex::new(number)
        {
            return Ok(Step::Grouped(regex));
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
        // An empty match is a cut; the search continues after the next character.
        let mut from = 0;
        while from <= text.len() {
            let (start, end) = match self {
                Step::Linear(regex) | Step::Grouped(regex) => {
                    match regex.find(Input::new(text).range(from..)) {
                        Some(found) => (found.start(), found.end()),
                        None => break,
                    }
                }
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
            if matches!(self, Step::Grouped(_)) {
                for at in group_starts(&text[start..end]) {
                    cutter.cut(start + at)?;
                }
            }
            cutter.cut(end)?;
            from = if start < end { end } else { end + char_at(text, end) };
        }
        cutter.cut(text.len())
    }
}

/// Cuts pieces off the front of a text.
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

/// The end of the match of `\s+(?!\S)|\s+` for the white space `run`: the last character belongs to the following
/// word, unless no word follows or the run has only that character.
fn end_of_white_space(text: &str, run: std::ops::Range<usize>) -> usize {
    let last = text[run.clone()].char_indices().next_back().map_or(0, |(i, _)| run.start + i);
    if run.end == text.len() || last == run.start { run.end } else { last }
}

/// Where the groups of three digits start in a number, counted from the right.
fn group_starts(number: &str) -> impl Iterator<Item = usize> {
    let digits = number.chars().count();
    let starts = number.char_indices().enumerate().filter(move |(i, _)| (digits - i).is_multiple_of(3));
    starts.map(|(_, (at, _))| at)
}

/// Whether a repetition in `expression` is possessive: `?+`, `*+`, `++` or `}+`.
fn has_possessive(expression: &str) -> bool {
    let mut chars = expression.chars().peekable();
    let mut class_depth = 0usize;
    while let Some(c) = chars.next() {
        let repeats = match c {
            '\\' => {
                let escaped = chars.next();
                // The braces of `\p{L}` are not a repetition.
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
    fn possessive_repetitions_are_distinguished_from_greedy_ones() {
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
    fn numbers_are_grouped_like_their_published_expressions() {
        for (published, _) in GROUPED {
            let ours = Splitter::new([published]).unwrap();
            assert!(ours.is_linear());
            // The engine that looks ahead, which `new` would not use for this expression.
            let theirs = Splitter {
                steps: vec![Step::Backtracking(Box::new(fancy_regex::Regex::new(published).unwrap()))],
            };
            for text in
                ["1", "12", "123", "1234", "a1234567 89,1234.", "1234a 12345_ 1234\u{301} ٣٤٥٦ 12²3½", "x"]
            {
                assert_eq!(ours.split(text).unwrap(), theirs.split(text).unwrap(), "{published} on {text:?}");
            }
        }
        assert_eq!(split(GROUPED[0].0, "1234567 12345a"), ["1", "234", "567", " 12345a"]);
        assert_eq!(split(GROUPED[1].0, "1234567 12345a"), ["1", "234", "567", " ", "12", "345", "a"]);
    }

    #[test]
    fn a_backtracking_expression_that_gives_up_is_an_error() {
        let splitter = Splitter::new([r"(?:(?!b)(?:a|aa))+c"]).unwrap();
        assert!(splitter.split(&"a".repeat(100)).unwrap_err().to_string().contains("gives up"));
    }

    #[test]
    fn invalid_expressions_are_refused() {
        assert!(Splitter::new(["(a"]).unwrap_err().contains("`(a`"));
        assert!(Splitter::new([&*"a".repeat(MAX_EXPRESSION + 1)]).is_err());
        assert!(Splitter::new([r"(?:(?:\w{1000}){1000}){1000}"]).is_err());
    }

    proptest! {
        #[test]
        fn the_tail_matches_like_the_look_ahead(text in "[ \\t\\r\\n\u{3000}ab'1!]{0,30}") {
            // A run of n white-space characters before a word: n - 1 of them, then the last one.
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
