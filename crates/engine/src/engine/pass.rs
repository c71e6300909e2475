//! One batch through the model, and the logits that come of it.

use std::ops::Range;
use std::sync::MutexGuard;

use super::{Compute, FEW_TOKENS, Inner};
use crate::backend::{ASSISTED_ROWS, Batch, Logits, Row, note_loss};
use crate::blocks::head::Head;
use crate::blocks::{Cancel, Context, RoutingObserver};
use crate::error::{Bytes, Error, Result};
use crate::experts::{ExpertStore, Purpose};
use crate::memory::{Pressure, Relief};

/// What is asked of a batch besides computing it.
pub(crate) struct Pass<'a> {
    /// Asks the pass to end early.
    pub cancel: &'a Cancel,
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
        self.inner.experts.store.lend_device(&mut *self.held.backend)
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
        // Many tokens together need nearly all experts, whether they are a prompt or the next ones of many answers.
        let few = rows == batch.sequences.len() && rows <= FEW_TOKENS;
        let purpose = if few { Purpose::Token } else { Purpose::Prompt };
        let cancel = pass.cancel;
        self.pass_layers(batch, purpose, pass).inspect_err(|error| match error {
            Error::DeviceLost(_) => note_loss(&self.inner.lost, error),
            // These end a batch between two layers, or before an expert was given a place there.
            Error::Cancelled | Error::Io { .. } => {}
            // What was on its way to the device may not have come there.
            _ => self.inner.experts.store.forget_device(),
        })?;
        let ComputeGuard { inner, held } = self;
        let mut computed = Computed { inner, held, rows, purpose, given: 0, ready: 0..0 };
        if computed.has_more() {
            cancel.check()?;
            computed.compute_more()?;
        }
        Ok(computed)
    }

    /// Takes a batch through all layers. Afterwards all experts that they used have come to where they are computed.
    fn pass_layers(&mut self, batch: &mut Batch<'_>, purpose: Purpose, pass: Pass<'_>) -> Result<()> {
        let Pass { cancel, mut observer } = pass;
        let Compute { backend, routing, expected, assistant, pressure, .. } = &mut *self.held;
        let few = purpose == Purpose::Token;
        // A prompt needs nearly all experts, which the store reads far ahead as it is.
        let expected = (self.inner.setup.prefetch && few).then_some(expected);
        let mut cx = Context {
            backend: &mut **backend,
            store: &self.inner.experts.store,
            routing,
            purpose,
            expected,
            assistant: assistant.as_mut().filter(|_| few && batch.tokens.len() <= ASSISTED_ROWS),
            cancel,
            // With its lifetime cut to that of the context.
            observer: match &mut observer {
                Some(observer) => Some(&mut **observer),
                None => None,
            },
        };
        if batch.tokens.len() == batch.sequences.len() {
            cx.store.tick();
        }
        relieve(pressure, cx.store);
        cx.store.lend_device(cx.backend)?;
        cx.backend.begin(batch.tokens.len());
        self.inner.decoder.forward(&mut cx, batch)?;
        cx.backend.submit()?;
        cx.store.note_copy_wait(cx.backend.copy_wait());
        Ok(())
    }
}

/// A batch that went through all layers. It gives the logits of the rows that want them, one after the other, and holds the
/// backend until it is dropped.
pub(crate) struct Computed<'a> {
    inner: &'a Inner,
    held: MutexGuard<'a, Compute>,
    /// Rows of the batch.
    rows: usize,
    purpose: Purpose,
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
        let Compute { backend, logits, wanted, .. } = &mut *self.held;
        let row = Row {
            backend: &mut **backend,
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
        let store = &self.inner.experts.store;
        if self.purpose == Purpose::Token {
            let told = self.held.backend.tell(&mut |layer, experts| store.note_used(layer, experts));
            told.inspect_err(|error| note_loss(&self.inner.lost, error))?;
        }
        Ok(())
    }

    /// Computes the logits of the next rows, as many as there is room for.
    fn compute_more(&mut self) -> Result<()> {
        let Compute { backend, logits, wanted, .. } = &mut *self.held;
        let next = self.given..wanted.len().min(self.given + Head::ROWS);
        logits.forget();
        backend.begin(self.rows);
        let done = self.inner.decoder.head().forward(&mut **backend, &wanted[next.clone()]);
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
