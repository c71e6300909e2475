//! Byte pair encoding: a text is normalised and cut into pieces, and the characters of each piece are merged into
//! tokens.

use std::borrow::Cow;

use super::ALPHABET;
use super::merger::Merger;
use super::normalise::{Normalise, Prepend, metaspace};
use super::split::Splitter;
use super::vocabulary::Spelling;
use crate::TokenId;
use crate::error::{Error, Result};

/// An encoder of plain text by byte pair encoding.
#[derive(Debug)]
pub(super) struct Bpe {
    pub(super) normaliser: Vec<Normalise>,
    /// Set if spaces become `▁`: whether a `▁` is put in front of a text.
    pub(super) metaspace: Option<Prepend>,
    pub(super) splitter: Splitter,
    /// Cuts pieces further after they are spelled in the byte alphabet.
    pub(super) spelled_splitter: Splitter,
    pub(super) spelling: Spelling,
    pub(super) merger: Merger,
}

impl Bpe {
    /// The normalised text, for [`encode`](Self::encode).
    pub(super) fn normalise<'t>(&self, text: &'t str) -> Cow<'t, str> {
        if self.normaliser.is_empty() {
            return Cow::Borrowed(text);
        }
        Cow::Owned(self.normaliser.iter().fold(text.to_owned(), |text, step| step.apply(text)))
    }

    /// Appends the tokens of a normalised text; `first` says whether it is the start of the whole text.
    pub(super) fn encode(&self, text: &str, first: bool, tokens: &mut Vec<TokenId>) -> Result<()> {
        let text = match self.metaspace {
            Some(prepend) => Cow::Owned(metaspace(text, prepend, first)),
            None => Cow::Borrowed(text),
        };
        let mut word = String::new();
        self.splitter.each(&text, &mut |piece| {
            match self.spelling {
                Spelling::ByteAlphabet => ALPHABET.spell(piece, &mut word),
                Spelling::Metaspace => {
                    word.clear();
                    word.push_str(piece);
                }
            }
            self.spelled_splitter.each(&word, &mut |piece| self.merge(piece, tokens))
        })
    }

    /// Bytes of the longest spelled piece of a text: merging a piece takes memory in proportion to its length.
    pub(super) fn longest_piece(&self, text: &str) -> Result<usize> {
        let mut longest = 0;
        self.splitter.each(&self.normalise(text), &mut |piece| {
            // A byte that is not printable ASCII is spelled with two bytes.
            longest = longest.max(if piece.is_ascii() { piece.len() } else { piece.len() * 2 });
            Ok(())
        })?;
        Ok(longest)
    }

    /// The largest factor by which normalising may shorten a text; `None` if there is no bound.
    pub(super) fn shrinks_by(&self, text: &str) -> Option<usize> {
        // Any number of unspellable neighbours become one token.
        if self.merger.fuses_unknown() {
            return None;
        }
        Some(self.normaliser.iter().map(|step| step.shrinks_by(text)).product())
    }

    /// The token whose spelling is `word`.
    pub(super) fn find(&self, word: &str) -> Option<TokenId> {
        self.merger.find(word).map(TokenId)
    }

    fn merge(&self, word: &str, tokens: &mut Vec<TokenId>) -> Result<()> {
        if !self.merger.merge(word, tokens) && !self.may_shorten(word) {
            return Err(self.unspellable(word));
        }
        Ok(())
    }

    /// Whether the models' own tokenizers also drop everything in `word` that has no token: some published byte-level
    /// vocabularies lack rare bytes.
    fn may_shorten(&self, word: &str) -> bool {
        let mut byte = Vec::new();
        self.spelling == Spelling::ByteAlphabet
            && word.chars().all(|c| {
                let c = c.encode_utf8(&mut [0; 4]).to_owned();
                byte.clear();
                self.find(&c).is_some() || ALPHABET.read(&c, &mut byte) && is_rare(byte[0])
            })
    }

    /// The error for the first character of `word` that has no token and needs one.
    fn unspellable(&self, word: &str) -> Error {
        let mut bytes = Vec::new();
        let mut byte_of = |c: char| {
            bytes.clear();
            let is_byte = self.spelling == Spelling::ByteAlphabet;
            (is_byte && ALPHABET.read(c.encode_utf8(&mut [0; 4]), &mut bytes)).then(|| bytes[0])
        };
        let has_token = |c: &char| self.merger.merge(c.encode_utf8(&mut [0; 4]), &mut Vec::new());
        let mut lacking = word.chars().filter(|c| !has_token(c));
        let missing = lacking.find(|&c| !byte_of(c).is_some_and(is_rare)).unwrap_or_default();
        let what = match byte_of(missing) {
            Some(byte) => format!("byte {byte:#04x}"),
            None => format!("character {missing:?}"),
        };
        Error::Invalid(format!("the text contains the {what}, for which the model's vocabulary has no token"))
    }
}

/// Whether a byte is a control character other than white space, or starts a character of a Unicode plane that is
/// hardly used.
fn is_rare(byte: u8) -> bool {
    matches!(byte, 0..0x20 | 0x7f | 0xf1..) && !matches!(byte, b'\t' | b'\n' | b'\r')
}

/// How merging works.
#[derive(Clone, Debug, Default)]
pub(super) struct MergeRules {
    /// The token for unspellable characters.
    pub(super) unknown: Option<String>,
    /// Whether unspellable neighbours become one unknown token.
    pub(super) fuses_unknown: bool,
    /// Whether unspellable characters become byte tokens such as `<0x0A>`.
    pub(super) byte_fallback: bool,
    /// Whether a piece that is a token becomes that token without merging.
    pub(super) ignores_merges: bool,
}
