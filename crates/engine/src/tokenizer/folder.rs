//! Builds a [`Tokenizer`] from a Hugging Face folder. Its files are not trusted.

use std::io::Read as _;
use std::path::{Path, PathBuf};

use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use super::{Tokenizer, json};
use crate::TokenId;
use crate::error::{Error, Result};

/// The longest file that is read. The largest vocabularies have some 30 MiB.
const MAX_FILE: u64 = 256 << 20;

/// Builds the tokenizer.
pub(super) fn tokenizer(folder: &Path) -> Result<Tokenizer> {
    let path = folder.join("tokenizer.json");
    let Some(document) = read(&path)? else {
        return Err(Error::Unsupported(format!(
            "{}: there is no tokenizer.json, and no other tokenizer of a folder is supported; download it from where \
             the weights come from",
            folder.display()
        )));
    };
    let mut tokenizer = json::tokenizer(&path, &document)?;
    drop(document);

    let config = SpecialTokens::of(folder)?;
    let ids = ModelIds::of(folder, &tokenizer)?;
    let named = |key: &str| -> Result<Option<TokenId>> {
        let Some(text) = config.text(key)? else { return Ok(None) };
        let token = tokenizer.find(&text);
        token.map(Some).ok_or_else(|| config.wrong(format!("{key} is {text:?}, which is not a token")))
    };
    let bos = named("bos_token")?.or(ids.bos);
    let eos = named("eos_token")?.or(ids.eos.first().copied());

    if let Some(adds_bos) = config.bool("add_bos_token")? {
        tokenizer.adds_bos = adds_bos;
    }
    // If `tokenizer.json` puts tokens in front of a text, they take precedence over the BOS token of other files.
    if tokenizer.start.is_empty() {
        tokenizer.start.extend(bos);
    }
    if tokenizer.adds_bos && tokenizer.start.is_empty() {
        return Err(config.wrong("the tokenizer adds a BOS token, but bos_token is missing".into()));
    }
    tokenizer.bos = bos.or(tokenizer.start.first().copied());
    tokenizer.eos = eos;
    for id in eos.into_iter().chain(ids.eos) {
        if !tokenizer.end_tokens.contains(&id) {
            tokenizer.end_tokens.push(id);
        }
    }
    tokenizer.complete_ends();
    Ok(tokenizer)
}

/// The contents of `tokenizer_config.json` and, for missing keys, `special_tokens_map.json`.
pub(crate) struct SpecialTokens {
    path: PathBuf,
    config: Map<String, Value>,
    map: Map<String, Value>,
}

impl SpecialTokens {
    pub(crate) fn of(folder: &Path) -> Result<SpecialTokens> {
        let path = folder.join("tokenizer_config.json");
        Ok(SpecialTokens {
            config: object(&path)?.unwrap_or_default(),
            map: object(&folder.join("special_tokens_map.json"))?.unwrap_or_default(),
            path,
        })
    }

    /// The value of a key of `tokenizer_config.json`.
    pub(crate) fn get(&self, key: &str) -> Option<&Value> {
        self.config.get(key).filter(|value| !value.is_null())
    }

    /// The text of the token that a key such as `bos_token` names.
    pub(crate) fn text(&self, key: &str) -> Result<Option<String>> {
        // A null in the configuration means that there is no such token, whatever the map has.
        let Some(value) = self.config.get(key).or_else(|| self.map.get(key)) else { return Ok(None) };
        match value {
            Value::Null => Ok(None),
            Value::String(text) => Ok(Some(text.clone())),
            Value::Object(token) => match token.get("content") {
                Some(Value::String(text)) => Ok(Some(text.clone())),
                _ => Err(self.wrong(format!("{key} has no text in `content`"))),
            },
            _ => Err(self.wrong(format!("{key} is neither a string nor a token"))),
        }
    }

    fn bool(&self, key: &str) -> Result<Option<bool>> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Bool(value)) => Ok(Some(*value)),
            Some(_) => Err(self.wrong(format!("{key} is not a boolean"))),
        }
    }

    /// An error about `tokenizer_config.json`.
    pub(crate) fn wrong(&self, message: String) -> Error {
        Error::format(&self.path, message)
    }
}

/// The special tokens that the model's configuration lists by number: in `generation_config.json` or, without that
/// file, in `config.json`.
struct ModelIds {
    bos: Option<TokenId>,
    eos: Vec<TokenId>,
}

impl ModelIds {
    fn of(folder: &Path, tokenizer: &Tokenizer) -> Result<ModelIds> {
        let mut found = ModelIds { bos: None, eos: vec![] };
        for name in ["generation_config.json", "config.json"] {
            let path = folder.join(name);
            let Some(config) = object(&path)? else { continue };
            // Multimodal models nest the language model's settings one level down.
            let nested = config.get("text_config").and_then(Value::as_object);
            let ids = |key: &str| match config.get(key).or_else(|| nested?.get(key)) {
                None | Some(Value::Null) => Ok(vec![]),
                Some(Value::Array(ids)) => ids.iter().map(|id| token(&path, key, id, tokenizer)).collect(),
                Some(id) => token(&path, key, id, tokenizer).map(|id| vec![id]),
            };
            if found.bos.is_none() {
                found.bos = ids("bos_token_id")?.first().copied();
            }
            if found.eos.is_empty() {
                found.eos = ids("eos_token_id")?;
            }
        }
        Ok(found)
    }
}

fn token(path: &Path, key: &str, id: &Value, tokenizer: &Tokenizer) -> Result<TokenId> {
    let count = tokenizer.vocab_size();
    match id.as_u64().and_then(|id| u32::try_from(id).ok()) {
        Some(id) if (id as usize) < count => Ok(TokenId(id)),
        _ => Err(Error::format(path, format!("{key} is {id}, but the vocabulary has {count} tokens"))),
    }
}

/// A file's bytes, if the file exists.
pub(crate) fn read(path: &Path) -> Result<Option<Vec<u8>>> {
    let file = match std::fs::File::open(path) {
        Ok(file) => file,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(Error::io(path, "cannot open", e)),
    };
    let mut bytes = Vec::new();
    file.take(MAX_FILE + 1).read_to_end(&mut bytes).map_err(|e| Error::io(path, "cannot read", e))?;
    if bytes.len() as u64 > MAX_FILE {
        return Err(Error::format(path, format!("the file is longer than {} MiB", MAX_FILE >> 20)));
    }
    Ok(Some(bytes))
}

/// A file's JSON object, if the file exists.
fn object(path: &Path) -> Result<Option<Map<String, Value>>> {
    read(path)?.map(|bytes| parse(path, &bytes)).transpose()
}

fn parse<T: DeserializeOwned>(path: &Path, bytes: &[u8]) -> Result<T> {
    serde_json::from_slice(bytes).map_err(|e| Error::format(path, format!("unexpected contents: {e}")))
}
