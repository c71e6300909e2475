//! SentencePiece encoding, as in GGUF files of Llama 2 and its relatives: of all neighbours whose joined text is a
//! token, those with the best score are merged first.

use std::cmp::Ordering;
use std::collections::{BinaryHeap, HashMap};

use super::vocabulary::SPACE;
use crate::TokenId;
use crate::error::{Error, Result};

/// An encoder of plain text.
#[derive(Debug)]
pub(super) struct SentencePiece {
    /// The tokens that text can become, with their scores.
    words: HashMap<Box<str>, (TokenId, f32)>,
    /// The token of each byte, for characters without a token.
    bytes: Box<[Option<TokenId>; 256]>,
    unknown: Option<TokenId>,
    adds_space: bool,
}

impl SentencePiece {
    /// An encoder without tokens. `unknown` is the token for unspellable characters; `adds_space` says whether a text
    /// gets a space in front.
    pub(super) fn new(unknown: Option<TokenId>, adds_space: bool) -> SentencePiece {
        SentencePiece { words: HashMap::new(), bytes: Box::new([None; 256]), unknown, adds_space }
    }

    /// Adds a token that text can become. Of two tokens with the same text the first is used.
    pub(super) fn add_word(&mut self, id: TokenId, text: &str, score: f32) {
        if !text.is_empty() {
            self.words.entry(text.into()).or_insert((id, score));
        }
    }

    /// Adds the token of a byte.
    pub(super) fn add_byte(&mut self, id: TokenId, byte: u8) {
        self.bytes[usize::from(byte)].get_or_insert(id);
    }

    /// The token with this spelling.
    pub(super) fn find(&self, word: &str) -> Option<TokenId> {
        self.words.get(word).map(|&(id, _)| id)
    }

    /// Appends the tokens of `text`.
    pub(super) fn encode(&self, text: &str, tokens: &mut Vec<TokenId>) -> Result<()> {
        if text.is_empty() {
            return Ok(());
        }
        let mut spelled = String::with_capacity(text.len() + SPACE.len_utf8());
        spelled.extend(self.adds_space.then_some(SPACE));
        spelled.extend(text.chars().map(|c| if c == ' ' { SPACE } else { c }));
        let mut chain = Chain::new(&spelled);
        let mut candidates = BinaryHeap::new();
        for left in 0..chain.symbols.len() {
            candidates.extend(self.candidate(&chain, left));
        }
        while let Some(best) = candidates.pop() {
            // Either symbol may have been merged with another one since.
            if chain.pair_len(best.left) != Some(best.len) {
                continue;
            }
            chain.merge(best.left);
            candidates.extend(self.candidate(&chain, best.left));
            if let Some(before) = chain.symbols[best.left].previous {
                candidates.extend(self.candidate(&chain, before));
            }
        }
        chain.texts().try_for_each(|symbol| self.push(symbol, tokens))
    }

    /// The merge of a symbol with the next one, if the two form a token.
    fn candidate(&self, chain: &Chain, left: usize) -> Option<Candidate> {
        let len = chain.pair_len(left)?;
        let start = chain.symbols[left].start;
        let &(_, score) = self.words.get(&chain.text[start..start + len])?;
        Some(Candidate { score, left, len })
    }

    /// Appends the token of a symbol, or those of its bytes.
    fn push(&self, symbol: &str, tokens: &mut Vec<TokenId>) -> Result<()> {
        if let Some(id) = self.find(symbol) {
            tokens.push(id);
            return Ok(());
        }
        let known = tokens.len();
        for byte in symbol.bytes() {
            match self.bytes[usize::from(byte)] {
                Some(id) => tokens.push(id),
                None => {
                    tokens.truncate(known);
                    let Some(unknown) = self.unknown else {
                        return Err(Error::Invalid(format!(
                            "the text contains the character {symbol:?}, for which the model's vocabulary has no token"
                        )));
                    };
                    tokens.push(unknown);
                    return Ok(());
                }
            }
        }
        Ok(())
    }
}

/// A possible merge. The best has the highest score; of equals, the leftmost.
struct Candidate {
    score: f32,
    /// The left symbol.
    left: usize,
    /// Bytes of the merged text, which reveal an outdated candidate.
    len: usize,
}

impl Ord for Candidate {
    fn cmp(&self, other: &Candidate) -> Ordering {
        self.score.total_cmp(&other.score).then(other.left.cmp(&self.left))
    }
}

impl PartialOrd for Candidate {
    fn partial_cmp(&self, other: &Candidate) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Candidate {
    fn eq(&self, other: &Candidate) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Candidate {}

/// A text as a chain of symbols, initially one for each character.
struct Chain<'t> {
    text: &'t str,
    symbols: Vec<Symbol>,
}

/// A part of the text. A symbol without bytes was merged into the one before it.
struct Symbol {
    start: usize,
    len: usize,
    previous: Option<usize>,
    next: Option<usize>,
}

impl<'t> Chain<'t> {
    fn new(text: &'t str) -> Chain<'t> {
        let mut symbols: Vec<Symbol> = Vec::new();
        for (start, c) in text.char_indices() {
            let index = symbols.len();
            if let Some(last) = symbols.last_mut() {
                last.next = Some(index);
            }
            symbols.push(Symbol { start, len: c.len_utf8(), previous: index.checked_sub(1), next: None });
        }
        Chain { text, symbols }
    }

    /// The bytes of a symbol and the next one together, if both exist.
    fn pair_len(&self, left: usize) -> Option<usize> {
        let symbol = &self.symbols[left];
        if symbol.len == 0 {
            return None;
        }
        Some(symbol.len + self.symbols[symbol.next?].len)
    }

    /// Merges a symbol with the next one.
    fn merge(&mut self, left: usize) {
        let Some(right) = self.symbols[left].next else { return };
        let after = self.symbols[right].next;
        self.symbols[left].len += std::mem::take(&mut self.symbols[right].len);
        self.symbols[left].next = after;
        if let Some(after) = after {
            self.symbols[after].previous = Some(left);
        }
    }

    /// The remaining symbols.
    fn texts(&self) -> impl Iterator<Item = &'t str> {
        self.symbols.iter().filter(|s| s.len > 0).map(|s| &self.text[s.start..s.start + s.len])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn encoder(words: &[(&str, f32)]) -> SentencePiece {
        let mut encoder = SentencePiece::new(None, false);
        for (id, (word, score)) in (0..).zip(words) {
            encoder.add_word(TokenId(id), word, *score);
        }
        for byte in 0..=255 {
            encoder.add_byte(TokenId(1000 + u32::from(byte)), byte);
        }
        encoder
    }

    fn ids(encoder: &SentencePiece, text: &str) -> Vec<u32> {
        let mut tokens = Vec::new();
        encoder.encode(text, &mut tokens).unwrap();
        tokens.iter().map(|id| id.0).collect()
    }

    #[test]
    fn the_best_score_is_merged_first_and_ties_go_to_the_left() {
        let encoder = encoder(&[("a", -9.0), ("b", -9.0), ("ab", -2.0), ("ba", -1.0), ("aa", -3.0)]);
        assert_eq!(ids(&encoder, "aba"), [0, 3]);
        assert_eq!(ids(&encoder, "aaa"), [4, 0]);
        assert_eq!(ids(&encoder, "abab"), [0, 3, 1]);
    }

    #[test]
    fn longer_tokens_are_merged_from_shorter_ones() {
        let encoder =
            encoder(&[("a", 0.0), ("▁", 0.0), ("▁a", -1.0), ("aa", -2.0), ("▁aaa", -3.0), ("▁aa", -9.0)]);
        // `▁a` is merged before `aa`; then `▁a` + `aa` is a token, and `▁aa` + `a` is never considered.
        assert_eq!(ids(&encoder, " aaa"), [4]);
        assert_eq!(ids(&encoder, " aa"), [5]);
    }

    #[test]
    fn characters_without_a_token_are_bytes() {
        let encoder = encoder(&[("a", 0.0)]);
        assert_eq!(ids(&encoder, "aé "), [0, 1195, 1169, 1226, 1150, 1129]);
    }

    #[test]
    fn without_bytes_the_unknown_token_or_an_error() {
        let mut tokens = Vec::new();
        assert!(SentencePiece::new(None, true).encode("a", &mut tokens).is_err());
        assert!(tokens.is_empty());
        SentencePiece::new(Some(TokenId(7)), true).encode("é", &mut tokens).unwrap();
        assert_eq!(tokens, [TokenId(7), TokenId(7)]);
    }

    #[test]
    fn an_empty_text_gets_no_space() {
        let mut tokens = Vec::new();
        SentencePiece::new(Some(TokenId(7)), true).encode("", &mut tokens).unwrap();
        assert!(tokens.is_empty());
    }
}
