//! The engine's error type.

use std::io;
use std::path::{Path, PathBuf};
use std::str::FromStr;

/// An error with a message that says what happened, where, and what to do.
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
        /// What failed, with the offset if there is one: "cannot read 4096 bytes at offset 17".
        doing: String,
        /// The operating system's error.
        source: io::Error,
    },
    /// A file violates its format: it is damaged, truncated or hostile.
    #[error("{}: {message}", path.display())]
    Format {
        /// The file.
        path: PathBuf,
        /// What is wrong, and where in the file.
        message: String,
    },
    /// The file is valid but contains something unsupported. The message names it.
    #[error("{0}")]
    Unsupported(String),
    /// Memory does not suffice.
    #[error("{} of memory is needed ({what}), but {} is available; {remedy}", Bytes(*need), Bytes(*have))]
    Budget {
        /// Bytes needed.
        need: u64,
        /// Bytes available.
        have: u64,
        /// What the memory is needed for.
        what: String,
        /// What to change.
        remedy: String,
    },
    /// More tokens than the context length.
    #[error("{tokens} tokens do not fit the context of {limit}; shorten the prompt or raise the context")]
    Context {
        /// Tokens asked for.
        tokens: usize,
        /// Tokens that fit.
        limit: usize,
    },
    /// The caller asked for something impossible.
    #[error("{0}")]
    Invalid(String),
    /// A field of a request has this error.
    #[error("{}", named(field, error))]
    Field {
        /// The field's path, such as `messages[1].content`.
        field: String,
        /// The error.
        #[source]
        error: Box<Error>,
    },
    /// A compute device failed.
    #[error("{0}")]
    Backend(String),
    /// A compute device failed for good: it computes nothing any more.
    #[error("{0}")]
    DeviceLost(String),
    /// The caller asked to stop.
    #[error("cancelled")]
    Cancelled,
}

/// A result with the engine's error type.
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

    /// Adds the field of a request that caused an error, unless the error names one already.
    pub fn about(field: impl Into<String>, error: Error) -> Error {
        match error {
            Error::Field { .. } => error,
            error => Error::Field { field: field.into(), error: Box::new(error) },
        }
    }

    /// The error without its field.
    pub fn reason(self) -> Error {
        match self {
            Error::Field { error, .. } => *error,
            error => error,
        }
    }

    /// A copy of the error, for a second request that it ends.
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

/// The error's message, preceded by the field unless it begins with it.
fn named(field: &str, error: &Error) -> String {
    let message = error.to_string();
    if message.starts_with(field) { message } else { format!("{field}: {message}") }
}

/// A number of bytes, displayed and read with binary units.
///
/// # Examples
/// ```
/// use forebay_engine::Bytes;
///
/// assert_eq!(Bytes(17 << 20).to_string(), "17.0 MiB");
/// assert_eq!("1.5G".parse::<Bytes>()?.0, 3 << 29);
/// # Ok::<(), forebay_engine::Error>(())
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

/// Reads `8G`, `1.5GiB`, `512 MB` or `4096`.
impl FromStr for Bytes {
    type Err = Error;

    fn from_str(s: &str) -> Result<Bytes> {
        let text = s.trim().to_ascii_uppercase();
        let text = text.strip_suffix("IB").or_else(|| text.strip_suffix('B')).unwrap_or(&text);
        let units = [('K', 1u64 << 10), ('M', 1 << 20), ('G', 1 << 30), ('T', 1 << 40)];
        let (number, unit) = units
            .into_iter()
            .find_map(|(letter, unit)| Some((text.strip_suffix(letter)?, unit)))
            .unwrap_or((text, 1));
        match number.trim().parse::<f64>() {
            Ok(number) if number > 0.0 && number.is_finite() => Ok(Bytes((number * unit as f64) as u64)),
            _ => Err(Error::Invalid("expected a size, such as 8G or 512M".into())),
        }
    }
}

impl Bytes {
    /// Below this many bytes, a number without a unit is a number of something else.
    const LEAST_WITHOUT_UNIT: u64 = 1 << 20;

    /// Reads an amount of memory. `6` is refused: it means 6 bytes, and whoever writes it means 6G.
    ///
    /// # Errors
    /// If it is not a size, or too small a number without a unit.
    pub fn of_memory(s: &str) -> Result<Bytes> {
        let bytes: Bytes = s.parse()?;
        if bytes.0 < Bytes::LEAST_WITHOUT_UNIT && s.trim().parse::<f64>().is_ok() {
            let meant = if bytes.0 < 4096 { 'G' } else { 'K' };
            return Err(Error::Invalid(format!(
                "{0} bytes is too small; did you mean {0}{meant}?",
                s.trim()
            )));
        }
        Ok(bytes)
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

    #[test]
    fn sizes_are_powers_of_1024() {
        let size = |s: &str| s.parse::<Bytes>().map(|bytes| bytes.0);
        assert_eq!(size("4096").unwrap(), 4096);
        assert_eq!(size("8G").unwrap(), 8 << 30);
        assert_eq!(size("1.5gib").unwrap(), 3 << 29);
        assert_eq!(size("512 MB").unwrap(), 512 << 20);
        for wrong in ["", "G", "-1G", "8X", "nan", "inf"] {
            assert!(size(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_few_bytes_are_no_amount_of_memory() {
        let refusal = |s: &str| Bytes::of_memory(s).unwrap_err().to_string();
        assert_eq!(refusal("6"), "6 bytes is too small; did you mean 6G?");
        assert_eq!(refusal(" 1.5"), "1.5 bytes is too small; did you mean 1.5G?");
        assert_eq!(refusal("65536"), "65536 bytes is too small; did you mean 65536K?");
        for (sound, bytes) in [("6K", 6 << 10), ("1048576", 1 << 20), ("8589934592", 8 << 30)] {
            assert_eq!(Bytes::of_memory(sound).unwrap().0, bytes);
        }
    }
}
