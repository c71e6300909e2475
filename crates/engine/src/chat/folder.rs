//! Finds the chat template of a Hugging Face folder.

use std::path::{Path, PathBuf};

use serde_json::Value;

use super::{DEFAULT, Sources, TOOL_USE};
use crate::error::{Error, Result};
use crate::tokenizer::folder::{SpecialTokens, read};

/// The chat template of a folder.
pub(super) struct Found {
    /// The file to name in messages about the template.
    pub(super) path: PathBuf,
    pub(super) sources: Sources,
    pub(super) tokens: Vec<(String, String)>,
}

/// The special tokens that templates may use.
const TOKENS: [&str; 7] =
    ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];

/// The folder's template, if it has one. A separate file takes precedence over a setting in another file.
pub(super) fn find(folder: &Path) -> Result<Option<Found>> {
    let config = SpecialTokens::of(folder)?;
    let path = folder.join("chat_template.jinja");
    let found = match text(&path)? {
        Some(default) => {
            let tool_use = text(&folder.join("additional_chat_templates").join("tool_use.jinja"))?;
            Some((path, Sources { default, tool_use }))
        }
        None => match config.get("chat_template") {
            Some(value) => named(value, &config)?.map(|found| (folder.join("tokenizer_config.json"), found)),
            None => None,
        },
    };
    let Some((path, sources)) = found else { return Ok(None) };
    let mut tokens = Vec::new();
    for name in TOKENS {
        tokens.extend(config.text(name)?.map(|text| (name.to_owned(), text)));
    }
    Ok(Some(Found { path, sources, tokens }))
}

/// One template, or a list of named templates.
fn named(value: &Value, config: &SpecialTokens) -> Result<Option<Sources>> {
    let Value::Array(list) = value else {
        let text = value
            .as_str()
            .ok_or_else(|| config.wrong("chat_template is neither a string nor a list".into()))?;
        return Ok(Some(Sources { default: text.to_owned(), tool_use: None }));
    };
    let (mut default, mut tool_use) = (None, None);
    for entry in list {
        let field = |key: &str| entry.get(key).and_then(Value::as_str);
        let (Some(name), Some(template)) = (field("name"), field("template")) else {
            return Err(config.wrong("chat_template: an entry of the list lacks a name or a template".into()));
        };
        match name {
            DEFAULT => default = Some(template.to_owned()),
            TOOL_USE => tool_use = Some(template.to_owned()),
            other => tracing::info!("the chat template named {other:?} is not used"),
        }
    }
    match default {
        Some(default) => Ok(Some(Sources { default, tool_use })),
        None => Err(config.wrong(format!("chat_template: no template in the list is named {DEFAULT:?}"))),
    }
}

fn text(path: &Path) -> Result<Option<String>> {
    let Some(bytes) = read(path)? else { return Ok(None) };
    let text = String::from_utf8(bytes).map_err(|_| Error::format(path, "the template is not UTF-8"))?;
    Ok(Some(text))
}
