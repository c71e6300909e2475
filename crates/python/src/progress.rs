//! How far something is that takes long.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use forebay_hub::Watcher;
use pyo3::prelude::*;

/// How many bytes are done, and how many there are. The thread that works writes it, and the one that waits reads it.
#[derive(Clone, Default)]
pub struct Progress(Arc<(AtomicU64, AtomicU64)>);

impl Progress {
    /// So many bytes are done.
    pub fn set(&self, done: u64, total: u64) {
        self.0.0.store(done, Ordering::Relaxed);
        self.0.1.store(total, Ordering::Relaxed);
    }

    /// Calls a Python function with both numbers, once there are some.
    ///
    /// # Errors
    /// The function's exception.
    pub fn tell(&self, function: &Bound<'_, PyAny>) -> PyResult<()> {
        let (done, total) = (self.0.0.load(Ordering::Relaxed), self.0.1.load(Ordering::Relaxed));
        if total > 0 { function.call1((done.min(total), total)).map(drop) } else { Ok(()) }
    }
}

impl Watcher for Progress {
    fn at(&self, done: u64, total: u64) {
        self.set(done, total);
    }
}
