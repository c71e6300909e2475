//! What a server is told by its program.

use std::path::Path;
use std::time::Duration;

/// Replaces the names of options in a message by the words of the program, such as its flags.
pub type Words = fn(&str) -> String;

/// Options of a server.
///
/// # Examples
/// ```
/// use forebay_server::ServerOptions;
///
/// let options = ServerOptions::new().parallel(8).queue(16).keys(vec!["secret".into()]);
/// ```
#[derive(Clone)]
pub struct ServerOptions {
    pub(crate) limits: Limits,
    pub(crate) keys: Vec<String>,
    pub(crate) origins: Vec<String>,
    pub(crate) words: Words,
}

/// Limits of requests.
#[derive(Clone, Debug)]
pub(crate) struct Limits {
    /// Answers that run at once.
    pub parallel: usize,
    /// Answers that may wait in addition.
    pub queue: usize,
    /// Bytes of a request body.
    pub body: u64,
    /// Tokens of an answer.
    pub max_tokens: Option<usize>,
    /// Tokens of reasoning.
    pub reasoning: Option<usize>,
    /// Time from the request to the end of its answer.
    pub timeout: Option<Duration>,
}

impl Limits {
    /// Answers that may be open at once.
    pub fn open(&self) -> usize {
        self.parallel + self.queue
    }
}

impl Default for ServerOptions {
    fn default() -> ServerOptions {
        ServerOptions {
            limits: Limits {
                parallel: ServerOptions::PARALLEL,
                queue: ServerOptions::QUEUE,
                body: ServerOptions::MAX_BODY,
                max_tokens: None,
                reasoning: None,
                timeout: None,
            },
            keys: Vec::new(),
            origins: Vec::new(),
            words: str::to_owned,
        }
    }
}

impl ServerOptions {
    /// The default of [`parallel`](Self::parallel).
    pub const PARALLEL: usize = 32;

    /// The default of [`queue`](Self::queue).
    pub const QUEUE: usize = 64;

    /// The default of [`max_body`](Self::max_body).
    pub const MAX_BODY: u64 = 16 << 20;

    /// The defaults.
    pub fn new() -> ServerOptions {
        ServerOptions::default()
    }

    /// Answers that are generated at once; further requests wait. One client gets at most three quarters of them.
    pub fn parallel(mut self, answers: usize) -> ServerOptions {
        self.limits.parallel = answers;
        self
    }

    /// Requests that may wait; more are refused.
    pub fn queue(mut self, requests: usize) -> ServerOptions {
        self.limits.queue = requests;
        self
    }

    /// Bytes that the body of a request may have.
    pub fn max_body(mut self, bytes: u64) -> ServerOptions {
        self.limits.body = bytes;
        self
    }

    /// Tokens that an answer may have, even if a request asks for more.
    pub fn max_tokens(mut self, tokens: Option<usize>) -> ServerOptions {
        self.limits.max_tokens = tokens;
        self
    }

    /// Tokens of reasoning that an answer may have, even if a request asks for more.
    pub fn max_reasoning(mut self, tokens: Option<usize>) -> ServerOptions {
        self.limits.reasoning = tokens;
        self
    }

    /// The time from a request to the end of its answer.
    pub fn timeout(mut self, limit: Option<Duration>) -> ServerOptions {
        self.limits.timeout = limit;
        self
    }

    /// API keys, of which every request needs one. Without keys everybody may send requests.
    pub fn keys(mut self, keys: Vec<String>) -> ServerOptions {
        self.keys = keys;
        self
    }

    /// Sites whose pages may send requests, such as `https://example.org`, or `*` for all.
    pub fn origins(mut self, origins: Vec<String>) -> ServerOptions {
        self.origins = origins;
        self
    }

    /// How messages name these options, and those of the engine. By default as they are called here.
    pub fn words(mut self, words: Words) -> ServerOptions {
        self.words = words;
        self
    }
}

/// The name of a model for clients: the name of a download as it was given, else the name of the file or folder.
pub fn model_name(given: Option<&Path>, path: &Path) -> String {
    if let Some(given) = given.filter(|given| !given.exists()) {
        return given.to_string_lossy().into_owned();
    }
    let name = path.file_name().unwrap_or(path.as_os_str()).to_string_lossy();
    let name = name.strip_suffix(".gguf").unwrap_or(&name);
    // The parts of a split file are one model.
    let part = name.len().checked_sub("-00001-of-00002".len()).and_then(|at| name.split_at_checked(at));
    match part {
        Some((whole, part)) if part.contains("-of-") && part.starts_with('-') => whole.to_owned(),
        _ => name.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn models_are_called_by_their_files() {
        let name = |path: &str| model_name(Some(Path::new("/")), Path::new(path));
        assert_eq!(name("/models/some-model-Q4_K_M.gguf"), "some-model-Q4_K_M");
        assert_eq!(name("/models/some-model-00001-of-00003.gguf"), "some-model");
        assert_eq!(name("/models/folder"), "folder");
        assert_eq!(name("x.gguf"), "x");
        assert_eq!(model_name(Some(Path::new("owner/name:Q4")), Path::new("/cache/x.gguf")), "owner/name:Q4");
    }
}
