//! Measures how fast the GPU moves bytes.

use std::sync::Arc;
use std::time::Instant;

use forebay_engine::Result;

use crate::device::{Gpu, Memory};
use crate::recorder::{Args, Recorder};
use crate::shaders::{File, Name};

/// How often an operation is repeated while it is measured.
const TIMES: usize = 16;

/// Kernels of a submission: a single one is over too soon to measure.
const READS: usize = 16;

/// What a workgroup of the kernel reads.
const GROUP_BYTES: usize = 64 << 10;

/// The bytes per second that a kernel reads from the GPU's memory.
///
/// # Errors
/// If there is not enough memory, or the GPU fails.
pub fn of_memory(gpu: &Arc<Gpu>) -> Result<f64> {
    let (there, out) = (moment(gpu)?, gpu.allocate(256, "a speed measurement")?);
    let mut recorder = Recorder::new(gpu)?;
    let grid = [there.bytes() as usize / GROUP_BYTES, 1, 1];
    let bound = [there.whole().into(), out.whole().into()];
    let name = Name::new(File::Speed, "read_all");
    let reads = time(gpu, || {
        (0..READS).try_for_each(|_| recorder.record(&name, grid, &Args::new(), &bound))?;
        recorder.submit().map(drop)
    })?;
    Ok((READS as u64 * there.bytes()) as f64 * reads)
}

/// The bytes per second of uploads.
///
/// # Errors
/// If there is not enough memory, or the GPU fails.
pub fn of_link(gpu: &Arc<Gpu>) -> Result<f64> {
    // The size of a few experts, because it is measured while all other memory is in use.
    let there = gpu.allocate(16 << 20, "a speed measurement")?;
    let here = vec![1; there.bytes() as usize];
    let there = there.whole();
    let uploads = time(gpu, || {
        gpu.queue.write_buffer(&there.buffer, 0, &here);
        gpu.queue.submit([]);
        Ok(())
    })?;
    Ok(here.len() as f64 * uploads)
}

/// Memory for a measurement: larger than caches, if possible. Of the computer's memory only a little, because it is beyond the
/// budget.
fn moment(gpu: &Arc<Gpu>) -> Result<Memory> {
    let allocate = |bytes: u64| gpu.allocate(bytes, "a speed measurement");
    let most = if gpu.unified { 64 << 20 } else { 256 << 20 };
    allocate(most).or_else(|_| allocate(16 << 20))
}

/// How often per second an operation completes when it is started repeatedly.
fn time(gpu: &Arc<Gpu>, mut start: impl FnMut() -> Result<()>) -> Result<f64> {
    start()?;
    gpu.wait(None)?;
    let begun = Instant::now();
    (0..TIMES).try_for_each(|_| start())?;
    gpu.wait(None)?;
    Ok(TIMES as f64 / begun.elapsed().as_secs_f64())
}
