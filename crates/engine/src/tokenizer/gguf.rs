//! Builds a [`Tokenizer`] from the metadata of a GGUF file. The file is not trusted.

use std::path::Path;

use super::bpe::{Bpe, MergeRules};
use super::merger::{Merger, Vocab};
use super::pre::{self, Pre};
use super::sentencepiece::SentencePiece;
use super::special::{Literal, Literals};
use super::vocabulary::{Spelling, TokenKind, Vocabulary, byte_token};
use super::{Encoder, LiteralSets, Tokenizer};
use crate::TokenId;
use crate::error::{Error, Result};
use crate::format::{Metadata, StringArray, Value};

/// The supported values of `tokenizer.ggml.model`, with [`pre::GEMMA_4`].
const BPE: &str = "gpt2";
const SENTENCEPIECE: &str = "llama";

const EOS: &str = "tokenizer.ggml.eos_token_id";

/// Builds the tokenizer.
pub(super) fn tokenizer(path: &Path, metadata: &Metadata) -> Result<Tokenizer> {
    let file = Keys { path, metadata };
    let texts = || file.strings("tokenizer.ggml.tokens");
    match file.string("tokenizer.ggml.model")? {
        BPE => bpe(&file, texts()?, pre_tokeniser(&file)?),
        pre::GEMMA_4 => bpe(&file, texts()?, named(&file, pre::GEMMA_4)?),
        SENTENCEPIECE => sentencepiece(&file, texts()?),
        other => Err(file.unsupported(
            &format!("the tokenizer `{other}` (tokenizer.ggml.model)"),
            &format!("{BPE} and {}, byte pair encoding; {SENTENCEPIECE}, SentencePiece", pre::GEMMA_4),
        )),
    }
}

/// The pre-tokeniser that the file names.
fn pre_tokeniser(file: &Keys) -> Result<&'static Pre> {
    match file.optional_string("tokenizer.ggml.pre")? {
        Some(name) => named(file, name),
        None => {
            tracing::warn!(
                "{}: the key tokenizer.ggml.pre is missing; Forebay uses the pre-tokeniser `{}`, which may differ from the one that the model was trained with",
                file.path.display(),
                pre::DEFAULT
            );
            named(file, pre::DEFAULT)
        }
    }
}

fn named(file: &Keys, name: &str) -> Result<&'static Pre> {
    Pre::named(name).ok_or_else(|| {
        file.unsupported(&format!("the pre-tokeniser `{name}` (tokenizer.ggml.pre)"), &Pre::names())
    })
}

fn bpe(file: &Keys, texts: &StringArray, pre: &Pre) -> Result<Tokenizer> {
    let is_byte_level = pre.spelling == Spelling::ByteAlphabet;
    let unknown = file.token("tokenizer.ggml.unknown_token_id", texts.len())?;
    let rules = MergeRules {
        // The file may name an unknown token, but byte-level tokenizers do not use it.
        unknown: unknown
            .filter(|_| !is_byte_level)
            .and_then(|id| texts.get(id.0 as usize))
            .map(str::to_owned),
        fuses_unknown: !is_byte_level,
        byte_fallback: !is_byte_level,
        ignores_merges: pre.ignores_merges,
    };
    let merges = merges(file)?;
    let merger = Merger::new(words(texts), merges.into_iter(), &rules)
        .map_err(|e| file.wrong(format!("cannot build the tokenizer: {e}")))?;
    let encoder = Bpe {
        normaliser: pre.normaliser(texts.len()),
        metaspace: None,
        splitter: pre.splitter(),
        spelled_splitter: pre.spelled_splitter(),
        spelling: pre.spelling,
        merger,
    };
    let eos = file.token(EOS, texts.len())?;
    // Converters mark some control tokens of Gemma 4 as text, so that llama.cpp prints them, or as normal tokens.
    let is_control = |id, text: &str| {
        let is_mark =
            text.starts_with("<|") && text.ends_with('>') || text.starts_with('<') && text.ends_with("|>");
        !is_byte_level && (Some(id) == eos || is_mark || text == "<mask>")
    };
    let vocabulary = vocabulary(file, texts, pre.spelling, is_control)?;
    let defaults = Defaults { bos: pre.adds_bos, needs_bos: !is_byte_level, space: false };
    assemble(file, texts, Encoder::Bpe(Box::new(encoder)), vocabulary, defaults)
}

fn sentencepiece(file: &Keys, texts: &StringArray) -> Result<Tokenizer> {
    const SCORES: &str = "tokenizer.ggml.scores";
    let vocabulary = vocabulary(file, texts, Spelling::Metaspace, |_, _| false)?;
    let scores = file.required(SCORES, "a list of numbers", Value::as_numbers)?;
    if scores.len() != texts.len() {
        return Err(file.wrong(format!("{SCORES} has {} entries for {} tokens", scores.len(), texts.len())));
    }
    let unknown = file.token("tokenizer.ggml.unknown_token_id", texts.len())?;
    let adds_space = file.bool("tokenizer.ggml.add_space_prefix")?.unwrap_or(true);
    let mut encoder = SentencePiece::new(unknown, adds_space);
    let all = (0u32..).map(TokenId).zip(texts.iter()).zip(vocabulary.kinds()).zip(scores.iter());
    for (((id, text), kind), score) in all {
        let score = score.as_f64().filter(|s| s.is_finite());
        let score = score.ok_or_else(|| file.wrong(format!("{SCORES} has no number for token {}", id.0)))?;
        match kind {
            TokenKind::Normal | TokenKind::UserDefined => encoder.add_word(id, text, score as f32),
            TokenKind::Byte => match byte_token(text) {
                Some(byte) => encoder.add_byte(id, byte),
                None => {
                    return Err(file.wrong(format!(
                        "token {}, `{text}`, has the type byte, but is not a byte token",
                        id.0
                    )));
                }
            },
            TokenKind::Control | TokenKind::Unknown | TokenKind::Unused => {}
        }
    }
    let encoder = Encoder::SentencePiece(Box::new(encoder));
    assemble(file, texts, encoder, vocabulary, Defaults { bos: true, needs_bos: false, space: adds_space })
}

/// The values of settings that the file does not have.
struct Defaults {
    /// Whether a text starts with the BOS token.
    bos: bool,
    /// Whether it does although the file denies it: the first files of Gemma 4 do.
    needs_bos: bool,
    /// Whether the encoder puts a space in front of a text.
    space: bool,
}

/// Adds the special tokens.
fn assemble(
    file: &Keys,
    texts: &StringArray,
    encoder: Encoder,
    vocabulary: Vocabulary,
    defaults: Defaults,
) -> Result<Tokenizer> {
    // GGUF files do not say which special tokens strip the white space after them. In Phi-3's tokenizers all but
    // three do.
    let phi_3 = matches!(encoder, Encoder::SentencePiece(_))
        && matches!(file.metadata.str("general.architecture"), Some("phi3" | "phimoe"));
    let strips_right = |text: &str| phi_3 && !["<unk>", "<s>", "<|endoftext|>"].contains(&text);
    let literals = |wanted: fn(TokenKind) -> bool| {
        let all = (0u32..).map(TokenId).zip(texts.iter()).zip(vocabulary.kinds());
        let wanted = all.filter(|&(_, &kind)| wanted(kind));
        let literal = |id, text| Literal { strips_right: strips_right(text), ..Literal::plain(id, text) };
        let raw = Literals::new(wanted.map(|((id, text), _)| literal(id, text)))
            .map_err(|e| file.wrong(format!("cannot index the special tokens: {e}")))?;
        Ok(LiteralSets { raw, normalised: Literals::default() })
    };
    let literal = literals(TokenKind::is_literal)?;
    let user_defined = literals(|kind| kind == TokenKind::UserDefined)?;
    let bos = file.token("tokenizer.ggml.bos_token_id", texts.len())?;
    let adds_bos = file.bool("tokenizer.ggml.add_bos_token")?.unwrap_or(defaults.bos) || defaults.needs_bos;
    if adds_bos && bos.is_none() {
        return Err(
            file.wrong("the tokenizer adds a BOS token, but tokenizer.ggml.bos_token_id is missing".into())
        );
    }
    let eos = file.token(EOS, texts.len())?;
    let mut end_tokens = Vec::from_iter(eos);
    for key in ["tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id"] {
        end_tokens.extend(file.token(key, texts.len())?.filter(|id| !end_tokens.contains(id)));
    }
    let mut tokenizer = Tokenizer {
        encoder,
        literals: literal,
        user_defined,
        vocabulary,
        strips_space: defaults.space,
        bos,
        start: Vec::from_iter(bos),
        eos,
        end_tokens,
        adds_bos,
    };
    tokenizer.complete_ends();
    Ok(tokenizer)
}

/// The kinds and bytes of all tokens. `is_control` says which tokens are control tokens whatever the file says.
fn vocabulary(
    file: &Keys,
    texts: &StringArray,
    spelling: Spelling,
    is_control: impl Fn(TokenId, &str) -> bool,
) -> Result<Vocabulary> {
    const TYPES: &str = "tokenizer.ggml.token_type";
    if u32::try_from(texts.len()).is_err() {
        return Err(
            file.wrong(format!("the vocabulary has {} tokens, too many for 32-bit token ids", texts.len()))
        );
    }
    let mut vocabulary = Vocabulary::new(spelling);
    let Some(types) = file.metadata.get(TYPES) else {
        texts.iter().for_each(|text| vocabulary.push(TokenKind::Normal, text));
        return Ok(vocabulary);
    };
    let types = types.as_numbers().ok_or_else(|| file.wrong(format!("{TYPES} is not a list of numbers")))?;
    if types.len() != texts.len() {
        return Err(file.wrong(format!("{TYPES} has {} entries for {} tokens", types.len(), texts.len())));
    }
    for (id, (text, number)) in (0..).zip(texts.iter().zip(types.iter())) {
        let kind = number.as_u64().and_then(TokenKind::from_number);
        let kind = kind
            .ok_or_else(|| file.wrong(format!("{TYPES} has the invalid type {number:?} for token {id}")))?;
        vocabulary.push(if is_control(TokenId(id), text) { TokenKind::Control } else { kind }, text);
    }
    Ok(vocabulary)
}

/// The tokens by text. In some files two tokens have the same text; the first one is used.
fn words(texts: &StringArray) -> Vocab {
    let mut words = Vocab::with_capacity_and_hasher(texts.len(), Default::default());
    for (id, text) in (0..).zip(texts.iter()) {
        words.entry(text.to_owned()).or_insert(id);
    }
    words
}

/// The two tokens of each merge.
fn merges<'a>(file: &Keys<'a>) -> Result<Vec<(&'a str, &'a str)>> {
    let all = file.strings("tokenizer.ggml.merges")?;
    let pairs = all.iter().enumerate().map(|(rank, merge)| {
        let pair = merge.split_once(' ').filter(|(left, right)| !left.is_empty() && !right.is_empty());
        pair.ok_or_else(|| {
            file.wrong(format!(
                "tokenizer.ggml.merges: merge {rank}, `{merge}`, does not consist of two tokens"
            ))
        })
    });
    pairs.collect()
}

/// Reads metadata, with errors that name the file and the key.
struct Keys<'a> {
    path: &'a Path,
    metadata: &'a Metadata,
}

impl<'a> Keys<'a> {
    fn wrong(&self, message: String) -> Error {
        Error::format(self.path, message)
    }

    fn unsupported(&self, what: &str, supported: &str) -> Error {
        let path = self.path.display();
        Error::Unsupported(format!("{path}: {what} is not supported; supported: {supported}"))
    }

    fn required<T>(&self, key: &str, what: &str, read: impl FnOnce(&'a Value) -> Option<T>) -> Result<T> {
        let missing =
            || self.wrong(format!("the key {key} is missing; convert the model again, with its tokenizer"));
        let value = self.metadata.get(key).ok_or_else(missing)?;
        read(value).ok_or_else(|| self.wrong(format!("{key} is not {what}")))
    }

    fn string(&self, key: &str) -> Result<&'a str> {
        self.required(key, "a string", Value::as_str)
    }

    fn optional_string(&self, key: &str) -> Result<Option<&'a str>> {
        self.metadata.get(key).map(|_| self.string(key)).transpose()
    }

    fn strings(&self, key: &str) -> Result<&'a StringArray> {
        self.required(key, "a list of strings", Value::as_strings)
    }

    fn bool(&self, key: &str) -> Result<Option<bool>> {
        self.metadata.get(key).map(|_| self.required(key, "a boolean", Value::as_bool)).transpose()
    }

    /// The value of `key` as a token of a vocabulary of `count` tokens.
    fn token(&self, key: &str, count: usize) -> Result<Option<TokenId>> {
        let Some(value) = self.metadata.get(key) else { return Ok(None) };
        match value.as_u64().and_then(|id| u32::try_from(id).ok()) {
            Some(id) if (id as usize) < count => Ok(Some(TokenId(id))),
            _ => Err(self.wrong(format!("{key} is {value:?}, but the vocabulary has {count} tokens"))),
        }
    }
}
