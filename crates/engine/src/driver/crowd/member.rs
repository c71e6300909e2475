//! One request among those that are answered together.

use std::time::Instant;

use super::Listener;
use crate::TokenId;
use crate::blocks::{Cancel, PromptMeter};
use crate::driver::prefix::Ticket;
use crate::engine::Engine;
use crate::error::Error;
use crate::experts::Meters;
use crate::generate::client::Client;
use crate::generate::{Choice, Event, Request, Writing};
use crate::session::Session;

/// An answer needs at least so much more room than it has: memory grows by pages of so many positions.
const AHEAD: usize = 64;

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
    pub client: Client,
    pub cancel: Cancel,
    pub listener: Box<dyn Listener>,
    pub writing: Writing,
    /// What has been computed of the text. Nothing, if it lost that for want of memory.
    pub session: Session,
    /// The prompt and what was written: all of it is to be computed.
    pub text: Vec<TokenId>,
    /// How much of the text is prompt.
    pub prompt: usize,
    /// Where the prompt's last turn begins: a later prompt that goes on with this one is the same up to there.
    turn: usize,
    /// Lengths of the text that the session should be able to go back to.
    pub marks: Vec<usize>,
    /// Of those, the ones that others are expected to go back to.
    pins: Vec<usize>,
    pub start: Start,
    /// Whether what is on disk may be read for it.
    pub may_read: bool,
    /// The number of the last pass it had a part in.
    pub served: u64,
    came: Instant,
    begun: Moment,
    /// Shows how much of the prompt is processed, once that has begun.
    meter: Option<PromptMeter>,
    /// When the prompt had been read.
    read: Option<Moment>,
    /// How much of the prompt its listener knows to be read.
    told: usize,
}

/// What computing waits for.
pub enum Start {
    /// Nothing.
    Now,
    /// The prompt of another one, of which `at` tokens are wanted.
    After { number: u64, at: usize },
    /// A file, of which so many tokens are wanted.
    Reading { ticket: Ticket, reach: usize },
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
        let opening = engine.opening_mark(&text);
        let (prompt, begun) = (text.len(), Moment::now(engine));
        let mut member = Member {
            number,
            client: request.client,
            cancel,
            listener,
            writing,
            session,
            text,
            prompt,
            turn: marks[0],
            marks,
            pins: Vec::new(),
            start: Start::Now,
            may_read: true,
            served: 0,
            came,
            begun,
            meter: None,
            read: None,
            told: 0,
        };
        opening.into_iter().for_each(|opening| member.pin(opening));
        Some(member)
    }
}

impl Member {
    /// Begins to compute, after what is known. Gives the number of tokens that are, if it begins for the first time.
    pub fn begin(&mut self, session: Option<Session>) -> Option<usize> {
        self.start = Start::Now;
        if let Some(session) = session {
            self.session = session;
        }
        self.pins.iter().for_each(|&pin| self.session.pin(pin));
        let known = self.session.tokens().len();
        let Member { meter, listener, prompt, session, .. } = self;
        if let Some(meter) = meter {
            session.show(meter);
            return None;
        }
        let meter = meter.insert(PromptMeter::new(known, *prompt));
        session.show(meter);
        listener.event(Event::Start(meter));
        self.writing.stats().reused_tokens = known;
        Some(known)
    }

    /// Has it able to go back to so many tokens, for others.
    pub fn pin(&mut self, at: usize) {
        self.marks.push(at);
        self.pins.push(at);
        self.session.pin(at);
    }

    /// Another conversation of its first tokens, if there is memory for it.
    pub fn fork(&mut self, len: usize) -> Option<Session> {
        let fork = self.session.fork_at(len);
        fork.inspect_err(|error| tracing::debug!("a prompt is read again: {error}")).ok()
    }

    /// Loses what was computed, and not its text.
    pub fn park(&mut self) {
        self.start = Start::Now;
        self.session = self.session.engine().session();
        self.writing.let_go();
    }

    /// Has the last token computed again, whose logits led to nothing.
    pub fn step_back(&mut self) {
        let before = self.session.tokens().len() - 1;
        self.session.go_back(self.session.reach(before));
    }

    /// Bytes that it takes soon, as far as can be said.
    pub fn need(&self) -> u64 {
        self.session.bytes_for(self.text.len() + AHEAD) + self.writing.matcher_bytes()
    }

    /// Whether it can have a part in the next pass.
    pub fn is_ready(&self) -> bool {
        matches!(self.start, Start::Now)
    }

    /// What is to be computed next, all at once if there is room.
    pub fn rest(&self) -> &[TokenId] {
        &self.text[self.session.tokens().len()..]
    }

    /// Whether only the token that was chosen last is to be computed.
    pub fn writes(&self) -> bool {
        self.text.len() > self.prompt && self.rest().len() == 1
    }

    /// More of the text has been computed. Gives whether that is news.
    pub fn tell_progress(&mut self) -> bool {
        let Some(meter) = &self.meter else { return false };
        let progress = meter.read();
        let done = progress.done as usize;
        // What is computed again after it was lost is nobody's progress.
        let is_news = done > self.told;
        if is_news {
            self.told = done;
            self.listener.event(Event::Prompt { done, total: progress.total });
        }
        is_news
    }

    /// The logits after the whole text led to this choice, of which the listener is told. Gives whether the answer goes on.
    pub fn take(&mut self, choice: Choice) -> bool {
        if self.read.is_none() {
            let now = Moment::now(self.session.engine());
            self.read = Some(now);
            let stats = self.writing.stats();
            stats.prompt_seconds = (now.at - self.begun.at).as_secs_f64();
            stats.prompt_experts = now.experts - self.begun.experts;
            stats.ttft_seconds = (now.at - self.came).as_secs_f64();
        }
        let Member { writing, listener, .. } = self;
        let token = writing.tell(choice, &mut |event| listener.event(event));
        self.text.extend(token);
        token.is_some()
    }

    /// Ends the answer and tells its listener. Gives what was computed, and where its last turn begins.
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
        let Member { mut listener, writing, session, turn, .. } = self;
        match outcome {
            Outcome::Failed(error) => listener.end(Err(error)),
            Outcome::Ended | Outcome::Cancelled => {
                let answer = writing.finish(&mut |event| listener.event(event));
                listener.end(Ok(answer));
            }
        }
        (session, turn)
    }
}

/// Why an answer ends.
pub enum Outcome {
    Ended,
    Cancelled,
    Failed(Error),
}
