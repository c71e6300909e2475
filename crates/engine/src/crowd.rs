//! Many answers at once: their conversations take every step together, so that each expert is read once for all.

use std::collections::VecDeque;

use crate::TokenId;
use crate::blocks::Cancel;
use crate::engine::Engine;
use crate::error::{Error, Result};
use crate::generate::{Answer, Request, Writing};
use crate::session::{Session, Turn};

/// Requests that are answered together. What an answer is does not depend on what else is answered meanwhile.
pub struct Crowd {
    engine: Engine,
    /// The most that are answered at once.
    most: usize,
    waiting: VecDeque<(usize, Request)>,
    active: Vec<Member>,
}

/// A request that is being answered.
struct Member {
    number: usize,
    request: Request,
    session: Session,
    writing: Writing,
    /// The token to be computed next, when all of the prompt has been.
    next: Option<TokenId>,
    /// Why it ended early, or that it ended.
    outcome: Option<Result<()>>,
}

impl Member {
    fn new(engine: &Engine, number: usize, request: Request) -> Result<Member, (usize, Error)> {
        let limit = engine.context();
        let tokens = request.prompt.len();
        if tokens > limit {
            return Err((number, Error::Context { tokens, limit }));
        }
        if tokens == 0 {
            return Err((number, Error::Invalid("the prompt has no tokens".into())));
        }
        let writing = Writing::new(engine, &request).map_err(|error| (number, error))?;
        Ok(Member { number, session: engine.session(), request, writing, next: None, outcome: None })
    }
}

/// A request that has been answered, or cannot be.
pub struct Finished {
    /// The number it was given.
    pub number: usize,
    /// The answer.
    pub answer: Result<Answer>,
}

impl Crowd {
    /// Nobody yet; later up to `most` at once.
    pub fn new(engine: &Engine, most: usize) -> Crowd {
        Crowd { engine: engine.clone(), most: most.max(1), waiting: VecDeque::new(), active: Vec::new() }
    }

    /// Adds a request under a number.
    pub fn add(&mut self, number: usize, request: Request) {
        self.waiting.push_back((number, request));
    }

    /// Requests that have not been answered.
    pub fn len(&self) -> usize {
        self.waiting.len() + self.active.len()
    }

    /// Whether all have been answered.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Takes one step: a token for everybody who is writing, and as much of the prompts of the others as one pass takes.
    /// Gives the number of tokens written, and tells `finished` of requests that have ended.
    ///
    /// # Errors
    /// If the computation fails or is cancelled. What concerns one request alone is told with it.
    pub fn step(&mut self, cancel: &Cancel, finished: &mut dyn FnMut(Finished)) -> Result<usize> {
        while self.active.len() < self.most {
            let Some((number, request)) = self.waiting.pop_front() else { break };
            match Member::new(&self.engine, number, request) {
                Ok(member) => self.active.push(member),
                Err((number, error)) => finished(Finished { number, answer: Err(error) }),
            }
        }
        let written = loop {
            match self.pass(cancel) {
                Ok(written) => break written,
                // Not all have room beside each other: the last one waits.
                Err(Error::Budget { .. }) if self.active.len() > 1 => {
                    let Member { number, request, .. } = self.active.pop().expect("there are several");
                    self.waiting.push_front((number, request));
                    self.most = self.active.len();
                    tracing::info!("memory has room for {} conversations at once", self.most);
                }
                Err(error) => return Err(error),
            }
        };
        let mut i = 0;
        while i < self.active.len() {
            match self.active[i].outcome.take() {
                None => i += 1,
                Some(outcome) => {
                    let Member { number, writing, .. } = self.active.remove(i);
                    finished(Finished { number, answer: outcome.map(|()| writing.finish(&mut |_| {})) });
                }
            }
        }
        Ok(written)
    }

    /// Computes what comes next for as many as one pass takes.
    fn pass(&mut self, cancel: &Cancel) -> Result<usize> {
        let mut room = self.engine.step_size();
        let mut turns = Vec::new();
        let mut writings = Vec::new();
        let mut members = Vec::new();
        let mut order: Vec<(usize, &mut Member)> = self.active.iter_mut().enumerate().collect();
        // Those who write go first, so that nobody waits for a prompt.
        order.sort_by_key(|(_, member)| member.next.is_none());
        for (i, Member { session, request, writing, next, .. }) in order {
            let rest = match next {
                Some(token) => std::slice::from_ref(token),
                None => &request.prompt[session.tokens().len()..],
            };
            let count = rest.len().min(room);
            if count > 0 {
                room -= count;
                turns.push(Turn { session, tokens: &rest[..count], logits: count == rest.len() });
                writings.push(writing);
                members.push((i, None));
            }
        }
        self.engine.step(&mut turns, cancel, |turn, logits| {
            members[turn].1 = Some(writings[turn].choose(logits, &mut |_| {}));
        })?;
        let mut written = 0;
        for (i, chosen) in members {
            let member = &mut self.active[i];
            match chosen {
                None => {}
                Some(Ok(next)) => {
                    written += 1;
                    member.next = next;
                    member.outcome = next.is_none().then_some(Ok(()));
                }
                Some(Err(error)) => member.outcome = Some(Err(error)),
            }
        }
        Ok(written)
    }
}
