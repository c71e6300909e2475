//! The request for an answer.

use crate::TokenId;
use crate::chat::dialect::ReasoningLimit;
use crate::engine::Engine;
use crate::error::Result;
use crate::generate::client::Client;
use crate::generate::grammar::Grammar;
use crate::generate::sampler::{SamplingOverrides, SamplingParams};

/// The request for an answer to a prompt of tokens.
///
/// # Examples
/// ```
/// use forebay_engine::{Request, SamplingParams};
///
/// # let model = std::path::Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/tales-qwen3moe-Q4_K_M.gguf"));
/// # let engine = forebay_engine::Engine::open(model, &forebay_engine::Options::new().threads(1))?;
/// let prompt = engine.tokenizer().encode("Once upon a time", Default::default())?;
/// let greedy = SamplingParams { temperature: 0.0, ..Default::default() };
/// let request = Request::new(&engine, prompt)?.sampling(greedy).max_tokens(8).stop(vec!["girl".into()]);
/// let answer = engine.session().generate(&request, &mut |_| ())?;
/// assert_eq!(answer.text, ", there was a little ");
/// assert_eq!(answer.stop.as_deref(), Some("girl"));
/// # Ok::<(), forebay_engine::Error>(())
/// ```
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct Request {
    /// The tokens of the whole conversation so far.
    pub prompt: Vec<TokenId>,
    /// Who sent it, if a [`Crowd`](crate::Crowd) answers several requests.
    pub client: Client,
    /// The most tokens to generate. `None`: until the context is full.
    pub max_tokens: Option<usize>,
    /// How tokens are sampled.
    pub sampling: SamplingParams,
    /// Strings that end the answer and are not part of it.
    pub stop: Vec<String>,
    /// Control tokens that appear in the text, for a parser of the model's
    /// [dialect](crate::chat::dialect::Dialect::shown). All other control tokens have no text.
    pub shown: Vec<TokenId>,
    /// A limit for the model's reasoning: see [`Dialect::limit`](crate::chat::dialect::Dialect::limit). The limit
    /// forces no token that a grammar forbids.
    pub reasoning: Option<ReasoningLimit>,
    /// Never choose the model's end tokens.
    pub ignore_end: bool,
    /// The grammar of the answer, if it must satisfy one.
    pub grammar: Option<Grammar>,
    /// How many of the likeliest tokens are reported with each token. With `None`, no probabilities are reported, with
    /// 0 only the chosen token's.
    pub logprobs: Option<usize>,
}

impl Request {
    /// A request with the sampling parameters that the model's file recommends.
    ///
    /// # Errors
    /// If the file's sampling parameters are invalid.
    pub fn new(engine: &Engine, prompt: Vec<TokenId>) -> Result<Request> {
        let file = engine.file();
        let sampling = SamplingOverrides::default().resolve(&file.metadata, file.path())?;
        Ok(Request { prompt, sampling, ..Request::default() })
    }

    /// Sets [`prompt`](Self::prompt).
    #[must_use]
    pub fn prompt(mut self, prompt: Vec<TokenId>) -> Request {
        self.prompt = prompt;
        self
    }

    /// Sets [`client`](Self::client).
    #[must_use]
    pub fn client(mut self, client: Client) -> Request {
        self.client = client;
        self
    }

    /// Sets [`max_tokens`](Self::max_tokens).
    #[must_use]
    pub fn max_tokens(mut self, max_tokens: impl Into<Option<usize>>) -> Request {
        self.max_tokens = max_tokens.into();
        self
    }

    /// Sets [`sampling`](Self::sampling).
    #[must_use]
    pub fn sampling(mut self, sampling: SamplingParams) -> Request {
        self.sampling = sampling;
        self
    }

    /// Sets [`stop`](Self::stop).
    #[must_use]
    pub fn stop(mut self, stop: Vec<String>) -> Request {
        self.stop = stop;
        self
    }

    /// Sets [`shown`](Self::shown).
    #[must_use]
    pub fn shown(mut self, shown: Vec<TokenId>) -> Request {
        self.shown = shown;
        self
    }

    /// Sets [`reasoning`](Self::reasoning).
    #[must_use]
    pub fn reasoning(mut self, reasoning: Option<ReasoningLimit>) -> Request {
        self.reasoning = reasoning;
        self
    }

    /// Sets [`ignore_end`](Self::ignore_end).
    #[must_use]
    pub fn ignore_end(mut self, ignore_end: bool) -> Request {
        self.ignore_end = ignore_end;
        self
    }

    /// Sets [`grammar`](Self::grammar).
    #[must_use]
    pub fn grammar(mut self, grammar: Option<Grammar>) -> Request {
        self.grammar = grammar;
        self
    }

    /// Sets [`logprobs`](Self::logprobs).
    #[must_use]
    pub fn logprobs(mut self, logprobs: impl Into<Option<usize>>) -> Request {
        self.logprobs = logprobs.into();
        self
    }
}
