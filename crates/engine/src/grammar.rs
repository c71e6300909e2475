//! What an answer must be: JSON, JSON of a schema, or a language of a Lark grammar.

use std::sync::Arc;

use crate::engine::Engine;
use crate::error::{Error, Result};

/// What an answer must be. Made once for a request, and checked then; clones share it.
#[derive(Clone, Debug)]
pub struct Grammar(Arc<str>);

impl Grammar {
    /// Any JSON object.
    ///
    /// # Errors
    /// If there is no memory for it.
    pub fn json_object(engine: &Engine) -> Result<Grammar> {
        Grammar::json_schema(engine, &serde_json::json!({ "type": "object" }))
    }

    /// JSON that a schema describes. Fields come in the order of the schema.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the schema is none, or holds what is not supported; the message says where.
    pub fn json_schema(_engine: &Engine, _schema: &serde_json::Value) -> Result<Grammar> {
        Err(Error::Unsupported("grammars".into()))
    }

    /// A text of the language that a Lark grammar describes.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the grammar is none; the message says where.
    pub fn lark(_engine: &Engine, _source: &str) -> Result<Grammar> {
        Err(Error::Unsupported("grammars".into()))
    }
}
