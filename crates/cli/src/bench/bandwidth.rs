//! How fast this machine's memory can be read, measured and not looked up.

use std::hint::black_box;
use std::thread;
use std::time::Instant;

use anyhow::Result;
use forebay_engine::memory::Region;

/// Far more than caches hold, so that the reads come from memory.
const BYTES: usize = 512 << 20;

/// The median of this many passes counts. The best one would be the memory while nobody else uses it, and no
/// test as long as a benchmark meets only that.
const PASSES: usize = 25;

/// Bytes a second that `threads` threads read together, each its own part from end to end, from memory like that
/// of the weights.
pub fn read_bandwidth(threads: usize) -> Result<f64> {
    let mut region = Region::new(BYTES)?;
    let part = BYTES.div_ceil(threads).next_multiple_of(LINE);
    // Pages that were never written are all the same page of zeros.
    thread::scope(|scope| {
        for bytes in region.chunks_mut(part) {
            scope.spawn(|| bytes.fill(1));
        }
    });
    let pass = || {
        let start = Instant::now();
        thread::scope(|scope| {
            for bytes in region.chunks(part) {
                scope.spawn(|| black_box(sum(bytes)));
            }
        });
        BYTES as f64 / start.elapsed().as_secs_f64()
    };
    let mut passes: Vec<f64> = (0..PASSES).map(|_| pass()).collect();
    passes.sort_by(f64::total_cmp);
    Ok(passes[PASSES / 2])
}

/// Bytes that are added up side by side: enough for the compiler to use its widest loads.
const LINE: usize = 64;

fn sum(bytes: &[u8]) -> u64 {
    let (words, _) = bytes.as_chunks::<8>();
    let (lines, _) = words.as_chunks::<{ LINE / 8 }>();
    let mut sums = [0u64; LINE / 8];
    for line in lines {
        for (sum, word) in sums.iter_mut().zip(line) {
            *sum = sum.wrapping_add(u64::from_le_bytes(*word));
        }
    }
    sums.into_iter().fold(0, u64::wrapping_add)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_is_read() {
        let mut bytes = vec![0; 10 * LINE];
        for i in 0..bytes.len() {
            bytes[i] = 1;
            assert_eq!(sum(&bytes), 1 << (i % 8 * 8), "byte {i}");
            bytes[i] = 0;
        }
    }
}
