//! A stage of a model that is split by layers over several machines: any but the last one, which is an
//! [`Engine`] made by [`Engine::after`].

mod host;

use std::path::Path;

pub use host::StageHost;

use crate::TokenId;
use crate::blocks::Cancel;
use crate::engine::{Engine, Options, Prospect};
use crate::error::{Error, Result};
use crate::experts::Meters;
use crate::models::Span;
use crate::plan::Plan;
use crate::session::{Session, Turn};

/// Some layers of a model, without the last one. It holds and streams only the weights of these layers, and keeps only
/// their part of each conversation. Clones share it.
///
/// Usually a [`StageHost`] has the stage, and the engine with the last layers sends it messages.
///
/// # Examples
/// ```
/// use forebay_engine::{Cancel, Options, Stage, StageTurn};
///
/// # let model = std::path::Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/tales-qwen3moe-Q4_K_M.gguf"));
/// # let tokens = [5, 6, 7].map(forebay_engine::TokenId);
/// let options = Options::new().threads(1);
/// let first = Stage::open(model, &options.clone().layers(0..1))?;
/// let second = Stage::open(model, &options.layers(1..3))?;
///
/// let (mut in_first, mut in_second) = (first.session(), second.session());
/// let turn = StageTurn { session: &mut in_first, tokens: &tokens, marks: &[] };
/// let stream = first.forward(&mut [turn], &[], &Cancel::default())?;
/// let turn = StageTurn { session: &mut in_second, tokens: &tokens, marks: &[] };
/// let stream = second.forward(&mut [turn], &stream, &Cancel::default())?;
/// assert_eq!(stream.len(), 3 * second.hidden());
/// # Ok::<(), forebay_engine::Error>(())
/// ```
#[derive(Clone)]
pub struct Stage(Engine);

/// A conversation's part in a batch of a [`Stage`], which has an example.
pub struct StageTurn<'a> {
    /// What the stage keeps of the conversation.
    pub session: &'a mut StageSession,
    /// The tokens to append: at least one.
    pub tokens: &'a [TokenId],
    /// Lengths, in ascending order, that the conversation can later be rewound to. Only those within `tokens` have an
    /// effect.
    pub marks: &'a [usize],
}

impl Stage {
    /// Loads the layers that [`Options::layers`] selects.
    ///
    /// # Errors
    /// As [`Engine::open`]; if no layers are selected, or the last one is among them.
    pub fn open(path: &Path, options: &Options) -> Result<Stage> {
        let prospect = Prospect::new(path, options)?;
        if prospect.span().has_last() {
            return Err(Error::Invalid(format!(
                "Options::layers selects {}, among them the last one; open the last stage with Engine::after",
                prospect.span()
            )));
        }
        Ok(Stage(prospect.load_layers(options, None)?))
    }

    /// A host, which answers messages about the stage.
    pub fn host(&self) -> StageHost {
        StageHost::new(self.clone())
    }

    /// The layers that are here, and how many the model has.
    pub fn span(&self) -> Span {
        self.0.span()
    }

    /// Channels of a hidden state.
    pub fn hidden(&self) -> usize {
        self.0.model().stream().width()
    }

    /// How memory is divided.
    pub fn plan(&self) -> &Plan {
        self.0.plan()
    }

    /// What the expert store has counted since the stage was loaded.
    pub fn meters(&self) -> Meters {
        self.0.meters()
    }

    /// Starts a new conversation.
    pub fn session(&self) -> StageSession {
        StageSession { session: self.0.session(), fresh: Vec::new() }
    }

    /// Computes the tokens of all turns in one pass, from the hidden states of the stage before: `[rows, hidden]`, empty
    /// for the first stage. Returns the hidden states for the next stage.
    ///
    /// # Errors
    /// As [`Engine::step`]; if there are not as many hidden states as tokens.
    pub fn forward(&self, turns: &mut [StageTurn<'_>], stream: &[f32], cancel: &Cancel) -> Result<Vec<f32>> {
        let rows: usize = turns.iter().map(|turn| turn.tokens.len()).sum();
        let expected = if self.span().has_first() { 0 } else { rows * self.hidden() };
        if stream.len() != expected {
            return Err(Error::Invalid(format!(
                "the stage with {} needs {expected} numbers of hidden states for {rows} tokens, not {}",
                self.span(),
                stream.len()
            )));
        }
        turns.iter_mut().for_each(|turn| turn.session.settle());
        let mut parts: Vec<_> = turns
            .iter_mut()
            .map(|StageTurn { session, tokens, marks }| Turn {
                session: &mut session.session,
                tokens,
                logits: false,
                marks,
            })
            .collect();
        let stream = self.0.step_stream(&mut parts, (!stream.is_empty()).then_some(stream), cancel)?;
        for turn in turns {
            turn.session.fresh.extend_from_slice(turn.tokens);
        }
        Ok(stream)
    }
}

/// What a stage keeps of one conversation: its tokens, and the states of the stage's layers.
///
/// [`Stage`] has an example.
pub struct StageSession {
    session: Session,
    /// The tokens of the last pass. They can be taken back without marks, because another stage may fail to compute
    /// them.
    fresh: Vec<TokenId>,
}

impl StageSession {
    /// The number of tokens.
    pub fn len(&self) -> usize {
        self.session.tokens().len() + self.fresh.len()
    }

    /// Whether there are no tokens.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Removes all tokens after the first `len`, or more if the layers cannot go back to exactly that length. Returns
    /// the length.
    pub fn rewind(&mut self, len: usize) -> usize {
        if len > self.session.tokens().len() {
            self.settle();
        }
        self.fresh.clear();
        let reach = self.session.reach(len);
        self.session.go_back(reach);
        reach
    }

    /// The longest prefix, of at most `len` tokens, that [`rewind`](Self::rewind) can leave.
    pub fn reach(&mut self, len: usize) -> usize {
        if len > self.session.tokens().len() {
            self.settle();
        }
        self.session.reach(len)
    }

    /// Keeps the mark at `len` tokens, once they are computed, however many tokens follow.
    pub fn pin(&mut self, len: usize) {
        self.session.pin(len);
    }

    /// A second conversation with the first `len` tokens, or fewer if the layers cannot go back to exactly that length.
    ///
    /// # Errors
    /// [`Error::Budget`] if there is no memory for the part that cannot be shared.
    pub fn fork(&mut self, len: usize) -> Result<StageSession> {
        let reach = self.reach(len);
        Ok(StageSession { session: self.session.fork_at(reach)?, fresh: Vec::new() })
    }

    /// Writes the conversation to a file, completely or not at all. The file names the stage's layers.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub fn save(&mut self, path: &Path) -> Result<()> {
        self.settle();
        self.session.save(path)
    }

    /// Loads a conversation that [`save`](Self::save) wrote.
    ///
    /// # Errors
    /// As [`Session::load`]; if the file belongs to other layers.
    pub fn load(stage: &Stage, path: &Path) -> Result<StageSession> {
        Ok(StageSession { session: Session::load(&stage.0, path)?, fresh: Vec::new() })
    }

    /// Keeps the tokens of the last pass.
    fn settle(&mut self) {
        if !self.fresh.is_empty() {
            self.session.commit(&std::mem::take(&mut self.fresh));
        }
    }
}
