//! Progress bars on a terminal, for what takes longer than a moment.

use std::sync::Arc;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// How long something takes before a bar appears.
const PATIENCE: Duration = Duration::from_millis(500);

/// A bar on stderr that appears late and leaves no trace. Where stderr is no terminal it never appears.
#[derive(Clone)]
struct LateBar {
    bar: ProgressBar,
    start: Instant,
}

impl LateBar {
    fn new(template: &str) -> LateBar {
        let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::hidden());
        let style = ProgressStyle::with_template(template).expect("the template is well-formed");
        bar.set_style(style.progress_chars("━╸ "));
        LateBar { bar, start: Instant::now() }
    }

    fn set(&self, done: u64, total: u64) {
        if self.bar.is_hidden() && self.start.elapsed() > PATIENCE {
            self.bar.set_draw_target(ProgressDrawTarget::stderr());
        }
        self.bar.set_length(total);
        self.bar.set_position(done);
    }
}

/// The bar of a model that is being loaded.
pub struct Loading(LateBar);

impl Loading {
    pub fn new() -> Loading {
        Loading(LateBar::new("loading {bar:30} {bytes} of {total_bytes} · {bytes_per_sec} · {eta}"))
    }

    /// Told how many bytes are loaded, and of how many.
    pub fn callback(&self) -> Arc<dyn Fn(u64, u64) + Send + Sync> {
        let bar = self.0.clone();
        Arc::new(move |done, total| bar.set(done, total))
    }

    pub fn finish(&self) {
        self.0.bar.finish_and_clear();
    }
}

/// The bar of a prompt that is being read.
pub struct Reading(LateBar);

impl Reading {
    pub fn new() -> Reading {
        Reading(LateBar::new("reading {bar:30} {pos} of {len} tokens · {per_sec} · {eta}"))
    }

    pub fn set(&self, done: usize, total: usize) {
        self.0.set(done as u64, total as u64);
        if done == total {
            self.finish();
        }
    }

    pub fn finish(&self) {
        self.0.bar.finish_and_clear();
    }
}
