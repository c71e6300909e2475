//! A model's configuration in its file's metadata. Every value is hostile until checked.

use crate::error::{Error, Result};
use crate::format::{ModelFile, Value};

/// No real model has a dimension or a count above this. The limit keeps products of two in range.
const LARGEST: u64 = 1 << 30;

/// The keys of one architecture: `qwen3moe.block_count` is asked for as `block_count`.
pub struct Config<'a> {
    file: &'a ModelFile,
    arch: &'a str,
}

impl<'a> Config<'a> {
    /// The configuration of a file of this architecture.
    pub fn new(file: &'a ModelFile, arch: &'a str) -> Config<'a> {
        Config { file, arch }
    }

    /// A positive integer that must be there.
    ///
    /// # Errors
    /// If it is missing, not an integer, zero or absurdly large.
    pub fn count(&self, key: &str) -> Result<usize> {
        self.optional_count(key)?.ok_or_else(|| self.error(key, "is missing"))
    }

    /// A positive integer that may be absent.
    ///
    /// # Errors
    /// If it is there and not an integer, zero or absurdly large.
    pub fn optional_count(&self, key: &str) -> Result<Option<usize>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        match value.as_u64() {
            Some(v @ 1..=LARGEST) => Ok(Some(v as usize)),
            Some(v) => Err(self.error(key, &format!("is {v}, not between 1 and {LARGEST}"))),
            None => Err(self.error(key, "is not a positive integer")),
        }
    }

    /// A positive float that must be there.
    ///
    /// # Errors
    /// If it is missing, or not a positive finite number.
    pub fn float(&self, key: &str) -> Result<f32> {
        self.optional_float(key)?.ok_or_else(|| self.error(key, "is missing"))
    }

    /// A positive float that may be absent.
    ///
    /// # Errors
    /// If it is there and not a positive finite number.
    pub fn optional_float(&self, key: &str) -> Result<Option<f32>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        match value.as_f64().map(|v| v as f32) {
            Some(v) if v > 0.0 && v.is_finite() => Ok(Some(v)),
            _ => Err(self.error(key, "is not a positive number")),
        }
    }

    /// A text that may be absent.
    ///
    /// # Errors
    /// If it is there and not text.
    pub fn optional_text(&self, key: &str) -> Result<Option<&'a str>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        value.as_str().map(Some).ok_or_else(|| self.error(key, "is not text"))
    }

    /// An error about a key.
    pub fn error(&self, key: &str, problem: &str) -> Error {
        Error::format(self.file.path(), format!("{}.{key} {problem}", self.arch))
    }

    /// Something that the file asks for and we do not have.
    pub fn unsupported(&self, key: &str, value: &str) -> Error {
        let path = self.file.path().display();
        Error::Unsupported(format!("{path}: {}.{key} = {} is not supported", self.arch, quoted(value)))
    }

    fn get(&self, key: &str) -> Option<&'a Value> {
        self.file.metadata.get(&format!("{}.{key}", self.arch))
    }
}

/// A text from a file as it can stand in a message: printable and not long.
pub(super) fn quoted(text: &str) -> String {
    const LONGEST: usize = 64;
    match text.char_indices().nth(LONGEST) {
        Some((end, _)) => format!("{:?}…", &text[..end]),
        None => format!("{text:?}"),
    }
}
