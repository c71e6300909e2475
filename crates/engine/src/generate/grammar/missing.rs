//! Stands in for grammars in a build without them: none can be made.

use serde_json::Value;

use crate::TokenId;
use crate::engine::Engine;
use crate::error::{Error, Result};

/// What an answer must be. There is none in this build.
#[derive(Clone, Debug)]
pub enum Grammar {}

/// Follows an answer along a grammar.
pub(crate) enum Matcher {}

/// Tokens that may be chosen.
pub(crate) enum Mask {}

fn missing<T>() -> Result<T> {
    Err(Error::Unsupported(
        "this build of forebay-engine has no grammars: enable its feature `grammar`".into(),
    ))
}

impl Grammar {
    /// Any JSON object.
    ///
    /// # Errors
    /// Always.
    pub fn json_object(_: &Engine) -> Result<Grammar> {
        missing()
    }

    /// JSON that a schema describes.
    ///
    /// # Errors
    /// Always.
    pub fn json_schema(_: &Engine, _: &Value) -> Result<Grammar> {
        missing()
    }

    /// A text of the language that a Lark grammar describes.
    ///
    /// # Errors
    /// Always.
    pub fn lark(_: &Engine, _: &str) -> Result<Grammar> {
        missing()
    }

    pub(crate) fn matcher(&self) -> Result<Matcher> {
        match *self {}
    }

    pub(crate) fn bytes(&self) -> u64 {
        match *self {}
    }
}

impl Matcher {
    pub fn bytes(&self) -> u64 {
        match *self {}
    }

    pub fn allowed(&mut self) -> Result<Option<Mask>> {
        match *self {}
    }

    pub fn accept(&mut self, _: TokenId) -> Result<bool> {
        match *self {}
    }
}

impl Mask {
    pub fn bits(&self) -> &[u32] {
        match *self {}
    }

    pub fn allows(&self, _: TokenId) -> bool {
        match *self {}
    }
}
