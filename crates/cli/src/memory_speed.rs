//! How fast this machine's memory can be read, where no model tells.

use std::thread;

use anyhow::Result;
use forebay_engine::internals::forecast::bound::read_speed;
use forebay_engine::internals::memory::Region;

/// Far more than caches hold, so that the reads come from memory.
const BYTES: usize = 512 << 20;

/// Bytes a second that `threads` threads read together from memory like that of the weights.
pub fn memory_speed(threads: usize) -> Result<f64> {
    let mut region = Region::new(BYTES)?;
    // Pages that were never written are all the same page of zeros.
    thread::scope(|scope| {
        for bytes in region.chunks_mut(BYTES.div_ceil(threads)) {
            scope.spawn(|| bytes.fill(1));
        }
    });
    Ok(read_speed(&region, threads))
}
