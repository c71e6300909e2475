//! Expert slots that a device copies from by itself.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use super::executor::Device;
use crate::memory::SharedBytes;

/// Bytes that are pinned at a time: enough to be worth a call, and little enough to stop soon.
pub const STEP: usize = 64 << 20;

/// Slots that a device copies from by itself, as far as the system allows it, as long as this lives. All their pages have to be there,
/// which takes as long as reading a good part of them, so a thread sees to it in the background.
pub struct Pinning {
    stop: Arc<AtomicBool>,
    thread: Mutex<Option<JoinHandle<Pins>>>,
    pins: Mutex<Pins>,
}

/// What the device gave for parts that are pinned.
type Pins = Vec<Box<dyn Send>>;

impl Pinning {
    /// Starts with the first of these parts.
    pub fn start(device: Arc<dyn Device>, parts: Vec<SharedBytes>) -> Pinning {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let body = move || pin(&*device, parts, &stopped);
        let thread = std::thread::Builder::new().name("forebay-pins".into()).spawn(body);
        let thread = thread.inspect_err(|error| warn(&error)).ok();
        Pinning { stop, thread: Mutex::new(thread), pins: Mutex::default() }
    }

    /// Waits until all slots are pinned.
    pub fn wait(&self) {
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(pins) = thread.and_then(|thread| thread.join().ok()) {
            *self.pins.lock().unwrap_or_else(PoisonError::into_inner) = pins;
        }
    }
}

impl Drop for Pinning {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        self.wait();
    }
}

fn pin(device: &dyn Device, parts: Vec<SharedBytes>, stop: &AtomicBool) -> Pins {
    let mut pins = Vec::with_capacity(parts.len());
    for part in parts {
        if stop.load(Ordering::Relaxed) {
            break;
        }
        match device.pin(part) {
            Ok(pin) => pins.push(pin),
            Err(error) => {
                warn(&error);
                break;
            }
        }
    }
    pins
}

fn warn(error: &dyn std::fmt::Display) {
    tracing::warn!("experts go to the GPU by way of a small buffer, which is slower: {error}");
}
