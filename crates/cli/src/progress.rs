//! Progress bars on a terminal, for work that takes longer than a moment.

use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use forebay_engine::PromptMeter;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// The delay before a bar appears.
const PATIENCE: Duration = Duration::from_millis(500);

/// The interval of redrawing without news, which shows that the program is alive.
const TICK: Duration = Duration::from_millis(200);

/// A line on standard error that appears after a delay and disappears when this is dropped. If standard error is not a
/// terminal, it never appears.
pub struct Progress {
    bar: ProgressBar,
    /// Shows the bar after the delay, unless the sender is dropped before.
    timer: Option<(Sender<()>, JoinHandle<()>)>,
}

impl Progress {
    /// A model is being loaded.
    pub fn loading() -> Progress {
        Progress::new(None, "loading {bar:30} {bytes} of {total_bytes} · {bytes_per_sec} · {eta}")
    }

    /// A prompt is being processed. The bar shows the meter, which also advances within a pass.
    pub fn prompt(meter: PromptMeter) -> Progress {
        let total = meter.read().total as u64;
        let template = "processing the prompt {bar:30} {percent} % of {len} tokens{msg}";
        Progress::following(Some(total), template, move |bar| {
            let progress = meter.read();
            bar.set_position(progress.done as u64);
            if let Some(left) = progress.time_left() {
                bar.set_message(format!(" · {} left", rough(left)));
            }
        })
    }

    /// The logits of this many tokens are being computed.
    pub fn computing(tokens: usize) -> Progress {
        Progress::new(Some(tokens as u64), "computing {bar:30} {pos} of {len} tokens · {elapsed}")
    }

    /// An answer is being generated that does not appear on the terminal.
    pub fn writing() -> Progress {
        Progress::new(None, "writing {pos} bytes · {elapsed}")
    }

    /// A file of this many bytes is being written.
    pub fn producing(bytes: u64) -> Progress {
        Progress::new(Some(bytes), "writing {bar:30} {bytes} of {total_bytes} · {bytes_per_sec} · {eta} left")
    }

    /// A text is being scored; [`say`](Self::say) sets the estimate so far.
    pub fn scoring(tokens: usize) -> Progress {
        Progress::new(Some(tokens as u64), "scoring {bar:30} {pos} of {len} tokens · {elapsed} · {msg}")
    }

    /// Something is being measured; [`say`](Self::say) sets its name.
    pub fn measuring() -> Progress {
        Progress::new(None, "measuring {msg} · {elapsed}")
    }

    /// Caches are being simulated; [`say`](Self::say) sets the name of the current one.
    pub fn simulating(runs: usize) -> Progress {
        Progress::new(Some(runs as u64), "simulating {bar:30} {pos} of {len} · {elapsed} · {msg}")
    }

    /// Requests are being answered; [`say`](Self::say) sets the speed.
    pub fn answering(requests: usize) -> Progress {
        Progress::new(
            Some(requests as u64),
            "answering {bar:30} {pos} of {len} · {elapsed}, {eta} left · {msg}",
        )
    }

    /// Files are being downloaded, some of which may be complete; [`say`](Self::say) sets the name of the current one.
    pub fn pulling(done: u64, total: u64) -> Progress {
        let progress = Progress::new(
            Some(total),
            "downloading {bar:30} {binary_bytes} of {binary_total_bytes} · {binary_bytes_per_sec}, {eta} left · {msg}",
        );
        progress.bar.set_position(done);
        // The speed counts only bytes of this download.
        progress.bar.reset_eta();
        progress
    }

    fn new(total: Option<u64>, template: &str) -> Progress {
        Progress::following(total, template, |_| {})
    }

    /// A bar that `follow` updates before each drawing.
    fn following(
        total: Option<u64>,
        template: &str,
        follow: impl Fn(&ProgressBar) + Send + 'static,
    ) -> Progress {
        let bar = ProgressBar::with_draw_target(total, ProgressDrawTarget::hidden());
        let style = ProgressStyle::with_template(template).expect("the template is well-formed");
        bar.set_style(style.progress_chars("━╸ "));
        let (sender, receiver) = mpsc::channel();
        let shown = bar.clone();
        let thread = thread::spawn(move || {
            let mut wait = PATIENCE;
            while receiver.recv_timeout(wait) == Err(RecvTimeoutError::Timeout) {
                if wait == PATIENCE {
                    shown.set_draw_target(ProgressDrawTarget::stderr());
                }
                wait = TICK;
                follow(&shown);
                shown.tick();
            }
        });
        Progress { bar, timer: Some((sender, thread)) }
    }

    /// Sets how much is done, and the total.
    pub fn set(&self, done: u64, total: u64) {
        set(&self.bar, done, total);
    }

    /// Sets the text beside the numbers.
    pub fn say(&self, message: String) {
        self.bar.set_message(message);
    }

    /// [`set`](Self::set) as a function, for other threads.
    pub fn callback(&self) -> Arc<dyn Fn(u64, u64) + Send + Sync> {
        let bar = self.bar.clone();
        Arc::new(move |done, total| set(&bar, done, total))
    }

    /// Adds to what is done, if the total is unknown.
    pub fn add(&self, done: u64) {
        self.bar.inc(done);
    }
}

/// A rounded duration: `8 s`, `1 min 20 s`, `2 h 5 min`.
fn rough(time: Duration) -> String {
    match time.as_secs_f64().round() as u64 {
        seconds @ ..60 => format!("{seconds} s"),
        seconds @ ..3600 => format!("{} min {} s", seconds / 60, seconds % 60),
        seconds => format!("{} h {} min", seconds / 3600, seconds / 60 % 60),
    }
}

fn set(bar: &ProgressBar, done: u64, total: u64) {
    bar.set_length(total);
    bar.set_position(done);
}

impl Drop for Progress {
    fn drop(&mut self) {
        if let Some((sender, thread)) = self.timer.take() {
            drop(sender);
            // From here on, the bar cannot appear any more.
            let _ = thread.join();
        }
        self.bar.finish_and_clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn estimates_are_rough() {
        let rough = |seconds| rough(Duration::from_secs_f64(seconds));
        assert_eq!(rough(0.3), "0 s");
        assert_eq!(rough(59.4), "59 s");
        assert_eq!(rough(59.6), "1 min 0 s");
        assert_eq!(rough(3599.0), "59 min 59 s");
        assert_eq!(rough(7500.0), "2 h 5 min");
    }
}
