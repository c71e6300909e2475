//! Runs models on NVIDIA GPUs.
//!
//! The driver and the kernel compiler (NVRTC) are loaded when they are first needed, so a program with this crate also
//! runs on machines without them. Dense weights and conversations are in GPU memory. So are as many experts as fit; the
//! others are uploaded from RAM.

mod backend;
mod compile;
mod driver;
mod executor;
mod grids;
pub mod profile;
mod program;
mod state;
mod weights;

use std::sync::Arc;
use std::time::Instant;

use forebay_engine::internals::backend::{BufShape, KvShape, Precision};
use forebay_engine::internals::experts::{Device, ExecutorBuilder};
use forebay_engine::internals::memory::SharedBytes;
use forebay_engine::{Error, Result};

pub use compile::compiler_is_there;
pub use driver::{Found, find};

use backend::{CudaBackend, attends};
use driver::{Gpu, Memory, Pinned, Registered};
use forebay_kernels::Encoding;
use weights::WeightKind;

/// Whether there are kernels for matrices with this encoding.
pub fn computes(encoding: Encoding) -> bool {
    WeightKind::of(encoding).is_some()
}

/// Tokens of a prompt that one pass computes: enough for every expert to have many.
const CHUNK: usize = 2048;

/// A GPU that models can be computed on.
pub struct Cuda(Arc<Gpu>);

impl Cuda {
    /// Opens the GPU with this number, with this much of its memory; by default all free memory less a margin.
    ///
    /// # Errors
    /// If there is no such GPU, or it cannot be used.
    pub fn open(ordinal: usize, memory: Option<u64>) -> Result<Cuda> {
        let found = find().map_err(Error::Backend)?;
        let Some(gpu) = found.get(ordinal) else {
            let last = found.len() - 1;
            return Err(Error::Backend(format!("there is no GPU {ordinal}; the last one is cuda:{last}")));
        };
        if gpu.capability < (8, 0) {
            let (major, minor) = gpu.capability;
            return Err(Error::Unsupported(format!(
                "{} has compute capability {major}.{minor}, but 8.0 or later is needed; use Options::device = None",
                gpu.name
            )));
        }
        Ok(Cuda(Gpu::open(ordinal, memory)?))
    }

    /// Memory for a measurement, in this many parts: larger than caches, if possible.
    fn moment(&self, parts: usize) -> Result<Memory> {
        let allocate = |bytes: usize| self.0.allocate(parts * bytes, "a speed measurement");
        allocate(256 << 20).or_else(|_| allocate(64 << 20)).or_else(|_| allocate(16 << 20))
    }

    /// How often per second an operation completes when it is started repeatedly.
    fn time(&self, mut start: impl FnMut() -> Result<()>) -> Result<f64> {
        const TIMES: usize = 32;
        start()?;
        self.0.wait()?;
        let begun = Instant::now();
        (0..TIMES).try_for_each(|_| start())?;
        self.0.wait()?;
        Ok(TIMES as f64 / begun.elapsed().as_secs_f64())
    }

    /// Bytes in use of the [memory limit](Device::memory), by purpose.
    pub fn used(&self) -> Vec<(&'static str, u64)> {
        self.0.used()
    }

    /// Its product name.
    pub fn name(&self) -> &str {
        &self.0.name
    }
}

impl Device for Cuda {
    fn executor(&self, precision: Precision, buffers: &[BufShape]) -> Result<Box<dyn ExecutorBuilder>> {
        Ok(Box::new(CudaBackend::new(&self.0, precision, buffers)?))
    }

    fn computes(&self, encoding: Encoding) -> bool {
        computes(encoding)
    }

    fn attends(&self, shape: &KvShape) -> bool {
        attends(shape, self.0.shared_limit as usize)
    }

    fn memory(&self) -> u64 {
        self.0.budget
    }

    fn chunk(&self) -> usize {
        CHUNK
    }

    fn memory_speed(&self) -> Result<f64> {
        let both = self.moment(2)?;
        let half = both.bytes() / 2;
        let speed = self.time(|| self.0.copy(both.address(), both.address() + half as u64, half))?;
        Ok(2.0 * half as f64 * speed)
    }

    fn link_speed(&self) -> Result<f64> {
        // The size of a few experts, because it is measured while all other memory is in use.
        let there = self.0.allocate(16 << 20, "a speed measurement")?;
        let mut here = Pinned::new(&self.0, there.bytes())?;
        let speed = self.time(|| self.0.send(there.address(), here.bytes()))?;
        Ok(there.bytes() as f64 * speed)
    }

    fn pin(&self, memory: SharedBytes) -> Result<Box<dyn Send>> {
        Ok(Box::new(Registered::new(&self.0, memory)?))
    }
}
