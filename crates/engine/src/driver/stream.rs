//! Passes answers from the driver's thread to the threads that asked for them.

use std::sync::mpsc::{Receiver, channel};

use super::Driver;
use super::work::Fate;
use crate::blocks::Cancel;
use crate::conversation::{Assembler, Draft, Question, Reply, ReplyEvent};
use crate::driver::crowd::Listener;
use crate::engine::Engine;
use crate::error::Result;
use crate::generate::{Answer, Event};

/// Receives the events of an answer.
type Tell = Box<dyn FnMut(Result<ReplyEvent>) + Send>;

/// A handle to an answer in progress. Dropping it cancels the answer.
///
/// # Examples
/// ```
/// use std::sync::mpsc;
///
/// use forebay_engine::{ChatRequest, Driver, DriverOptions, FinishReason, ReplyEvent};
///
/// # let model = std::path::Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/tales-qwen3moe-Q4_K_M.gguf"));
/// # let engine = forebay_engine::Engine::open(model, &forebay_engine::Options::new().threads(1))?;
/// # let driver = Driver::start(&engine, DriverOptions::new(1))?;
/// let question = driver.prompter().chat(ChatRequest::user("Tell me a story."))?;
/// let (sender, events) = mpsc::channel();
/// let ticket = driver.ask_telling(question, move |event| drop(sender.send(event)))?;
/// ticket.cancel();
///
/// let ends = events.iter().any(|event| {
///     matches!(event, Ok(ReplyEvent::End(answer)) if answer.finish_reason == FinishReason::Cancelled)
/// });
/// assert!(ends);
/// # Ok::<(), forebay_engine::Error>(())
/// ```
#[must_use = "dropping it cancels the answer"]
pub struct Ticket(Cancel);

impl Ticket {
    /// Cancels the answer, which ends where it is.
    pub fn cancel(&self) {
        self.0.cancel();
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        self.0.cancel();
    }
}

/// The events of an answer in progress, as a blocking iterator. The last item is [`ReplyEvent::End`] or an error.
/// Dropping the stream cancels the answer.
///
/// # Examples
/// ```
/// use forebay_engine::{ChatRequest, Driver, DriverOptions, ReplyEvent};
///
/// # let model = std::path::Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/tales-qwen3moe-Q4_K_M.gguf"));
/// # let engine = forebay_engine::Engine::open(model, &forebay_engine::Options::new().threads(1))?;
/// # let driver = Driver::start(&engine, DriverOptions::new(1))?;
/// let mut text = String::new();
/// for event in driver.chat(ChatRequest::user("Tell me a story."))? {
///     if let ReplyEvent::Content { text: more, .. } = event? {
///         text.push_str(&more);
///     }
///     if text.len() > 10 {
///         break; // drops the stream, which cancels the answer
///     }
/// }
/// assert!(text.len() > 10);
/// # Ok::<(), forebay_engine::Error>(())
/// ```
pub struct ReplyStream {
    events: Receiver<Result<ReplyEvent>>,
    ticket: Ticket,
    fate: Fate,
    ended: bool,
}

impl ReplyStream {
    pub(super) fn of(driver: &Driver, question: Question) -> Result<ReplyStream> {
        let (sender, events) = channel();
        let tell = move |event| {
            // If the receiver is gone, the answer is being cancelled.
            let _ = sender.send(event);
        };
        let ticket = driver.ask_telling(question, tell)?;
        Ok(ReplyStream { events, ticket, fate: driver.fate(), ended: false })
    }

    /// Cancels the answer. The events so far and the end are still delivered.
    pub fn cancel(&self) {
        self.ticket.cancel();
    }

    /// Waits for the whole answer.
    ///
    /// # Errors
    /// If the answer cannot be computed, or is cancelled before it begins. An answer that is cancelled later is not an
    /// error.
    pub fn whole(mut self) -> Result<Reply> {
        let mut draft = Draft::default();
        loop {
            match self.next() {
                Some(event) => {
                    if let Some(reply) = draft.take(event?) {
                        return Ok(reply);
                    }
                }
                // The driver ended without ending this answer.
                None => return Err(self.fate.error()),
            }
        }
    }
}

impl Iterator for ReplyStream {
    type Item = Result<ReplyEvent>;

    fn next(&mut self) -> Option<Result<ReplyEvent>> {
        if self.ended {
            return None;
        }
        let event = self.events.recv().unwrap_or_else(|_| Err(self.fate.error()));
        self.ended = matches!(event, Err(_) | Ok(ReplyEvent::End(_)));
        Some(event)
    }
}

/// Submits a question whose events go to `tell`.
pub(super) fn ask(driver: &Driver, question: Question, tell: Tell) -> Result<Ticket> {
    let cancel = Cancel::default();
    let assembler = question.assembler();
    let engine = driver.engine().clone();
    let listener = Assembling { assembler, engine, cancel: cancel.clone(), tell };
    driver.submit(question.request, cancel.clone(), Box::new(listener))?;
    Ok(Ticket(cancel))
}

/// Splits an answer into its parts and passes them on.
struct Assembling {
    assembler: Assembler,
    engine: Engine,
    cancel: Cancel,
    tell: Tell,
}

impl Listener for Assembling {
    fn event(&mut self, event: Event<'_>) {
        let Assembling { assembler, cancel, tell, .. } = self;
        if !assembler.push(event, &mut |event| tell(Ok(event))) {
            cancel.cancel();
        }
    }

    fn end(self: Box<Self>, answer: Result<Answer>) {
        let Assembling { mut assembler, engine, mut tell, .. } = *self;
        let end = answer.map(|answer| {
            let answer = assembler.finish(&engine, answer, &mut |event| tell(Ok(event)));
            ReplyEvent::End(Box::new(answer))
        });
        tell(end);
    }
}
