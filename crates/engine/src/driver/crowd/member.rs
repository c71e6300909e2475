//! One request of the crowd, from arrival to its answer.

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

/// An answer needs memory for at least this many more tokens, because memory grows in pages of this many positions.
const AHEAD: usize = 64;

/// A request for which nothing has been computed.
pub struct Asked {
    /// The request's number, in order of arrival.
    pub number: u64,
    pub request: Request,
    pub cancel: Cancel,
    pub listener: Box<dyn Listener>,
    pub came: Instant,
}

/// A request that is being answered, or was being answered and now waits for memory.
pub struct Member {
    pub number: u64,
    pub client: Client,
    pub cancel: Cancel,
    pub listener: Box<dyn Listener>,
    pub writing: Writing,
    /// The tokens of the text that are computed. Empty if the request gave its memory to others.
    pub session: Session,
    /// The prompt and the tokens generated so far, all of which must be computed.
    pub text: Vec<TokenId>,
    /// Tokens of the text that belong to the prompt.
    pub prompt: usize,
    /// Where the prompt's last turn begins. A later prompt that continues this conversation is the same up to there.
    turn: usize,
    /// Lengths of the text that the session should be able to rewind to.
    pub marks: Vec<usize>,
    /// Those of the marks that other requests are expected to rewind to.
    pins: Vec<usize>,
    pub start: Start,
    /// Whether kept conversations may be read from disk for it.
    pub may_read: bool,
    /// The number of the last pass that computed some of its tokens.
    pub served: u64,
    came: Instant,
    begun: Moment,
    /// Shows how much of the prompt is processed, once that has begun.
    meter: Option<PromptMeter>,
    /// When the whole prompt was computed.
    read: Option<Moment>,
    /// Prompt tokens that the listener knows to be computed.
    told: usize,
}

/// What a request waits for before it is computed.
pub enum Start {
    /// Nothing.
    Now,
    /// The first `at` tokens of another request's prompt.
    After { number: u64, at: usize },
    /// A file, of which `reach` tokens will be used.
    Reading { ticket: Ticket, reach: usize },
}

/// A time, and the expert store's counters at that time.
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
    /// Starts with an empty session; or reports to the listener why that is impossible.
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
    /// Starts computing after the tokens of a session. At the first start, returns how many tokens that saves.
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

    /// Keeps a mark at this length, for other requests.
    pub fn pin(&mut self, at: usize) {
        self.marks.push(at);
        self.pins.push(at);
        self.session.pin(at);
    }

    /// A second session with the first tokens, if there is memory for it.
    pub fn fork(&mut self, len: usize) -> Option<Session> {
        let fork = self.session.fork_at(len);
        fork.inspect_err(|error| tracing::debug!("a prompt is computed again: {error}")).ok()
    }

    /// Drops what was computed. The text stays.
    pub fn park(&mut self) {
        self.start = Start::Now;
        self.session = self.session.engine().session();
        self.writing.let_go();
    }

    /// Removes the last token from the session, so that its logits are computed again.
    pub fn step_back(&mut self) {
        let before = self.session.tokens().len() - 1;
        self.session.go_back(self.session.reach(before));
    }

    /// An estimate of the bytes that it needs soon.
    pub fn need(&self) -> u64 {
        self.session.bytes_for(self.text.len() + AHEAD) + self.writing.matcher_bytes()
    }

    /// Whether it can take part in the next pass.
    pub fn is_ready(&self) -> bool {
        matches!(self.start, Start::Now)
    }

    /// The tokens to compute next, if the pass has room for all of them.
    pub fn rest(&self) -> &[TokenId] {
        &self.text[self.session.tokens().len()..]
    }

    /// Whether only the last chosen token must be computed.
    pub fn writes(&self) -> bool {
        self.text.len() > self.prompt && self.rest().len() == 1
    }

    /// Reports prompt progress to the listener. Returns false if there is none.
    pub fn tell_progress(&mut self) -> bool {
        let Some(meter) = &self.meter else { return false };
        let progress = meter.read();
        let done = progress.done as usize;
        // Recomputing lost tokens is not progress.
        let is_news = done > self.told;
        if is_news {
            self.told = done;
            self.listener.event(Event::Prompt { done, total: progress.total });
        }
        is_news
    }

    /// Handles the choice of the next token, and reports it to the listener. Returns whether the answer goes on.
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

    /// Ends the answer and reports it to the listener. Returns the session, and where its last turn begins.
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
