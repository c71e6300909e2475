//! Tokenizers, built from a model's files: convert text to tokens and back.

mod bpe;
mod bytes;
pub(crate) mod folder;
mod gguf;
mod json;
#[cfg(feature = "grammar")]
pub(crate) mod lexicon;
mod merger;
mod normalise;
mod pre;
mod sentencepiece;
mod special;
mod split;
mod stream;
mod vocabulary;

use std::borrow::Cow;
use std::collections::HashSet;
use std::ops::Range;
use std::path::Path;

pub use stream::StreamDecoder;

use self::bpe::Bpe;
use self::bytes::ByteAlphabet;
use self::sentencepiece::SentencePiece;
use self::special::{Literals, Span};
use self::vocabulary::{SPACE, Spelling, TokenKind, Vocabulary};
use crate::TokenId;
use crate::error::{Error, Result};
use crate::format::{Metadata, ModelFile};

/// A tokenizer.
///
/// Control and user-defined tokens are found in the text first; the encoder gets the rest as plain text.
///
/// # Examples
/// ```
/// # let model = std::path::Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/tales-qwen3moe-Q4_K_M.gguf"));
/// # let engine = forebay_engine::Engine::open(model, &forebay_engine::Options::new().threads(1))?;
/// let tokenizer = engine.tokenizer();
/// let tokens = tokenizer.encode("Once upon a time", Default::default())?;
/// assert_eq!(tokens.len(), 4);
/// assert_eq!(tokenizer.token_text(tokens[1]), " upon");
/// assert_eq!(tokenizer.decode(&tokens, false), "Once upon a time");
/// # Ok::<(), forebay_engine::Error>(())
/// ```
#[derive(Debug)]
pub struct Tokenizer {
    encoder: Encoder,
    /// Control and user-defined tokens.
    literals: LiteralSets,
    /// User-defined tokens alone.
    user_defined: LiteralSets,
    vocabulary: Vocabulary,
    /// Whether decoding strips the space that encoding put in front of a text.
    strips_space: bool,
    bos: Option<TokenId>,
    /// The BOS token, or the several tokens that take its place.
    start: Vec<TokenId>,
    eos: Option<TokenId>,
    end_tokens: Vec<TokenId>,
    adds_bos: bool,
}

/// The algorithm that converts plain text to tokens.
#[derive(Debug)]
enum Encoder {
    Bpe(Box<Bpe>),
    SentencePiece(Box<SentencePiece>),
}

/// Tokens to find before the text is normalised, and tokens to find in the rest after that.
#[derive(Debug, Default)]
struct LiteralSets {
    raw: Literals,
    normalised: Literals,
}

/// The options of [`Tokenizer::encode`].
///
/// # Examples
/// ```
/// use forebay_engine::tokenizer::{Bos, EncodeOptions};
///
/// # let model = std::path::Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/tales-qwen3moe-Q4_K_M.gguf"));
/// # let engine = forebay_engine::Engine::open(model, &forebay_engine::Options::new().threads(1))?;
/// let trusted = EncodeOptions { special: true, bos: Bos::Never };
/// assert_eq!(engine.tokenizer().encode("<|im_end|>", trusted)?.len(), 1, "a control token");
/// let typed = EncodeOptions { special: false, bos: Bos::Never };
/// assert!(engine.tokenizer().encode("<|im_end|>", typed)?.len() > 1, "plain text");
/// # Ok::<(), forebay_engine::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EncodeOptions {
    /// Whether the text of a control token, such as `<|im_end|>`, becomes that token. If not, it is plain text, so
    /// that user input cannot end a turn. User-defined tokens are found in both cases.
    pub special: bool,
    /// Whether the tokens start with the BOS token.
    pub bos: Bos,
}

/// Whether a text starts with the BOS token.
///
/// [`EncodeOptions`] has an example.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Bos {
    /// As the model file demands: see [`Tokenizer::adds_bos`].
    #[default]
    AsFileSays,
    /// Never, for a text that continues another or contains its own BOS token.
    Never,
    /// Always; an error if the file names no BOS token.
    Always,
}

impl Tokenizer {
    /// Builds the tokenizer of a model in any format.
    pub fn of(model: &ModelFile) -> Result<Tokenizer> {
        match model.folder() {
            Some(folder) => Tokenizer::from_folder(folder),
            None => Tokenizer::from_metadata(model.path(), &model.metadata),
        }
    }

    /// Builds the tokenizer that the `metadata` of a GGUF file describes; `path` is only used in messages.
    pub fn from_metadata(path: &Path, metadata: &Metadata) -> Result<Tokenizer> {
        gguf::tokenizer(path, metadata)
    }

    /// Builds the tokenizer of a Hugging Face folder from its `tokenizer.json`, and from the special tokens in
    /// `tokenizer_config.json`, `generation_config.json` and `config.json`.
    pub fn from_folder(folder: &Path) -> Result<Tokenizer> {
        folder::tokenizer(folder)
    }

    /// Encodes `text`. Never adds an end token, because the text is to be continued.
    ///
    /// Fails if the vocabulary cannot spell the text, or if a BOS token is required and there is none. Drops control
    /// characters and other rare bytes that a byte-level vocabulary lacks, like the models' own tokenizers.
    pub fn encode(&self, text: &str, options: EncodeOptions) -> Result<Vec<TokenId>> {
        let mut tokens = self.start(options.bos)?.to_vec();
        let literals = if options.special { &self.literals } else { &self.user_defined };
        // Whether plain text would start the whole text.
        let mut first = true;
        for part in literals.raw.parts(text) {
            match part {
                Span::Token(id) => tokens.push(id),
                Span::Text(text) => self.encode_plain(text, &literals.normalised, first, &mut tokens)?,
            }
            first = false;
        }
        Ok(tokens)
    }

    /// A lower bound for the number of tokens of `text`, computed without encoding it.
    pub fn fewest_tokens(&self, text: &str) -> usize {
        let shrinks_by = match &self.encoder {
            Encoder::Bpe(encoder) => encoder.shrinks_by(text),
            Encoder::SentencePiece(_) => Some(1),
        };
        // An unknown token stands for at most one character.
        let longest = self.vocabulary.longest().max(4);
        shrinks_by.map_or(0, |shrinks_by| text.len() / (longest * shrinks_by))
    }

    /// Bytes of memory that encoding `text` may take temporarily.
    ///
    /// # Errors
    /// If the text cannot be cut into pieces.
    pub fn encoding_bytes(&self, text: &str) -> Result<u64> {
        // A symbol for each byte, waiting merges, and merged tokens with their texts.
        const EACH_MERGED: u64 = 200;
        // The tokens, and copies of the text for normalising.
        const EACH: u64 = 10;
        let merged = match &self.encoder {
            Encoder::Bpe(encoder) => encoder.longest_piece(text)?,
            Encoder::SentencePiece(_) => {
                let stretch = |part| match part {
                    Span::Text(text) => text.len(),
                    Span::Token(_) => 0,
                };
                self.literals.raw.parts(text).map(stretch).max().unwrap_or(0)
            }
        };
        Ok(merged as u64 * EACH_MERGED + text.len() as u64 * EACH)
    }

    /// Encodes a prompt that a chat template wrote. In the byte ranges `from_request`, which are in order, the text
    /// of a control token is plain text, also if only part of it is in a range. Otherwise this is
    /// [`encode`](Self::encode) with `special` and without a BOS token; the ranges cut no words.
    pub fn encode_prompt(&self, text: &str, from_request: &[Range<usize>]) -> Result<Vec<TokenId>> {
        let is_own = |found: Range<usize>| {
            let next = from_request.partition_point(|range| range.end <= found.start);
            from_request.get(next).is_none_or(|range| found.end <= range.start)
        };
        let allowed = |found, id| !self.is_control(id) || is_own(found);
        let mut tokens = Vec::new();
        let mut first = true;
        for part in self.literals.raw.parts_where(text, allowed) {
            match part {
                Span::Token(id) => tokens.push(id),
                Span::Text(part) => {
                    // Tokens may strip white space between parts.
                    let at = part.as_ptr() as usize - text.as_ptr() as usize;
                    let is_own = |found: Range<usize>| is_own(at + found.start..at + found.end);
                    self.encode_part_of_prompt(part, is_own, first, &mut tokens)?;
                }
            }
            first = false;
        }
        Ok(tokens)
    }

    /// Decodes `tokens`. `special` says whether control tokens are printed. Bytes that are not UTF-8 become U+FFFD;
    /// ids outside the vocabulary are skipped.
    pub fn decode(&self, tokens: &[TokenId], special: bool) -> String {
        let mut decoder = StreamDecoder::new(special);
        let mut text: String = tokens.iter().map(|&id| decoder.push(self, id)).collect();
        text += &decoder.finish();
        text
    }

    /// The bytes of a token, which may be part of a character. A control token has its text; an id outside the
    /// vocabulary has none.
    pub fn token_bytes(&self, id: TokenId) -> &[u8] {
        self.vocabulary.bytes(id)
    }

    /// The text of a token for display: U+FFFD replaces bytes that are not UTF-8.
    pub fn token_text(&self, id: TokenId) -> Cow<'_, str> {
        String::from_utf8_lossy(self.token_bytes(id))
    }

    /// Whether a token is not text: a control token or the unknown token.
    pub fn is_control(&self, id: TokenId) -> bool {
        self.vocabulary.kind(id).is_some_and(TokenKind::is_control)
    }

    /// The token whose text is exactly `text`.
    pub fn find(&self, text: &str) -> Option<TokenId> {
        let literal = self.literals.raw.find(text).or_else(|| self.literals.normalised.find(text));
        literal.or_else(|| {
            let mut word = String::new();
            match self.vocabulary.spelling() {
                Spelling::ByteAlphabet => ALPHABET.spell(text, &mut word),
                Spelling::Metaspace => word.extend(text.chars().map(|c| if c == ' ' { SPACE } else { c })),
            }
            let id = match &self.encoder {
                Encoder::Bpe(encoder) => encoder.find(&word),
                Encoder::SentencePiece(encoder) => encoder.find(&word),
            }?;
            (self.token_bytes(id) == text.as_bytes()).then_some(id)
        })
    }

    /// The number of tokens. The model may have more logits, padded to a round number.
    pub fn vocab_size(&self) -> usize {
        self.vocabulary.len()
    }

    /// The token that starts a text, if the file has one.
    pub fn bos(&self) -> Option<TokenId> {
        self.bos
    }

    /// The token that ends a text, if the file has one.
    pub fn eos(&self) -> Option<TokenId> {
        self.eos
    }

    /// All tokens that end an answer: the end of a text, of a turn and of a message, without duplicates.
    pub fn end_tokens(&self) -> &[TokenId] {
        &self.end_tokens
    }

    /// Whether the model's texts start with the BOS token.
    pub fn adds_bos(&self) -> bool {
        self.adds_bos
    }

    /// Adds end tokens that files omit: those that end a turn by their name, and those of gpt-oss, Solar Open, GLM and
    /// Gemma 4, whose models end a call with a token of its own.
    fn complete_ends(&mut self) {
        const TURN_ENDS: [&str; 8] = [
            "<|im_end|>",
            "<|eot_id|>",
            "<|eom_id|>",
            "<|eot|>",
            "<|eom|>",
            "<end_of_turn>",
            "<turn|>",
            "[e~[",
        ];
        let control = |text: &str| self.find(text).filter(|&id| self.is_control(id));
        let mut ends: Vec<TokenId> = TURN_ENDS.into_iter().filter_map(control).collect();
        let mut message_end = None;
        for [call, answer] in [["<|call|>", "<|return|>"], ["<|calls|>", "<|flush|>"]] {
            if let (Some(call), Some(answer)) = (control(call), control(answer)) {
                ends.extend([call, answer]);
                // This token ends a message, and another message may follow.
                message_end = control("<|end|>");
            }
        }
        // After its calls, Gemma 4 starts to write the result. This token is not a control token in its files.
        if control("<turn|>").is_some() {
            ends.extend(self.find("<|tool_response>"));
        }
        if control("[gMASK]").is_some() {
            ends.extend(["<|user|>", "<|observation|>"].into_iter().filter_map(control));
        }
        self.end_tokens.retain(|&id| Some(id) != message_end);
        for id in ends {
            if !self.end_tokens.contains(&id) {
                self.end_tokens.push(id);
            }
        }
    }

    fn start(&self, bos: Bos) -> Result<&[TokenId]> {
        match bos {
            Bos::Never => Ok(&[]),
            Bos::AsFileSays if !self.adds_bos => Ok(&[]),
            Bos::AsFileSays => Ok(&self.start),
            Bos::Always if self.start.is_empty() => {
                Err(Error::Invalid("a BOS token is required, but the model file has none".into()))
            }
            Bos::Always => Ok(&self.start),
        }
    }

    /// Appends the tokens of a part of a prompt that contains no raw literals.
    fn encode_part_of_prompt(
        &self,
        text: &str,
        is_own: impl Fn(Range<usize>) -> bool,
        mut first: bool,
        tokens: &mut Vec<TokenId>,
    ) -> Result<()> {
        let encoder = match &self.encoder {
            Encoder::SentencePiece(encoder) => return encoder.encode(text, tokens),
            Encoder::Bpe(encoder) => encoder,
        };
        let literals = &self.literals.normalised;
        let control = |text| {
            let found = literals.found(text, |_, _| true);
            found.filter(|(_, id)| self.is_control(*id)).collect::<Vec<_>>()
        };
        let normalised = encoder.normalise(text);
        // Normalising moves text that it does not change. What occurs before and after, in the same order, is the
        // same.
        let own: Option<HashSet<usize>> = (normalised != text).then(|| {
            let (before, after) = (control(text), control(&normalised));
            let same = before.iter().map(|(_, id)| id).eq(after.iter().map(|(_, id)| id));
            let pairs = before.into_iter().zip(after);
            let own = pairs.filter(|((before, _), _)| same && is_own(before.clone()));
            own.map(|(_, (after, _))| after.start).collect()
        });
        let allowed = |found: Range<usize>, id| {
            !self.is_control(id)
                || own.as_ref().map_or_else(|| is_own(found.clone()), |own| own.contains(&found.start))
        };
        for part in literals.parts_where(&normalised, allowed) {
            match part {
                Span::Token(id) => tokens.push(id),
                Span::Text(text) => encoder.encode(text, first, tokens)?,
            }
            first = false;
        }
        Ok(())
    }

    /// Appends the tokens of a text that contains no raw literals.
    fn encode_plain(
        &self,
        text: &str,
        literals: &Literals,
        mut first: bool,
        tokens: &mut Vec<TokenId>,
    ) -> Result<()> {
        let encoder = match &self.encoder {
            Encoder::SentencePiece(encoder) => return encoder.encode(text, tokens),
            Encoder::Bpe(encoder) => encoder,
        };
        for part in literals.parts(&encoder.normalise(text)) {
            match part {
                Span::Token(id) => tokens.push(id),
                Span::Text(text) => encoder.encode(text, first, tokens)?,
            }
            first = false;
        }
        Ok(())
    }
}

static ALPHABET: ByteAlphabet = ByteAlphabet::new();

/// The character of a byte in the texts of byte-level tokens.
pub(crate) fn byte_character(byte: u8) -> char {
    ALPHABET.char(byte)
}
