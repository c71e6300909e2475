//! One pass: a batch through all layers, and the logits of its rows.

use std::ops::Range;
use std::sync::MutexGuard;

use super::{Compute, Inner};
use crate::backend::{Batch, Logits, Row, note_loss};
use crate::blocks::head::Head;
use crate::blocks::{Cancel, Context, PromptPart};
use crate::error::{Bytes, Error, Result};
use crate::experts::{BatchShape, ExpertStore, RoutingObserver};
use crate::memory::{Pressure, Relief};

/// What a pass does besides computing its batch.
pub(crate) struct Pass<'a> {
    /// Ends the pass early when it is cancelled.
    pub cancel: &'a Cancel,
    /// The prompts of the batch whose meters advance with each layer.
    pub prompts: &'a [PromptPart],
    /// Called with the choices of each layer's router. It runs while the backend is locked, so it only stores them.
    pub observer: Option<&'a mut RoutingObserver<'a>>,
}

/// The locked backend, for one batch.
pub(crate) struct ComputeGuard<'a> {
    pub(super) inner: &'a Inner,
    pub(super) held: MutexGuard<'a, Compute>,
}

impl<'a> ComputeGuard<'a> {
    /// Lends device slots to conversations that need their memory.
    ///
    /// # Errors
    /// If the device fails.
    pub fn lend_device(&mut self) -> Result<()> {
        self.held.executor.lend()
    }

    /// Computes a batch, and the logits of the first few of the `wanted` rows, which are in ascending order.
    ///
    /// # Errors
    /// If the device fails, an expert cannot be read, or the pass is cancelled. Later errors about logits come from
    /// [`Computed`].
    pub fn forward(
        mut self,
        batch: &mut Batch<'_>,
        wanted: impl IntoIterator<Item = usize>,
        pass: Pass<'_>,
    ) -> Result<Computed<'a>> {
        self.held.wanted.clear();
        self.held.wanted.extend(wanted);
        let rows = batch.tokens.len();
        let cancel = pass.cancel;
        self.pass_layers(batch, pass)?;
        let ComputeGuard { inner, held } = self;
        let mut computed = Computed { inner, held, rows, given: 0, ready: 0..0 };
        if computed.has_more() {
            cancel.check()?;
            computed.compute_more()?;
        }
        Ok(computed)
    }

    /// Computes a batch in a stage that is not the last one. Returns the hidden states: `[rows, hidden]`.
    ///
    /// # Errors
    /// If the device fails, an expert cannot be read, or the pass is cancelled.
    pub fn forward_stream(mut self, batch: &mut Batch<'_>, pass: Pass<'_>) -> Result<Vec<f32>> {
        self.pass_layers(batch, pass)?;
        let ComputeGuard { inner, mut held } = self;
        let stream = inner.decoder.stream();
        let mut values = vec![0.0; batch.tokens.len() * stream.width()];
        let read = held.executor.backend().read(stream, &mut values);
        let read = read.and_then(|()| held.executor.count_used());
        read.inspect_err(|error| note_loss(&inner.lost, error))?;
        Ok(values)
    }

    /// Takes a batch through all layers. At the end, all experts that they used are where they are computed.
    fn pass_layers(&mut self, batch: &mut Batch<'_>, pass: Pass<'_>) -> Result<()> {
        if let Some(why) = self.inner.lost.get() {
            return Err(Error::DeviceLost(why.clone()));
        }
        self.issue_layers(batch, pass).inspect_err(|error| match error {
            Error::DeviceLost(_) => note_loss(&self.inner.lost, error),
            // These end a batch between two layers, or before an expert got a slot on the device.
            Error::Cancelled | Error::Io { .. } => {}
            // Uploads to the device may be incomplete.
            _ => self.held.executor.forget(),
        })
    }

    fn issue_layers(&mut self, batch: &mut Batch<'_>, pass: Pass<'_>) -> Result<()> {
        let Pass { cancel, prompts, mut observer } = pass;
        let Compute { executor, pressure, .. } = &mut *self.held;
        relieve(pressure, &self.inner.experts.store);
        executor.begin(BatchShape { rows: batch.tokens.len(), sequences: batch.sequences.len() })?;
        let mut cx = Context {
            executor: &mut **executor,
            cancel,
            prompts,
            // Shortens the observer's lifetime to the context's.
            observer: match &mut observer {
                Some(observer) => Some(&mut **observer),
                None => None,
            },
        };
        self.inner.decoder.forward(&mut cx, batch)?;
        executor.end()
    }
}

/// A batch that went through all layers. It returns the logits of the wanted rows in order, and keeps the backend
/// locked until it is dropped.
pub(crate) struct Computed<'a> {
    inner: &'a Inner,
    held: MutexGuard<'a, Compute>,
    /// Rows of the batch.
    rows: usize,
    /// How many of the wanted rows were returned.
    given: usize,
    /// The wanted rows whose logits are in the backend's buffer, which holds a few.
    ready: Range<usize>,
}

impl Computed<'_> {
    /// Whether there are rows that were not returned.
    pub fn has_more(&self) -> bool {
        self.given < self.held.wanted.len()
    }

    /// Whether the next row's logits must be computed first.
    pub fn must_compute(&self) -> bool {
        self.has_more() && self.given == self.ready.end
    }

    /// The next wanted row: its index in the batch, and its logits.
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
            buffer: self.inner.head().logits,
            kept: logits,
            lost: &self.inner.lost,
            number: place - self.ready.start,
        };
        Ok(Some((wanted[place], Logits::in_buffer(row))))
    }

    /// Ends the batch and unlocks the backend.
    ///
    /// # Errors
    /// If the device fails.
    pub fn finish(mut self) -> Result<()> {
        self.held.executor.count_used().inspect_err(|error| note_loss(&self.inner.lost, error))
    }

    /// Computes the logits of the next rows, until the buffer is full.
    fn compute_more(&mut self) -> Result<()> {
        let Compute { executor, logits, wanted, .. } = &mut *self.held;
        let next = self.given..wanted.len().min(self.given + Head::ROWS);
        logits.forget();
        let backend = executor.backend();
        backend.begin(self.rows);
        let done = self.inner.head().forward(backend, &wanted[next.clone()]);
        done.inspect_err(|error| note_loss(&self.inner.lost, error))?;
        self.ready = next;
        Ok(())
    }
}

/// Returns slots to the system when memory is short, in the machine or in the budget, and takes them back when there is
/// plenty.
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
