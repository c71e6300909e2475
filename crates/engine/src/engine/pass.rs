//! One batch through the model, and the logits that come of it.

use std::ops::Range;
use std::sync::MutexGuard;

use super::{Compute, Inner};
use crate::backend::{Batch, Logits, Row, note_loss};
use crate::blocks::head::Head;
use crate::blocks::{Cancel, Context, PromptPart};
use crate::error::{Bytes, Error, Result};
use crate::experts::{BatchShape, ExpertStore, RoutingObserver};
use crate::memory::{Pressure, Relief};

/// What is asked of a batch besides computing it.
pub(crate) struct Pass<'a> {
    /// Asks the pass to end early.
    pub cancel: &'a Cancel,
    /// The prompts of the batch whose meters advance with each layer.
    pub prompts: &'a [PromptPart],
    /// Told of each layer's choices, if somebody wants to know. It runs while the backend is held, so it only writes them down.
    pub observer: Option<&'a mut RoutingObserver<'a>>,
}

/// The backend, held for a batch.
pub(crate) struct ComputeGuard<'a> {
    pub(super) inner: &'a Inner,
    pub(super) held: MutexGuard<'a, Compute>,
}

impl<'a> ComputeGuard<'a> {
    /// Lends conversations what they need of the device's slots.
    ///
    /// # Errors
    /// If the device fails.
    pub fn lend_device(&mut self) -> Result<()> {
        self.held.executor.lend()
    }

    /// Computes a batch, and the logits of the first of the `wanted` rows, which are ascending.
    ///
    /// # Errors
    /// If the device fails or an expert cannot be read; [`Error::Cancelled`]. What goes wrong with logits later is an error of
    /// [`Computed`], and what the reader of logits makes of them is no error of either.
    pub fn forward(
        mut self,
        batch: &mut Batch<'_>,
        wanted: impl IntoIterator<Item = usize>,
        pass: Pass<'_>,
    ) -> Result<Computed<'a>> {
        if let Some(why) = self.inner.lost.get() {
            return Err(Error::DeviceLost(why.clone()));
        }
        self.held.wanted.clear();
        self.held.wanted.extend(wanted);
        let rows = batch.tokens.len();
        let cancel = pass.cancel;
        self.pass_layers(batch, pass).inspect_err(|error| match error {
            Error::DeviceLost(_) => note_loss(&self.inner.lost, error),
            // These end a batch between two layers, or before an expert was given a place there.
            Error::Cancelled | Error::Io { .. } => {}
            // What was on its way to the device may not have come there.
            _ => self.held.executor.forget(),
        })?;
        let ComputeGuard { inner, held } = self;
        let mut computed = Computed { inner, held, rows, given: 0, ready: 0..0 };
        if computed.has_more() {
            cancel.check()?;
            computed.compute_more()?;
        }
        Ok(computed)
    }

    /// Takes a batch through all layers. Afterwards all experts that they used have come to where they are computed.
    fn pass_layers(&mut self, batch: &mut Batch<'_>, pass: Pass<'_>) -> Result<()> {
        let Pass { cancel, prompts, mut observer } = pass;
        let Compute { executor, pressure, .. } = &mut *self.held;
        relieve(pressure, &self.inner.experts.store);
        executor.begin(BatchShape { rows: batch.tokens.len(), sequences: batch.sequences.len() })?;
        let mut cx = Context {
            executor: &mut **executor,
            cancel,
            prompts,
            // With its lifetime cut to that of the context.
            observer: match &mut observer {
                Some(observer) => Some(&mut **observer),
                None => None,
            },
        };
        self.inner.decoder.forward(&mut cx, batch)?;
        executor.end()
    }
}

/// A batch that went through all layers. It gives the logits of the rows that want them, one after the other, and holds the
/// backend until it is dropped.
pub(crate) struct Computed<'a> {
    inner: &'a Inner,
    held: MutexGuard<'a, Compute>,
    /// Rows of the batch.
    rows: usize,
    /// How many of the wanted rows have been given.
    given: usize,
    /// Which of the wanted rows have their logits in the backend's buffer, which has room for a few.
    ready: Range<usize>,
}

impl Computed<'_> {
    /// Whether there are rows that have not been given.
    pub fn has_more(&self) -> bool {
        self.given < self.held.wanted.len()
    }

    /// Whether the next row's logits have to be computed first.
    pub fn must_compute(&self) -> bool {
        self.has_more() && self.given == self.ready.end
    }

    /// The next row that is wanted: its number in the batch, and its logits.
    ///
    /// # Errors
    /// If the device fails.
    pub fn next_row(&mut self) -> Result<Option<(usize, Logits<'_>)>> {
        if !self.has_more() {
            return Ok(None);
        }
        if self.must_compute() {
            self.compute_more()?;
        }
        let place = self.given;
        self.given += 1;
        let Compute { executor, logits, wanted, .. } = &mut *self.held;
        let row = Row {
            backend: executor.backend(),
            buffer: self.inner.decoder.head().logits,
            kept: logits,
            lost: &self.inner.lost,
            number: place - self.ready.start,
        };
        Ok(Some((wanted[place], Logits::there(row))))
    }

    /// Ends the batch, whose logits have served, and lets others compute.
    ///
    /// # Errors
    /// If the device fails.
    pub fn finish(mut self) -> Result<()> {
        self.held.executor.count_used().inspect_err(|error| note_loss(&self.inner.lost, error))
    }

    /// Computes the logits of the next rows, as many as there is room for.
    fn compute_more(&mut self) -> Result<()> {
        let Compute { executor, logits, wanted, .. } = &mut *self.held;
        let next = self.given..wanted.len().min(self.given + Head::ROWS);
        logits.forget();
        let backend = executor.backend();
        backend.begin(self.rows);
        let done = self.inner.decoder.head().forward(backend, &wanted[next.clone()]);
        done.inspect_err(|error| note_loss(&self.inner.lost, error))?;
        self.ready = next;
        Ok(())
    }
}

/// Gives slots back when memory is short, the machine's or what the process may have, and takes them again when there is plenty.
fn relieve(pressure: &mut Pressure, store: &ExpertStore) {
    match pressure.relief() {
        None => {}
        Some(Relief::Give(bytes)) => {
            let given = store.relieve(bytes);
            tracing::debug!("memory is short: {} of expert slots given back", Bytes(given.freed));
            pressure.done(Relief::Give(given.slots));
        }
        Some(Relief::Take(bytes)) => pressure.done(Relief::Take(store.take_again(bytes))),
    }
}
