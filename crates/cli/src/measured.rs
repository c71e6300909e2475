//! What `plan` and `doctor` find out about the machine before a model is loaded.

use std::time::Duration;

use anyhow::Result;
use forebay_engine::internals::forecast::ComputeTime;
use forebay_engine::internals::forecast::DriveProbe;
use forebay_engine::internals::forecast::predict::{DriveSpeed, Outlook, Prediction, Range};
use forebay_engine::{Options, Prospect};
use serde_json::{Value, json};

use crate::memory_speed::memory_speed;
use crate::progress::Progress;

/// Long enough for the drive's own cache not to matter much, short enough to wait for.
const MOMENT: Duration = Duration::from_millis(400);

/// The machine's speeds, as far as a model's tokens depend on them.
pub struct Measured {
    /// Bytes a second.
    pub memory: f64,
    /// `None` where the model has no experts.
    pub drive: Option<DriveSpeed>,
    pub compute: ComputeTime,
}

impl Measured {
    pub fn new(prospect: &Prospect, options: &Options) -> Result<Measured> {
        let bar = Progress::measuring();
        bar.say("the drive".into());
        let drive = match prospect.drive_probe(options.io)? {
            Some(mut probe) => {
                let together = DriveProbe::MOST_TOGETHER;
                Some(DriveSpeed {
                    one: probe.speed(1, MOMENT)?,
                    many: probe.speed(together, MOMENT)?,
                    together,
                })
            }
            None => None,
        };
        bar.say("the memory".into());
        let memory = memory_speed(threads(options))?;
        bar.say("products with weights like the model's".into());
        Ok(Measured { memory, drive, compute: prospect.compute_time(options)? })
    }

    /// What they mean for the model.
    pub fn outlook(&self, prospect: &Prospect, options: &Options) -> Result<Outlook> {
        Ok(prospect.outlook(options, self.compute, self.drive)?)
    }
}

/// Threads that would compute.
pub fn threads(options: &Options) -> usize {
    options.threads.unwrap_or_else(|| std::thread::available_parallelism().map_or(1, usize::from))
}

/// `4.1 tok/s (3.0 – 5.6)`
pub fn speed_text(speed: Range) -> String {
    let Range { low, middle, high } = speed;
    let digits = if middle < 1.0 { 2 } else { 1 };
    format!("{middle:.digits$} tok/s ({low:.digits$} – {high:.digits$})")
}

/// `62 % (51 – 71)`
pub fn hits_text(hits: Range) -> String {
    let [low, middle, high] = [hits.low, hits.middle, hits.high].map(|share| 100.0 * share);
    format!("{middle:.0} % ({low:.0} – {high:.0})")
}

/// `5.4 GB/s`
pub fn rate(bytes: f64) -> String {
    format!("{:.1} GB/s", bytes / 1e9)
}

pub fn range_json(range: Range) -> Value {
    json!({ "low": range.low, "middle": range.middle, "high": range.high })
}

pub fn prediction_json(prediction: &Prediction) -> Value {
    json!({
        "hit_rate": range_json(prediction.hit_rate),
        "tokens_per_second": range_json(prediction.speed),
        "waiting_for_drive": prediction.waiting,
    })
}
