//! The kind and the bytes of each token of a vocabulary.

use super::ALPHABET;
use crate::TokenId;

/// The kind of a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TokenKind {
    /// Created by merging.
    Normal,
    /// Represents unspellable text.
    Unknown,
    /// Controls the model and is not text.
    Control,
    /// Text that is always one token.
    UserDefined,
    /// An unused id.
    Unused,
    /// One byte.
    Byte,
}

impl TokenKind {
    /// The kind for a number in GGUF files.
    pub(super) fn from_number(number: u64) -> Option<TokenKind> {
        Some(match number {
            // 0 means "undefined", which files use for normal tokens.
            0 | 1 => TokenKind::Normal,
            2 => TokenKind::Unknown,
            3 => TokenKind::Control,
            4 => TokenKind::UserDefined,
            5 => TokenKind::Unused,
            6 => TokenKind::Byte,
            _ => return None,
        })
    }

    /// Whether the token is text only if control tokens are requested.
    pub(super) fn is_control(self) -> bool {
        matches!(self, TokenKind::Control | TokenKind::Unknown)
    }

    /// Whether the token's text is stored unchanged, not in the vocabulary's spelling.
    pub(super) fn is_literal(self) -> bool {
        self.is_control() || self == TokenKind::UserDefined
    }
}

/// How a vocabulary spells the text of its normal tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Spelling {
    /// Each byte as one printable character.
    ByteAlphabet,
    /// Plain text with `▁` for spaces; a token `<0x0A>` is that byte.
    Metaspace,
}

/// SentencePiece's character for a space.
pub(super) const SPACE: char = '▁';

/// The kind and the bytes of each token.
#[derive(Debug)]
pub(super) struct Vocabulary {
    spelling: Spelling,
    kinds: Vec<TokenKind>,
    /// The bytes of all tokens, in order.
    bytes: Vec<u8>,
    /// The end of each token's bytes; they start where the previous token's end.
    ends: Vec<usize>,
    longest: usize,
}

impl Vocabulary {
    pub(super) fn new(spelling: Spelling) -> Vocabulary {
        Vocabulary { spelling, kinds: vec![], bytes: vec![], ends: vec![], longest: 0 }
    }

    /// Adds a token with its text in the file.
    pub(super) fn push(&mut self, kind: TokenKind, text: &str) {
        match self.spelling {
            _ if kind.is_literal() => self.bytes.extend_from_slice(text.as_bytes()),
            // Some files mark padding tokens as normal ones, with texts outside the alphabet; these are plain text.
            Spelling::ByteAlphabet => {
                if !ALPHABET.read(text, &mut self.bytes) {
                    self.bytes.extend_from_slice(text.as_bytes());
                }
            }
            Spelling::Metaspace => match byte_token(text) {
                Some(byte) => self.bytes.push(byte),
                None => self.bytes.extend_from_slice(text.replace(SPACE, " ").as_bytes()),
            },
        }
        let start = self.ends.last().copied().unwrap_or(0);
        self.longest = self.longest.max(self.bytes.len() - start);
        self.ends.push(self.bytes.len());
        self.kinds.push(kind);
    }

    pub(super) fn spelling(&self) -> Spelling {
        self.spelling
    }

    pub(super) fn len(&self) -> usize {
        self.kinds.len()
    }

    pub(super) fn kind(&self, id: TokenId) -> Option<TokenKind> {
        self.kinds.get(id.0 as usize).copied()
    }

    pub(super) fn kinds(&self) -> &[TokenKind] {
        &self.kinds
    }

    /// Bytes of the longest token.
    pub(super) fn longest(&self) -> usize {
        self.longest
    }

    pub(super) fn bytes(&self, id: TokenId) -> &[u8] {
        let index = id.0 as usize;
        let Some(&end) = self.ends.get(index) else { return &[] };
        let start = if index == 0 { 0 } else { self.ends[index - 1] };
        &self.bytes[start..end]
    }
}

/// The byte of a token such as `<0x0A>`.
pub(super) fn byte_token(text: &str) -> Option<u8> {
    let digits = text.strip_prefix("<0x")?.strip_suffix('>')?;
    if digits.len() == 2 && digits.bytes().all(|b| b.is_ascii_hexdigit()) {
        u8::from_str_radix(digits, 16).ok()
    } else {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn byte_tokens_are_two_digits_in_brackets() {
        assert_eq!(byte_token("<0x0A>"), Some(10));
        assert_eq!(byte_token("<0xff>"), Some(255));
        for text in ["<0x0A", "0x0A>", "<0xA>", "<0x+A>", "<0x00A>", "<0xGG>", "<0xé>", ""] {
            assert_eq!(byte_token(text), None, "{text}");
        }
    }

    #[test]
    fn literals_are_plain_text_in_either_spelling() {
        let texts = |spelling| {
            let mut vocabulary = Vocabulary::new(spelling);
            vocabulary.push(TokenKind::Normal, "▁aĠ");
            vocabulary.push(TokenKind::Control, "▁aĠ");
            vocabulary.push(TokenKind::Byte, "<0x41>");
            [0, 1, 2].map(|id| String::from_utf8(vocabulary.bytes(TokenId(id)).to_vec()).unwrap())
        };
        // `▁` is not in the alphabet, so the first token is read as plain text.
        assert_eq!(texts(Spelling::ByteAlphabet), ["▁aĠ", "▁aĠ", "<0x41>"]);
        assert_eq!(texts(Spelling::Metaspace), [" aĠ", "▁aĠ", "A"]);
    }
}
