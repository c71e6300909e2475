//! The memory bandwidth of this machine, measured without a model.

use std::thread;

use anyhow::Result;
use forebay_engine::internals::forecast::bound::read_speed;
use forebay_engine::internals::memory::Region;

/// The bytes to read: far more than caches hold.
const BYTES: usize = 512 << 20;

/// Bytes per second that `threads` threads read together, from memory that is mapped like that of the weights.
pub fn memory_speed(threads: usize) -> Result<f64> {
    let mut region = Region::new(BYTES)?;
    // The system maps all pages without a write to one page of zeros.
    thread::scope(|scope| {
        for bytes in region.chunks_mut(BYTES.div_ceil(threads)) {
            scope.spawn(|| bytes.fill(1));
        }
    });
    Ok(read_speed(&region, threads))
}
