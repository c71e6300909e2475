//! How much of a prompt has been processed, for other threads to read while a pass computes.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Shows how much of one prompt has been processed. Any thread reads it at any time, also while a batch is computed: the pass
/// advances it with each layer. Clones show the same prompt.
///
/// # Examples
/// ```
/// use forebay_engine::{ChatRequest, Driver, DriverOptions, ReplyEvent};
///
/// # let model = std::path::Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/tales-qwen3moe-Q4_K_M.gguf"));
/// # let engine = forebay_engine::Engine::open(model, &forebay_engine::Options::new().threads(1))?;
/// # let driver = Driver::start(&engine, DriverOptions::new(1))?;
/// let mut meter = None;
/// for event in driver.chat(ChatRequest::user("Tell me a story.").max_tokens(4))? {
///     if let ReplyEvent::Start(started) = event? {
///         meter = Some(started); // may go to another thread, which draws a progress bar
///     }
/// }
/// let progress = meter.expect("prompt processing starts before the answer").read();
/// assert!(progress.total > 0 && progress.done == progress.total as f64);
/// # Ok::<(), forebay_engine::Error>(())
/// ```
#[derive(Clone)]
pub struct PromptMeter(Arc<Metered>);

struct Metered {
    /// Tokens of the prompt that the conversation held at the start.
    reused: usize,
    /// Tokens of the prompt.
    prompt: usize,
    started: Instant,
    /// Tokens of the conversation, including the tokens of the current pass times the share of layers that it has computed: the
    /// bits of an `f64`.
    position: AtomicU64,
}

/// What a [`PromptMeter`] shows at one moment.
///
/// # Examples
/// ```
/// use std::time::Duration;
///
/// use forebay_engine::PromptProgress;
///
/// let progress = PromptProgress { done: 250.0, total: 1000, elapsed: Duration::from_secs(3) };
/// assert_eq!(progress.time_left(), Some(Duration::from_secs(9)));
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PromptProgress {
    /// Processed tokens. A token of the current pass counts by the share of layers that it has passed. On a GPU, a layer
    /// counts when its work has been launched.
    pub done: f64,
    /// Tokens to process: those of the prompt that the conversation did not hold already.
    pub total: usize,
    /// Time since prompt processing started.
    pub elapsed: Duration,
}

impl PromptProgress {
    /// The time that the rest takes at the speed so far; `None` before there is a speed.
    pub fn time_left(&self) -> Option<Duration> {
        let left = (self.total as f64 - self.done) / self.done;
        Duration::try_from_secs_f64(self.elapsed.as_secs_f64() * left).ok()
    }
}

impl PromptMeter {
    /// The meter of a prompt, whose first `reused` tokens the conversation has already.
    pub fn new(reused: usize, prompt: usize) -> PromptMeter {
        let position = AtomicU64::new((reused as f64).to_bits());
        PromptMeter(Arc::new(Metered { reused, prompt, started: Instant::now(), position }))
    }

    /// The current progress.
    pub fn read(&self) -> PromptProgress {
        let &Metered { reused, prompt, started, ref position } = &*self.0;
        let total = prompt - reused;
        let done = f64::from_bits(position.load(Ordering::Relaxed)) - reused as f64;
        PromptProgress { done: done.clamp(0.0, total as f64), total, elapsed: started.elapsed() }
    }

    /// Sets the number of the conversation's tokens, which includes parts of tokens.
    pub(crate) fn set(&self, position: f64) {
        self.0.position.store(position.to_bits(), Ordering::Relaxed);
    }

    /// Whether the prompt has tokens after the first `tokens`.
    pub(crate) fn concerns(&self, tokens: usize) -> bool {
        tokens < self.0.prompt
    }
}

impl fmt::Debug for PromptMeter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("PromptMeter").field(&self.read()).finish()
    }
}

/// Two are equal if they show the same prompt.
impl PartialEq for PromptMeter {
    fn eq(&self, other: &PromptMeter) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

/// What one conversation adds to its prompt in a pass.
pub struct PromptPart {
    /// Shows it.
    pub meter: PromptMeter,
    /// Tokens that the conversation has before the pass.
    pub start: usize,
    /// Tokens of the pass.
    pub tokens: usize,
}

impl PromptPart {
    /// So many layers of all are behind it.
    pub fn advance(&self, layers: usize, all: usize) {
        self.meter.set(self.start as f64 + self.tokens as f64 * layers as f64 / all as f64);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_counts_by_its_layers() {
        let meter = PromptMeter::new(100, 500);
        assert_eq!((meter.read().done, meter.read().total, meter.read().time_left()), (0.0, 400, None));
        let part = PromptPart { meter: meter.clone(), start: 200, tokens: 100 };
        for (layers, done) in [(0, 100.0), (1, 125.0), (3, 175.0), (4, 200.0)] {
            part.advance(layers, 4);
            assert_eq!(meter.read().done, done);
        }
        // What a conversation holds beside the prompt is none of it.
        meter.set(7.0);
        assert_eq!(meter.read().done, 0.0);
        meter.set(502.0);
        assert_eq!(meter.read().done, 400.0);
        assert_eq!(meter.read().time_left(), Some(Duration::ZERO));
    }
}
