//! Forebay's engine: runs Mixture-of-Experts language models that are larger than memory.

pub mod chat;
mod error;
pub mod format;
pub mod sampler;
pub mod stop;
pub mod tokenizer;

pub use error::{Bytes, Error, Result};

/// A token of a model's vocabulary.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize)]
#[serde(transparent)]
pub struct TokenId(pub u32);
