//! One batch through the model.

use std::sync::MutexGuard;

use super::{Compute, FEW_TOKENS, Inner};
use crate::backend::{ASSISTED_ROWS, Backend};
use crate::blocks::head::Head;
use crate::blocks::{Cancel, Context, RoutingObserver};
use crate::error::{Bytes, Error, Result};
use crate::logits::{Logits, Rows};
use crate::plan::{Pressure, Relief};
use crate::session::Batch;
use crate::store::{ExpertStore, Purpose};

/// What is asked of a batch besides computing it.
pub(crate) struct Pass<'a> {
    /// Rows whose logits are computed.
    pub wanted: &'a [usize],
    /// Asks the pass to end early.
    pub cancel: &'a Cancel,
    /// Told of each layer's choices, if somebody wants to know.
    pub observer: Option<&'a mut RoutingObserver<'a>>,
}

/// The backend, held for a batch.
pub(crate) struct ComputeGuard<'a> {
    pub(super) inner: &'a Inner,
    pub(super) held: MutexGuard<'a, Compute>,
}

impl ComputeGuard<'_> {
    pub fn backend(&self) -> &dyn Backend {
        &*self.held.backend
    }

    /// Lends conversations what they need of the device's slots.
    ///
    /// # Errors
    /// If the device fails.
    pub fn lend_device(&mut self) -> Result<()> {
        self.inner.store.lend_device(&mut *self.held.backend)
    }

    /// Computes a batch, then the logits of the rows that want them, a few at a time.
    pub fn forward(
        &mut self,
        batch: &mut Batch<'_>,
        pass: Pass<'_>,
        logits: impl FnMut(usize, &mut Logits<'_>) -> Result<()>,
    ) -> Result<()> {
        if let Some(why) = self.inner.lost.get() {
            return Err(Error::DeviceLost(why.clone()));
        }
        let mut submitted = false;
        let done = self.forward_there(batch, pass, logits, &mut submitted);
        done.inspect_err(|error| match error {
            Error::DeviceLost(why) => {
                self.inner.lost.get_or_init(|| why.clone());
            }
            // These end a batch between two layers, or before an expert was given a place there.
            Error::Cancelled | Error::Io { .. } => {}
            // Experts have come by then: it is the output that failed, or whoever was given it.
            _ if submitted => {}
            // What was on its way to the device may not have come there.
            _ => self.inner.store.forget_device(),
        })
    }

    fn forward_there(
        &mut self,
        batch: &mut Batch<'_>,
        pass: Pass<'_>,
        mut logits: impl FnMut(usize, &mut Logits<'_>) -> Result<()>,
        submitted: &mut bool,
    ) -> Result<()> {
        let Pass { wanted, cancel, mut observer } = pass;
        let Compute { backend, routing, expected, assistant, pressure, logits: kept } = &mut *self.held;
        let one_each = batch.tokens.len() == batch.sequences.len();
        // Many tokens together need nearly all experts, whether they are a prompt or the next ones of many answers.
        let few = one_each && batch.tokens.len() <= FEW_TOKENS;
        let purpose = if few { Purpose::Token } else { Purpose::Prompt };
        // A prompt needs nearly all experts, which the store reads far ahead as it is.
        let expected = (self.inner.prefetch && few).then_some(expected);
        let mut cx = Context {
            backend: &mut **backend,
            store: &self.inner.store,
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
        if one_each {
            cx.store.tick();
        }
        relieve(pressure, cx.store);
        cx.store.lend_device(cx.backend)?;
        cx.backend.begin(batch.tokens.len());
        self.inner.model.forward(&mut cx, batch)?;
        cx.backend.submit()?;
        *submitted = true;
        cx.store.note_copy_wait(cx.backend.copy_wait());
        for rows in wanted.chunks(Head::ROWS) {
            cancel.check()?;
            cx.backend.begin(batch.tokens.len());
            let head = self.inner.model.head();
            head.forward(cx.backend, rows)?;
            Rows { backend: cx.backend, buffer: head.logits, kept }.each(rows, &mut logits)?;
        }
        if purpose == Purpose::Token {
            cx.backend.tell(&mut |layer, experts| cx.store.note_used(layer, experts))?;
        }
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
