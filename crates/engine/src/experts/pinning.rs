//! Pins expert slots, so that a device copies from them directly.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use super::executor::Device;
use crate::memory::SharedBytes;

/// Keeps slots pinned, as far as the operating system allows, while it lives. Pinning makes all pages of the slots
/// resident, which takes a while, so a background thread does it.
pub struct Pinning {
    stop: Arc<AtomicBool>,
    thread: Mutex<Option<JoinHandle<Pins>>>,
    pins: Mutex<Pins>,
}

/// Each keeps one part of the memory pinned.
type Pins = Vec<Box<dyn Send>>;

impl Pinning {
    /// Starts pinning these parts in order.
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
    tracing::warn!(
        "cannot pin expert slots, so uploads to the GPU take a slower path through a small buffer: {error}"
    );
}
