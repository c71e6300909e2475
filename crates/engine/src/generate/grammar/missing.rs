//! Replaces grammars in builds without the feature `grammar`: making one is always an error.

use serde_json::Value;

use crate::TokenId;
use crate::engine::Engine;
use crate::error::{Error, Result};

/// What an answer must satisfy. This build has no grammars.
#[derive(Clone, Debug)]
pub enum Grammar {}

/// The state of one answer within a grammar.
pub(crate) enum Matcher {}

/// A set of allowed tokens.
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

    /// JSON that satisfies a schema.
    ///
    /// # Errors
    /// Always.
    pub fn json_schema(_: &Engine, _: &Value) -> Result<Grammar> {
        missing()
    }

    /// Text that matches a Lark grammar.
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
