//! One conversation: the tokens it holds and what attention remembers of them.

use std::ops::Range;

use crate::backend::{Backend, LayerState, Routing};
use crate::blocks::Cancel;
use crate::engine::{Engine, Pass};
use crate::error::{Error, Result};
use crate::models::Model;
use crate::store::trace::Phase;
use crate::{LayerIdx, TokenId};

/// The most marks of a conversation: positions that it can go back to at no cost, whatever its layers keep.
pub const MARKS: usize = 6;

/// What the layers of a model remember of one sequence of tokens.
pub struct State {
    layers: Vec<Box<dyn LayerState>>,
    len: usize,
    /// Numbers of positions that all layers can go back to, ascending; some may be ahead.
    marks: Vec<usize>,
}

impl State {
    fn new(model: &dyn Model, backend: &dyn Backend) -> State {
        let layers = model.state().iter().map(|&shape| backend.new_state(shape)).collect();
        State { layers, len: 0, marks: Vec::with_capacity(MARKS) }
    }

    /// Positions remembered by all layers. While a batch is computed, the layers it has passed hold more.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether nothing is remembered.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// One layer's state, and the positions to which all must be able to go back.
    pub fn layer(&mut self, layer: LayerIdx) -> (&mut dyn LayerState, &[usize]) {
        (&mut *self.layers[layer.0], &self.marks)
    }

    /// Bytes that so many positions take in all layers.
    fn bytes_for(&self, len: usize) -> u64 {
        self.layers.iter().map(|layer| layer.bytes_for(len, &self.marks)).sum()
    }

    /// The largest number of positions, not more than `len`, that all layers can go back to.
    fn reach(&self, mut len: usize) -> usize {
        loop {
            let reach = self.layers.iter().map(|layer| layer.reach(len)).min().unwrap_or(len);
            if reach == len {
                return len;
            }
            len = reach;
        }
    }

    /// Goes back to `len` positions, which must be within reach.
    fn truncate(&mut self, len: usize) {
        self.layers.iter_mut().for_each(|layer| layer.truncate(len));
        self.marks.retain(|&mark| mark <= len);
        self.len = len;
    }

    /// All layers have computed up to `len`.
    fn settle(&mut self, len: usize) {
        self.len = len;
        self.layers.iter_mut().for_each(|layer| layer.settle(&self.marks));
    }
}

/// A sequence's part in a batch.
pub struct Sequence<'a> {
    /// What it remembers; the batch's tokens come after that.
    pub state: &'a mut State,
    /// Its rows in the batch.
    pub rows: Range<usize>,
}

/// Tokens computed together, of one sequence or of several.
pub struct Batch<'a> {
    /// `[rows]`
    pub tokens: &'a [TokenId],
    /// `[rows]` Each token's position in its sequence.
    pub positions: &'a [u32],
    /// Whose tokens they are.
    pub sequences: &'a mut [Sequence<'a>],
}

/// What [`Session::extend`] did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extended {
    /// Tokens that the session already held.
    pub reused: usize,
    /// Tokens that were computed.
    pub computed: usize,
}

/// Watches [`Session::extend_watched`].
#[derive(Default)]
pub struct Watch<'a> {
    /// Told after each chunk how many tokens are done, and of how many.
    pub progress: Option<&'a mut dyn FnMut(usize, usize)>,
    /// Given the logits of every computed position. Without it only the last position's are computed.
    pub logits: Option<&'a mut LogitsWatch<'a>>,
}

/// Takes a position and its logits.
pub type LogitsWatch<'a> = dyn FnMut(usize, &[f32]) + 'a;

/// What the router of one layer chose for tokens that are computed together.
pub struct Routed<'a> {
    /// What the tokens are.
    pub phase: Phase,
    /// The layer.
    pub layer: LayerIdx,
    /// Its choices.
    pub routing: &'a Routing,
}

/// Takes what routers choose.
pub type RoutedWatch = dyn FnMut(Routed<'_>) + Send;

/// One conversation with an [`Engine`].
pub struct Session {
    engine: Engine,
    state: State,
    /// Bytes that the engine counts for it.
    held: u64,
    tokens: Vec<TokenId>,
    /// After the last token; empty if they are not known.
    logits: Vec<f32>,
    cancel: Cancel,
    /// Of the chunk at hand; kept for the next.
    positions: Vec<u32>,
    /// Rows of the chunk at hand whose logits are wanted; kept for the next.
    wanted: Vec<usize>,
    routed: Option<Box<RoutedWatch>>,
}

impl Session {
    pub(crate) fn new(engine: Engine) -> Session {
        let state = State::new(engine.model(), engine.compute().backend());
        Session {
            state,
            held: 0,
            tokens: Vec::with_capacity(engine.plan().reserved),
            engine,
            logits: Vec::new(),
            cancel: Cancel::default(),
            positions: Vec::new(),
            wanted: Vec::new(),
            routed: None,
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

    /// The logits after the last token; empty before the first.
    pub fn logits(&self) -> &[f32] {
        &self.logits
    }

    /// A handle with which another thread can stop what the session is doing. The session stays usable:
    /// it holds the tokens whose computation was complete. It computes no more until the request is
    /// [taken back](Cancel::reset), so a request that comes between two chunks is not lost.
    pub fn cancel(&self) -> &Cancel {
        &self.cancel
    }

    /// Has a watch told what every router chooses, layer by layer, from now on; `None` ends that. A batch that
    /// fails or is cancelled ends before its last layer.
    pub fn watch_routing(&mut self, watch: Option<Box<RoutedWatch>>) {
        self.routed = watch;
    }

    /// Makes the session hold exactly these tokens, computing only those after the longest prefix it
    /// already holds. Afterwards [`logits`](Self::logits) are those after the last token.
    ///
    /// # Errors
    /// If there is no token, more than the context holds, or one that is not in the vocabulary; if the
    /// computation fails or is cancelled.
    pub fn extend(&mut self, tokens: &[TokenId]) -> Result<Extended> {
        self.extend_watched(tokens, Watch::default())
    }

    /// As [`extend`](Self::extend), watched. If every position's logits are wanted nothing is reused.
    ///
    /// # Errors
    /// As [`extend`](Self::extend).
    pub fn extend_watched(&mut self, tokens: &[TokenId], mut watch: Watch<'_>) -> Result<Extended> {
        self.check(tokens)?;
        let same = self.tokens.iter().zip(tokens).take_while(|(a, b)| a == b).count();
        let reused = if watch.logits.is_some() {
            0
        } else if same == tokens.len() && same == self.tokens.len() && !self.logits.is_empty() {
            return Ok(Extended { reused: same, computed: 0 });
        } else {
            // The last token is computed again for its logits, if nothing else.
            self.state.reach(same.min(tokens.len() - 1))
        };
        self.tokens.truncate(reused);
        self.logits.clear();
        while self.tokens.len() < tokens.len() {
            let start = self.tokens.len();
            let end = tokens.len().min(start + self.engine.chunk());
            let last = end == tokens.len();
            self.compute(Phase::Prompt, &tokens[start..end], last, &mut watch)?;
            if let Some(progress) = &mut watch.progress {
                progress(end - reused, tokens.len() - reused);
            }
        }
        Ok(Extended { reused, computed: tokens.len() - reused })
    }

    /// Adds one token after those it holds.
    ///
    /// # Errors
    /// As [`extend`](Self::extend).
    pub fn push(&mut self, token: TokenId) -> Result<()> {
        if self.tokens.len() == self.engine.context() {
            return Err(Error::Context { tokens: self.tokens.len() + 1, limit: self.engine.context() });
        }
        self.check(&[token])?;
        self.compute(Phase::Answer, &[token], true, &mut Watch::default())
    }

    fn check(&self, tokens: &[TokenId]) -> Result<()> {
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

    /// Has the engine count so many bytes for the conversation, and make room for them.
    fn hold(&mut self, bytes: u64) -> Result<()> {
        self.engine.hold_context(self.held, bytes)?;
        self.held = bytes;
        Ok(())
    }

    /// Computes one chunk after the tokens held. If it fails, the session is as it was before the chunk.
    fn compute(&mut self, phase: Phase, tokens: &[TokenId], last: bool, watch: &mut Watch<'_>) -> Result<()> {
        let start = self.tokens.len();
        // The layers may hold more: of tokens that were let go, of a chunk that failed or whose watcher panicked.
        self.state.truncate(start);
        self.hold(self.state.bytes_for(start + tokens.len()))?;
        self.positions.clear();
        self.positions.extend((start..start + tokens.len()).map(|p| p as u32));
        self.wanted.clear();
        self.wanted.extend(match (watch.logits.is_some(), last) {
            (true, _) => 0..tokens.len(),
            (false, true) => tokens.len() - 1..tokens.len(),
            (false, false) => 0..0,
        });
        let mut sequences = [Sequence { state: &mut self.state, rows: 0..tokens.len() }];
        let mut batch = Batch { tokens, positions: &self.positions, sequences: &mut sequences };
        let kept = &mut self.logits;
        let routed = &mut self.routed;
        let mut observe = |layer, routing: &Routing| {
            if let Some(watch) = routed {
                watch(Routed { phase, layer, routing });
            }
        };
        let pass = Pass { wanted: &self.wanted, cancel: &self.cancel, observer: &mut observe };
        let result = self.engine.compute().forward(&mut batch, pass, |row, logits| {
            if let Some(watch) = &mut watch.logits {
                watch(start + row, logits);
            }
            if last && row + 1 == tokens.len() {
                kept.clear();
                kept.extend_from_slice(logits);
            }
        });
        result?;
        self.tokens.extend_from_slice(tokens);
        self.state.settle(self.tokens.len());
        Ok(())
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.state.truncate(0);
        // Giving memory back does not fail.
        let _ = self.hold(0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Options, Precision};

    /// Three sequences of different lengths, the second of which is in the middle of its conversation.
    #[test]
    fn a_sequence_gives_the_same_bits_alone_and_beside_others() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/golden/qwen3moe.gguf");
        for precision in [Precision::Fast, Precision::Exact] {
            let options = Options { precision, threads: Some(2), ..Options::default() };
            let engine = Engine::open(path.as_ref(), &options).unwrap();
            let tokens: Vec<TokenId> = (0..90).map(|i| TokenId(i * 7 % 160)).collect();
            let parts = [(0, 0..20), (70, 70..75), (0, 40..41)];

            let mut sessions: Vec<Session> = parts.iter().map(|_| engine.session()).collect();
            sessions[1].extend(&tokens[..70]).unwrap();
            let mut batch_tokens = Vec::new();
            let mut positions = Vec::new();
            let mut sequences = Vec::new();
            for (session, (start, range)) in sessions.iter_mut().zip(&parts) {
                let first = batch_tokens.len();
                batch_tokens.extend_from_slice(&tokens[range.clone()]);
                positions.extend((0..range.len()).map(|i| (start + i) as u32));
                sequences.push(Sequence { state: &mut session.state, rows: first..batch_tokens.len() });
            }
            let mut batch = Batch { tokens: &batch_tokens, positions: &positions, sequences: &mut sequences };
            let wanted: Vec<usize> = (0..batch_tokens.len()).collect();
            let mut together: Vec<Vec<u32>> = Vec::new();
            let keep = |_, logits: &[f32]| together.push(logits.iter().map(|l| l.to_bits()).collect());
            let pass = Pass { wanted: &wanted, cancel: &Cancel::default(), observer: &mut |_, _| {} };
            engine.compute().forward(&mut batch, pass, keep).unwrap();

            let mut together = together.into_iter();
            for (start, range) in parts {
                let mut alone = engine.session();
                if start > 0 {
                    alone.extend(&tokens[..start]).unwrap();
                }
                for position in range {
                    alone.push(tokens[position]).unwrap();
                    let bits: Vec<u32> = alone.logits().iter().map(|l| l.to_bits()).collect();
                    assert_eq!(together.next(), Some(bits), "{precision:?}, token {position}");
                }
            }
        }
    }
}
