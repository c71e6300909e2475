//! Several conversations computed together, so that weights are read once for all of them.

use super::Session;
use crate::TokenId;
use crate::backend::Logits;
use crate::backend::{Batch, Sequence};
use crate::blocks::Cancel;
use crate::engine::{Computed, Engine, Pass};
use crate::error::{Error, Result};

/// A conversation's part in a step that several take together.
///
/// [`Engine::step`] has an example.
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

/// A step that several conversations take together: gives the logits of those who want them. It holds what computes until it is
/// [finished](Self::finish) or dropped, so a token is chosen by the logits, and told when the step has ended.
///
/// [`Engine::step`] has an example.
#[must_use = "no conversation has changed until the step is finished"]
pub struct Step<'a, 's> {
    computed: Computed<'a>,
    turns: &'a mut [Turn<'s>],
    /// Numbers of the turns that want logits and have not been given them.
    wanting: std::vec::IntoIter<usize>,
}

impl Step<'_, '_> {
    /// The number of the next turn that wants logits, and those after its last token, with the bits that the conversation would have
    /// computed alone.
    ///
    /// # Errors
    /// If the device fails.
    pub fn next_row(&mut self) -> Result<Option<(usize, Logits<'_>)>> {
        let row = self.computed.next_row()?;
        Ok(row.zip(self.wanting.next()).map(|((_, logits), turn)| (turn, logits)))
    }

    /// Lets others compute. The conversations hold their new tokens, and do not keep the logits.
    ///
    /// # Errors
    /// If the device fails. Then no conversation has changed.
    pub fn finish(self) -> Result<()> {
        let Step { computed, turns, .. } = self;
        computed.finish()?;
        for turn in turns {
            turn.session.logits.clear();
            turn.session.commit(turn.tokens);
        }
        Ok(())
    }
}

impl Engine {
    /// Computes each turn's tokens after those of its conversation, all in one pass. The conversations have changed when the step is
    /// [finished](Step::finish), and not before.
    ///
    /// A step takes no more tokens than [`step_size`](Self::step_size). Watches of routing are not told of it. Who computes with the same
    /// engine before it is finished or dropped, in the same thread, waits for ever.
    ///
    /// # Errors
    /// If a turn has no tokens, too many for its context, or one outside the vocabulary; if all have more than a step
    /// takes; if a conversation is another engine's; if the computation fails or is cancelled.
    ///
    /// # Examples
    /// ```
    /// use forebay_engine::{Cancel, Turn};
    ///
    /// # let model = std::path::Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/tales-qwen3moe-Q4_K_M.gguf"));
    /// # let engine = forebay_engine::Engine::open(model, &forebay_engine::Options::new().threads(1))?;
    /// let cat = engine.tokenizer().encode("The cat", Default::default())?;
    /// let dog = engine.tokenizer().encode("The dog", Default::default())?;
    /// let (mut first, mut second) = (engine.session(), engine.session());
    /// let mut turns = [
    ///     Turn { session: &mut first, tokens: &cat, logits: true, marks: &[] },
    ///     Turn { session: &mut second, tokens: &dog, logits: false, marks: &[] },
    /// ];
    /// let mut step = engine.step(&mut turns, &Cancel::default())?;
    /// while let Some((turn, mut logits)) = step.next_row()? {
    ///     assert_eq!((turn, logits.all()?.len()), (0, engine.vocab_size()));
    /// }
    /// step.finish()?;
    /// assert_eq!((first.tokens(), second.tokens()), (&*cat, &*dog));
    /// # Ok::<(), forebay_engine::Error>(())
    /// ```
    pub fn step<'a, 's>(&'a self, turns: &'a mut [Turn<'s>], cancel: &Cancel) -> Result<Step<'a, 's>> {
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
        let prompts: Vec<_> =
            turns.iter().filter_map(|turn| turn.session.prompt_part(turn.tokens.len())).collect();
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
        let pass = Pass { cancel, prompts: &prompts, observer: None };
        let computed = self.compute().forward(&mut batch, wanted, pass)?;
        Ok(Step { computed, turns, wanting: wanting.into_iter() })
    }

    /// The most tokens of one [step](Self::step).
    pub fn step_size(&self) -> usize {
        self.chunk()
    }
}
