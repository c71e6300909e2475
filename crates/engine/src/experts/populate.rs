//! Takes the pages of the slots from the system in the background.
//!
//! A page that is touched for the first time has to be found and cleared. If the drive's writes are the first, that
//! happens page by page on the thread that reads, and costs more than the reading.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use crate::memory::Region;

/// Enough to be worth a call, and little enough to stop soon.
const STEP: usize = 16 << 20;

/// A thread that ends when all pages are there, or when this is dropped.
pub struct Populating {
    stop: Arc<AtomicBool>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Populating {
    /// Starts with the first page of the first region, because slots are taken in that order.
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
        // Without the thread, pages come as they are written.
        let thread = std::thread::Builder::new().name("forebay-pages".into()).spawn(body).ok();
        Populating { stop, thread: Mutex::new(thread) }
    }

    /// Takes no more pages.
    pub fn stop(&self) {
        self.stop.store(true, Ordering::Relaxed);
        self.wait();
    }

    /// Waits until all pages are there.
    pub fn wait(&self) {
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(thread) = thread {
            // It has nothing to say.
            let _ = thread.join();
        }
    }
}

impl Drop for Populating {
    fn drop(&mut self) {
        self.stop();
    }
}
