//! Builds a [`Tokenizer`] from what a model file says. Nothing in the file is trusted.

use std::path::Path;

use tokenizers::models::bpe::{BPE, Merges, Vocab};

use super::pre::Pre;
use super::special::Literals;
use super::{ALPHABET, Tokenizer, Vocabulary};
use crate::TokenId;
use crate::error::{Error, Result};
use crate::format::{Metadata, StringArray, Value};

/// What a token is, as GGUF numbers it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// Made by BPE.
    Normal,
    /// Stands for what the vocabulary cannot spell.
    Unknown,
    /// Steers the model and is no text.
    Control,
    /// Text that is always one token.
    UserDefined,
    /// Fills a gap in the numbering.
    Unused,
    /// One byte.
    Byte,
}

impl Kind {
    fn from_number(number: u64) -> Option<Kind> {
        Some(match number {
            // 0 is "undefined", which files use for ordinary tokens.
            0 | 1 => Kind::Normal,
            2 => Kind::Unknown,
            3 => Kind::Control,
            4 => Kind::UserDefined,
            5 => Kind::Unused,
            6 => Kind::Byte,
            _ => return None,
        })
    }

    /// Whether the token is no text unless control tokens are asked for.
    pub(super) fn is_control(self) -> bool {
        matches!(self, Kind::Control | Kind::Unknown)
    }

    /// Whether the file has the token's text as it stands, and not in the byte alphabet.
    pub(super) fn is_literal(self) -> bool {
        self.is_control() || self == Kind::UserDefined
    }
}

/// The one tokenizer model that is supported, as `tokenizer.ggml.model` names it.
const BYTE_LEVEL_BPE: &str = "gpt2";

/// Builds the tokenizer.
pub(super) fn tokenizer(path: &Path, metadata: &Metadata) -> Result<Tokenizer> {
    let file = Keys { path, metadata };
    let model = file.string("tokenizer.ggml.model")?;
    if model != BYTE_LEVEL_BPE {
        let what = format!("the tokenizer `{model}` (tokenizer.ggml.model)");
        return Err(file.unsupported(&what, &format!("{BYTE_LEVEL_BPE}, byte-level BPE")));
    }
    let pre = file.string("tokenizer.ggml.pre")?;
    let pre = Pre::named(pre).ok_or_else(|| {
        file.unsupported(&format!("the pre-tokeniser `{pre}` (tokenizer.ggml.pre)"), &Pre::names())
    })?;
    let texts = file.strings("tokenizer.ggml.tokens")?;
    let vocabulary = vocabulary(&file, texts)?;
    let literals = |wanted: fn(Kind) -> bool| {
        let all = (0u32..).map(TokenId).zip(texts.iter()).zip(&vocabulary.kinds);
        Literals::new(all.filter(|&(_, &kind)| wanted(kind)).map(|(token, _)| token))
            .map_err(|e| file.wrong(format!("cannot index the special tokens: {e}")))
    };

    let unknown = file.token("tokenizer.ggml.unknown_token_id", texts.len())?;
    let words = words(texts);
    let spells = |byte| words.contains_key(ALPHABET.char(byte).encode_utf8(&mut [0; 2]) as &str);
    // Bytes that UTF-8 never uses are often absent.
    let unspellable = match unknown {
        Some(_) => vec![],
        None => (0..=255).filter(|&b| !matches!(b, 0xc0 | 0xc1 | 0xf5..) && !spells(b)).collect(),
    };

    let bos = file.token("tokenizer.ggml.bos_token_id", texts.len())?;
    let adds_bos = file.bool("tokenizer.ggml.add_bos_token")?.unwrap_or(pre.adds_bos);
    if adds_bos && bos.is_none() {
        return Err(file.wrong(
            "texts are to start with a BOS token, but tokenizer.ggml.bos_token_id is missing".into(),
        ));
    }
    let eos = file.token("tokenizer.ggml.eos_token_id", texts.len())?;
    let mut end_tokens = Vec::from_iter(eos);
    for key in ["tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id"] {
        end_tokens.extend(file.token(key, texts.len())?.filter(|id| !end_tokens.contains(id)));
    }

    Ok(Tokenizer {
        splitter: pre.splitter(),
        literals: literals(Kind::is_literal)?,
        user_defined: literals(|kind| kind == Kind::UserDefined)?,
        bpe: bpe(&file, words, unknown.and_then(|id| texts.get(id.0 as usize)))?,
        vocabulary,
        unspellable,
        bos,
        eos,
        end_tokens,
        adds_bos,
    })
}

/// The kinds and bytes of all tokens.
fn vocabulary(file: &Keys, texts: &StringArray) -> Result<Vocabulary> {
    const TYPES: &str = "tokenizer.ggml.token_type";
    if u32::try_from(texts.len()).is_err() {
        return Err(file.wrong(format!("{} tokens are more than a token id can name", texts.len())));
    }
    let mut vocabulary = Vocabulary::default();
    let Some(types) = file.metadata.get(TYPES) else {
        texts.iter().for_each(|text| vocabulary.push(Kind::Normal, text));
        return Ok(vocabulary);
    };
    let types = types.as_numbers().ok_or_else(|| file.wrong(format!("{TYPES} is not a list of numbers")))?;
    if types.len() != texts.len() {
        return Err(file.wrong(format!("{TYPES} has {} entries for {} tokens", types.len(), texts.len())));
    }
    for (id, (text, number)) in texts.iter().zip(types.iter()).enumerate() {
        let kind = number.as_u64().and_then(Kind::from_number);
        let kind = kind.ok_or_else(|| file.wrong(format!("{TYPES} gives token {id} the type {number:?}")))?;
        vocabulary.push(kind, text);
    }
    Ok(vocabulary)
}

/// The tokens by their text. Files exist in which two tokens have one text; the first is the one to use.
fn words(texts: &StringArray) -> Vocab {
    let mut words = Vocab::with_capacity(texts.len());
    for (id, text) in (0..).zip(texts.iter()) {
        words.entry(text.to_owned()).or_insert(id);
    }
    words
}

fn bpe(file: &Keys, words: Vocab, unknown: Option<&str>) -> Result<BPE> {
    let mut merges = Merges::new();
    let mut merged = String::new();
    let all = file.strings("tokenizer.ggml.merges")?;
    for (rank, merge) in all.iter().enumerate() {
        let bad = || file.wrong(format!("tokenizer.ggml.merges: merge {rank}, `{merge}`, is not two tokens"));
        let (left, right) = merge.split_once(' ').ok_or_else(bad)?;
        if left.is_empty() || right.is_empty() {
            return Err(bad());
        }
        merged.clear();
        merged.extend([left, right]);
        // Vocabularies that were cut down keep merges of tokens they no longer have. Such a merge never
        // applies, and BPE's constructor must not see it.
        if [left, right, &merged].iter().all(|token| words.contains_key(*token)) {
            merges.push((left.to_owned(), right.to_owned()));
        }
    }
    if merges.len() < all.len() {
        tracing::info!(
            "{} of {} merges are of tokens outside the vocabulary",
            all.len() - merges.len(),
            all.len()
        );
    }
    let mut builder = BPE::builder()
        .vocab_and_merges(words, merges)
        // The cache is one per thread, outlives the tokenizer and is outside the memory plan.
        .cache_capacity(0);
    if let Some(unknown) = unknown {
        builder = builder.unk_token(unknown.to_owned());
    }
    builder.build().map_err(|e| file.wrong(format!("cannot build the tokenizer: {e}")))
}

/// The metadata, read with errors that name the file and the key.
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
        let value = self.metadata.get(key).ok_or_else(|| self.wrong(format!("the key {key} is missing")))?;
        read(value).ok_or_else(|| self.wrong(format!("{key} is not {what}")))
    }

    fn string(&self, key: &str) -> Result<&'a str> {
        self.required(key, "text", Value::as_str)
    }

    fn strings(&self, key: &str) -> Result<&'a StringArray> {
        self.required(key, "a list of texts", Value::as_strings)
    }

    fn bool(&self, key: &str) -> Result<Option<bool>> {
        self.metadata.get(key).map(|_| self.required(key, "a truth value", Value::as_bool)).transpose()
    }

    /// The token that `key` names in a vocabulary of `count`.
    fn token(&self, key: &str, count: usize) -> Result<Option<TokenId>> {
        let Some(value) = self.metadata.get(key) else { return Ok(None) };
        match value.as_u64().and_then(|id| u32::try_from(id).ok()) {
            Some(id) if (id as usize) < count => Ok(Some(TokenId(id))),
            _ => Err(self.wrong(format!("{key} is {value:?}, and there are {count} tokens"))),
        }
    }
}
