//! What an answer must be: JSON, JSON of a schema, or a text of a Lark grammar.
//!
//! A [`Grammar`] is compiled once for a request. Each answer has a `Matcher` of its own, which says before each token which
//! tokens may come next. What it says depends on the grammar and the tokens so far, and on nothing else. Grammars need the crate's
//! feature `grammar`; without it, asking for one is an error.

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
