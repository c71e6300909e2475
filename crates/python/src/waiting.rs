//! Waiting for work without holding the interpreter's lock, until the work ends or a signal's handler raises an
//! exception, as Ctrl-C does.

use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::thread;
use std::time::Duration;

use forebay_engine::Cancel;
use pyo3::prelude::*;

use crate::errors::failure;

/// How often a waiting call looks for signals.
pub const LOOK: Duration = Duration::from_millis(50);

/// Runs work on another thread and waits for its result. If a signal's handler raises an exception, the work is
/// cancelled; the call returns at once, and the work's result is dropped when it comes.
pub fn wait<T: Send + 'static>(
    py: Python<'_>,
    cancel: &Cancel,
    work: impl FnOnce() -> T + Send + 'static,
) -> PyResult<T> {
    wait_looking(py, cancel, work, |_| Ok(()))
}

/// Like [`wait`]. While it waits, it calls `look` again and again, and once more at the end. An exception of `look`
/// ends the wait, too.
pub fn wait_looking<T: Send + 'static>(
    py: Python<'_>,
    cancel: &Cancel,
    work: impl FnOnce() -> T + Send + 'static,
    mut look: impl FnMut(Python<'_>) -> PyResult<()>,
) -> PyResult<T> {
    let (sender, mut result) = sync_channel(1);
    let work = move || {
        // Nobody receives it after an exception.
        let _ = sender.send(work());
    };
    thread::Builder::new()
        .name("forebay".into())
        .spawn(work)
        .map_err(|error| failure(&format!("cannot start a thread: {error}")))?;
    loop {
        match receive(py, &mut result) {
            // Signals are handled by the interpreter after the call.
            Ok(result) => {
                look(py)?;
                return Ok(result);
            }
            Err(RecvTimeoutError::Timeout) => {
                py.check_signals().and_then(|()| look(py)).inspect_err(|_| cancel.cancel())?;
            }
            Err(RecvTimeoutError::Disconnected) => {
                return Err(failure("a thread of Forebay panicked, which is a bug: see standard error"));
            }
        }
    }
}

fn receive<T: Send>(py: Python<'_>, result: &mut Receiver<T>) -> Result<T, RecvTimeoutError> {
    py.detach(move || result.recv_timeout(LOOK))
}
