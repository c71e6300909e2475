//! The logits after a token, wherever they were computed.

use std::sync::OnceLock;

use crate::backend::{Backend, Buf, Ranked};
use crate::error::{Error, Result};

/// How many of the likeliest tokens a device tells: mostly all that choosing one needs, and little to copy.
const BEST: usize = 256;

/// The logits after a token. The likeliest are quick to ask for where the others are in a device's memory.
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
    /// The likeliest first; of equals, the lower number. None is impossible.
    pub ranked: &'a [Ranked],
    /// No other token has a higher logit than this. Minus infinity: no other is possible.
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
    /// Where it is noted if the device is lost.
    pub lost: &'a OnceLock<String>,
    /// Which row of the buffer it is.
    pub number: usize,
}

/// What was read of the buffer, in memory that lasts from batch to batch.
#[derive(Default)]
pub(crate) struct Kept {
    /// Of all rows, once they were asked for.
    best: Vec<Ranked>,
    /// Of one row.
    all: Vec<f32>,
}

impl Kept {
    /// Other logits are in the buffer.
    pub fn forget(&mut self) {
        self.best.clear();
    }
}

impl<'a> Logits<'a> {
    /// Those in a slice.
    pub fn of(logits: &'a [f32]) -> Logits<'a> {
        Logits(Source::Here(logits))
    }

    /// Those of a row of a backend's buffer.
    pub(crate) fn there(row: Row<'a>) -> Logits<'a> {
        Logits(Source::There(row))
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        match &self.0 {
            Source::Here(logits) => logits.len(),
            Source::There(row) => row.buffer.width(),
        }
    }

    /// All of them.
    ///
    /// # Errors
    /// The backend's.
    pub fn all(&mut self) -> Result<&[f32]> {
        match &mut self.0 {
            Source::Here(logits) => Ok(logits),
            Source::There(row) => {
                row.read()?;
                Ok(&row.kept.all)
            }
        }
    }

    /// All of them, for as long as the row is there.
    pub(crate) fn into_all(self) -> Result<&'a [f32]> {
        match self.0 {
            Source::Here(logits) => Ok(logits),
            Source::There(mut row) => {
                row.read()?;
                Ok(&row.kept.all)
            }
        }
    }

    /// The likeliest tokens, if they can be had without the others.
    ///
    /// # Errors
    /// The backend's.
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
            // All rows at once: the next one's are asked for next.
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

/// Has everybody know it if the device is lost.
pub(crate) fn note_loss(lost: &OnceLock<String>, error: &Error) {
    if let Error::DeviceLost(why) = error {
        lost.get_or_init(|| why.clone());
    }
}
