//! Grammars that answers must satisfy: JSON, a JSON schema, or a Lark grammar.
//!
//! A [`Grammar`] is compiled once per request. Each answer has its own `Matcher`, which lists the tokens that may come
//! next. The list depends only on the grammar and the answer's tokens so far. Grammars need the crate's feature
//! `grammar`; without it, making one is an error.

#[cfg(feature = "grammar")]
mod compiled;
#[cfg(not(feature = "grammar"))]
mod missing;
#[cfg(feature = "grammar")]
mod schema;

#[cfg(feature = "grammar")]
pub use compiled::Grammar;
#[cfg(feature = "grammar")]
pub(crate) use compiled::{Mask, Matcher};
#[cfg(not(feature = "grammar"))]
pub use missing::Grammar;
#[cfg(not(feature = "grammar"))]
pub(crate) use missing::{Mask, Matcher};
