//! The logits after a token, in RAM or in device memory.

use std::sync::OnceLock;

use crate::backend::{Backend, Buf, Ranked};
use crate::error::{Error, Result};

/// How many of the likeliest tokens a device returns: usually all that the sampler needs, and little to copy.
const BEST: usize = 256;

/// The logits after a token. If they are in device memory, the likeliest tokens are quicker to get than all.
///
/// # Examples
/// ```
/// use forebay_engine::Logits;
///
/// let mut logits = Logits::of(&[0.5, 2.0, -1.0]);
/// let likeliest = match logits.best()? {
///     // Logits in a device's memory: the likeliest are ranked there, and only these are copied.
///     Some(best) => best.ranked[0].token as usize,
///     None => logits.all()?.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1)).expect("there is one").0,
/// };
/// assert_eq!(likeliest, 1);
/// # Ok::<(), forebay_engine::Error>(())
/// ```
pub struct Logits<'a>(Source<'a>);

/// The likeliest tokens.
///
/// [`Logits`] has an example.
#[derive(Clone, Copy, Debug)]
pub struct Best<'a> {
    /// Sorted by logit, the highest first; equal logits by token number. Only possible tokens.
    pub ranked: &'a [Ranked],
    /// No other token has a higher logit than this. Minus infinity means that no other token is possible.
    pub others: f32,
}

enum Source<'a> {
    Here(&'a [f32]),
    There(Row<'a>),
}

/// A row of logits in a backend's buffer.
pub(crate) struct Row<'a> {
    pub backend: &'a mut dyn Backend,
    pub buffer: Buf,
    pub kept: &'a mut Kept,
    /// Records that the device was lost.
    pub lost: &'a OnceLock<String>,
    /// The row's number in the buffer.
    pub number: usize,
}

/// The parts of the buffer that were read, in memory that is reused from batch to batch.
#[derive(Default)]
pub(crate) struct Kept {
    /// The likeliest tokens of all rows, once requested.
    best: Vec<Ranked>,
    /// All logits of one row.
    all: Vec<f32>,
}

impl Kept {
    /// Call it when the buffer has new logits.
    pub fn forget(&mut self) {
        self.best.clear();
    }
}

impl<'a> Logits<'a> {
    /// The logits of a slice.
    pub fn of(logits: &'a [f32]) -> Logits<'a> {
        Logits(Source::Here(logits))
    }

    /// The logits of a row in a backend's buffer.
    pub(crate) fn in_buffer(row: Row<'a>) -> Logits<'a> {
        Logits(Source::There(row))
    }

    /// The number of logits.
    pub fn count(&self) -> usize {
        match &self.0 {
            Source::Here(logits) => logits.len(),
            Source::There(row) => row.buffer.width(),
        }
    }

    /// All logits.
    ///
    /// # Errors
    /// If the backend fails.
    pub fn all(&mut self) -> Result<&[f32]> {
        match &mut self.0 {
            Source::Here(logits) => Ok(logits),
            Source::There(row) => {
                row.read()?;
                Ok(&row.kept.all)
            }
        }
    }

    /// All logits, for as long as the row exists.
    pub(crate) fn into_all(self) -> Result<&'a [f32]> {
        match self.0 {
            Source::Here(logits) => Ok(logits),
            Source::There(mut row) => {
                row.read()?;
                Ok(&row.kept.all)
            }
        }
    }

    /// The likeliest tokens, if the backend can return them without the others.
    ///
    /// # Errors
    /// If the backend fails.
    pub fn best(&mut self) -> Result<Option<Best<'_>>> {
        match &mut self.0 {
            Source::Here(_) => Ok(None),
            Source::There(row) => row.best().map(Some),
        }
    }
}

impl Row<'_> {
    fn read(&mut self) -> Result<()> {
        self.kept.all.resize(self.buffer.width(), 0.0);
        let read = self.backend.read_row(self.buffer, self.number, &mut self.kept.all);
        read.inspect_err(|error| note_loss(self.lost, error))
    }

    fn best(&mut self) -> Result<Best<'_>> {
        let each = BEST.min(self.buffer.width());
        if self.kept.best.is_empty() {
            // All rows at once, because the next row's are usually requested next.
            let found = self.backend.best(self.buffer, each, &mut self.kept.best);
            found.inspect_err(|error| note_loss(self.lost, error))?;
        }
        let ranked = &self.kept.best[self.number * each..][..each];
        let possible = ranked.partition_point(|ranked| ranked.logit > f32::NEG_INFINITY);
        let all = possible < each || each == self.buffer.width();
        let others = if all { f32::NEG_INFINITY } else { ranked[each - 1].logit };
        Ok(Best { ranked: &ranked[..possible], others })
    }
}

/// Records the loss of the device, if that is the error.
pub(crate) fn note_loss(lost: &OnceLock<String>, error: &Error) {
    if let Error::DeviceLost(why) = error {
        lost.get_or_init(|| why.clone());
    }
}
