//! Tokenizers, built from a model file's metadata alone: text to tokens and back.

mod bytes;
mod load;
mod pre;
mod special;
mod stream;

use std::borrow::Cow;
use std::path::Path;

use tokenizers::Model as _;
use tokenizers::models::bpe::BPE;

pub use stream::StreamDecoder;

use self::bytes::ByteAlphabet;
use self::load::Kind;
use self::pre::Splitter;
use self::special::{Literals, Part};
use crate::TokenId;
use crate::error::{Error, Result};
use crate::format::Metadata;

/// A byte-level BPE tokenizer.
///
/// Control and user-defined tokens are found in the text first; the rest is cut into pieces by the
/// pre-tokeniser, and BPE merges the bytes of each piece.
#[derive(Debug)]
pub struct Tokenizer {
    splitter: Splitter,
    bpe: BPE,
    /// Control and user-defined tokens.
    literals: Literals,
    /// User-defined tokens alone.
    user_defined: Literals,
    vocabulary: Vocabulary,
    /// Bytes that no token spells and that the file has no unknown token for.
    unspellable: Vec<u8>,
    bos: Option<TokenId>,
    eos: Option<TokenId>,
    end_tokens: Vec<TokenId>,
    adds_bos: bool,
}

/// How [`Tokenizer::encode`] reads a text.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EncodeOptions {
    /// Whether the text of a control token, such as `<|im_end|>`, means that token. Where it does not, it is
    /// plain text, so what a user types cannot end a turn. User-defined tokens are found either way.
    pub special: bool,
    /// Whether the tokens start with the BOS token.
    pub bos: Bos,
}

/// Whether a text starts with the BOS token.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Bos {
    /// As the model file says: see [`Tokenizer::adds_bos`].
    #[default]
    AsFileSays,
    /// Never, as for a text that continues another or brings its own.
    Never,
    /// Always; an error where the file names no BOS token.
    Always,
}

impl Tokenizer {
    /// Builds the tokenizer that `metadata` describes; `path` names the file in messages.
    pub fn from_metadata(path: &Path, metadata: &Metadata) -> Result<Tokenizer> {
        load::tokenizer(path, metadata)
    }

    /// The tokens of `text`. No end token is added, whatever the file says: the text is there to go on.
    ///
    /// Fails where the vocabulary cannot spell the text, or has no BOS token and one is asked for.
    pub fn encode(&self, text: &str, options: EncodeOptions) -> Result<Vec<TokenId>> {
        let mut tokens = Vec::new();
        tokens.extend(self.leading_bos(options.bos)?);
        let literals = if options.special { &self.literals } else { &self.user_defined };
        for part in literals.parts(text) {
            match part {
                Part::Token(id) => tokens.push(id),
                Part::Text(text) => self.encode_plain(text, &mut tokens)?,
            }
        }
        Ok(tokens)
    }

    /// The text of `tokens`. `special` says whether control tokens are printed; bytes that are not UTF-8
    /// become U+FFFD, and an id outside the vocabulary is nothing.
    pub fn decode(&self, tokens: &[TokenId], special: bool) -> String {
        let shown = tokens.iter().filter(|&&id| special || !self.is_control(id));
        let bytes: Vec<u8> = shown.flat_map(|&id| self.token_bytes(id)).copied().collect();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// The bytes that a token stands for, which may be part of a character. A control token gives its text,
    /// an id outside the vocabulary nothing.
    pub fn token_bytes(&self, id: TokenId) -> &[u8] {
        self.vocabulary.bytes(id)
    }

    /// The text of a token for people: U+FFFD stands where its bytes are not UTF-8.
    pub fn token_text(&self, id: TokenId) -> Cow<'_, str> {
        String::from_utf8_lossy(self.token_bytes(id))
    }

    /// Whether a token steers the model and is no text: a control token or the unknown token.
    pub fn is_control(&self, id: TokenId) -> bool {
        self.vocabulary.kind(id).is_some_and(Kind::is_control)
    }

    /// The token that stands for exactly `text`.
    pub fn find(&self, text: &str) -> Option<TokenId> {
        self.literals.find(text).or_else(|| {
            let mut word = String::new();
            ALPHABET.spell(text, &mut word);
            let id = TokenId(self.bpe.token_to_id(&word)?);
            (self.token_bytes(id) == text.as_bytes()).then_some(id)
        })
    }

    /// The number of tokens. The model's output may be longer, padded to a round number.
    pub fn vocab_size(&self) -> usize {
        self.vocabulary.len()
    }

    /// The token that starts a text, if the file names one.
    pub fn bos(&self) -> Option<TokenId> {
        self.bos
    }

    /// The token that ends a text, if the file names one.
    pub fn eos(&self) -> Option<TokenId> {
        self.eos
    }

    /// Every token that ends a generation, each once: the file's end of text, of turn and of message.
    pub fn end_tokens(&self) -> &[TokenId] {
        &self.end_tokens
    }

    /// Whether the model wants its texts to start with the BOS token.
    pub fn adds_bos(&self) -> bool {
        self.adds_bos
    }

    fn leading_bos(&self, bos: Bos) -> Result<Option<TokenId>> {
        match bos {
            Bos::Never => Ok(None),
            Bos::AsFileSays => Ok(self.bos.filter(|_| self.adds_bos)),
            Bos::Always => match self.bos {
                Some(id) => Ok(Some(id)),
                None => Err(Error::Invalid("a BOS token is asked for, and the model file names none".into())),
            },
        }
    }

    fn encode_plain(&self, text: &str, tokens: &mut Vec<TokenId>) -> Result<()> {
        // BPE passes over a byte that it has no token for, which would change the text without a word.
        if let Some(byte) = text.bytes().find(|b| self.unspellable.contains(b)) {
            return Err(Error::Invalid(format!(
                "the model's vocabulary has no token for the byte {byte:#04x}, which the text holds"
            )));
        }
        let mut word = String::new();
        for piece in self.splitter.split(text) {
            ALPHABET.spell(piece, &mut word);
            let merged =
                self.bpe.tokenize(&word).map_err(|e| Error::Invalid(format!("cannot tokenise: {e}")))?;
            tokens.extend(merged.iter().map(|token| TokenId(token.id)));
        }
        Ok(())
    }
}

static ALPHABET: ByteAlphabet = ByteAlphabet::new();

/// What each token stands for.
#[derive(Debug, Default)]
struct Vocabulary {
    kinds: Vec<Kind>,
    /// The bytes of all tokens, in order.
    bytes: Vec<u8>,
    /// Where each token's bytes end; they start where the bytes of the token before it end.
    ends: Vec<usize>,
}

impl Vocabulary {
    /// Adds the token that the file writes as `text`.
    fn push(&mut self, kind: Kind, text: &str) {
        // Tokens of BPE are spelled in the byte alphabet and the others are plain text. Files hold padding
        // tokens marked as ordinary ones whose text is not of the alphabet; those are plain text, too.
        if kind.is_literal() || !ALPHABET.read(text, &mut self.bytes) {
            self.bytes.extend_from_slice(text.as_bytes());
        }
        self.ends.push(self.bytes.len());
        self.kinds.push(kind);
    }

    fn len(&self) -> usize {
        self.kinds.len()
    }

    fn kind(&self, id: TokenId) -> Option<Kind> {
        self.kinds.get(id.0 as usize).copied()
    }

    fn bytes(&self, id: TokenId) -> &[u8] {
        let index = id.0 as usize;
        let Some(&end) = self.ends.get(index) else { return &[] };
        let start = if index == 0 { 0 } else { self.ends[index - 1] };
        &self.bytes[start..end]
    }
}
