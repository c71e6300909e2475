//! Generating an answer: the loop that samples tokens and computes the next logits, until the answer ends.

pub mod client;
pub mod grammar;
mod request;
pub mod sampler;
pub mod stop;

use std::time::Instant;

use crate::TokenId;
use crate::backend::Logits;
use crate::blocks::PromptMeter;
use crate::chat::dialect::ReasoningLimit;
use crate::engine::Engine;
use crate::error::{Error, Result};
use crate::experts::Meters;
use crate::generate::grammar::{Grammar, Mask, Matcher};
use crate::generate::sampler::{Sampler, Scored, Scorer};
use crate::generate::stop::StopMatcher;
use crate::session::Session;
use crate::tokenizer::StreamDecoder;

pub use request::Request;

/// A step in generating an answer.
///
/// # Examples
/// ```
/// use std::io::{Write, stdout};
///
/// use forebay_engine::{Event, Request};
///
/// # let model = std::path::Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/tales-qwen3moe-Q4_K_M.gguf"));
/// # let engine = forebay_engine::Engine::open(model, &forebay_engine::Options::new().threads(1))?;
/// # let prompt = engine.tokenizer().encode("Once upon a time", Default::default())?;
/// let request = Request::new(&engine, prompt)?.max_tokens(8);
/// let answer = engine.session().generate(&request, &mut |event| match event {
///     Event::Start(meter) => eprintln!("{} tokens to process", meter.read().total),
///     Event::Prompt { done, total } => eprintln!("{done} of {total} tokens processed"),
///     Event::Token(_) => unreachable!("no probabilities were asked for"),
///     Event::Text(text) => {
///         print!("{text}");
///         let _ = stdout().flush();
///     }
/// })?;
/// # Ok::<(), forebay_engine::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Event<'a> {
    /// Prompt processing starts. The meter shows its progress at any time, even during a pass.
    Start(&'a PromptMeter),
    /// More of the prompt has been processed. Sent after each pass.
    Prompt {
        /// Prompt tokens processed so far.
        done: usize,
        /// Prompt tokens to process.
        total: usize,
    },
    /// A token of the answer, sent before its text, if [probabilities](Request::logprobs) were requested. The end token
    /// is not sent. Tokens of a stop string are sent, although their text is not.
    Token(&'a Scored),
    /// More text of the answer, in whole characters.
    Text(&'a str),
}

impl Event<'_> {
    /// The event after a pass.
    fn prompt(meter: &PromptMeter) -> Event<'static> {
        let progress = meter.read();
        Event::Prompt { done: progress.done as usize, total: progress.total }
    }
}

/// Why an answer ended.
///
/// # Examples
/// ```
/// use forebay_engine::{FinishReason, Request};
///
/// # let model = std::path::Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/tales-qwen3moe-Q4_K_M.gguf"));
/// # let engine = forebay_engine::Engine::open(model, &forebay_engine::Options::new().threads(1))?;
/// # let prompt = engine.tokenizer().encode("Once upon a time", Default::default())?;
/// let request = Request::new(&engine, prompt)?.max_tokens(2);
/// let answer = engine.session().generate(&request, &mut |_| ())?;
/// assert_eq!(answer.finish_reason, FinishReason::Length);
/// assert_eq!(answer.finish_reason.name(), "length");
/// # Ok::<(), forebay_engine::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// The model chose an end token, a stop string occurred, or the grammar is complete.
    Stop,
    /// The same, after the model called a tool. Only [replies](crate::conversation) have this reason.
    Calls,
    /// The answer reached its token limit, or the context is full.
    Length,
    /// It was [cancelled](crate::Cancel).
    Cancelled,
}

impl FinishReason {
    /// The name in output and in JSON.
    pub fn name(self) -> &'static str {
        match self {
            FinishReason::Stop => "stop",
            FinishReason::Calls => "calls",
            FinishReason::Length => "length",
            FinishReason::Cancelled => "cancelled",
        }
    }
}

/// Measurements of one answer. Times are in seconds.
///
/// # Examples
/// ```
/// use forebay_engine::Request;
///
/// # let model = std::path::Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/tales-qwen3moe-Q4_K_M.gguf"));
/// # let engine = forebay_engine::Engine::open(model, &forebay_engine::Options::new().threads(1))?;
/// # let prompt = engine.tokenizer().encode("Once upon a time", Default::default())?;
/// let request = Request::new(&engine, prompt)?.max_tokens(8);
/// let stats = engine.session().generate(&request, &mut |_| ())?.stats;
/// println!("first token after {:.2} s, then {:.1} a second", stats.ttft_seconds, stats.steps_per_second());
/// assert_eq!((stats.generated_tokens, stats.decode_steps), (8, 7));
/// # Ok::<(), forebay_engine::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Stats {
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Prompt tokens that the session already held.
    pub reused_tokens: usize,
    /// Time for prompt processing.
    pub prompt_seconds: f64,
    /// Tokens generated.
    pub generated_tokens: usize,
    /// Tokens generated up to the end of reasoning, if the answer is a [reply](crate::conversation).
    pub reasoning_tokens: usize,
    /// Tokens that were computed after the prompt. The first token of an answer comes from the prompt's logits, and the
    /// last one of an answer that reached its limit is not computed.
    pub decode_steps: usize,
    /// Time from the end of the prompt to the end of the answer.
    pub decode_seconds: f64,
    /// Time to first token.
    pub ttft_seconds: f64,
    /// What the expert store counted during prompt processing.
    pub prompt_experts: Meters,
    /// What the expert store counted during generation.
    pub experts: Meters,
}

impl Stats {
    /// Decode steps per second; zero if there were none.
    pub fn steps_per_second(&self) -> f64 {
        if self.decode_seconds > 0.0 { self.decode_steps as f64 / self.decode_seconds } else { 0.0 }
    }
}

/// A finished answer.
///
/// # Examples
/// ```
/// use forebay_engine::{Request, SamplingParams};
///
/// # let model = std::path::Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/tales-qwen3moe-Q4_K_M.gguf"));
/// # let engine = forebay_engine::Engine::open(model, &forebay_engine::Options::new().threads(1))?;
/// let prompt = engine.tokenizer().encode("Once upon a time", Default::default())?;
/// let request = Request::new(&engine, prompt)?.max_tokens(6);
/// let answer = engine.session().generate(&request, &mut |_| ())?;
///
/// // The seed of an answer repeats it.
/// let sampling = SamplingParams { seed: Some(answer.seed), ..request.sampling.clone() };
/// let again = engine.session().generate(&request.sampling(sampling), &mut |_| ())?;
/// assert_eq!(again.text, answer.text);
/// # Ok::<(), forebay_engine::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct Answer {
    /// The text.
    pub text: String,
    /// The tokens, without the end token.
    pub tokens: Vec<TokenId>,
    /// Why the answer ended.
    pub finish_reason: FinishReason,
    /// The stop string that ended it, if one did.
    pub stop: Option<String>,
    /// The seed that repeats the answer.
    pub seed: u64,
    /// Measurements.
    pub stats: Stats,
    /// The probabilities of its tokens, if they were requested.
    pub logprobs: Vec<Scored>,
}

impl Session {
    /// Answers a prompt. A cancelled answer is not an error: it ends where it is. At its end the session's
    /// [`Cancel`](crate::Cancel) is reset, so that the next answer can be computed.
    ///
    /// # Errors
    /// If the request is invalid, the prompt does not fit the context, or the computation fails.
    pub fn generate(&mut self, request: &Request, on_event: &mut dyn FnMut(Event<'_>)) -> Result<Answer> {
        let answer = self.answer(request, on_event);
        self.cancel().reset();
        answer
    }

    fn answer(&mut self, request: &Request, on_event: &mut dyn FnMut(Event<'_>)) -> Result<Answer> {
        let engine = self.engine().clone();
        let mut writing = Writing::new(&engine, request)?;
        writing.prepare()?;
        let start = Instant::now();
        let before = engine.meters();
        let mut started = false;
        let mut watch = |meter: &PromptMeter| {
            let event = match std::mem::replace(&mut started, true) {
                false => Event::Start(meter),
                true => Event::prompt(meter),
            };
            on_event(event);
        };
        match self.extend_watched(&request.prompt, &mut watch) {
            Ok(extended) => writing.stats().reused_tokens = extended.reused,
            Err(Error::Cancelled) => writing.cancel(),
            Err(error) => return Err(error),
        }
        let read = engine.meters();
        writing.stats().prompt_seconds = start.elapsed().as_secs_f64();
        writing.stats().prompt_experts = read - before;
        let choice = writing.choose(&mut Logits::of(self.logits()))?;
        let mut next = writing.tell(choice, on_event);
        if !writing.answer.tokens.is_empty() {
            writing.stats().ttft_seconds = start.elapsed().as_secs_f64();
        }
        while let Some(token) = next.take() {
            match self.push_choosing(token, |logits| writing.choose(logits)) {
                Ok(choice) => next = writing.tell(choice, on_event),
                Err(Error::Cancelled) => writing.cancel(),
                Err(error) => return Err(error),
            }
        }
        let mut answer = writing.finish(on_event);
        answer.stats.decode_seconds = start.elapsed().as_secs_f64() - answer.stats.prompt_seconds;
        answer.stats.experts = engine.meters() - read;
        Ok(answer)
    }
}

/// The result of sampling.
pub enum Choice {
    /// A token of the answer.
    Token {
        /// The token.
        token: TokenId,
        /// Whether the grammar is complete after it.
        is_complete: bool,
        /// Its probability, if requested.
        scored: Option<Scored>,
    },
    /// The answer has ended.
    End,
}

/// An answer in progress: takes logits, chooses tokens, and converts them to text.
pub struct Writing {
    engine: Engine,
    sampler: Sampler,
    scorer: Option<Scorer>,
    grammar: Option<Grammar>,
    /// The answer's position in the grammar, once it is [prepared](Self::prepare).
    matcher: Option<Matcher>,
    /// Bytes that the last matcher used.
    matcher_bytes: u64,
    reasoning: Option<ReasoningLimit>,
    text: TextStream,
    answer: Answer,
    /// The token limit of the answer.
    most: usize,
    /// How many tokens were chosen, the end token included.
    chosen: usize,
    ended: bool,
}

impl Writing {
    /// Starts an answer.
    ///
    /// # Errors
    /// If the request is invalid.
    pub fn new(engine: &Engine, request: &Request) -> Result<Writing> {
        let mut sampling = request.sampling.clone();
        if request.ignore_end {
            let ends = engine.tokenizer().end_tokens().iter();
            sampling.logit_bias.extend(ends.map(|&t| (t, f32::NEG_INFINITY)));
        }
        let mut sampler = Sampler::new(sampling, engine.vocab_size())?;
        sampler.accept_prompt(&request.prompt);
        let room = engine.context().saturating_sub(request.prompt.len());
        let answer = Answer {
            text: String::new(),
            tokens: Vec::new(),
            finish_reason: FinishReason::Length,
            stop: None,
            seed: sampler.seed(),
            stats: Stats { prompt_tokens: request.prompt.len(), ..Stats::default() },
            logprobs: Vec::new(),
        };
        Ok(Writing {
            sampler,
            scorer: request.logprobs.map(Scorer::new),
            matcher: None,
            matcher_bytes: request.grammar.as_ref().map_or(0, Grammar::bytes),
            grammar: request.grammar.clone(),
            reasoning: request.reasoning.clone(),
            text: TextStream {
                decoder: StreamDecoder::continuing(false).showing(request.shown.clone()),
                stops: StopMatcher::new(request.stop.clone())?,
                text: String::new(),
            },
            answer,
            most: request.max_tokens.map_or(room, |n| n.min(room)),
            chosen: 0,
            ended: false,
            engine: engine.clone(),
        })
    }

    /// Reserves the memory that the grammar needs for the next token.
    ///
    /// # Errors
    /// [`Error::Budget`] if there is not enough memory. Then nothing has changed.
    pub fn prepare(&mut self) -> Result<()> {
        if let (Some(grammar), None) = (&self.grammar, &self.matcher) {
            let mut matcher = grammar.matcher()?;
            for &token in &self.answer.tokens {
                matcher.accept(token)?;
            }
            self.matcher = Some(matcher);
        }
        Ok(())
    }

    /// Returns that memory. The next [`prepare`](Self::prepare) rebuilds the grammar's state from the answer's tokens.
    pub fn let_go(&mut self) {
        if let Some(matcher) = self.matcher.take() {
            self.matcher_bytes = matcher.bytes();
        }
    }

    /// Bytes that following the grammar needs, now or when it is next prepared.
    pub fn matcher_bytes(&self) -> u64 {
        self.matcher.as_ref().map_or(self.matcher_bytes, Matcher::bytes)
    }

    /// Bytes of the grammar itself.
    pub fn grammar_bytes(&self) -> u64 {
        self.grammar.as_ref().map_or(0, Grammar::bytes)
    }

    /// Chooses the next token from the logits after the last one. [`tell`](Self::tell) reports it to the caller after
    /// the backend is unlocked, so that the caller's code never delays other computations.
    ///
    /// # Errors
    /// If the logits cannot be read or are not numbers, or no token fits the grammar. [`Error::Budget`] if there is not
    /// enough memory to find the tokens that fit; then nothing was chosen, and the call may be repeated.
    pub fn choose(&mut self, logits: &mut Logits<'_>) -> Result<Choice> {
        if self.ended || self.answer.tokens.len() == self.most {
            self.chosen += 1;
            return Ok(Choice::End);
        }
        debug_assert_eq!(self.grammar.is_some(), self.matcher.is_some(), "it was not prepared");
        let allowed = self.matcher.as_mut().map(Matcher::allowed).transpose()?;
        self.chosen += 1;
        let mask = match allowed {
            None => None,
            Some(Some(mask)) => Some(mask),
            Some(None) => {
                self.stop();
                return Ok(Choice::End);
            }
        };
        let forced = self.reasoning.as_ref().and_then(ReasoningLimit::next);
        let token = match forced.filter(|&token| mask.as_ref().is_none_or(|mask| mask.allows(token))) {
            Some(token) => token,
            None => self.sampler.choose(logits, mask.as_ref().map(Mask::bits))?,
        };
        if self.engine.tokenizer().end_tokens().contains(&token) {
            self.stop();
            return Ok(Choice::End);
        }
        let is_complete = match &mut self.matcher {
            None => false,
            Some(matcher) => matcher.accept(token)?,
        };
        let scored = match &mut self.scorer {
            None => None,
            Some(scorer) => Some(scorer.score(logits.all()?, token)),
        };
        self.sampler.accept(token);
        self.answer.tokens.push(token);
        Ok(Choice::Token { token, is_complete, scored })
    }

    /// Converts a choice to text and reports it. Returns the token if it must be computed, or `None` if the answer has
    /// ended.
    pub fn tell(&mut self, choice: Choice, on_event: &mut dyn FnMut(Event<'_>)) -> Option<TokenId> {
        let Choice::Token { token, is_complete, scored } = choice else { return None };
        if let Some(scored) = scored {
            on_event(Event::Token(&scored));
            self.answer.logprobs.push(scored);
        }
        let text = self.text.decoder.push(self.engine.tokenizer(), token);
        if let Some(reasoning) = &mut self.reasoning {
            reasoning.take(token, &text);
        }
        if self.text.push(&text, on_event) || is_complete {
            self.stop();
        }
        (!self.ended && self.answer.tokens.len() < self.most).then_some(token)
    }

    fn stop(&mut self) {
        self.answer.finish_reason = FinishReason::Stop;
        self.ended = true;
    }

    /// Ends the answer where it is.
    pub fn cancel(&mut self) {
        self.answer.finish_reason = FinishReason::Cancelled;
        self.ended = true;
    }

    /// The measurements so far, filled in by the caller.
    pub fn stats(&mut self) -> &mut Stats {
        &mut self.answer.stats
    }

    /// The finished answer. Text that was held back for stop strings is emitted first.
    pub fn finish(self, on_event: &mut dyn FnMut(Event<'_>)) -> Answer {
        let mut answer = self.answer;
        // The first logits are the prompt's.
        answer.stats.decode_steps = self.chosen.saturating_sub(1);
        (answer.text, answer.stop) = self.text.finish(on_event);
        if answer.stop.is_some() {
            answer.finish_reason = FinishReason::Stop;
        }
        answer.stats.generated_tokens = answer.tokens.len();
        answer
    }
}

/// Converts tokens to text: whole characters, up to a stop string.
struct TextStream {
    decoder: StreamDecoder,
    stops: StopMatcher,
    text: String,
}

impl TextStream {
    /// Adds the text of a token. Returns true if a stop string occurred.
    fn push(&mut self, text: &str, on_event: &mut dyn FnMut(Event<'_>)) -> bool {
        let outcome = self.stops.push(text);
        self.emit(&outcome.emit, on_event);
        outcome.stopped
    }

    /// Emits the text that was held back. Returns the whole text, and the stop string that ended it, if one did.
    fn finish(mut self, on_event: &mut dyn FnMut(Event<'_>)) -> (String, Option<String>) {
        let tail = self.decoder.finish();
        let outcome = self.stops.push(&tail);
        self.emit(&outcome.emit, on_event);
        let held = self.stops.finish();
        self.emit(&held, on_event);
        (self.text, self.stops.met().map(str::to_owned))
    }

    fn emit(&mut self, text: &str, on_event: &mut dyn FnMut(Event<'_>)) {
        if !text.is_empty() {
            self.text.push_str(text);
            on_event(Event::Text(text));
        }
    }
}
