//! What goes wrong.

use std::fmt;

use crate::cache::NotDownloaded;

/// What goes wrong.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A model of the hub is not on this machine, or not all of it.
    #[error(transparent)]
    NotDownloaded(#[from] NotDownloaded),
    /// A file is not what it should be, or the caller cancelled.
    #[error(transparent)]
    Engine(#[from] forebay_engine::Error),
    /// Anything else, in a sentence.
    #[error("{what}")]
    Other {
        /// What happened, and what to do next.
        what: String,
        /// What caused it.
        source: Option<Box<dyn std::error::Error + Send + Sync>>,
    },
}

/// The result of what asks the hub or its cache.
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    pub(crate) fn new(what: impl Into<String>) -> Error {
        Error::Other { what: what.into(), source: None }
    }

    /// This error as the cause of another one.
    pub(crate) fn caused(
        what: impl Into<String>,
        source: impl std::error::Error + Send + Sync + 'static,
    ) -> Error {
        Error::Other { what: what.into(), source: Some(Box::new(source)) }
    }

    /// The error with its causes, on one line.
    pub fn in_full(&self) -> String {
        let mut text = self.to_string();
        let mut cause = std::error::Error::source(self);
        while let Some(error) = cause {
            text = format!("{text}: {error}");
            cause = error.source();
        }
        text
    }
}

/// Says what could not be done.
pub(crate) trait Context<T> {
    /// With a sentence about what failed.
    fn with_context<S: fmt::Display>(self, what: impl FnOnce() -> S) -> Result<T>;

    /// The same, with a sentence that is ready.
    fn context(self, what: impl fmt::Display) -> Result<T>
    where
        Self: Sized,
    {
        self.with_context(|| what)
    }
}

impl<T, E: std::error::Error + Send + Sync + 'static> Context<T> for std::result::Result<T, E> {
    fn with_context<S: fmt::Display>(self, what: impl FnOnce() -> S) -> Result<T> {
        self.map_err(|error| Error::caused(what().to_string(), error))
    }
}

/// An error with a formatted sentence.
macro_rules! failure {
    ($($sentence:tt)*) => { $crate::error::Error::new(format!($($sentence)*)) };
}

/// Returns an error with a formatted sentence.
macro_rules! bail {
    ($($sentence:tt)*) => { return Err($crate::error::failure!($($sentence)*).into()) };
}

pub(crate) use {bail, failure};
