//! Finds literal tokens, which are matched in the unchanged text before the encoder gets the rest.

use std::ops::Range;

use aho_corasick::{AhoCorasick, AhoCorasickKind, BuildError, Input, Match, MatchKind};

use crate::TokenId;

/// A token that is matched in the unchanged text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Literal {
    pub(super) id: TokenId,
    pub(super) text: String,
    /// Whether it strips the white space before it.
    pub(super) strips_left: bool,
    /// Whether it strips the white space after it.
    pub(super) strips_right: bool,
}

impl Literal {
    /// A token that strips nothing.
    pub(super) fn plain(id: TokenId, text: &str) -> Literal {
        Literal { id, text: text.to_owned(), strips_left: false, strips_right: false }
    }
}

/// A set of literal tokens. The leftmost match wins and, of several there, the longest.
#[derive(Debug, Default)]
pub(super) struct Literals {
    /// `None` if the set is empty.
    automaton: Option<AhoCorasick>,
    /// The token of each pattern of the automaton.
    tokens: Vec<Literal>,
}

/// A part of the text.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Span<'t> {
    /// Plain text, never empty.
    Text(&'t str),
    /// A literal token.
    Token(TokenId),
}

impl Literals {
    /// The set of these tokens. A token without text would match everywhere and is omitted.
    pub(super) fn new(tokens: impl Iterator<Item = Literal>) -> Result<Literals, BuildError> {
        let tokens: Vec<_> = tokens.filter(|token| !token.text.is_empty()).collect();
        if tokens.is_empty() {
            return Ok(Literals::default());
        }
        let automaton = AhoCorasick::builder()
            .match_kind(MatchKind::LeftmostLongest)
            // A DFA takes up to 1 KiB per byte of each token, and a hostile token can be long.
            .kind(Some(AhoCorasickKind::ContiguousNFA))
            .build(tokens.iter().map(|token| &token.text))?;
        Ok(Literals { automaton: Some(automaton), tokens })
    }

    /// The parts of `text` in order.
    pub(super) fn parts<'t>(&'t self, text: &'t str) -> impl Iterator<Item = Span<'t>> {
        self.parts_where(text, |_, _| true)
    }

    /// The tokens in `text`, with their places, that are `allowed` there.
    pub(super) fn found<'s>(
        &'s self,
        text: &'s str,
        allowed: impl Fn(Range<usize>, TokenId) -> bool + 's,
    ) -> impl Iterator<Item = (Range<usize>, TokenId)> + 's {
        self.matches(text, allowed).map(|found| (found.range(), self.tokens[found.pattern()].id))
    }

    /// The leftmost and longest `allowed` tokens. A token that is not allowed hides no other.
    fn matches<'s>(
        &'s self,
        text: &'s str,
        allowed: impl Fn(Range<usize>, TokenId) -> bool + 's,
    ) -> impl Iterator<Item = Match> + 's {
        let mut from = 0;
        std::iter::from_fn(move || {
            let automaton = self.automaton.as_ref()?;
            loop {
                let longest = automaton.find(Input::new(text).range(from..))?;
                let mut here = Some(longest);
                while let Some(found) = here {
                    if allowed(found.range(), self.tokens[found.pattern()].id) {
                        from = found.end();
                        return Some(found);
                    }
                    // A shorter token may start in the same place.
                    let shorter = Input::new(text).range(found.start()..found.end() - 1);
                    here = automaton.find(shorter).filter(|shorter| shorter.start() == found.start());
                }
                from = longest.start() + 1;
            }
        })
    }

    /// The parts of `text` in order, with the tokens that are `allowed` in their places.
    pub(super) fn parts_where<'t>(
        &'t self,
        text: &'t str,
        allowed: impl Fn(Range<usize>, TokenId) -> bool + 't,
    ) -> impl Iterator<Item = Span<'t>> {
        let mut at = 0;
        let mut matches = self.matches(text, allowed).peekable();
        std::iter::from_fn(move || {
            // A token that stripped white space may have stripped the start of the next token.
            while matches.next_if(|m| m.start() < at).is_some() {}
            let Some(found) = matches.peek() else {
                let rest = &text[at..];
                at = text.len();
                return (!rest.is_empty()).then_some(Span::Text(rest));
            };
            let token = &self.tokens[found.pattern()];
            let before = &text[at..found.start()];
            let before = if token.strips_left { before.trim_end() } else { before };
            if !before.is_empty() {
                // The rest before the token is white space that it strips.
                at = found.start();
                return Some(Span::Text(before));
            }
            at = found.end();
            if token.strips_right {
                at = text.len() - text[at..].trim_start().len();
            }
            matches.next();
            Some(Span::Token(token.id))
        })
    }

    /// The token whose text is exactly `text`.
    pub(super) fn find(&self, text: &str) -> Option<TokenId> {
        let mut parts = self.parts(text);
        match (parts.next(), parts.next()) {
            (Some(Span::Token(id)), None) => Some(id),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn literals(texts: &[&'static str]) -> Literals {
        Literals::new(texts.iter().enumerate().map(|(i, t)| Literal::plain(TokenId(i as u32), t))).unwrap()
    }

    #[test]
    fn the_leftmost_and_longest_literal_wins() {
        let set = literals(&["<a>", "<a><b>", "", "<b>c"]);
        let parts: Vec<_> = set.parts("x<a><b>c<b>c<a>").collect();
        let token = |i| Span::Token(TokenId(i));
        assert_eq!(parts, [Span::Text("x"), token(1), Span::Text("c"), token(3), token(0)]);
    }

    #[test]
    fn literals_strip_white_space_if_configured() {
        let left = Literal { strips_left: true, ..Literal::plain(TokenId(0), "<l>") };
        let right = Literal { strips_right: true, ..Literal::plain(TokenId(1), "<r>") };
        let set = Literals::new([left, right, Literal::plain(TokenId(2), "\n<n>")].into_iter()).unwrap();
        let token = |i| Span::Token(TokenId(i));
        let parts: Vec<_> = set.parts("a <l> b <r> c <r>  <l>").collect();
        let text = |t| Span::Text(t);
        assert_eq!(parts, [text("a"), token(0), text(" b "), token(1), text("c "), token(1), token(0)]);
        let parts: Vec<_> = set.parts("<r> \n<n>\n<n>").collect();
        assert_eq!(parts, [token(1), text("<n>"), token(2)]);
        assert_eq!(set.parts(" <l>").collect::<Vec<_>>(), [token(0)]);
    }

    #[test]
    fn a_token_that_is_not_allowed_hides_no_other() {
        let set = literals(&["<a>", "<a><b>", "<b>", "><"]);
        let token = |i| Span::Token(TokenId(i));
        let allowed = |wanted: &'static [u32]| {
            set.parts_where("x<a><b>", move |_, id| wanted.contains(&id.0)).collect::<Vec<_>>()
        };
        assert_eq!(allowed(&[0, 2, 3]), [Span::Text("x"), token(0), token(2)]);
        assert_eq!(allowed(&[2, 3]), [Span::Text("x<a"), token(3), Span::Text("b>")]);
        assert_eq!(allowed(&[2]), [Span::Text("x<a>"), token(2)]);
        assert_eq!(allowed(&[]), [Span::Text("x<a><b>")]);
    }

    #[test]
    fn no_literals_leave_the_text_whole() {
        let set = literals(&[]);
        assert_eq!(set.parts("abc").collect::<Vec<_>>(), [Span::Text("abc")]);
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
