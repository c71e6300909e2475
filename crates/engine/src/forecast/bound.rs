//! What limits the speed of generation: compares the machine's measured speeds with what a token needs.

use std::hint::black_box;
use std::thread;
use std::time::Instant;

use crate::experts::Meters;

/// The measured speeds of this machine, in bytes per second.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Speeds {
    /// The speed of reading weights from memory; `None` if the model has so few that caches hold them.
    pub memory: Option<f64>,
    /// The speed of reading experts from the drive; `None` if no experts are streamed.
    pub drive: Option<f64>,
    /// The speed of uploading experts to the device; `None` if none are uploaded during generation.
    pub link: Option<f64>,
}

/// The cost of a token, averaged over several.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct TokenCost {
    /// All seconds.
    pub seconds: f64,
    /// Seconds of everything except experts.
    pub dense_seconds: f64,
    /// Seconds of waiting for experts with nothing to compute.
    pub wait_seconds: f64,
    /// The hit rate: the share of experts that were in memory already.
    pub hit_rate: f64,
    /// Bytes of the experts that were used.
    pub bytes_used: f64,
    /// Bytes that were read from the drive.
    pub bytes_read: f64,
    /// The share of experts that were in device memory already.
    pub device_hit_rate: f64,
    /// Bytes that were uploaded to the device.
    pub bytes_lifted: f64,
}

impl TokenCost {
    /// The cost of each of `tokens` tokens that took `seconds` together.
    pub fn new(tokens: usize, seconds: f64, experts: &Meters) -> TokenCost {
        let tokens = tokens as f64;
        TokenCost {
            seconds: seconds / tokens,
            dense_seconds: (seconds - experts.expert_seconds) / tokens,
            wait_seconds: experts.wait_seconds / tokens,
            hit_rate: experts.hit_rate().unwrap_or(1.0),
            bytes_used: experts.bytes_used as f64 / tokens,
            bytes_read: experts.bytes_read as f64 / tokens,
            device_hit_rate: experts.device_hit_rate().unwrap_or(0.0),
            bytes_lifted: experts.bytes_lifted as f64 / tokens,
        }
    }

    /// The mean of several.
    pub fn mean(all: &[TokenCost]) -> TokenCost {
        let mean = |of: fn(&TokenCost) -> f64| all.iter().map(of).sum::<f64>() / all.len() as f64;
        TokenCost {
            seconds: mean(|c| c.seconds),
            dense_seconds: mean(|c| c.dense_seconds),
            wait_seconds: mean(|c| c.wait_seconds),
            hit_rate: mean(|c| c.hit_rate),
            bytes_used: mean(|c| c.bytes_used),
            bytes_read: mean(|c| c.bytes_read),
            device_hit_rate: mean(|c| c.device_hit_rate),
            bytes_lifted: mean(|c| c.bytes_lifted),
        }
    }
}

/// The part of the machine that limits the speed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bottleneck {
    /// The drive: it delivers experts more slowly than they are computed.
    Drive,
    /// The link to the device: uploading experts is slower than computing them.
    Link,
    /// Memory: weights are computed as fast as they are read.
    Memory,
}

impl Bottleneck {
    /// The name for people and for JSON.
    pub fn name(self) -> &'static str {
        match self {
            Bottleneck::Drive => "drive",
            Bottleneck::Link => "PCIe",
            Bottleneck::Memory => "memory",
        }
    }
}

/// The highest possible speed of generation.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Bound {
    /// What limits it.
    pub by: Bottleneck,
    /// The highest speed that this allows.
    pub tokens_per_second: f64,
}

impl Bound {
    /// The bound for tokens of this cost: the measured time of everything except experts, plus the time of the experts,
    /// which cannot be read faster than the drive reads, nor computed faster than memory is read. A device does all of this
    /// at the same time, so there the slowest alone is the bound. `None` if the speeds are unknown.
    pub fn of(cost: &TokenCost, speeds: &Speeds) -> Option<Bound> {
        let read = speeds.drive.map(|drive| (Bottleneck::Drive, cost.bytes_read / drive));
        let compute = speeds.memory.map(|memory| (Bottleneck::Memory, cost.bytes_used / memory));
        let upload = speeds.link.map(|link| (Bottleneck::Link, cost.bytes_lifted / link));
        let all = read.into_iter().chain(compute).chain(upload);
        let (by, seconds) = all.max_by(|a, b| a.1.total_cmp(&b.1))?;
        let before = if speeds.link.is_some() { 0.0 } else { cost.dense_seconds };
        // If nothing was read or uploaded, this part does not limit the speed.
        (before + seconds > 0.0).then(|| Bound { by, tokens_per_second: 1.0 / (before + seconds) })
    }

    /// The measured speed as a share of the bound.
    pub fn ratio(&self, cost: &TokenCost) -> f64 {
        1.0 / (cost.seconds * self.tokens_per_second)
    }
}

/// The result is the median of this many passes over memory. The best pass would show the speed of memory that no other
/// program uses, which an answer seldom gets.
const PASSES: usize = 25;

/// Bytes per second that `threads` threads read together, each its own part of `bytes` from start to end. `bytes` must be far
/// larger than the caches, or the result is not the speed of memory.
pub fn read_speed(bytes: &[u8], threads: usize) -> f64 {
    let part = bytes.len().div_ceil(threads).next_multiple_of(LINE).max(LINE);
    let pass = || {
        let start = Instant::now();
        thread::scope(|scope| {
            for bytes in bytes.chunks(part) {
                scope.spawn(|| black_box(sum(bytes)));
            }
        });
        bytes.len() as f64 / start.elapsed().as_secs_f64()
    };
    let mut passes: Vec<f64> = (0..PASSES).map(|_| pass()).collect();
    passes.sort_by(f64::total_cmp);
    passes[PASSES / 2]
}

/// Bytes that are summed at once: enough for the compiler to use its widest loads.
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

    #[test]
    fn the_slower_of_drive_and_memory_is_the_bound() {
        let experts = Meters {
            hits: 3,
            misses: 1,
            bytes_used: 8_000,
            bytes_read: 2_000,
            expert_seconds: 6.0,
            ..Meters::default()
        };
        let cost = TokenCost::new(2, 10.0, &experts);
        assert_eq!((cost.dense_seconds, cost.hit_rate), (2.0, 0.75));
        let bound = |memory, drive| Bound::of(&cost, &Speeds { memory, drive, link: None });
        // Experts take 1 s from the drive, 2 s from memory.
        let both = bound(Some(2000.0), Some(1000.0)).unwrap();
        assert_eq!(both, Bound { by: Bottleneck::Memory, tokens_per_second: 0.25 });
        assert_eq!(both.ratio(&cost), 0.8);
        let slow = bound(Some(8000.0), Some(1000.0)).unwrap();
        assert_eq!(slow, Bound { by: Bottleneck::Drive, tokens_per_second: 1.0 / 3.0 });
        assert_eq!(bound(None, Some(1000.0)), Some(slow));
        assert_eq!(bound(None, None), None);
    }
}
