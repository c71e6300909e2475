//! A model that is split by layers over several machines: the stages before the last one, as the last one sees them.
//!
//! The engine with the model's last layers owns the [`Chain`]. For each batch, the chain sends the tokens to the first
//! stage and the hidden states from stage to stage. The engine computes the rest and chooses tokens, so nothing but
//! tokens travels back. Each stage keeps its own part of every conversation, under a number.
//!
//! A stage may lose conversations, for example because it was started again. It says so, and the chain computes their
//! tokens again, in that stage and in those before it. States of the later stages stay valid, because the same tokens
//! give the same bits.

pub(crate) mod wire;

use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use self::wire::{Call, Facts, Missing, Order, Reply, TurnCall, decode, encode};
use crate::TokenId;
use crate::blocks::{Cancel, PromptPart};
use crate::error::{Error, Result};
use crate::models::Span;

/// How many times stages are started again for one batch. A batch that ends a stage each time fails.
const RESTARTS: usize = 3;

/// How many times a stage may lack tokens of a conversation for one batch. A stage that forgets at once fails the batch.
const REPEATS: usize = 16;

/// Carries messages to one stage, wherever it runs.
///
/// A message is a few bytes, or the hidden states of a batch: four bytes for each channel of each token. The other end
/// gives it to a [`StageHost`](crate::StageHost), which returns the reply. Both ends trust each other: messages are
/// checked, but not authenticated.
///
/// # Examples
/// ```
/// use forebay_engine::{Engine, Lost, Options, Stage, StageHost, Transport};
///
/// # let model = std::path::Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/tales-qwen3moe-Q4_K_M.gguf"));
/// /// A stage in this process, which is opened again if it is lost.
/// struct Here {
///     host: Option<StageHost>,
///     open: Box<dyn Fn() -> forebay_engine::Result<Stage> + Send>,
/// }
///
/// impl Transport for Here {
///     fn call(&mut self, message: &[u8]) -> Result<Vec<u8>, Lost> {
///         let host = self.host.as_mut().ok_or_else(|| Lost("it was never started".into()))?;
///         Ok(host.handle(message))
///     }
///
///     fn restart(&mut self) -> Result<(), Lost> {
///         let stage = (self.open)().map_err(|error| Lost(error.to_string()))?;
///         self.host = Some(stage.host());
///         Ok(())
///     }
/// }
///
/// let options = Options::new().threads(1);
/// let first = options.clone().layers(0..1);
/// let here = Here { host: None, open: Box::new(move || Stage::open(model, &first)) };
/// let engine = Engine::after(vec![Box::new(here)], model, &options)?;
/// engine.session().push(forebay_engine::TokenId(5))?;
/// # Ok::<(), forebay_engine::Error>(())
/// ```
pub trait Transport: Send {
    /// Gives a message to the stage and waits for its reply.
    ///
    /// # Errors
    /// [`Lost`] if there is no reply, and the stage has to be started again.
    fn call(&mut self, message: &[u8]) -> Result<Vec<u8>, Lost>;

    /// Starts the stage again after it was lost, with the same model and layers. Its conversations may be gone.
    ///
    /// # Errors
    /// [`Lost`] if that is impossible. The batch then fails; the next one tries again.
    fn restart(&mut self) -> Result<(), Lost>;
}

/// A stage does not answer, for this reason.
///
/// [`Transport`] has an example.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lost(pub String);

/// The stages before the last one.
pub(crate) struct Chain {
    links: Vec<Link>,
    /// The number of the next conversation.
    next: AtomicU64,
    /// Bytes of a conversation in the last stage, as long as memory is reserved for.
    conversation: u64,
}

/// One stage of the chain.
struct Link {
    facts: Facts,
    transport: Mutex<Box<dyn Transport>>,
    /// What the stage must do before the next batch.
    orders: Mutex<Vec<Order>>,
}

/// A conversation's part in a batch.
#[derive(Clone, Copy)]
pub(crate) struct Part<'a> {
    /// Its number.
    pub conversation: u64,
    /// The tokens that it has.
    pub before: &'a [TokenId],
    /// The tokens that follow.
    pub tokens: &'a [TokenId],
    /// Lengths that it can later be rewound to, in ascending order.
    pub marks: &'a [usize],
}

/// What goes with a batch on its way through the stages.
struct Journey<'a> {
    cancel: &'a Cancel,
    prompts: &'a [PromptPart],
    /// How many times stages may still be started again.
    restarts: usize,
    /// How many times stages may still lack tokens.
    repeats: usize,
}

/// What became of a batch.
enum Passed {
    /// The hidden states after the last stage that it went through.
    Through(Vec<f32>),
    /// This stage lacks tokens of these conversations.
    Stopped(usize, Vec<Missing>),
}

impl Chain {
    /// Asks all stages what they are.
    ///
    /// # Errors
    /// If a stage does not answer, or the stages do not follow each other.
    pub fn new(stages: Vec<Box<dyn Transport>>) -> Result<Chain> {
        let links = stages.into_iter().map(Link::new).collect::<Result<Vec<_>>>()?;
        let Some(Link { facts: first, .. }) = links.first() else {
            return Err(Error::Invalid("there are no stages; use Engine::open".into()));
        };
        let mut end = 0;
        for Link { facts: Facts { span, model, hidden, .. }, .. } in &links {
            if span.first != end || span.all != first.span.all {
                return Err(Error::Invalid(format!(
                    "a stage has {span}, but layer {end} of {} must be next; \
                     name the stages in the order of their layers",
                    first.span.all
                )));
            }
            if (*model, *hidden) != (first.model, first.hidden) {
                return Err(Error::Invalid(format!(
                    "the stage with {span} has another model or precision than the stage with {}",
                    first.span
                )));
            }
            end = span.end;
        }
        // Numbers that another engine gave to the same stages mean nothing here.
        let next = AtomicU64::new(RandomState::new().hash_one("conversations"));
        Ok(Chain { links, next, conversation: 0 })
    }

    /// The layers that the stages leave to the last one.
    pub fn rest(&self) -> Span {
        let Span { end, all, .. } = self.links[self.links.len() - 1].facts.span;
        Span { first: end, end: all, all }
    }

    /// Checks that the stages belong to the last one.
    ///
    /// # Errors
    /// If they have another model or precision, or shorter contexts.
    pub fn check(&self, model: u64, context: usize) -> Result<()> {
        for Link { facts: Facts { span, model: theirs, context: limit, .. }, .. } in &self.links {
            if *theirs != model {
                return Err(Error::Invalid(format!(
                    "the stage with {span} has another model or precision than the last stage"
                )));
            }
            if *limit < context {
                return Err(Error::Invalid(format!(
                    "the stage with {span} has a context of {limit} tokens, and the last stage {context}; \
                     use the same Options::context for all stages"
                )));
            }
        }
        Ok(())
    }

    /// The chain before a stage with such conversations.
    pub fn beside(self, conversation: u64) -> Chain {
        Chain { conversation, ..self }
    }

    /// The number of stages.
    pub fn stages(&self) -> usize {
        self.links.len()
    }

    /// The most tokens that all stages compute in one pass.
    pub fn chunk(&self) -> usize {
        self.links.iter().map(|link| link.facts.chunk).min().expect("there is a stage")
    }

    /// Takes a batch through all stages. Returns the hidden states: `[rows, hidden]`.
    ///
    /// # Errors
    /// If a stage fails or stays lost; [`Error::Cancelled`] if a stop is requested, which is noticed between stages.
    pub fn forward(&self, parts: &[Part<'_>], cancel: &Cancel, prompts: &[PromptPart]) -> Result<Vec<f32>> {
        let repeats = REPEATS * self.links.len() * (parts.len() + 1);
        let mut journey = Journey { cancel, prompts, restarts: RESTARTS, repeats };
        loop {
            let (stage, missing) = match self.pass(parts, self.links.len(), &mut journey)? {
                Passed::Through(stream) => return Ok(stream),
                Passed::Stopped(stage, missing) => (stage, missing),
            };
            for Missing { conversation, have } in missing {
                let part = parts.iter().find(|part| part.conversation == conversation);
                self.compute_again(part.ok_or_else(damaged)?, have, stage, &mut journey)?;
            }
        }
    }

    /// Takes a batch through the first stages.
    fn pass(&self, parts: &[Part<'_>], stages: usize, journey: &mut Journey<'_>) -> Result<Passed> {
        let rows: usize = parts.iter().map(|part| part.tokens.len()).sum();
        let mut stream = Vec::new();
        for (stage, link) in self.links[..stages].iter().enumerate() {
            journey.cancel.check()?;
            stream = match link.forward(parts, &stream, &mut journey.restarts) {
                Ok((Reply::Through, stream)) if stream.len() == rows * link.facts.hidden => stream,
                Ok((Reply::Missing(missing), _)) if !missing.is_empty() => {
                    let left = journey.repeats.checked_sub(1);
                    journey.repeats = left.ok_or_else(|| forgetful(&link.facts))?;
                    return Ok(Passed::Stopped(stage, missing));
                }
                Ok(_) => return Err(damaged()),
                Err(error) => return Err(self.in_own_bytes(error, &link.facts)),
            };
            let Span { end, all, .. } = link.facts.span;
            journey.prompts.iter().for_each(|prompt| prompt.advance(end, all));
        }
        Ok(Passed::Through(stream))
    }

    /// Computes tokens of a conversation again, from the first that `stage` lacks, in all stages up to that one.
    fn compute_again(
        &self,
        part: &Part<'_>,
        have: usize,
        stage: usize,
        journey: &mut Journey<'_>,
    ) -> Result<()> {
        let end = part.before.len();
        tracing::info!(
            "the stage with {} lacks a conversation: {} tokens are computed again",
            self.links[stage].facts.span,
            end.saturating_sub(have)
        );
        let mut done = have;
        while done < end {
            let next = end.min(done + self.chunk());
            let (before, tokens) = (&part.before[..done], &part.before[done..next]);
            let again = Part { before, tokens, ..*part };
            // Prompts make no progress meanwhile.
            let prompts = std::mem::take(&mut journey.prompts);
            let passed = self.pass(&[again], stage + 1, journey);
            journey.prompts = prompts;
            done = match passed? {
                Passed::Through(_) => next,
                // An earlier stage cannot go back to exactly that length.
                Passed::Stopped(_, missing) => missing.iter().map(|missing| missing.have).min().unwrap_or(0),
            };
        }
        Ok(())
    }

    /// A stage's memory in the last stage's measure: callers compare it with what conversations need there.
    fn in_own_bytes(&self, error: Error, facts: &Facts) -> Error {
        match error {
            Error::Budget { need, have, what, remedy } => {
                let own = |bytes: u64| {
                    let share = self.conversation as f64 / facts.conversation.max(1) as f64;
                    (bytes as f64 * share) as u64
                };
                let what = format!("in the stage with {}: {what}", facts.span);
                Error::Budget { need: own(need), have: own(have), what, remedy }
            }
            other => other,
        }
    }

    /// Tells all stages to do something before the next batch.
    fn order(&self, order: Order) {
        for link in &self.links {
            link.orders.lock().unwrap_or_else(PoisonError::into_inner).push(order);
        }
    }
}

impl Link {
    fn new(mut transport: Box<dyn Transport>) -> Result<Link> {
        let facts = greet(&mut *transport, "a stage", None, &mut { RESTARTS })?;
        Ok(Link { facts, transport: Mutex::new(transport), orders: Mutex::default() })
    }

    /// Computes a batch in this stage. If the stage is lost, it is started again.
    fn forward(&self, parts: &[Part<'_>], stream: &[f32], restarts: &mut usize) -> Result<(Reply, Vec<f32>)> {
        let mut transport = lock(&self.transport);
        let orders = std::mem::take(&mut *lock(&self.orders));
        let turns = parts.iter().map(TurnCall::of).collect();
        let message = encode(&Call::Forward { orders, turns }, stream);
        let name = format!("the stage with {}", self.facts.span);
        loop {
            let lost = match transport.call(&message) {
                Ok(reply) => match decode(&reply).map_err(|_| damaged())? {
                    (Reply::Lost(why), _) => Lost(why),
                    (Reply::Failed(failure), _) => return Err(failure.error(&name)),
                    replied => return Ok(replied),
                },
                Err(lost) => lost,
            };
            let facts = greet(&mut **transport, &name, Some(lost), restarts)?;
            if !facts.is_like(&self.facts) {
                return Err(Error::Invalid(format!(
                    "{name} was started again with {} or other settings; \
                     start it with the same model and options",
                    facts.span
                )));
            }
        }
    }
}

/// Asks a stage what it is, after starting it again if it is lost. It forgets all conversations, so that none of them can
/// be in a state that nobody knows.
fn greet(
    transport: &mut dyn Transport,
    name: &str,
    mut lost: Option<Lost>,
    restarts: &mut usize,
) -> Result<Facts> {
    let hello = encode(&Call::Hello, &[]);
    loop {
        if let Some(lost) = &lost {
            tracing::warn!("{name} is lost and is started again: {}", lost.0);
            *restarts = restarts.checked_sub(1).ok_or_else(|| gone(name, lost))?;
            transport.restart().map_err(|lost| gone(name, &lost))?;
        }
        lost = match transport.call(&hello) {
            Err(lost) => Some(lost),
            Ok(reply) => match decode(&reply).map_err(|_| damaged())? {
                (Reply::Facts(facts), _) => return Ok(facts),
                (Reply::Lost(why), _) => Some(Lost(why)),
                (Reply::Failed(failure), _) => return Err(failure.error(name)),
                _ => return Err(damaged()),
            },
        };
    }
}

fn gone(name: &str, Lost(why): &Lost) -> Error {
    Error::Backend(format!("{name} is lost: {why}; start it again"))
}

fn forgetful(facts: &Facts) -> Error {
    Error::Backend(format!(
        "the stage with {} lacks a conversation each time that it was computed again; start it again",
        facts.span
    ))
}

fn damaged() -> Error {
    Error::Backend(
        "a stage sent a reply that cannot be understood; run the same version of Forebay in all stages"
            .into(),
    )
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The part of a session that the stages before its own keep. Dropping it makes them forget it.
pub(crate) struct Remote {
    chain: Arc<Chain>,
    /// Its number in the stages.
    number: u64,
}

impl Remote {
    /// A new conversation.
    pub fn new(chain: &Arc<Chain>) -> Remote {
        let number = chain.next.fetch_add(1, Ordering::Relaxed);
        Remote { chain: Arc::clone(chain), number }
    }

    /// A second conversation with the first `len` tokens.
    pub fn fork(&self, len: usize) -> Remote {
        let fork = Remote::new(&self.chain);
        self.chain.order(Order::Fork { from: self.number, to: fork.number, len });
        fork
    }

    /// Keeps the mark at `len` tokens.
    pub fn pin(&self, len: usize) {
        self.chain.order(Order::Pin { conversation: self.number, len });
    }

    /// Its number in the stages.
    pub fn number(&self) -> u64 {
        self.number
    }
}

impl Drop for Remote {
    fn drop(&mut self) {
        self.chain.order(Order::Forget { conversation: self.number });
    }
}
