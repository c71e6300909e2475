//! A pool of threads that take pieces from the queue and block while each is read.

use std::sync::Arc;

use super::queue::{Drives, Piece, Queue};
use super::{Background, ByteSource, OnDone, Threads};
use crate::error::{Error, Result};

/// Enough to keep a drive busy with reads of about a megabyte.
pub(super) const THREADS_PER_DRIVE: usize = 8;

/// The settings of a pool.
pub(super) struct Setup {
    pub threads: usize,
    /// The reader's description of itself.
    pub how: String,
}

/// Starts the threads.
pub(super) fn start(
    source: Arc<dyn ByteSource>,
    drives: Drives,
    setup: Setup,
    on_done: OnDone,
) -> Result<Background> {
    let places = (setup.threads / drives.count()).max(1);
    let queue = Arc::new(Queue::new(drives, places, on_done));
    let sleepers = Arc::clone(&queue);
    let wake = Box::new(move || sleepers.wake());
    // If a thread cannot be started, dropping the reader ends those that were.
    let reader = Background { queue, wake, threads: Threads::new(), how: setup.how };
    for i in 0..setup.threads.max(1) {
        let (queue, source) = (Arc::clone(&reader.queue), Arc::clone(&source));
        let work = move || work(&queue, &*source);
        let refused = |e| Error::Backend(format!("cannot start a thread that reads experts: {e}"));
        reader.threads.start(format!("forebay-io-{i}"), work).map_err(refused)?;
    }
    Ok(reader)
}

fn work(queue: &Queue, source: &dyn ByteSource) {
    while let Some(piece) = queue.take() {
        let Piece { file, offset, to, len, needed, .. } = piece;
        // SAFETY: the submitter left its initialised memory to the reader until the read is reported, and no other
        // piece covers the same bytes.
        let buffer = unsafe { std::slice::from_raw_parts_mut(to, len) };
        let result = source.read_at_least(file, offset, buffer, needed);
        queue.finish(piece, result);
    }
}
