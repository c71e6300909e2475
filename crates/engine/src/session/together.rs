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
        let (mut wanted, mut wanting) = (Vec::with_capacity(turns.len()), Vec::with_capacity(turns.len()));
        let mut rows = 0;
        for (i, turn) in turns.iter().enumerate() {
            rows += turn.tokens.len();
            if turn.logits {
                wanted.push(rows - 1);
                wanting.push(i);
            }
        }
        let computed =
            self.together(turns, None, cancel, |batch, pass| self.compute().forward(batch, wanted, pass))?;
        Ok(Step { computed, turns, wanting: wanting.into_iter() })
    }

    /// Computes the tokens of all turns in a stage that is not the last one, from the hidden states of the stage before
    /// it. Returns the hidden states: `[rows, hidden]`. The conversations hold the tokens when they are
    /// [committed](Session::commit).
    ///
    /// # Errors
    /// As [`step`](Self::step).
    pub(crate) fn step_stream(
        &self,
        turns: &mut [Turn<'_>],
        stream: Option<&[f32]>,
        cancel: &Cancel,
    ) -> Result<Vec<f32>> {
        self.together(turns, stream, cancel, |batch, pass| self.compute().forward_stream(batch, pass))
    }

    /// Makes a batch of the tokens of all turns and computes it.
    fn together<T>(
        &self,
        turns: &mut [Turn<'_>],
        stream: Option<&[f32]>,
        cancel: &Cancel,
        compute: impl FnOnce(&mut Batch<'_>, Pass<'_>) -> Result<T>,
    ) -> Result<T> {
        self.check_turns(turns)?;
        let rows = turns.iter().map(|turn| turn.tokens.len()).sum();
        let (mut tokens, mut positions) = (Vec::with_capacity(rows), Vec::with_capacity(rows));
        for turn in turns.iter_mut() {
            let start = turn.session.tokens.len();
            turn.session.go_back(start);
            turn.session.mark(turn.tokens.len(), turn.marks);
            turn.session.make_room(start + turn.tokens.len())?;
            tokens.extend_from_slice(turn.tokens);
            positions.extend((start..start + turn.tokens.len()).map(|position| position as u32));
        }
        let prompts: Vec<_> =
            turns.iter().filter_map(|turn| turn.session.prompt_part(turn.tokens.len())).collect();
        let parts = || turns.iter().map(|turn| turn.session.part(turn.tokens)).collect();
        let before = self.stream(parts, cancel, &prompts)?;
        let mut row = 0;
        let mut sequences: Vec<Sequence<'_>> = turns
            .iter_mut()
            .map(|turn| {
                let rows = row..row + turn.tokens.len();
                row = rows.end;
                Sequence { state: &mut turn.session.state, rows }
            })
            .collect();
        let stream = before.as_deref().or(stream);
        let mut batch = Batch { tokens: &tokens, positions: &positions, stream, sequences: &mut sequences };
        compute(&mut batch, Pass { cancel, prompts: &prompts, observer: None })
    }

    /// # Errors
    /// If these turns cannot be computed in one pass.
    fn check_turns(&self, turns: &[Turn<'_>]) -> Result<()> {
        let rows: usize = turns.iter().map(|turn| turn.tokens.len()).sum();
        if rows > self.step_size() {
            let most = self.step_size();
            return Err(Error::Invalid(format!("a step takes at most {most} tokens, not {rows}")));
        }
        for turn in turns {
            if !turn.session.engine.is(self) {
                return Err(Error::Invalid("a session belongs to another engine".into()));
            }
            turn.session.check(turn.tokens)?;
            let tokens = turn.session.tokens.len() + turn.tokens.len();
            if tokens > self.context() {
                return Err(Error::Context { tokens, limit: self.context() });
            }
        }
        Ok(())
    }

    /// The most tokens of one [step](Self::step).
    pub fn step_size(&self) -> usize {
        self.chunk()
    }
}
