//! Runs models on GPUs of any maker: through Metal on macOS, through Vulkan on Linux and Windows.
//!
//! Where the GPU shares the processor's memory, kernels read experts in the very slots that the drive wrote to. A card
//! with its own memory has expert slots there, and experts are uploaded from RAM.

mod adopt;
mod backend;
mod device;
mod executor;
mod find;
mod grids;
mod heap;
mod profile;
mod recorder;
mod shaders;
mod speed;
mod state;
mod submissions;
mod texts;
mod weights;

use std::sync::Arc;

use forebay_engine::Result;
use forebay_engine::internals::backend::{BufShape, KvShape, Precision};
use forebay_engine::internals::experts::{Device, ExecutorBuilder};
use forebay_engine::internals::memory::SharedBytes;
use forebay_kernels::Encoding;

pub use device::{Counts, Variants};
pub use find::{Api, Found, Kind, find};
#[doc(hidden)]
pub use profile::{HostTimes, Line};
#[doc(hidden)]
pub use texts::kernel_texts;

use backend::{GpuBackend, attends};
use device::Gpu;
use weights::WeightKind;

/// Tokens of a prompt that one pass computes, on a card, and where its buffers take from the memory of the process.
const CHUNK: usize = 2048;
const SHARED_CHUNK: usize = 512;

/// A GPU that models can be computed on.
pub struct PortableGpu(Arc<Gpu>);

impl PortableGpu {
    /// Opens a GPU with this much of its memory; by default all of it, less a margin. A GPU that shares the processor's
    /// memory has no memory of its own: [`Options::memory`](forebay_engine::Options::memory) limits both.
    ///
    /// # Errors
    /// If it cannot be used.
    pub fn open(found: &Found, memory: Option<u64>, variants: Variants) -> Result<PortableGpu> {
        Gpu::open(found, memory, variants).map(PortableGpu)
    }

    /// Its product name and interface.
    pub fn name(&self) -> String {
        self.0.name()
    }

    /// How much the GPU was given to do so far.
    pub fn counts(&self) -> Counts {
        self.0.counts.get()
    }

    /// Starts measuring the time of each kernel, which makes everything slower.
    ///
    /// # Errors
    /// If the GPU has no timestamps.
    #[doc(hidden)]
    pub fn start_profile(&self) -> Result<()> {
        profile::start(&self.0)
    }

    /// Stops measuring. Returns the time of each kernel since the start, the longest first.
    ///
    /// # Errors
    /// If the GPU fails.
    #[doc(hidden)]
    pub fn stop_profile(&self) -> Result<Vec<Line>> {
        profile::stop(&self.0)
    }

    /// What the host has spent time with so far.
    #[doc(hidden)]
    pub fn host_times(&self) -> HostTimes {
        self.0.clock.get()
    }

    /// Bytes in use, by purpose.
    pub fn used(&self) -> Vec<(&'static str, u64)> {
        self.0.used()
    }
}

impl Device for PortableGpu {
    fn executor(&self, precision: Precision, buffers: &[BufShape]) -> Result<Box<dyn ExecutorBuilder>> {
        Ok(Box::new(GpuBackend::new(&self.0, precision, buffers)?))
    }

    fn computes(&self, encoding: Encoding) -> bool {
        WeightKind::of(encoding).is_some()
    }

    fn attends(&self, shape: &KvShape) -> bool {
        attends(shape, self.0.limits.max_compute_workgroup_storage_size as usize)
    }

    fn shares_memory(&self) -> bool {
        self.0.unified
    }

    fn memory(&self) -> u64 {
        self.0.budget
    }

    fn chunk(&self) -> usize {
        if self.0.unified { SHARED_CHUNK } else { CHUNK }
    }

    fn memory_speed(&self) -> Result<f64> {
        speed::of_memory(&self.0)
    }

    fn link_speed(&self) -> Result<f64> {
        speed::of_link(&self.0)
    }

    fn pins_at_once(&self) -> usize {
        // Kernels reach only some of these parts at a time.
        if self.0.unified { self.0.largest_arena() } else { 64 << 20 }
    }

    fn pin(&self, memory: SharedBytes) -> Result<Box<dyn Send>> {
        Ok(Box::new(self.0.adopt(memory)?))
    }
}
