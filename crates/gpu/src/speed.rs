//! Measures how fast the GPU moves bytes.

use std::sync::Arc;
use std::time::Instant;

use forebay_engine::Result;

use crate::device::{Gpu, Memory};

/// How often an operation is repeated while it is measured.
const TIMES: usize = 16;

/// The bytes per second that a copy within the GPU's memory reads and writes.
///
/// # Errors
/// If there is not enough memory, or the GPU fails.
pub fn of_memory(gpu: &Arc<Gpu>) -> Result<f64> {
    let (source, target) = (moment(gpu)?, moment(gpu)?);
    let bytes = source.bytes().min(target.bytes());
    let (source, target) = (source.whole(), target.whole());
    let copies = time(gpu, || {
        let mut encoder = gpu.device.create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
        encoder.copy_buffer_to_buffer(&source.buffer, 0, &target.buffer, 0, bytes);
        gpu.queue.submit([encoder.finish()]);
    })?;
    Ok(2.0 * bytes as f64 * copies)
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
fn time(gpu: &Arc<Gpu>, mut start: impl FnMut()) -> Result<f64> {
    start();
    gpu.wait(None)?;
    let begun = Instant::now();
    (0..TIMES).for_each(|_| start());
    gpu.wait(None)?;
    Ok(TIMES as f64 / begun.elapsed().as_secs_f64())
}
