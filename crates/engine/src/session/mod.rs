//! One conversation: its tokens, and what the layers keep for them.

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
use crate::chain::{Part, Remote};
use crate::engine::{Computed, Engine, Pass};
use crate::error::{Error, Result};
use crate::experts::RoutingObserver;
use crate::forecast::trace::Phase;
use crate::memory::{Hold, Purpose};
use crate::{LayerIdx, TokenId};

/// Long prompts and answers get a mark after this many tokens.
const MARK_EVERY: usize = 512;

/// Fewer tokens than this between two control tokens are a role's name, not text.
const OPENING: usize = 8;

/// Marks memory shared with a snapshot that is being written. No fork is that long.
const FROZEN: usize = usize::MAX;

/// The result of [`Session::extend`].
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
    /// The hidden states that the stages before this engine's compute of a batch; `None` if there are none.
    fn stream<'a>(
        &self,
        parts: impl FnOnce() -> Vec<Part<'a>>,
        cancel: &Cancel,
        prompts: &[PromptPart],
    ) -> Result<Option<Vec<f32>>> {
        self.chain().map(|chain| chain.forward(&parts(), cancel, prompts)).transpose()
    }

    /// Starts a new conversation. It does not wait for computations in progress.
    pub fn session(&self) -> Session {
        Session::new(self.clone())
    }

    /// Positions after `start` to which a prompt's last turn can be rewound. One is the prompt's end, because the next
    /// prompt may leave out the answer's reasoning. The other is the last control token, because the next prompt may
    /// open the turn with other words.
    pub(crate) fn turn_marks(&self, prompt: &[TokenId], start: usize) -> SmallVec<[usize; 4]> {
        let turn = prompt[start..].iter().rposition(|&token| self.tokenizer().is_control(token));
        turn.map(|turn| start + turn).into_iter().chain([prompt.len()]).collect()
    }

    /// The end of a prompt's opening, which other conversations may share: the first control token after some text.
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

/// The experts that one layer's router chose for tokens that were computed together.
///
/// [`Session::watch_routing`] has an example.
pub struct Routed<'a> {
    /// Whether the tokens belong to a prompt or to an answer.
    pub phase: Phase,
    /// The layer.
    pub layer: LayerIdx,
    /// The choices.
    pub routing: &'a Routing,
}

/// A callback that receives the routers' choices.
///
/// [`Session::watch_routing`] has an example.
pub type RoutedWatch = dyn FnMut(Routed<'_>) + Send;

/// A routing callback, and the choices of the current batch. The callback runs after the batch, so that the caller's
/// code never delays other computations.
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
    /// The memory that the session holds of the budget.
    hold: Hold,
    /// Memory shared with forks, each with the number of positions that are shared.
    shared: Vec<(usize, Arc<Hold>)>,
    tokens: Vec<TokenId>,
    /// The logits after the last token; empty if unknown.
    logits: Vec<f32>,
    cancel: Cancel,
    /// The meter of the current or last prompt.
    meter: Option<PromptMeter>,
    /// Positions of the current chunk. Kept to reuse the allocation.
    positions: Vec<u32>,
    routers: Option<Routers>,
    /// What the stages before the engine's keep of the conversation.
    remote: Option<Remote>,
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
            remote: engine.chain().map(Remote::new),
            engine,
        }
    }

    /// A second conversation with the same tokens. Both share what was computed so far; only what follows is stored
    /// twice.
    ///
    /// # Errors
    /// [`Error::Budget`] if there is no memory for the part that cannot be shared.
    pub fn fork(&mut self) -> Result<Session> {
        let logits = self.logits.clone();
        Ok(Session { logits, ..self.fork_at(self.tokens.len())? })
    }

    /// Like [`fork`](Self::fork), but with only the first `len` tokens, which must be within [reach](Self::reach).
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
        let remote = self.remote.as_ref().map(|remote| remote.fork(len));
        Ok(Session { state, hold, shared, tokens, remote, ..Session::new(self.engine.clone()) })
    }

    /// Takes back memory that was shared with snapshots that are written.
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

    /// The session's engine.
    pub fn engine(&self) -> &Engine {
        &self.engine
    }

    /// The session's tokens.
    pub fn tokens(&self) -> &[TokenId] {
        &self.tokens
    }

    /// The logits after the last token. Empty before the first token, and after an answer was generated.
    pub fn logits(&self) -> &[f32] {
        &self.logits
    }

    /// A handle with which another thread can stop the session's computation. The session stays usable: it keeps the
    /// tokens that were computed completely. After a cancellation it computes nothing until [`Cancel::reset`], so that
    /// a cancellation between two chunks is not lost. [`generate`](Self::generate) resets it at the end of its answer;
    /// a cancellation between two answers ends the next one.
    pub fn cancel(&self) -> &Cancel {
        &self.cancel
    }

    /// Replaces the session's cancel handle.
    pub fn obey(&mut self, cancel: &Cancel) {
        self.cancel = cancel.clone();
    }

    /// Sets the meter that shows how much of a prompt is processed.
    pub(crate) fn show(&mut self, meter: &PromptMeter) {
        self.meter = Some(meter.clone());
    }

    /// The part of the meter's prompt that the next `tokens` tokens are.
    fn prompt_part(&self, tokens: usize) -> Option<PromptPart> {
        let start = self.tokens.len();
        let meter = self.meter.clone().filter(|meter| meter.concerns(start))?;
        Some(PromptPart { meter, start, tokens })
    }

    /// Sets a callback that receives the choice of every router, layer by layer; `None` removes it. It is called after
    /// each batch, when other sessions may compute already. A batch that fails or is cancelled reports only the layers
    /// that it completed.
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

    /// Makes the session hold exactly these tokens. Only the tokens after the longest prefix that the session already
    /// holds are computed. Afterwards [`logits`](Self::logits) returns the logits after the last token.
    ///
    /// # Errors
    /// If there are no tokens, more than the context length, or one outside the vocabulary; if the computation fails or
    /// is cancelled.
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

    /// Like [`extend`](Self::extend). `watch` receives the prompt's meter before the first chunk and after each chunk.
    /// Another thread may read the meter in between.
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
        // At least the last token is computed again, for its logits.
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

    /// Appends one token.
    ///
    /// # Errors
    /// As [`extend`](Self::extend).
    pub fn push(&mut self, token: TokenId) -> Result<()> {
        let engine = self.engine.clone();
        let computed = self.compute_token(&engine, token)?;
        self.keep(computed, &[token])
    }

    /// Like [`push`](Self::push), but `choose` reads the logits and they are not kept. On a GPU, only the logits that
    /// `choose` reads are copied. `choose` runs while the backend is locked, so it must not call the caller's code.
    ///
    /// # Errors
    /// As [`extend`](Self::extend), and the errors of `choose`.
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

    /// The longest prefix, of at most `len` tokens, that the session can be rewound to.
    pub(crate) fn reach(&self, len: usize) -> usize {
        self.state.reach(len.min(self.tokens.len()))
    }

    /// Bytes that the session needs for `len` tokens, including what it shares.
    pub(crate) fn bytes_for(&self, len: usize) -> u64 {
        self.state.bytes_for(len)
    }

    /// Bytes that the session uses, including its part of what it shares.
    pub(crate) fn held_bytes(&self) -> u64 {
        let part = |(_, hold): &(usize, Arc<Hold>)| hold.bytes() / Arc::strong_count(hold) as u64;
        self.hold.bytes() + self.shared.iter().map(part).sum::<u64>()
    }

    /// Sets the purpose under which the ledger counts the memory that the session does not share.
    pub(crate) fn hold_for(&mut self, purpose: Purpose) {
        self.hold.turn_to(purpose);
    }

    /// Keeps the mark at `len` tokens, once they are computed, however many tokens follow.
    pub(crate) fn pin(&mut self, len: usize) {
        self.state.pin(len);
        self.remote.iter().for_each(|remote| remote.pin(len));
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

    /// Removes all tokens after the first `len`, which must be within [reach](Self::reach).
    pub(crate) fn go_back(&mut self, len: usize) {
        if len < self.tokens.len() {
            self.tokens.truncate(len);
            self.logits.clear();
            self.shared.retain(|(shared, _)| *shared <= len);
        }
        // The layers may still hold more tokens, of a batch that failed or whose callback panicked.
        self.state.truncate(len);
    }

    /// Sets marks among the next `count` tokens: at `places`, and at regular distances.
    fn mark(&mut self, count: usize, places: &[usize]) {
        let start = self.tokens.len();
        let end = start + count;
        let between = (start / MARK_EVERY + 1..=end / MARK_EVERY).map(|n| n * MARK_EVERY);
        let places = places.iter().copied().filter(|&place| start < place && place <= end);
        let mut places: SmallVec<[usize; 8]> = between.chain(places).collect();
        places.sort_unstable();
        places.into_iter().for_each(|place| self.state.mark(place, end));
    }

    /// Reserves the memory that the conversation needs for `len` tokens.
    fn make_room(&mut self, len: usize) -> Result<()> {
        let shared = total(&self.shared);
        match self.hold.resize(self.state.bytes_for(len).saturating_sub(shared)) {
            Err(Error::Budget { .. }) if !self.state.marks().is_empty() => {
                // Continuing the conversation is worth more than being able to rewind it.
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

    /// Computes one more token, with its logits.
    fn compute_token<'e>(&mut self, engine: &'e Engine, token: TokenId) -> Result<Computed<'e>> {
        if self.tokens.len() == engine.context() {
            return Err(Error::Context { tokens: self.tokens.len() + 1, limit: engine.context() });
        }
        self.check(&[token])?;
        self.go_back(self.tokens.len());
        self.mark(1, &[]);
        self.compute(engine, Phase::Answer, &[token], 0..1)
    }

    /// Computes tokens after those of the session. The session does not change until they are
    /// [committed](Self::commit).
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
        let stream = engine.stream(|| vec![self.part(tokens)], &self.cancel, prompt.as_slice())?;
        self.positions.clear();
        self.positions.extend((start..start + tokens.len()).map(|p| p as u32));
        let mut sequences = [Sequence { state: &mut self.state, rows: 0..tokens.len() }];
        let (positions, stream) = (&self.positions[..], stream.as_deref());
        let mut batch = Batch { tokens, positions, stream, sequences: &mut sequences };
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

    /// What the stages before the engine's compute of these tokens.
    fn part<'a>(&'a self, tokens: &'a [TokenId]) -> Part<'a> {
        let remote = self.remote.as_ref().expect("an engine with a chain makes such sessions");
        Part { conversation: remote.number(), before: &self.tokens, tokens, marks: self.state.marks() }
    }

    /// Keeps the logits after the last token, if these were asked for, and the tokens.
    fn keep(&mut self, mut computed: Computed<'_>, tokens: &[TokenId]) -> Result<()> {
        // Without new tokens the old logits would have no meaning.
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

    /// Appends tokens that have been computed. The backend is free by then.
    pub(crate) fn commit(&mut self, tokens: &[TokenId]) {
        self.tokens.extend_from_slice(tokens);
        self.state.settle(self.tokens.len());
        if let Some(meter) = &self.meter {
            meter.set(self.tokens.len() as f64);
        }
        self.tell_routers();
    }

    /// Passes the choices of the last batch to the routing callback.
    fn tell_routers(&mut self) {
        if let Some(Routers { watch, chosen }) = &mut self.routers {
            for (phase, layer, routing) in chosen.drain(..) {
                watch(Routed { phase, layer, routing: &routing });
            }
        }
    }
}

/// Bytes of shared memory.
fn total(shared: &[(usize, Arc<Hold>)]) -> u64 {
    shared.iter().map(|(_, hold)| hold.bytes()).sum()
}
