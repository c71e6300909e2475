//! One conversation: the tokens it holds and what the layers remember of them.

mod every;
mod snapshot;
mod together;

use std::ops::Range;
use std::sync::Arc;

use smallvec::SmallVec;

pub use every::AllLogits;
pub(crate) use snapshot::{Outline, Snapshot};

pub use together::{Step, Turn};

use crate::backend::{Batch, Logits, Routing, Sequence, SequenceState};
use crate::blocks::{Cancel, PromptMeter, PromptPart};
use crate::engine::{Computed, Engine, Pass};
use crate::error::{Error, Result};
use crate::experts::RoutingObserver;
use crate::forecast::trace::Phase;
use crate::memory::{Hold, Purpose};
use crate::{LayerIdx, TokenId};

/// While an answer is written, and in a long prompt, there is a mark after every so many tokens.
const MARK_EVERY: usize = 512;

/// Fewer tokens between control tokens are a role's name and not a text.
const OPENING: usize = 8;

/// What is shared with a snapshot that is being written is no fork's, however long.
const FROZEN: usize = usize::MAX;

/// What [`Session::extend`] did.
///
/// [`Session::extend`] has an example.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extended {
    /// Tokens that the session already held.
    pub reused: usize,
    /// Tokens that were computed.
    pub computed: usize,
}

impl Engine {
    /// A new conversation. It is there at once, also while others compute.
    pub fn session(&self) -> Session {
        Session::new(self.clone())
    }

    /// Where a prompt's last turn can be taken back to, if it is after `start`: its end, where an answer starts that may
    /// come back without its reasoning, and its last control token, as the opening that follows may come back in other
    /// words.
    pub(crate) fn turn_marks(&self, prompt: &[TokenId], start: usize) -> SmallVec<[usize; 4]> {
        let turn = prompt[start..].iter().rposition(|&token| self.tokenizer().is_control(token));
        turn.map(|turn| start + turn).into_iter().chain([prompt.len()]).collect()
    }

    /// Where a prompt's opening ends, which other conversations may have in common with it: the first control token
    /// after some text.
    pub(crate) fn opening_mark(&self, prompt: &[TokenId]) -> Option<usize> {
        let mut text = 0;
        prompt.iter().position(|&token| {
            let control = self.tokenizer().is_control(token);
            let ends = control && text >= OPENING;
            text = if control { 0 } else { text + 1 };
            ends
        })
    }
}

/// What the router of one layer chose for tokens that are computed together.
///
/// [`Session::watch_routing`] has an example.
pub struct Routed<'a> {
    /// What the tokens are.
    pub phase: Phase,
    /// The layer.
    pub layer: LayerIdx,
    /// Its choices.
    pub routing: &'a Routing,
}

/// Takes what routers choose.
///
/// [`Session::watch_routing`] has an example.
pub type RoutedWatch = dyn FnMut(Routed<'_>) + Send;

/// A watch of routers, and what they chose in the batch at hand. It is told when the batch has ended, so that nothing of the
/// caller's runs while others wait to compute.
struct Routers {
    watch: Box<RoutedWatch>,
    chosen: Vec<(Phase, LayerIdx, Routing)>,
}

/// One conversation with an [`Engine`].
///
/// # Examples
/// ```
/// use forebay_engine::Request;
///
/// # let model = std::path::Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/tales-qwen3moe-Q4_K_M.gguf"));
/// # let engine = forebay_engine::Engine::open(model, &forebay_engine::Options::new().threads(1))?;
/// let mut session = engine.session();
/// let prompt = engine.tokenizer().encode("The cat and the dog", Default::default())?;
/// session.extend(&prompt)?;
///
/// // A fork shares what was computed, and goes its own way.
/// let mut other = session.fork()?;
/// let answer = other.generate(&Request::new(&engine, prompt.clone())?.max_tokens(4), &mut |_| ())?;
/// assert_eq!(answer.stats.reused_tokens, prompt.len());
/// assert_eq!(session.tokens(), prompt);
/// # Ok::<(), forebay_engine::Error>(())
/// ```
pub struct Session {
    state: SequenceState,
    /// The memory that the engine counts for it.
    hold: Hold,
    /// What it shares with its forks, each with the number of positions up to which it does.
    shared: Vec<(usize, Arc<Hold>)>,
    tokens: Vec<TokenId>,
    /// After the last token; empty if they are not known.
    logits: Vec<f32>,
    cancel: Cancel,
    /// Of the prompt that is processed, or was last.
    meter: Option<PromptMeter>,
    /// Of the chunk at hand; kept for the next.
    positions: Vec<u32>,
    routers: Option<Routers>,
    engine: Engine,
}

impl Session {
    pub(crate) fn new(engine: Engine) -> Session {
        Session {
            state: engine.blank_state(),
            hold: Hold::none(engine.ledger(), Purpose::Conversations),
            shared: Vec::new(),
            tokens: Vec::with_capacity(engine.plan().reserved),
            logits: Vec::new(),
            cancel: Cancel::default(),
            meter: None,
            positions: Vec::new(),
            routers: None,
            engine,
        }
    }

    /// Another conversation that holds the same tokens, and goes its own way from here. Both share what they have
    /// computed; only what follows is kept twice.
    ///
    /// # Errors
    /// [`Error::Budget`] if there is no memory for what cannot be shared.
    pub fn fork(&mut self) -> Result<Session> {
        let logits = self.logits.clone();
        Ok(Session { logits, ..self.fork_at(self.tokens.len())? })
    }

    /// As [`fork`](Self::fork), of only the first `len` tokens, which must be within reach.
    ///
    /// # Errors
    /// As [`fork`](Self::fork).
    pub(crate) fn fork_at(&mut self, len: usize) -> Result<Session> {
        self.thaw();
        let mut state = self.state.fork();
        state.truncate(len);
        let (all, common) = (state.bytes_for(len), state.shared_bytes());
        let within = |shared: &[(usize, Arc<Hold>)]| -> Vec<(usize, Arc<Hold>)> {
            shared.iter().filter(|(positions, _)| *positions <= len).cloned().collect()
        };
        let counted = total(&within(&self.shared));
        if common > counted {
            self.shared.push((len, Arc::new(self.hold.split(common - counted))));
        }
        let shared = within(&self.shared);
        let mut hold = Hold::none(self.engine.ledger(), Purpose::Conversations);
        hold.resize(all.saturating_sub(total(&shared)))?;
        let tokens = self.tokens[..len].to_vec();
        Ok(Session { state, hold, shared, tokens, ..Session::new(self.engine.clone()) })
    }

    /// What was frozen for a snapshot that has been written is its own again.
    fn thaw(&mut self) {
        let (frozen, shared) =
            self.shared.drain(..).partition::<Vec<_>, _>(|(positions, _)| *positions == FROZEN);
        self.shared = shared;
        for (_, hold) in frozen {
            match Arc::try_unwrap(hold) {
                Ok(hold) => self.hold.join(hold),
                Err(hold) => self.shared.push((FROZEN, hold)),
            }
        }
    }

    /// The engine it runs on.
    pub fn engine(&self) -> &Engine {
        &self.engine
    }

    /// The tokens it holds.
    pub fn tokens(&self) -> &[TokenId] {
        &self.tokens
    }

    /// The logits after the last token; empty before the first, and where an answer was generated since.
    pub fn logits(&self) -> &[f32] {
        &self.logits
    }

    /// A handle with which another thread can stop what the session is doing. The session stays usable:
    /// it holds the tokens whose computation was complete. It computes no more until the request is
    /// [taken back](Cancel::reset), so a request that comes between two chunks is not lost.
    /// [`generate`](Self::generate) takes it back at the end of its answer; one that comes between two answers ends the next.
    pub fn cancel(&self) -> &Cancel {
        &self.cancel
    }

    /// Lets requests to stop be made through this handle, instead of the one it had.
    pub fn obey(&mut self, cancel: &Cancel) {
        self.cancel = cancel.clone();
    }

    /// Has a meter show how much of a prompt is processed from now on.
    pub(crate) fn show(&mut self, meter: &PromptMeter) {
        self.meter = Some(meter.clone());
    }

    /// What so many tokens after those held are of the prompt that a meter shows.
    fn prompt_part(&self, tokens: usize) -> Option<PromptPart> {
        let start = self.tokens.len();
        let meter = self.meter.clone().filter(|meter| meter.concerns(start))?;
        Some(PromptPart { meter, start, tokens })
    }

    /// Has a watch told what every router chooses, layer by layer, from now on; `None` ends that. It is told after each batch, when
    /// others may compute already: what routers chose is copied meanwhile. A batch that fails or is cancelled ends before its last layer.
    ///
    /// # Examples
    /// ```
    /// use std::sync::mpsc;
    ///
    /// # let model = std::path::Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/tales-qwen3moe-Q4_K_M.gguf"));
    /// # let engine = forebay_engine::Engine::open(model, &forebay_engine::Options::new().threads(1))?;
    /// # let prompt = engine.tokenizer().encode("Once upon a time", Default::default())?;
    /// let (sender, choices) = mpsc::channel();
    /// let mut session = engine.session();
    /// session.watch_routing(Some(Box::new(move |routed| {
    ///     let _ = sender.send((routed.layer, routed.routing.chosen().to_vec()));
    /// })));
    /// session.extend(&prompt)?;
    /// for (layer, experts) in choices.try_iter() {
    ///     println!("layer {}: {experts:?}", layer.0);
    ///     assert!((4..=16).contains(&experts.len()));
    /// }
    /// # Ok::<(), forebay_engine::Error>(())
    /// ```
    pub fn watch_routing(&mut self, watch: Option<Box<RoutedWatch>>) {
        self.routers = watch.map(|watch| Routers { watch, chosen: Vec::new() });
    }

    /// Makes the session hold exactly these tokens, computing only those after the longest prefix it
    /// already holds. Afterwards [`logits`](Self::logits) are those after the last token.
    ///
    /// # Errors
    /// If there is no token, more than the context holds, or one that is not in the vocabulary; if the
    /// computation fails or is cancelled.
    ///
    /// # Examples
    /// ```
    /// use forebay_engine::Extended;
    ///
    /// # let model = std::path::Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/tales-qwen3moe-Q4_K_M.gguf"));
    /// # let engine = forebay_engine::Engine::open(model, &forebay_engine::Options::new().threads(1))?;
    /// let encode = |text| engine.tokenizer().encode(text, Default::default());
    /// let mut session = engine.session();
    /// session.extend(&encode("The cat sat on the")?)?;
    /// let longer = encode("The cat sat on the mat")?;
    /// let extended = session.extend(&longer)?;
    /// assert_eq!(extended, Extended { reused: longer.len() - 1, computed: 1 });
    /// assert_eq!(session.logits().len(), engine.vocab_size());
    /// # Ok::<(), forebay_engine::Error>(())
    /// ```
    pub fn extend(&mut self, tokens: &[TokenId]) -> Result<Extended> {
        self.extend_watched(tokens, &mut |_| {})
    }

    /// As [`extend`](Self::extend), and tells of the prompt's meter: before the first chunk, and after each. Another thread may
    /// read it in between.
    ///
    /// # Errors
    /// As [`extend`](Self::extend).
    pub fn extend_watched(
        &mut self,
        tokens: &[TokenId],
        watch: &mut dyn FnMut(&PromptMeter),
    ) -> Result<Extended> {
        self.check(tokens)?;
        let same = self.tokens.iter().zip(tokens).take_while(|(a, b)| a == b).count();
        if same == tokens.len() && same == self.tokens.len() && !self.logits.is_empty() {
            return Ok(Extended { reused: same, computed: 0 });
        }
        // The last token is computed again for its logits, if nothing else.
        let reused = self.state.reach(same.min(tokens.len() - 1));
        self.go_back(reused);
        let meter = PromptMeter::new(reused, tokens.len());
        self.show(&meter);
        watch(&meter);
        let engine = self.engine.clone();
        while self.tokens.len() < tokens.len() {
            let end = tokens.len().min(self.tokens.len() + engine.chunk());
            let last = end == tokens.len();
            let computed =
                self.compute_chunk(&engine, &tokens[..end], if last { end - 1..end } else { 0..0 })?;
            self.keep(computed, &tokens[self.tokens.len()..end])?;
            watch(&meter);
        }
        Ok(Extended { reused, computed: tokens.len() - reused })
    }

    /// Adds one token after those it holds.
    ///
    /// # Errors
    /// As [`extend`](Self::extend).
    pub fn push(&mut self, token: TokenId) -> Result<()> {
        let engine = self.engine.clone();
        let computed = self.compute_token(&engine, token)?;
        self.keep(computed, &[token])
    }

    /// As [`push`](Self::push), and has something chosen by the logits, which it does not keep: where they are far away, only
    /// what is asked of them is fetched. `choose` runs while the backend is held, so nothing of a caller's may run in it.
    ///
    /// # Errors
    /// As [`extend`](Self::extend), and those of `choose`.
    pub(crate) fn push_choosing<T>(
        &mut self,
        token: TokenId,
        choose: impl FnOnce(&mut Logits<'_>) -> Result<T>,
    ) -> Result<T> {
        let engine = self.engine.clone();
        let mut computed = self.compute_token(&engine, token)?;
        let (_, mut logits) = computed.next_row()?.expect("the token's logits are wanted");
        let chosen = choose(&mut logits)?;
        computed.finish()?;
        self.logits.clear();
        self.commit(&[token]);
        Ok(chosen)
    }

    /// The longest prefix of what it holds, of `len` tokens at most, that it can go back to.
    pub(crate) fn reach(&self, len: usize) -> usize {
        self.state.reach(len.min(self.tokens.len()))
    }

    /// Bytes that it takes when it has `len` tokens, what it shares included.
    pub(crate) fn bytes_for(&self, len: usize) -> u64 {
        self.state.bytes_for(len)
    }

    /// Bytes that it takes; of what it shares, its part.
    pub(crate) fn held_bytes(&self) -> u64 {
        let part = |(_, hold): &(usize, Arc<Hold>)| hold.bytes() / Arc::strong_count(hold) as u64;
        self.hold.bytes() + self.shared.iter().map(part).sum::<u64>()
    }

    /// What it holds alone is kept for later prompts from now on, or is a conversation's that goes on.
    pub(crate) fn hold_for(&mut self, purpose: Purpose) {
        self.hold.turn_to(purpose);
    }

    /// Has it able to go back to `len` tokens when they have been computed, however many follow.
    pub(crate) fn pin(&mut self, len: usize) {
        self.state.pin(len);
    }

    /// # Errors
    /// If these cannot be the tokens of a conversation.
    pub(crate) fn check(&self, tokens: &[TokenId]) -> Result<()> {
        let (vocab, limit) = (self.engine.vocab_size(), self.engine.context());
        if tokens.is_empty() {
            return Err(Error::Invalid("the prompt has no tokens".into()));
        }
        if tokens.len() > limit {
            return Err(Error::Context { tokens: tokens.len(), limit });
        }
        match tokens.iter().find(|t| t.0 as usize >= vocab) {
            Some(TokenId(id)) => {
                Err(Error::Invalid(format!("token {id} is not in the vocabulary of {vocab} tokens")))
            }
            None => Ok(()),
        }
    }

    /// Lets go of all tokens after the first `len`, which must be within reach.
    pub(crate) fn go_back(&mut self, len: usize) {
        if len < self.tokens.len() {
            self.tokens.truncate(len);
            self.logits.clear();
            self.shared.retain(|(shared, _)| *shared <= len);
        }
        // The layers may hold more all the same: of a batch that failed or whose watcher panicked.
        self.state.truncate(len);
    }

    /// Marks places among the `count` tokens that come next which a later prompt may go back to: these, and now and then
    /// one between.
    fn mark(&mut self, count: usize, places: &[usize]) {
        let start = self.tokens.len();
        let end = start + count;
        let between = (start / MARK_EVERY + 1..=end / MARK_EVERY).map(|n| n * MARK_EVERY);
        let places = places.iter().copied().filter(|&place| start < place && place <= end);
        let mut places: SmallVec<[usize; 8]> = between.chain(places).collect();
        places.sort_unstable();
        places.into_iter().for_each(|place| self.state.mark(place, end));
    }

    /// Has the engine count what the conversation takes when it has `len` tokens, and make room for that.
    fn make_room(&mut self, len: usize) -> Result<()> {
        let shared = total(&self.shared);
        match self.hold.resize(self.state.bytes_for(len).saturating_sub(shared)) {
            Err(Error::Budget { .. }) if !self.state.marks().is_empty() => {
                // Going back is a convenience; going on is not.
                self.state.forget_marks();
                self.hold.resize(self.state.bytes_for(len).saturating_sub(shared))
            }
            other => other,
        }
    }

    /// Computes the next chunk of a text, up to its end, with the logits of the `wanted` positions.
    fn compute_chunk<'e>(
        &mut self,
        engine: &'e Engine,
        text: &[TokenId],
        wanted: Range<usize>,
    ) -> Result<Computed<'e>> {
        let start = self.tokens.len();
        self.mark(text.len() - start, &engine.turn_marks(text, start));
        let rows = wanted.start.saturating_sub(start)..wanted.end.saturating_sub(start);
        self.compute(engine, Phase::Prompt, &text[start..], rows)
    }

    /// Computes a token after those held, with its logits.
    fn compute_token<'e>(&mut self, engine: &'e Engine, token: TokenId) -> Result<Computed<'e>> {
        if self.tokens.len() == engine.context() {
            return Err(Error::Context { tokens: self.tokens.len() + 1, limit: engine.context() });
        }
        self.check(&[token])?;
        self.go_back(self.tokens.len());
        self.mark(1, &[]);
        self.compute(engine, Phase::Answer, &[token], 0..1)
    }

    /// Computes tokens after those held. The session is as it was until they are [committed](Self::commit).
    fn compute<'e>(
        &mut self,
        engine: &'e Engine,
        phase: Phase,
        tokens: &[TokenId],
        wanted: Range<usize>,
    ) -> Result<Computed<'e>> {
        let start = self.tokens.len();
        self.make_room(start + tokens.len())?;
        let prompt = self.prompt_part(tokens.len());
        self.positions.clear();
        self.positions.extend((start..start + tokens.len()).map(|p| p as u32));
        let mut sequences = [Sequence { state: &mut self.state, rows: 0..tokens.len() }];
        let mut batch = Batch { tokens, positions: &self.positions, sequences: &mut sequences };
        let mut record = self.routers.as_mut().map(|routers| {
            routers.chosen.clear();
            |layer: LayerIdx, routing: &Routing| routers.chosen.push((phase, layer, routing.clone()))
        });
        let observer = record.as_mut().map(|record| record as &mut RoutingObserver<'_>);
        let pass = Pass { cancel: &self.cancel, prompts: prompt.as_slice(), observer };
        let computed = engine.compute().forward(&mut batch, wanted, pass);
        if computed.is_err() {
            self.tell_routers();
        }
        computed
    }

    /// Keeps the logits after the last token, if these were asked for, and the tokens.
    fn keep(&mut self, mut computed: Computed<'_>, tokens: &[TokenId]) -> Result<()> {
        // Without tokens that were computed, nobody knows what they are of.
        self.logits.clear();
        let mut logits = std::mem::take(&mut self.logits);
        if let Some((_, mut row)) = computed.next_row()? {
            logits.extend_from_slice(row.all()?);
        }
        computed.finish()?;
        self.logits = logits;
        self.commit(tokens);
        Ok(())
    }

    /// The tokens have been computed, and the backend is free.
    fn commit(&mut self, tokens: &[TokenId]) {
        self.tokens.extend_from_slice(tokens);
        self.state.settle(self.tokens.len());
        if let Some(meter) = &self.meter {
            meter.set(self.tokens.len() as f64);
        }
        self.tell_routers();
    }

    /// Has the watch of routers told what was chosen in the last batch.
    fn tell_routers(&mut self) {
        if let Some(Routers { watch, chosen }) = &mut self.routers {
            for (phase, layer, routing) in chosen.drain(..) {
                watch(Routed { phase, layer, routing: &routing });
            }
        }
    }
}

/// Bytes of what is shared.
fn total(shared: &[(usize, Arc<Hold>)]) -> u64 {
    shared.iter().map(|(_, hold)| hold.bytes()).sum()
}
