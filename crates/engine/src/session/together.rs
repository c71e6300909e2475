//! Several conversations computed together, so that weights are read once for all of them.

use super::{Batch, Sequence, Session};
use crate::TokenId;
use crate::blocks::Cancel;
use crate::engine::{Engine, Pass};
use crate::error::{Error, Result};
use crate::logits::Logits;

/// A conversation's part in a step that several take together.
pub struct Turn<'a> {
    /// The conversation.
    pub session: &'a mut Session,
    /// What it adds: at least one token.
    pub tokens: &'a [TokenId],
    /// Whether the logits after the last of them are wanted.
    pub logits: bool,
    /// Lengths of the conversation that it should be able to go back to, ascending; those among its tokens count.
    pub marks: &'a [usize],
}

impl Engine {
    /// Adds each turn's tokens to its conversation, all in one pass. `logits` is given the number of each turn that wants
    /// them and the logits after its last token, with the bits that the conversation would have computed alone. The
    /// conversations do not keep them.
    ///
    /// A step takes no more tokens than [`step_size`](Self::step_size). Watches of routing are not told of it.
    ///
    /// # Errors
    /// If a turn has no tokens, too many for its context, or one outside the vocabulary; if all have more than a step
    /// takes; if a conversation is another engine's; if the computation fails or is cancelled; those of `logits`. Then no conversation
    /// has changed, whatever logits were given.
    pub fn step(
        &self,
        turns: &mut [Turn<'_>],
        cancel: &Cancel,
        mut logits: impl FnMut(usize, &mut Logits<'_>) -> Result<()>,
    ) -> Result<()> {
        let rows: usize = turns.iter().map(|turn| turn.tokens.len()).sum();
        if rows > self.step_size() {
            let most = self.step_size();
            return Err(Error::Invalid(format!("a step takes {most} tokens at most, not {rows}")));
        }
        for turn in turns.iter() {
            if !turn.session.engine.is(self) {
                return Err(Error::Invalid("a conversation belongs to another model".into()));
            }
            turn.session.check(turn.tokens)?;
            let tokens = turn.session.tokens.len() + turn.tokens.len();
            if tokens > self.context() {
                return Err(Error::Context { tokens, limit: self.context() });
            }
        }
        let mut tokens = Vec::with_capacity(rows);
        let mut positions = Vec::with_capacity(rows);
        let mut wanted = Vec::with_capacity(turns.len());
        let mut wanting = Vec::with_capacity(turns.len());
        for (i, turn) in turns.iter_mut().enumerate() {
            let start = turn.session.tokens.len();
            turn.session.go_back(start);
            turn.session.mark(turn.tokens.len(), turn.marks);
            turn.session.make_room(start + turn.tokens.len())?;
            tokens.extend_from_slice(turn.tokens);
            positions.extend((start..start + turn.tokens.len()).map(|position| position as u32));
            if turn.logits {
                wanted.push(tokens.len() - 1);
                wanting.push(i);
            }
        }
        let mut row = 0;
        let mut sequences: Vec<Sequence<'_>> = turns
            .iter_mut()
            .map(|turn| {
                let rows = row..row + turn.tokens.len();
                row = rows.end;
                Sequence { state: &mut turn.session.state, rows }
            })
            .collect();
        let mut batch = Batch { tokens: &tokens, positions: &positions, sequences: &mut sequences };
        let pass = Pass { wanted: &wanted, cancel, observer: None };
        let mut wanting = wanting.into_iter();
        self.compute().forward(&mut batch, pass, |_, row| {
            logits(wanting.next().expect("rows come in the order in which they are wanted"), row)
        })?;
        for turn in turns.iter_mut() {
            turn.session.commit(turn.tokens);
            turn.session.logits.clear();
        }
        Ok(())
    }

    /// The most tokens of one [step](Self::step).
    pub fn step_size(&self) -> usize {
        self.chunk()
    }
}
