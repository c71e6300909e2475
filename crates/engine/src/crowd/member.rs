//! One request among those that are answered together.

use std::time::Instant;

use super::Listener;
use crate::TokenId;
use crate::blocks::Cancel;
use crate::engine::Engine;
use crate::error::Error;
use crate::generate::{Event, Request, Writing};
use crate::session::Session;
use crate::store::Meters;

/// A request that nothing has been done for.
pub struct Asked {
    /// The order in which requests came.
    pub number: u64,
    pub request: Request,
    pub cancel: Cancel,
    pub listener: Box<dyn Listener>,
    pub came: Instant,
}

/// A request that is being answered, or was and waits for memory.
pub struct Member {
    pub number: u64,
    pub cancel: Cancel,
    pub listener: Box<dyn Listener>,
    pub writing: Writing,
    /// What has been computed of the text. Nothing, if it lost that for want of memory.
    pub session: Session,
    /// The prompt and what was written: all of it is to be computed.
    pub text: Vec<TokenId>,
    /// How much of the text is prompt.
    pub prompt: usize,
    /// Lengths of the text that the session should be able to go back to, ascending.
    pub marks: Vec<usize>,
    /// The number of the last pass it had a part in.
    pub served: u64,
    came: Instant,
    begun: Moment,
    /// When the prompt had been read.
    read: Option<Moment>,
    /// How much of the prompt its listener knows to be read.
    told: usize,
}

/// A time, and what the expert store had counted then.
#[derive(Clone, Copy)]
struct Moment {
    at: Instant,
    experts: Meters,
}

impl Moment {
    fn now(engine: &Engine) -> Moment {
        Moment { at: Instant::now(), experts: engine.meters() }
    }
}

impl Asked {
    /// Begins, with an empty conversation; or tells the listener why that cannot be.
    pub fn begin(self, engine: &Engine) -> Option<Member> {
        let Asked { number, request, cancel, listener, came } = self;
        let session = engine.session();
        let writing = session.check(&request.prompt).and_then(|()| Writing::new(engine, &request));
        let writing = match writing {
            Ok(writing) => writing,
            Err(error) => {
                listener.end(Err(error));
                return None;
            }
        };
        let text = request.prompt;
        let marks = engine.turn_marks(&text, 0).to_vec();
        let (prompt, begun) = (text.len(), Moment::now(engine));
        Some(Member {
            number,
            cancel,
            listener,
            writing,
            session,
            text,
            prompt,
            marks,
            served: 0,
            came,
            begun,
            read: None,
            told: 0,
        })
    }
}

impl Member {
    /// What is to be computed next, all at once if there is room.
    pub fn rest(&self) -> &[TokenId] {
        &self.text[self.session.tokens().len()..]
    }

    /// Whether only the token that was chosen last is to be computed.
    pub fn writes(&self) -> bool {
        self.text.len() > self.prompt && self.rest().len() == 1
    }

    /// More of the text has been computed.
    pub fn tell_progress(&mut self) {
        let reused = self.writing.stats().reused_tokens;
        let done = self.session.tokens().len().min(self.prompt).saturating_sub(reused);
        // What is computed again after it was lost is nobody's progress.
        if done > self.told {
            self.told = done;
            self.listener.event(Event::Prompt { done, total: self.prompt - reused });
        }
    }

    /// The logits after the whole text led to this token, or to the end. Tells whether the answer goes on.
    pub fn take(&mut self, chosen: Option<TokenId>) -> bool {
        if self.read.is_none() {
            let now = Moment::now(self.session.engine());
            self.read = Some(now);
            let stats = self.writing.stats();
            stats.prompt_seconds = (now.at - self.begun.at).as_secs_f64();
            stats.prompt_experts = now.experts - self.begun.experts;
            stats.ttft_seconds = (now.at - self.came).as_secs_f64();
        }
        self.text.extend(chosen);
        chosen.is_some()
    }

    /// Ends the answer and tells its listener. Gives what was computed, and how much of that is prompt.
    pub fn end(mut self, outcome: Outcome) -> (Session, usize) {
        let now = Moment::now(self.session.engine());
        if matches!(outcome, Outcome::Cancelled) {
            self.writing.cancel();
        }
        let stats = self.writing.stats();
        match self.read {
            Some(read) => {
                stats.decode_seconds = (now.at - read.at).as_secs_f64();
                stats.experts = now.experts - read.experts;
            }
            None => {
                stats.prompt_seconds = (now.at - self.begun.at).as_secs_f64();
                stats.prompt_experts = now.experts - self.begun.experts;
            }
        }
        let Member { mut listener, writing, session, prompt, .. } = self;
        match outcome {
            Outcome::Failed(error) => listener.end(Err(error)),
            Outcome::Ended | Outcome::Cancelled => {
                let answer = writing.finish(&mut |event| listener.event(event));
                listener.end(Ok(answer));
            }
        }
        (session, prompt)
    }
}

/// Why an answer ends.
pub enum Outcome {
    Ended,
    Cancelled,
    Failed(Error),
}
