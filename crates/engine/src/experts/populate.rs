//! Makes the pages of the slots resident in the background.
//!
//! The kernel finds and clears a page when it is first touched. If the drive's writes touch it first, this happens
//! page by page on the thread that reads, and takes longer than the read itself.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use crate::memory::Region;

/// Bytes per call: large enough to be worth a call, small enough to stop soon.
const STEP: usize = 16 << 20;

/// A thread that ends when all pages are resident, or when this is dropped.
pub struct Populating {
    stop: Arc<AtomicBool>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Populating {
    /// Starts with the first region, because slots are taken in that order.
    pub fn start(regions: impl Iterator<Item = Arc<Region>>) -> Populating {
        let stop = Arc::new(AtomicBool::new(false));
        let (stopped, regions) = (Arc::clone(&stop), regions.collect::<Vec<_>>());
        let body = move || {
            for region in &regions {
                for start in (0..region.len()).step_by(STEP) {
                    if stopped.load(Ordering::Relaxed) {
                        return;
                    }
                    region.populate(start..region.len().min(start + STEP));
                }
            }
        };
        // Without the thread, pages become resident when they are first written.
        let thread = std::thread::Builder::new().name("forebay-pages".into()).spawn(body).ok();
        Populating { stop, thread: Mutex::new(thread) }
    }

    /// Stops the thread.
    pub fn stop(&self) {
        self.stop.store(true, Ordering::Relaxed);
        self.wait();
    }

    /// Waits until all pages are resident.
    pub fn wait(&self) {
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(thread) = thread {
            // The thread returns nothing, and a panic in it is harmless.
            let _ = thread.join();
        }
    }
}

impl Drop for Populating {
    fn drop(&mut self) {
        self.stop();
    }
}
