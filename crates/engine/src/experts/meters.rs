//! The counters of the expert store.

use std::ops::Sub;

/// Counters since the store was opened. Subtract two of them to get what happened in between.
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
    /// Requested experts that were in memory.
    pub hits: u64,
    /// Hits in device memory.
    pub device_hits: u64,
    /// Hits in RAM that the CPU computed while a device computed the others.
    pub computed_in_memory: u64,
    /// Requested experts that were not in memory.
    pub misses: u64,
    /// Bytes of the requested experts.
    pub bytes_used: u64,
    /// Bytes of experts read from the drive.
    pub bytes_read: u64,
    /// Bytes of experts uploaded to the device.
    pub bytes_lifted: u64,
    /// Experts uploaded before a layer requested them.
    pub sent_ahead: u64,
    /// Those of [`sent_ahead`](Self::sent_ahead) that were requested next.
    pub sent_used: u64,
    /// Experts read from the drive before a layer requested them.
    pub prefetches: u64,
    /// Those of [`prefetches`](Self::prefetches) that were requested while in memory or being read.
    pub prefetch_used: u64,
    /// Time from each request for experts to the end of computing with them.
    pub expert_seconds: f64,
    /// Time in which at least one read was under way.
    pub read_seconds: f64,
    /// Time in which the computation waited for reads.
    pub wait_seconds: f64,
    /// Time in which the computation waited for uploads.
    pub copy_wait_seconds: f64,
}

impl Meters {
    /// Counts a requested expert.
    pub(super) fn count(&mut self, hit: bool, bytes: u64) {
        if hit {
            self.hits += 1;
        } else {
            self.misses += 1;
        }
        self.bytes_used += bytes;
    }

    /// The share of requested experts that were in device memory; `None` if none was requested.
    pub fn device_hit_rate(&self) -> Option<f64> {
        let all = self.hits + self.misses;
        (all > 0).then(|| self.device_hits as f64 / all as f64)
    }

    /// The share of requested experts that were in RAM or device memory; `None` if none was requested.
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
