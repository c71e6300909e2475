//! The logits after a token, wherever they were computed.

use crate::backend::{Backend, Buf, Ranked};
use crate::error::Result;

/// How many of the likeliest tokens a device tells: mostly all that choosing one needs, and little to copy.
const BEST: usize = 256;

/// The logits after a token. The likeliest are quick to ask for where the others are in a device's memory.
pub struct Logits<'a>(Source<'a>);

/// The likeliest tokens.
#[derive(Clone, Copy, Debug)]
pub struct Best<'a> {
    /// The likeliest first; of equals, the lower number. None is impossible.
    pub ranked: &'a [Ranked],
    /// No other token has a higher logit than this. Minus infinity: no other is possible.
    pub others: f32,
}

enum Source<'a> {
    Here(&'a [f32]),
    There { rows: &'a mut Rows<'a>, row: usize },
}

/// Rows of logits in a backend's buffer.
pub(crate) struct Rows<'a> {
    pub backend: &'a mut dyn Backend,
    pub buffer: Buf,
    pub kept: &'a mut Kept,
}

/// What was read of them, in memory that lasts from batch to batch.
#[derive(Default)]
pub(crate) struct Kept {
    /// Of all rows, once they were asked for.
    best: Vec<Ranked>,
    /// Of one row.
    all: Vec<f32>,
}

impl<'a> Logits<'a> {
    /// Those in a slice.
    pub fn of(logits: &'a [f32]) -> Logits<'a> {
        Logits(Source::Here(logits))
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        match &self.0 {
            Source::Here(logits) => logits.len(),
            Source::There { rows, .. } => rows.buffer.width(),
        }
    }

    /// All of them.
    ///
    /// # Errors
    /// The backend's.
    pub fn all(&mut self) -> Result<&[f32]> {
        match &mut self.0 {
            Source::Here(logits) => Ok(logits),
            Source::There { rows, row } => rows.read(*row),
        }
    }

    /// The likeliest tokens, if they can be had without the others.
    ///
    /// # Errors
    /// The backend's.
    pub fn best(&mut self) -> Result<Option<Best<'_>>> {
        match &mut self.0 {
            Source::Here(_) => Ok(None),
            Source::There { rows, row } => rows.best(*row).map(Some),
        }
    }
}

impl Rows<'_> {
    /// Has each row's logits taken.
    pub fn each(
        &mut self,
        numbers: &[usize],
        mut take: impl FnMut(usize, &mut Logits<'_>) -> Result<()>,
    ) -> Result<()> {
        self.kept.best.clear();
        for (row, &number) in numbers.iter().enumerate() {
            let Rows { backend, buffer, kept } = self;
            let mut rows = Rows { backend: &mut **backend, buffer: *buffer, kept };
            take(number, &mut Logits(Source::There { rows: &mut rows, row }))?;
        }
        Ok(())
    }

    fn read(&mut self, row: usize) -> Result<&[f32]> {
        self.kept.all.resize(self.buffer.width(), 0.0);
        self.backend.read_row(self.buffer, row, &mut self.kept.all)?;
        Ok(&self.kept.all)
    }

    fn best(&mut self, row: usize) -> Result<Best<'_>> {
        let each = BEST.min(self.buffer.width());
        if self.kept.best.is_empty() {
            // All rows at once: the next one's are asked for next.
            self.backend.best(self.buffer, each, &mut self.kept.best)?;
        }
        let ranked = &self.kept.best[row * each..][..each];
        let possible = ranked.partition_point(|ranked| ranked.logit > f32::NEG_INFINITY);
        let all = possible < each || each == self.buffer.width();
        let others = if all { f32::NEG_INFINITY } else { ranked[each - 1].logit };
        Ok(Best { ranked: &ranked[..possible], others })
    }
}
