//! Computing several conversations in one pass, so that weights are read once for all of them.

use super::Session;
use crate::TokenId;
use crate::backend::Logits;
use crate::backend::{Batch, Sequence};
use crate::blocks::Cancel;
use crate::engine::{Computed, Engine, Pass};
use crate::error::{Error, Result};

/// One conversation's part in a step.
///
/// [`Engine::step`] has an example.
pub struct Turn<'a> {
    /// The conversation.
    pub session: &'a mut Session,
    /// The tokens to append: at least one.
    pub tokens: &'a [TokenId],
    /// Whether the logits after the last token are wanted.
    pub logits: bool,
    /// Lengths, in ascending order, that the conversation can later be rewound to. Only those within `tokens` have an
    /// effect.
    pub marks: &'a [usize],
}

/// One pass for several conversations, which returns the logits of those that want them. It locks the backend until it
/// is [finished](Self::finish) or dropped. So choose tokens from the logits first, and report them after the step.
///
/// [`Engine::step`] has an example.
#[must_use = "no conversation has changed until the step is finished"]
pub struct Step<'a, 's> {
    computed: Computed<'a>,
    turns: &'a mut [Turn<'s>],
    /// Turns whose logits are wanted and were not returned yet.
    wanting: std::vec::IntoIter<usize>,
}

impl Step<'_, '_> {
    /// The next turn that wants logits: its index, and the logits after its last token. They are bit-identical to those
    /// that the conversation would get alone.
    ///
    /// # Errors
    /// If the device fails.
    pub fn next_row(&mut self) -> Result<Option<(usize, Logits<'_>)>> {
        let row = self.computed.next_row()?;
        Ok(row.zip(self.wanting.next()).map(|((_, logits), turn)| (turn, logits)))
    }

    /// Unlocks the backend. The conversations now hold their new tokens; the logits are not kept.
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
    /// Computes the tokens of all turns in one pass. The conversations change when the step is
    /// [finished](Step::finish), and not before.
    ///
    /// A step takes at most [`step_size`](Self::step_size) tokens. Routing callbacks are not called. A thread that
    /// computes with the same engine before it finishes or drops the step deadlocks.
    ///
    /// # Errors
    /// If a turn has no tokens, too many for the context, or one outside the vocabulary; if all turns together exceed
    /// the step size; if a session belongs to another engine; if the computation fails or is cancelled.
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
            return Err(Error::Invalid(format!("a step takes at most {most} tokens, not {rows}")));
        }
        for turn in turns.iter() {
            if !turn.session.engine.is(self) {
                return Err(Error::Invalid("a session belongs to another engine".into()));
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
