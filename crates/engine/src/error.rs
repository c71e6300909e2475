//! The one error type of the engine.

use std::io;
use std::path::{Path, PathBuf};

/// What can go wrong, in words a person can act on.
///
/// # Examples
/// ```
/// use forebay_engine::{Engine, Error, Options};
///
/// # let model = std::path::Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/tales-qwen3moe-Q4_K_M.gguf"));
/// match Engine::open(model, &Options::new().memory(1 << 20)) {
///     Ok(_) => unreachable!("a mebibyte does not suffice"),
///     Err(Error::Budget { need, have, .. }) => assert!(need > have),
///     Err(other) => return Err(other),
/// }
/// # Ok::<(), forebay_engine::Error>(())
/// ```
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The operating system refused to open or read a file.
    #[error("{}: {doing}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What was being done, with the offset where there is one: "cannot read 4096 bytes at offset 17".
        doing: String,
        /// The operating system's reason.
        source: io::Error,
    },
    /// A file is not what its format demands: damaged, truncated or hostile.
    #[error("{}: {message}", path.display())]
    Format {
        /// The file.
        path: PathBuf,
        /// What is wrong, and where.
        message: String,
    },
    /// The file is sound, and holds something that is not supported. The message names it.
    #[error("{0}")]
    Unsupported(String),
    /// The memory there is cannot hold what is needed.
    #[error("needs {} of memory ({what}), but {} is available; {remedy}", Bytes(*need), Bytes(*have))]
    Budget {
        /// Bytes needed.
        need: u64,
        /// Bytes there are.
        have: u64,
        /// What the need is made of.
        what: String,
        /// What to change.
        remedy: String,
    },
    /// More tokens than the context holds.
    #[error("{tokens} tokens do not fit the context of {limit}; shorten the prompt or raise the context")]
    Context {
        /// Tokens asked for.
        tokens: usize,
        /// Tokens that fit.
        limit: usize,
    },
    /// The caller asked for something that makes no sense.
    #[error("{0}")]
    Invalid(String),
    /// A field of a request cannot be answered, for this reason.
    #[error("{}", named(field, error))]
    Field {
        /// The field, as in `messages[1].content`.
        field: String,
        /// The reason.
        #[source]
        error: Box<Error>,
    },
    /// A compute device failed.
    #[error("{0}")]
    Backend(String),
    /// A compute device failed for good: nothing more is computed there.
    #[error("{0}")]
    DeviceLost(String),
    /// The caller asked to stop.
    #[error("cancelled")]
    Cancelled,
}

/// The engine's result.
///
/// # Examples
/// ```
/// use forebay_engine::{Engine, Result};
///
/// fn count(engine: &Engine, text: &str) -> Result<usize> {
///     Ok(engine.tokenizer().encode(text, Default::default())?.len())
/// }
///
/// # let model = std::path::Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/tales-qwen3moe-Q4_K_M.gguf"));
/// # let engine = forebay_engine::Engine::open(model, &forebay_engine::Options::new().threads(1))?;
/// assert!(count(&engine, "Once upon a time")? > 0);
/// # Ok::<(), forebay_engine::Error>(())
/// ```
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    /// An [`Error::Io`] about `path`; `doing` says what was attempted: "cannot open".
    pub fn io(path: &Path, doing: impl Into<String>, source: io::Error) -> Error {
        Error::Io { path: path.to_owned(), doing: doing.into(), source }
    }

    /// An [`Error::Format`] about `path`.
    pub fn format(path: &Path, message: impl Into<String>) -> Error {
        Error::Format { path: path.to_owned(), message: message.into() }
    }

    /// An [`Error::Invalid`] about a field of a request.
    pub fn field(field: impl Into<String>, message: impl Into<String>) -> Error {
        Error::about(field, Error::Invalid(message.into()))
    }

    /// An error whose reason is this field of a request, unless it names one already.
    pub fn about(field: impl Into<String>, error: Error) -> Error {
        match error {
            Error::Field { .. } => error,
            error => Error::Field { field: field.into(), error: Box::new(error) },
        }
    }

    /// The error without the field that it is about.
    pub fn reason(self) -> Error {
        match self {
            Error::Field { error, .. } => *error,
            error => error,
        }
    }

    /// The same error again, for another whom it concerns.
    pub(crate) fn repeat(&self) -> Error {
        match self {
            Error::Io { path, doing, source } => Error::Io {
                path: path.clone(),
                doing: doing.clone(),
                source: io::Error::new(source.kind(), source.to_string()),
            },
            Error::Format { path, message } => Error::format(path, message),
            Error::Unsupported(message) => Error::Unsupported(message.clone()),
            Error::Budget { need, have, what, remedy } => {
                Error::Budget { need: *need, have: *have, what: what.clone(), remedy: remedy.clone() }
            }
            Error::Context { tokens, limit } => Error::Context { tokens: *tokens, limit: *limit },
            Error::Invalid(message) => Error::Invalid(message.clone()),
            Error::Field { field, error } => Error::about(field, error.repeat()),
            Error::Backend(message) => Error::Backend(message.clone()),
            Error::DeviceLost(message) => Error::DeviceLost(message.clone()),
            Error::Cancelled => Error::Cancelled,
        }
    }
}

/// An error with the field that it is about, unless it says that itself.
fn named(field: &str, error: &Error) -> String {
    let message = error.to_string();
    if message.starts_with(field) { message } else { format!("{field}: {message}") }
}

/// Prints a number of bytes for people: `17.3 MB` style with binary units.
///
/// # Examples
/// ```
/// use forebay_engine::Bytes;
///
/// assert_eq!(Bytes(17 << 20).to_string(), "17.0 MiB");
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Bytes(pub u64);

impl std::fmt::Display for Bytes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
        let mut value = self.0 as f64;
        let mut unit = 0;
        while value >= 1023.95 && unit + 1 < UNITS.len() {
            value /= 1024.0;
            unit += 1;
        }
        if unit == 0 { write!(f, "{} B", self.0) } else { write!(f, "{value:.1} {}", UNITS[unit]) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_field_that_is_the_reason_is_named_once() {
        assert_eq!(
            Error::field("tools[0]", "a tool has no name").to_string(),
            "tools[0]: a tool has no name"
        );
        assert_eq!(Error::field("top_p", "top_p is 2").to_string(), "top_p is 2");
        let about = Error::about("messages", Error::field("messages[1].content", "no text"));
        assert!(matches!(&about, Error::Field { field, .. } if field == "messages[1].content"));
        assert!(matches!(about.reason(), Error::Invalid(message) if message == "no text"));
    }

    #[test]
    fn bytes_read_like_a_person_writes_them() {
        assert_eq!(Bytes(0).to_string(), "0 B");
        assert_eq!(Bytes(1023).to_string(), "1023 B");
        assert_eq!(Bytes(17 << 20).to_string(), "17.0 MiB");
        assert_eq!(Bytes((1 << 30) - 1).to_string(), "1.0 GiB");
    }
}
