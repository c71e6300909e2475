//! Computes models on NVIDIA GPUs.
//!
//! The driver and the compiler of kernels are looked for when they are first needed: a program with this crate runs as it
//! did where there are none. All weights are in the GPU's memory, and so is what conversations keep.

mod backend;
mod compile;
mod driver;
pub mod profile;
mod program;
mod state;
mod weights;

use std::sync::Arc;
use std::time::Instant;

use forebay_engine::backend::{Backend, BufShape, Device, Precision};
use forebay_engine::{Error, Result};

pub use backend::CudaBackend;
pub use compile::compiler_is_there;
pub use driver::{Found, find};

use driver::Gpu;

/// Tokens of a prompt that are computed together: enough for every expert to have many.
const CHUNK: usize = 2048;

/// A GPU that models can be computed on.
pub struct Cuda(Arc<Gpu>);

impl Cuda {
    /// The GPU of this number, of whose memory so many bytes may be used: by default what is free, less a margin.
    ///
    /// # Errors
    /// If there is no such GPU, or it cannot be used.
    pub fn open(ordinal: usize, memory: Option<u64>) -> Result<Cuda> {
        let found = find().map_err(Error::Backend)?;
        let Some(gpu) = found.get(ordinal) else {
            let last = found.len() - 1;
            return Err(Error::Backend(format!("there is no GPU {ordinal}; the last is cuda:{last}")));
        };
        if gpu.capability < (8, 0) {
            let (major, minor) = gpu.capability;
            return Err(Error::Unsupported(format!(
                "{} is of compute capability {major}.{minor}, and at least 8.0 is needed; use --device cpu",
                gpu.name
            )));
        }
        Ok(Cuda(Gpu::open(ordinal, memory)?))
    }

    /// Bytes a second that its memory reads and writes, tried for a moment.
    ///
    /// # Errors
    /// If it has no memory for that.
    pub fn memory_speed(&self) -> Result<f64> {
        const BYTES: usize = 256 << 20;
        const COPIES: usize = 64;
        let both = self.0.allocate(2 * BYTES, "a moment's measurement")?;
        let copy = || self.0.copy(both.address(), both.address() + BYTES as u64, BYTES);
        copy()?;
        self.0.wait()?;
        let start = Instant::now();
        for _ in 0..COPIES {
            copy()?;
        }
        self.0.wait()?;
        Ok((2 * BYTES * COPIES) as f64 / start.elapsed().as_secs_f64())
    }

    /// What the maker calls it.
    pub fn name(&self) -> &str {
        &self.0.name
    }
}

impl Device for Cuda {
    fn backend(&self, precision: Precision, buffers: &[BufShape]) -> Result<Box<dyn Backend>> {
        Ok(Box::new(CudaBackend::new(&self.0, precision, buffers)?))
    }

    fn memory(&self) -> u64 {
        self.0.budget
    }

    fn chunk(&self) -> usize {
        CHUNK
    }
}
