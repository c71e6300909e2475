//! Finds the tokens that are matched in the text as it stands, before BPE sees the rest.

use aho_corasick::{AhoCorasick, AhoCorasickKind, BuildError, MatchKind};

use crate::TokenId;

/// A set of literal tokens. Where several match, the leftmost wins, and of those the longest.
#[derive(Debug, Default)]
pub(super) struct Literals {
    /// Absent where the set is empty, so that the text passes untouched.
    automaton: Option<AhoCorasick>,
    /// The token of each of the automaton's patterns.
    ids: Vec<TokenId>,
}

/// A stretch of the text.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Part<'t> {
    /// Plain text, never empty.
    Text(&'t str),
    /// A literal token.
    Token(TokenId),
}

impl Literals {
    /// The set of these tokens. A token without text would match everywhere and is left out.
    pub(super) fn new<'a>(tokens: impl Iterator<Item = (TokenId, &'a str)>) -> Result<Literals, BuildError> {
        let (ids, texts): (Vec<_>, Vec<_>) = tokens.filter(|(_, text)| !text.is_empty()).unzip();
        if ids.is_empty() {
            return Ok(Literals::default());
        }
        let automaton = AhoCorasick::builder()
            .match_kind(MatchKind::LeftmostLongest)
            // A DFA takes up to a kibibyte for each byte of each token, and a hostile token can be long.
            .kind(Some(AhoCorasickKind::ContiguousNFA))
            .build(texts)?;
        Ok(Literals { automaton: Some(automaton), ids })
    }

    /// The parts of `text` in order.
    pub(super) fn parts<'t>(&self, text: &'t str) -> impl Iterator<Item = Part<'t>> {
        let mut at = 0;
        let mut matches = self.automaton.iter().flat_map(move |a| a.find_iter(text)).peekable();
        std::iter::from_fn(move || {
            let stop = matches.peek().map_or(text.len(), |m| m.start());
            if at < stop {
                let plain = &text[at..stop];
                at = stop;
                return Some(Part::Text(plain));
            }
            let found = matches.next()?;
            at = found.end();
            Some(Part::Token(self.ids[found.pattern()]))
        })
    }

    /// The token whose text is `text`.
    pub(super) fn find(&self, text: &str) -> Option<TokenId> {
        let mut parts = self.parts(text);
        match (parts.next(), parts.next()) {
            (Some(Part::Token(id)), None) => Some(id),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn literals(texts: &[&'static str]) -> Literals {
        Literals::new(texts.iter().enumerate().map(|(i, &t)| (TokenId(i as u32), t))).unwrap()
    }

    #[test]
    fn the_leftmost_and_longest_literal_wins() {
        let set = literals(&["<a>", "<a><b>", "", "<b>c"]);
        let parts: Vec<_> = set.parts("x<a><b>c<b>c<a>").collect();
        let token = |i| Part::Token(TokenId(i));
        assert_eq!(parts, [Part::Text("x"), token(1), Part::Text("c"), token(3), token(0)]);
    }

    #[test]
    fn no_literals_leave_the_text_whole() {
        let set = literals(&[]);
        assert_eq!(set.parts("abc").collect::<Vec<_>>(), [Part::Text("abc")]);
        assert_eq!(set.parts("").count(), 0);
    }

    #[test]
    fn a_literal_is_found_by_its_whole_text() {
        let set = literals(&["<a>", "<a><b>"]);
        assert_eq!(set.find("<a>"), Some(TokenId(0)));
        assert_eq!(set.find("<a><b>"), Some(TokenId(1)));
        assert_eq!(set.find("<a>x"), None);
        assert_eq!(set.find(""), None);
    }
}
