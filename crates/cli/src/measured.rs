//! What `plan` and `doctor` measure of the machine before a model is loaded.

use std::fs;
use std::path::Path;
use std::thread;
use std::time::Duration;

use anyhow::Result;
use forebay_engine::internals::forecast::ComputeTime;
use forebay_engine::internals::forecast::DriveProbe;
use forebay_engine::internals::forecast::predict::{DriveSpeed, Outlook, Prediction, Range};
use forebay_engine::{Cancel, Options, Prospect};
use serde_json::{Value, json};

use crate::drive_probe::probe_of_folder;
use crate::memory_speed::memory_speed;
use crate::progress::Progress;

/// Long enough that the drive's own cache matters little, short enough to wait for.
const MOMENT: Duration = Duration::from_millis(400);

/// The speeds of the machine that a prediction needs.
pub struct Measured {
    /// Bytes a second.
    pub memory: f64,
    /// `None` where the model has no experts.
    pub drive: Option<DriveSpeed>,
    pub compute: ComputeTime,
    /// The load of other programs; `None` if the system does not report it.
    pub load: Option<Load>,
}

/// The size of the temporary file that measures the drive before the download of a model.
const TRIAL: usize = 256 << 20;

impl Measured {
    /// Measures for a model. If it is not downloaded yet, `downloads` is the folder of downloads.
    pub fn new(prospect: &Prospect, options: &Options, downloads: Option<&Path>) -> Result<Measured> {
        let bar = Progress::measuring();
        bar.say("the load on the CPUs".into());
        let load = Load::look(Path::new("/"));
        bar.say("the drive".into());
        let probe = match downloads {
            // The folder may not exist before the first download.
            Some(folder) if prospect.traffic().experts > 0 => {
                let folder = folder.ancestors().find(|folder| folder.is_dir()).unwrap_or(folder);
                Some(probe_of_folder(folder, TRIAL, options.io, &Cancel::default())?)
            }
            Some(_) => None,
            None => prospect.drive_probe(options.io)?,
        };
        let drive = match probe {
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
        bar.say("the memory bandwidth".into());
        let memory = match options.device.as_deref().filter(|device| device.shares_memory()) {
            Some(device) => device.memory_speed()?,
            None => memory_speed(threads(options))?,
        };
        bar.say("the speed of matrix products with weights of the model's types".into());
        Ok(Measured { memory, drive, compute: prospect.compute_time(options)?, load })
    }

    /// The prediction for the model.
    pub fn outlook(&self, prospect: &Prospect, options: &Options) -> Result<Outlook> {
        Ok(prospect.outlook(options, self.compute, self.drive)?)
    }
}

/// The load of other programs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Load {
    /// How many CPUs were busy on average, during a moment in which this program was idle.
    pub busy: f64,
    /// The number of CPUs.
    pub cpus: usize,
    /// The load average of the last minute.
    pub average: Option<f64>,
}

/// Above this share of busy CPUs, measurements are too low.
const MUCH_LOAD: f64 = 0.25;

impl Load {
    /// Measures for a moment; `None` if the system does not report it.
    pub fn look(root: &Path) -> Option<Load> {
        let text = || fs::read_to_string(root.join("proc/stat")).ok();
        let before = text()?;
        thread::sleep(Duration::from_millis(250));
        let busy = busy_share(&before, &text()?)?;
        let cpus = before.lines().filter(|line| line.starts_with("cpu") && !line.starts_with("cpu ")).count();
        let average = fs::read_to_string(root.join("proc/loadavg")).ok();
        let average = average.and_then(|text| text.split_whitespace().next()?.parse().ok());
        Some(Load { busy: busy * cpus as f64, cpus, average })
    }

    /// Whether the load disturbs measurements.
    pub fn is_high(&self) -> bool {
        self.busy >= MUCH_LOAD * self.cpus as f64
    }

    /// `1.8 of 2 CPUs busy, load average 3.2`
    pub fn text(&self) -> String {
        let average = self.average.map_or(String::new(), |average| format!(", load average {average:.1}"));
        format!("{:.1} of {} CPUs busy{average}", self.busy, self.cpus)
    }

    pub fn json(&self) -> Value {
        json!({ "busy_cpus": self.busy, "cpus": self.cpus, "load_average": self.average })
    }
}

/// The share of CPU time that was not idle between two readings of `/proc/stat`; `None` if no time has passed.
fn busy_share(before: &str, after: &str) -> Option<f64> {
    // The fields idle and iowait.
    const IDLE: [usize; 2] = [3, 4];
    // The times of guests are contained in other fields.
    const FIELDS: usize = 8;
    let times = |text: &str| -> Option<Vec<f64>> {
        let line = text.lines().find_map(|line| line.strip_prefix("cpu "))?;
        line.split_whitespace().take(FIELDS).map(|time| time.parse().ok()).collect()
    };
    let (before, after) = (times(before)?, times(after)?);
    let passed: Vec<f64> = before.iter().zip(&after).map(|(before, after)| after - before).collect();
    let all: f64 = passed.iter().sum();
    let idle: f64 = IDLE.iter().filter_map(|&field| passed.get(field)).sum();
    (all > 0.0).then(|| ((all - idle) / all).clamp(0.0, 1.0))
}

/// Threads that would compute.
pub fn threads(options: &Options) -> usize {
    options.threads.unwrap_or_else(|| thread::available_parallelism().map_or(1, usize::from))
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_load_is_what_was_not_idle() {
        let before = "cpu  100 0 100 700 100 0 0 0 5 0\ncpu0 1 1\ncpu1 1 1\n";
        let after = "cpu  220 10 110 740 120 0 0 0 9 0\n";
        // 140 of 200 ticks.
        assert_eq!(busy_share(before, after), Some(0.7));
        assert_eq!(busy_share(before, before), None);
        assert_eq!(busy_share("", after), None);

        let root = tempfile::tempdir().unwrap();
        assert_eq!(Load::look(root.path()), None);
        let load = |busy| Load { busy, cpus: 4, average: Some(3.25) };
        assert!(load(1.0).is_high() && !load(0.9).is_high());
        assert_eq!(load(1.0).text(), "1.0 of 4 CPUs busy, load average 3.2");
    }
}
