//! The process's own memory as buffers of the GPU, so that kernels read weights in place. wgpu has no such buffers, so
//! this goes below it, to Metal or Vulkan.

#[cfg(target_vendor = "apple")]
#[path = "metal.rs"]
mod platform;
#[cfg(not(target_vendor = "apple"))]
#[path = "vulkan.rs"]
mod platform;

use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use forebay_engine::internals::memory::SharedBytes;
use forebay_engine::{Error, Result};

use crate::device::{Gpu, Span};

pub use platform::{is_possible, memory, open};

/// The most bytes of one buffer over dense weights.
const WINDOW: usize = 1 << 30;

/// The memory that the GPU reads in place.
#[derive(Default)]
pub struct Adopted(Mutex<Vec<Part>>);

/// Adopted memory.
struct Part {
    /// Its addresses.
    addresses: Range<usize>,
    buffer: wgpu::Buffer,
    /// Identifies it.
    number: u64,
    /// Keeps the memory. Dropped after the buffer.
    _memory: SharedBytes,
}

impl Adopted {
    fn lock(&self) -> MutexGuard<'_, Vec<Part>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The adopted part that has all of these bytes.
    pub fn find(&self, bytes: &[u8]) -> Option<Span> {
        let start = bytes.as_ptr() as usize;
        let parts = self.lock();
        let part = parts
            .iter()
            .find(|part| part.addresses.start <= start && start + bytes.len() <= part.addresses.end)?;
        let start = (start - part.addresses.start) as u64;
        Some(Span { buffer: part.buffer.clone(), start, bytes: bytes.len() as u64 })
    }

    /// The buffers of all parts, in the order of their adoption, each with its number.
    pub fn buffers(&self) -> Vec<(u64, Span)> {
        let whole = |part: &Part| Span { buffer: part.buffer.clone(), start: 0, bytes: part.buffer.size() };
        self.lock().iter().map(|part| (part.number, whole(part))).collect()
    }
}

/// Keeps memory adopted while it lives.
pub struct Adoption {
    gpu: Arc<Gpu>,
    number: u64,
}

impl Drop for Adoption {
    fn drop(&mut self) {
        // Nothing that was submitted may still read the memory. A lost GPU reads nothing.
        self.gpu.submit_closed();
        let _ = self.gpu.wait(None);
        self.gpu.adopted.lock().retain(|part| part.number != self.number);
        self.gpu.note_dropped();
    }
}

impl Gpu {
    /// Adopts all pages of these bytes.
    ///
    /// # Errors
    /// If the driver refuses.
    pub fn adopt(self: &Arc<Self>, memory: SharedBytes) -> Result<Adoption> {
        let page = page_size();
        let start = memory.as_ptr() as usize / page * page;
        let end = (memory.as_ptr() as usize + memory.len()).next_multiple_of(page);
        // SAFETY: the pages belong to a mapping of their own, of which `memory` keeps a share. It is dropped after the
        // buffer, and after everything that was submitted has ended (`Adoption::drop`).
        let buffer =
            unsafe { platform::import(&self.device, start as *mut u8, end - start) }.map_err(|why| {
                Error::Backend(format!("{} cannot use the process's memory: {why}", self.name()))
            })?;
        let mut parts = self.adopted.lock();
        let number = parts.iter().map(|part| part.number + 1).max().unwrap_or(0);
        parts.push(Part { addresses: start..end, buffer, number, _memory: memory });
        Ok(Adoption { gpu: Arc::clone(self), number })
    }

    /// A buffer over dense weights. Weights that follow in the same region share it.
    ///
    /// # Errors
    /// If the driver refuses.
    pub fn adopt_weights(self: &Arc<Self>, bytes: &SharedBytes) -> Result<(Span, Option<Adoption>)> {
        if let Some(span) = self.adopted.find(bytes) {
            return Ok((span, None));
        }
        let most = WINDOW.min(self.limits.max_buffer_size as usize).max(bytes.len());
        let adoption = self.adopt(bytes.extended(most))?;
        let span = self.adopted.find(bytes).expect("it has just been adopted");
        Ok((span, Some(adoption)))
    }
}

/// Bytes of a page, or of several: an alignment that every driver accepts.
fn page_size() -> usize {
    if cfg!(target_vendor = "apple") { 16384 } else { 4096 }
}
