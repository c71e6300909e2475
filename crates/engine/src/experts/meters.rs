//! What the expert store counts.

use std::ops::Sub;

/// Counted since the store was opened. The difference of two is what happened between them.
///
/// # Examples
/// ```
/// use forebay_engine::Request;
///
/// # let model = std::path::Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/tales-qwen3moe-Q4_K_M.gguf"));
/// # let engine = forebay_engine::Engine::open(model, &forebay_engine::Options::new().threads(1))?;
/// # let prompt = engine.tokenizer().encode("Once upon a time", Default::default())?;
/// let before = engine.meters();
/// engine.session().generate(&Request::new(&engine, prompt)?.max_tokens(4), &mut |_| ())?;
/// let during = engine.meters() - before;
///
/// assert!(during.hits > 0);
/// assert_eq!(during.hit_rate(), Some(1.0), "all experts fit in memory");
/// # Ok::<(), forebay_engine::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Meters {
    /// Experts that were asked for and found in memory.
    pub hits: u64,
    /// Of those, the ones that were in the memory of the device that computes.
    pub device_hits: u64,
    /// Of those in memory, the ones that the processor computed while a device did the others.
    pub computed_in_memory: u64,
    /// Experts that were asked for and had to be waited for.
    pub misses: u64,
    /// Bytes of the experts that were asked for.
    pub bytes_used: u64,
    /// Bytes of experts that were read.
    pub bytes_read: u64,
    /// Bytes of experts that were brought to the device.
    pub bytes_lifted: u64,
    /// Experts that were sent to the device because a layer was expected to ask for them.
    pub sent_ahead: u64,
    /// Of those, the ones it did ask for.
    pub sent_used: u64,
    /// Experts that were read because a layer was expected to ask for them.
    pub prefetches: u64,
    /// Of those, the ones it did ask for while they were there or on their way.
    pub prefetch_used: u64,
    /// Time from asking for experts to the end of computing with them.
    pub expert_seconds: f64,
    /// Time in which the drive was reading.
    pub read_seconds: f64,
    /// Time in which nothing could be computed because no expert was there.
    pub wait_seconds: f64,
    /// Time in which nothing could be started because experts were on their way to the device.
    pub copy_wait_seconds: f64,
}

impl Meters {
    /// An expert was asked for.
    pub(super) fn count(&mut self, hit: bool, bytes: u64) {
        if hit {
            self.hits += 1;
        } else {
            self.misses += 1;
        }
        self.bytes_used += bytes;
    }

    /// The share of experts that were found in the device's memory; `None` before the first is asked for.
    pub fn device_hit_rate(&self) -> Option<f64> {
        let all = self.hits + self.misses;
        (all > 0).then(|| self.device_hits as f64 / all as f64)
    }

    /// The share of experts that were found in memory, the device's or the computer's; `None` before the first is asked for.
    pub fn hit_rate(&self) -> Option<f64> {
        let all = self.hits + self.misses;
        (all > 0).then(|| self.hits as f64 / all as f64)
    }
}

impl Sub for Meters {
    type Output = Meters;

    fn sub(self, before: Meters) -> Meters {
        Meters {
            hits: self.hits - before.hits,
            device_hits: self.device_hits - before.device_hits,
            computed_in_memory: self.computed_in_memory - before.computed_in_memory,
            misses: self.misses - before.misses,
            bytes_used: self.bytes_used - before.bytes_used,
            bytes_read: self.bytes_read - before.bytes_read,
            bytes_lifted: self.bytes_lifted - before.bytes_lifted,
            sent_ahead: self.sent_ahead - before.sent_ahead,
            sent_used: self.sent_used - before.sent_used,
            prefetches: self.prefetches - before.prefetches,
            prefetch_used: self.prefetch_used - before.prefetch_used,
            expert_seconds: self.expert_seconds - before.expert_seconds,
            read_seconds: self.read_seconds - before.read_seconds,
            wait_seconds: self.wait_seconds - before.wait_seconds,
            copy_wait_seconds: self.copy_wait_seconds - before.copy_wait_seconds,
        }
    }
}
