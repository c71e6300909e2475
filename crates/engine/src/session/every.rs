//! The logits after every token of a text.

use super::Session;
use crate::TokenId;
use crate::engine::{Computed, Engine};
use crate::error::{Error, Result};

/// The logits after every token of a text, in order: see [`Engine::all_logits`].
///
/// All of them together would need far more memory than the model's buffers, so they are computed a few at a time from
/// the output of the last layer. That output must stay in the backend's buffer, so no other session can compute between
/// two rows of a chunk. A thread that computes with another session of the same engine before it drops this value
/// deadlocks.
///
/// # Examples
/// ```
/// # let model = std::path::Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/tales-qwen3moe-Q4_K_M.gguf"));
/// # let engine = forebay_engine::Engine::open(model, &forebay_engine::Options::new().threads(1))?;
/// let text = engine.tokenizer().encode("Once upon a time", Default::default())?;
/// let mut session = engine.session();
/// let mut rows = engine.all_logits(&mut session, &text)?;
/// let mut right = 0;
/// while let Some((position, logits)) = rows.next_row()? {
///     let likeliest = (0..logits.len()).max_by(|&a, &b| logits[a].total_cmp(&logits[b]));
///     right += usize::from(text.get(position + 1).map(|next| next.0 as usize) == likeliest);
/// }
/// println!("{right} of {} tokens were the likeliest", text.len() - 1);
/// # assert!(right > 0);
/// # Ok::<(), forebay_engine::Error>(())
/// ```
pub struct AllLogits<'a> {
    engine: &'a Engine,
    session: &'a mut Session,
    text: &'a [TokenId],
    /// The end of the current chunk, in tokens.
    end: usize,
    chunk: Option<Computed<'a>>,
    /// The logits after the last token.
    last: Vec<f32>,
}

impl Engine {
    /// Makes a session hold exactly these tokens, all of them computed anew, and returns the logits after each of them
    /// on request. The session holds a chunk's tokens when the first row of the next chunk is requested, and all tokens
    /// when there are no more rows.
    ///
    /// # Errors
    /// If there are no tokens, more than the context length, or one outside the vocabulary; if the session belongs to
    /// another engine.
    pub fn all_logits<'a>(&'a self, session: &'a mut Session, text: &'a [TokenId]) -> Result<AllLogits<'a>> {
        if !session.engine.is(self) {
            return Err(Error::Invalid("the session belongs to another engine".into()));
        }
        session.check(text)?;
        session.go_back(0);
        session.meter = None;
        Ok(AllLogits { engine: self, session, text, end: 0, chunk: None, last: Vec::new() })
    }
}

impl AllLogits<'_> {
    /// The next position and the logits after its token; `None` after the last one.
    ///
    /// # Errors
    /// If the computation fails or is [cancelled](Session::cancel). Then the session holds the chunks before this one.
    pub fn next_row(&mut self) -> Result<Option<(usize, &[f32])>> {
        if self.chunk.as_ref().is_some_and(|chunk| !chunk.has_more()) {
            self.end_chunk()?;
        }
        if self.chunk.is_none() {
            let start = self.end;
            if start == self.text.len() {
                return Ok(None);
            }
            self.end = self.text.len().min(start + self.engine.chunk());
            let text = &self.text[..self.end];
            self.chunk = Some(self.session.compute_chunk(self.engine, text, start..self.end)?);
        }
        let Some(chunk) = &mut self.chunk else { return Ok(None) };
        if chunk.must_compute() {
            self.session.cancel.check()?;
        }
        let Some((row, logits)) = chunk.next_row()? else { return Ok(None) };
        let position = self.session.tokens.len() + row;
        let logits = logits.into_all()?;
        if position + 1 == self.text.len() {
            self.last.extend_from_slice(logits);
        }
        Ok(Some((position, logits)))
    }

    /// Commits the current chunk, whose rows have all been read.
    fn end_chunk(&mut self) -> Result<()> {
        if let Some(chunk) = self.chunk.take() {
            chunk.finish()?;
            self.session.logits = std::mem::take(&mut self.last);
            self.session.commit(&self.text[self.session.tokens.len()..self.end]);
        }
        Ok(())
    }
}
