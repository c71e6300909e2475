//! Many answers at once. All running requests share each pass, so that each expert is read once for all of them.
//!
//! Requests come and go between passes. A pass computes one token for each request that generates, and parts of other
//! requests' prompts. If no request generates, these parts are as large as possible. Otherwise they are so small that
//! the generating requests do not wait long (`pace.rs`).

mod batch;
mod member;
mod pace;
mod place;
mod queue;

use std::thread::sleep;
use std::time::{Duration, Instant};

use batch::{Done, Failure};
use member::{Asked, Member, Outcome, Start};
use pace::{Pace, divide};
use queue::{Queue, Waiting};

use crate::blocks::Cancel;
use crate::driver::prefix::{PrefixMeters, PrefixOptions, Prefixes, Room};
use crate::engine::Engine;
use crate::error::{Error, Result};
use crate::generate::{Answer, Event, Request};

/// The longest time between two tokens of an answer while prompts are processed, if the machine is fast enough.
const PACE: Duration = Duration::from_millis(500);

/// How long a step waits for a file when nothing can be computed.
const MOMENT: Duration = Duration::from_millis(20);

/// How long an answer waits for memory that requests hold which are not being answered yet.
const PATIENCE: Duration = Duration::from_secs(10);

/// Receives the events of a request.
///
/// [`Crowd`] has an example.
pub trait Listener: Send {
    /// Handles an event.
    fn event(&mut self, event: Event<'_>);

    /// Handles the end of the request: its answer, or an error.
    fn end(self: Box<Self>, answer: Result<Answer>);
}

/// Options of a [`Crowd`].
///
/// # Examples
/// ```
/// use std::time::Duration;
///
/// use forebay_engine::CrowdOptions;
///
/// let mut options = CrowdOptions::new(8);
/// options.share = 2; // of one client's requests, two are answered at once
/// options.pace = Duration::from_millis(200);
/// ```
#[derive(Clone, Debug)]
pub struct CrowdOptions {
    /// The most requests that are answered at once, if they fit memory.
    pub most: usize,
    /// The most requests of one [client](crate::Client) that are answered at once.
    pub share: usize,
    /// The target for the time between two tokens of an answer while prompts are processed.
    pub pace: Duration,
    /// The prefix cache's options; `None` turns it off.
    pub prefixes: Option<PrefixOptions>,
}

impl CrowdOptions {
    /// Options for this many requests at once, all of them of one client if there is no other, and no prefix cache.
    pub fn new(most: usize) -> CrowdOptions {
        CrowdOptions { most, share: most, pace: PACE, prefixes: None }
    }
}

/// Requests that are answered together. An answer does not depend on the other requests.
///
/// # Examples
/// ```
/// use forebay_engine::{Answer, Cancel, Crowd, CrowdOptions, Event, Listener, Request, Result};
///
/// struct Print;
///
/// impl Listener for Print {
///     fn event(&mut self, event: Event<'_>) {
///         if let Event::Text(text) = event {
///             print!("{text}");
///         }
///     }
///
///     fn end(self: Box<Self>, answer: Result<Answer>) {
///         println!("[{}]", answer.map_or("failed", |answer| answer.finish_reason.name()));
///     }
/// }
///
/// # let model = std::path::Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/tales-qwen3moe-Q4_K_M.gguf"));
/// # let engine = forebay_engine::Engine::open(model, &forebay_engine::Options::new().threads(1))?;
/// let mut crowd = Crowd::new(&engine, CrowdOptions::new(2));
/// for text in ["The cat", "The dog"] {
///     let prompt = engine.tokenizer().encode(text, Default::default())?;
///     crowd.add(Request::new(&engine, prompt)?.max_tokens(4), Cancel::default(), Box::new(Print));
/// }
/// while !crowd.is_empty() {
///     crowd.step(&Cancel::default())?;
/// }
/// # Ok::<(), forebay_engine::Error>(())
/// ```
pub struct Crowd {
    engine: Engine,
    options: CrowdOptions,
    waiting: Queue,
    active: Vec<Member>,
    prefixes: Option<Prefixes>,
    pace: Pace,
    /// Requests added so far.
    came: u64,
    /// Passes computed so far.
    passes: u64,
    idle_steps: u64,
    /// Tokens generated so far.
    written: usize,
    /// Whether a deadlock of requests was logged.
    warned: bool,
    /// Bytes for all conversations, after that turned out to be too little for all running requests.
    room: Option<u64>,
    /// Since when no request can continue, because requests that are not being answered yet hold the memory.
    stalled: Option<Instant>,
}

/// The part of a pass that one request gets.
#[derive(Clone, Copy)]
struct Share {
    number: u64,
    tokens: usize,
}

impl Crowd {
    /// A crowd without requests.
    pub fn new(engine: &Engine, mut options: CrowdOptions) -> Crowd {
        options.most = options.most.max(1);
        options.share = options.share.max(1);
        Crowd {
            engine: engine.clone(),
            pace: Pace::new(options.pace),
            prefixes: options.prefixes.clone().map(|prefixes| Prefixes::new(engine, prefixes)),
            options,
            waiting: Queue::default(),
            active: Vec::new(),
            came: 0,
            passes: 0,
            idle_steps: 0,
            written: 0,
            warned: false,
            room: None,
            stalled: None,
        }
    }

    /// Adds a request. `cancel` ends only this request.
    pub fn add(&mut self, request: Request, cancel: Cancel, listener: Box<dyn Listener>) {
        let number = self.came;
        self.came += 1;
        let asked = Asked { number, request, cancel, listener, came: Instant::now() };
        self.waiting.insert(Waiting::New(Box::new(asked)));
    }

    /// The number of requests that are being answered.
    pub fn running(&self) -> usize {
        self.active.len()
    }

    /// The number of requests that wait for a place.
    pub fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// Whether there are no requests.
    pub fn is_empty(&self) -> bool {
        self.active.is_empty() && self.waiting.is_empty()
    }

    /// The number of steps that could compute nothing although there were requests.
    pub fn idle_steps(&self) -> u64 {
        self.idle_steps
    }

    /// The counters of the prefix cache.
    pub fn prefix_meters(&self) -> PrefixMeters {
        self.prefixes.as_ref().map_or_else(PrefixMeters::default, Prefixes::meters)
    }

    /// Writes the prefix cache to disk in the background, before shutdown or when there is nothing to do. Dropping the
    /// crowd waits until it is written.
    pub fn save_prefixes(&mut self) {
        if let Some(prefixes) = &mut self.prefixes {
            prefixes.save();
        }
    }

    /// Computes one pass: a token for each request that generates, and parts of other requests' prompts. Returns the
    /// number of tokens generated. Listeners receive the events of their requests. If the computation fails, only the
    /// requests that are affected end with the error, unless [the device is lost](Engine::lost).
    ///
    /// A pass stops early if most of its requests have been cancelled. If all requests wait for files, the step waits a
    /// short time and counts as [idle](Self::idle_steps).
    ///
    /// # Errors
    /// [`Error::Cancelled`] if `cancel` was cancelled. Then the state is the same as before the step, except that some
    /// requests may have a token more if the model has several stages.
    pub fn step(&mut self, cancel: &Cancel) -> Result<usize> {
        self.dismiss();
        self.take_files(Duration::ZERO);
        self.follow();
        self.admit();
        if !self.active.iter().any(Member::is_ready) {
            self.rest();
            return Ok(0);
        }
        let before = self.written;
        loop {
            self.passes += 1;
            let parts = self.parts();
            match self.compute(&parts, cancel) {
                Ok(()) => break,
                Err(Error::Cancelled) => {
                    cancel.check()?;
                    break;
                }
                Err(error @ Error::Budget { have, .. }) => match self.make_room(have) {
                    Room::Made => {}
                    Room::Soon => break,
                    Room::None => {
                        self.fail(&parts, &error);
                        break;
                    }
                },
                Err(error) => {
                    self.end_all(&error);
                    break;
                }
            }
        }
        self.dismiss();
        Ok(self.written - before)
    }

    /// Ends the cancelled requests.
    fn dismiss(&mut self) {
        while let Some(i) = self.active.iter().position(|member| member.cancel.is_cancelled()) {
            let member = self.active.remove(i);
            self.end(member, Outcome::Cancelled);
        }
        for waiting in self.waiting.take_cancelled() {
            let member = match waiting {
                Waiting::New(asked) => asked.begin(&self.engine),
                Waiting::Parked(member) => Some(*member),
            };
            if let Some(member) = member {
                self.end(member, Outcome::Cancelled);
            }
        }
    }

    /// Starts waiting requests, as far as places and memory allow.
    fn admit(&mut self) {
        while self.active.len() < self.options.most {
            let active = &self.active;
            let places = |client| active.iter().filter(|member| member.client.number == client).count();
            let member = match self.waiting.next(places, self.options.share) {
                None => break,
                Some(Waiting::New(asked)) => asked.begin(&self.engine),
                Some(Waiting::Parked(member)) => Some(*member),
            };
            let Some(mut member) = member else { continue };
            if !self.has_room_for(&member) {
                self.waiting.insert(Waiting::Parked(Box::new(member)));
                break;
            }
            match member.writing.prepare() {
                Ok(()) => self.place(member),
                Err(error @ Error::Budget { .. }) => {
                    let room = match self.active.is_empty() {
                        true => self.make_room_for_one(),
                        false => Room::Soon,
                    };
                    match room {
                        Room::None => self.end(member, Outcome::Failed(error)),
                        Room::Made => self.waiting.insert(Waiting::Parked(Box::new(member))),
                        Room::Soon => {
                            self.waiting.insert(Waiting::Parked(Box::new(member)));
                            break;
                        }
                    }
                }
                Err(error) => self.end(member, Outcome::Failed(error)),
            }
        }
    }

    /// Waits a short time for files, if no running request can be computed.
    fn rest(&mut self) {
        if self.active.is_empty() {
            return;
        }
        self.idle_steps += 1;
        if self.active.iter().any(|member| matches!(member.start, Start::Reading { .. })) {
            self.take_files(MOMENT);
            return;
        }
        // `leader` explains why this cannot happen. If it does happen, it must not keep a CPU busy, and the log must
        // say so.
        if !std::mem::replace(&mut self.warned, true) {
            tracing::error!("{} requests wait for each other, which is a bug", self.active.len());
        }
        sleep(MOMENT);
    }

    /// Whether another request fits, judging by the last time that memory was too small.
    fn has_room_for(&mut self, member: &Member) -> bool {
        if self.active.is_empty() {
            self.room = None;
        }
        self.room.is_none_or(|room| self.active_need() + member.need() <= room)
    }

    /// Bytes that the running requests need soon.
    fn active_need(&self) -> u64 {
        self.active.iter().map(Member::need).sum()
    }

    /// Frees memory after a pass needed more than the `have` bytes that exist: first from the prefix cache, then by
    /// parking the request that came last.
    fn make_room(&mut self, have: u64) -> Room {
        match self.take_from_kept() {
            Room::None => {}
            made => return made,
        }
        let mut holders: Vec<usize> =
            (0..self.active.len()).filter(|&i| self.holds_memory(&self.active[i])).collect();
        holders.sort_by_key(|&i| self.active[i].number);
        let [_, .., last] = holders[..] else { return self.wait_for_requests() };
        self.park(last);
        self.room = Some(have);
        tracing::info!("memory suffices for {} conversations at the moment", holders.len() - 1);
        Room::Made
    }

    /// Frees memory if only one request needs some, and no other running request holds any.
    fn make_room_for_one(&mut self) -> Room {
        match self.take_from_kept() {
            Room::None => self.wait_for_requests(),
            made => made,
        }
    }

    /// Parks a running request: it drops its session and waits for memory.
    fn park(&mut self, i: usize) {
        let mut member = self.active.remove(i);
        member.park();
        self.waiting.insert(Waiting::Parked(Box::new(member)));
    }

    /// Whether parking the request would free memory.
    fn holds_memory(&self, member: &Member) -> bool {
        member.served == self.passes
            || !member.session.tokens().is_empty()
            || member.writing.matcher_bytes() > 0
    }

    /// Frees memory of the prefix cache.
    fn take_from_kept(&mut self) -> Room {
        let Some(prefixes) = &mut self.prefixes else { return Room::None };
        let room = prefixes.give_way();
        if matches!(room, Room::Soon) {
            // Writing takes a while, in which requests come and leave, so wait only a moment at a time.
            self.idle_steps += 1;
            prefixes.wait_for_write(MOMENT);
        }
        room
    }

    /// Only one running request holds memory, and it needs more. Requests that are not being answered yet hold the
    /// rest. They will return it or start themselves, so this request waits, but only for a limited time.
    fn wait_for_requests(&mut self) -> Room {
        let own: u64 = self.active.iter().map(|member| member.writing.grammar_bytes()).sum();
        let since = *self.stalled.get_or_insert_with(Instant::now);
        if self.engine.held_by_requests() <= own || since.elapsed() > PATIENCE {
            self.stalled = None;
            return Room::None;
        }
        self.idle_steps += 1;
        sleep(MOMENT);
        Room::Soon
    }

    /// Parks requests that had no memory to find the tokens that their grammars allow. A request that is alone tries
    /// again, as long as memory may become free.
    fn wait_for_memory(&mut self, mut short: Vec<(u64, Error)>) {
        short.sort_by_key(|(number, _)| *number);
        while let Some((number, error)) = short.pop() {
            let Some(i) = self.index(number) else { continue };
            let is_alone =
                !self.active.iter().enumerate().any(|(j, other)| j != i && self.holds_memory(other));
            if !is_alone {
                self.park(i);
                self.room = Some(self.active_need());
                continue;
            }
            self.active[i].step_back();
            if let Room::None = self.make_room_for_one() {
                let member = self.active.remove(i);
                self.end(member, Outcome::Failed(error));
            }
        }
    }

    /// Ends the requests that took part in a failed pass.
    fn fail(&mut self, parts: &[Share], error: &Error) {
        for i in (0..self.active.len()).rev() {
            if parts.iter().any(|part| part.number == self.active[i].number) {
                let member = self.active.remove(i);
                self.end(member, Outcome::Failed(error.repeat()));
            }
        }
    }

    /// Ends all requests with this error.
    pub(crate) fn end_all(&mut self, error: &Error) {
        for member in std::mem::take(&mut self.active) {
            self.end(member, Outcome::Failed(error.repeat()));
        }
        for waiting in self.waiting.take_all() {
            match waiting {
                Waiting::New(asked) => asked.listener.end(Err(error.repeat())),
                Waiting::Parked(member) => self.end(*member, Outcome::Failed(error.repeat())),
            }
        }
    }

    /// Computes these parts of the running requests, in several batches at once if the model has several stages.
    ///
    /// # Errors
    /// Only errors that concern all requests: a cancelled pass, not enough memory, a lost device.
    fn compute(&mut self, parts: &[Share], cancel: &Cancel) -> Result<()> {
        let writes = |part: &Share| self.member(part.number).is_some_and(|member| member.writes());
        let parts: Vec<_> = parts.iter().map(|part| (*part, writes(part))).collect();
        let batches = batch::divide_batches(&parts, self.engine.stages());
        for (part, _) in &parts {
            if let Some(i) = self.index(part.number) {
                self.active[i].served = self.passes;
            }
        }
        let start = Instant::now();
        let computed = batch::compute(&self.engine, &mut self.active, &batches, cancel);
        let prompt_rows = computed.iter().flatten().map(|done| done.prompt_rows).sum();
        self.pace.learn(prompt_rows, start.elapsed().as_secs_f64());
        let mut result = Ok(());
        for (batch, computed) in batches.iter().zip(computed) {
            let handled = match computed {
                Ok(done) => {
                    self.take(done);
                    Ok(())
                }
                Err(failure) => self.repeat(batch, failure, cancel),
            };
            result = result.and(handled);
        }
        result
    }

    /// Handles a failed batch. An error such as an unreadable expert may concern only some of its requests. So each half
    /// is tried again without the other, until only the requests that fail on their own are left. Repeating a batch is
    /// safe because bits do not depend on which requests share it.
    ///
    /// # Errors
    /// As [`compute`](Self::compute).
    fn repeat(&mut self, parts: &[Share], failure: Failure, cancel: &Cancel) -> Result<()> {
        match failure {
            Failure::Pass(error @ (Error::Cancelled | Error::Budget { .. } | Error::DeviceLost(_)))
            | Failure::Logits(error @ Error::DeviceLost(_)) => Err(error),
            Failure::Pass(error) if parts.len() > 1 => {
                tracing::warn!(
                    "a pass for {} requests failed, and is repeated in halves: {error}",
                    parts.len()
                );
                let (first, second) = parts.split_at(parts.len() / 2);
                self.compute(first, cancel)?;
                self.compute(second, cancel)
            }
            Failure::Pass(error) | Failure::Logits(error) => {
                self.fail(parts, &error);
                Ok(())
            }
        }
    }

    /// Reports what a batch computed and chose to the listeners.
    fn take(&mut self, done: Done) {
        let mut short = Vec::new();
        for (number, chosen) in done.chosen {
            let Some(i) = self.index(number) else { continue };
            let member = &mut self.active[i];
            if member.tell_progress() {
                self.stalled = None;
            }
            let outcome = match chosen {
                None => continue,
                Some(Ok(choice)) => {
                    self.stalled = None;
                    self.written += 1;
                    if member.take(choice) {
                        continue;
                    }
                    Outcome::Ended
                }
                Some(Err(error @ Error::Budget { .. })) => {
                    short.push((number, error));
                    continue;
                }
                Some(Err(error)) => Outcome::Failed(error),
            };
            let member = self.active.remove(i);
            self.end(member, outcome);
        }
        self.wait_for_memory(short);
    }

    /// The place of a running request.
    fn index(&self, number: u64) -> Option<usize> {
        self.active.iter().position(|member| member.number == number)
    }

    fn member(&self, number: u64) -> Option<&Member> {
        self.index(number).map(|i| &self.active[i])
    }

    /// Divides the next pass among the running requests.
    fn parts(&self) -> Vec<Share> {
        let mut shares = vec![0; self.active.len()];
        let all = self.engine.step_size();
        let ready = (0..self.active.len()).filter(|&i| self.active[i].is_ready());
        let (mut writers, mut readers): (Vec<usize>, Vec<usize>) =
            ready.partition(|&i| self.active[i].writes());
        // If not all generating requests fit a pass, those that waited longest go first, and prompts get a quarter.
        writers.sort_by_key(|&i| self.active[i].served);
        writers.truncate(if readers.is_empty() { all } else { all - all / 4 });
        writers.iter().for_each(|&i| shares[i] = 1);
        readers.sort_by_key(|&i| self.active[i].number);
        let room = all - writers.len();
        let room = if writers.is_empty() { room } else { room.min(self.pace.share()) };
        let needs: Vec<usize> = readers.iter().map(|&i| self.active[i].rest().len()).collect();
        for (i, share) in readers.into_iter().zip(divide(room, &needs)) {
            shares[i] = share;
        }
        let parts = self.active.iter().zip(shares).filter(|(_, tokens)| *tokens > 0);
        parts.map(|(member, tokens)| Share { number: member.number, tokens }).collect()
    }

    fn end(&mut self, member: Member, outcome: Outcome) {
        // A session that failed must not be reused.
        let sound = !matches!(outcome, Outcome::Failed(_));
        let tenant = member.client.tenant;
        let (session, turn) = member.end(outcome);
        if let Some(prefixes) = self.prefixes.as_mut().filter(|_| sound && !session.tokens().is_empty()) {
            prefixes.keep(tenant, session, turn);
        }
        // Other conversations may have shrunk since, so the limit is raised a little.
        self.room = self.room.map(|room| room + room / 16);
    }
}
