//! Measures the drive with reads like those of experts.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::Result;
use forebay_engine::internals::experts::IoMethod;
use forebay_engine::internals::forecast::DriveProbe;
use forebay_engine::internals::forecast::predict::DriveSpeed;
use forebay_engine::{Bytes, Cancel, Prospect};
use serde_json::{Value, json};

use super::system::Volume;
use crate::drive_probe::probe_of_folder;
use crate::measured::rate;
use crate::progress::Progress;

/// The numbers of experts that are read at a time: a layer misses between one and all of the experts that it uses.
const DEPTHS: [usize; 4] = [1, 2, 4, 8];

/// A drive that gets slower than this share of its first speed counts as throttled.
const THROTTLED: f64 = 0.7;

/// The durations of the measurements.
#[derive(Clone, Copy)]
pub struct Effort {
    /// For each number of experts that are read at a time.
    pub moment: Duration,
    /// For sustained reads, which heat the drive; zero for none.
    pub endurance: Duration,
    /// The size of the temporary file, if there is no model.
    pub file: usize,
}

/// The measurements of a drive.
pub struct Drive {
    pub path: PathBuf,
    pub volume: Volume,
    /// How bytes are read, and why.
    pub how: String,
    /// Bytes of a read.
    pub expert_bytes: u64,
    /// Bytes per second for each number of experts at a time.
    pub depths: Vec<(usize, f64)>,
    pub endurance: Option<Endurance>,
}

/// Whether the drive keeps its speed.
#[derive(Clone, Copy)]
pub struct Endurance {
    pub seconds: f64,
    /// Bytes per second in its first part and in its last.
    pub first: f64,
    pub last: f64,
}

impl Endurance {
    pub fn throttles(&self) -> bool {
        self.last < THROTTLED * self.first
    }
}

impl Drive {
    /// The drive that holds a model's experts; `None` if it has none.
    pub fn of_model(
        prospect: &Prospect,
        io: IoMethod,
        effort: Effort,
        cancel: &Cancel,
    ) -> Result<Option<Drive>> {
        let path = prospect.file().files[0].path.clone();
        let probe = prospect.drive_probe(io)?;
        probe.map(|probe| Drive::measure(path, probe, effort, cancel)).transpose()
    }

    /// The drive of a folder, measured with a file that is written for this and removed.
    pub fn of_folder(folder: &Path, io: IoMethod, effort: Effort, cancel: &Cancel) -> Result<Drive> {
        let probe = probe_of_folder(folder, effort.file, io, cancel)?;
        Drive::measure(folder.to_owned(), probe, effort, cancel)
    }

    fn measure(path: PathBuf, mut probe: DriveProbe, effort: Effort, cancel: &Cancel) -> Result<Drive> {
        let bar = Progress::measuring();
        let mut depths = Vec::new();
        for depth in DEPTHS {
            cancel.check()?;
            bar.say(format!("the drive, {depth} experts at a time"));
            depths.push((depth, probe.speed(depth, effort.moment)?));
        }
        let volume = volume(&path);
        let endurance = endure(&mut probe, effort.endurance, cancel, &bar)?;
        Ok(Drive { path, volume, how: probe.how(), expert_bytes: probe.expert_bytes(), depths, endurance })
    }

    /// The speed, as predictions need it.
    pub fn speed(&self) -> Option<DriveSpeed> {
        let ((_, one), (together, many)) = (*self.depths.first()?, *self.depths.last()?);
        Some(DriveSpeed { one, many, together })
    }

    /// The measurements as text.
    pub fn rows(&self) -> Vec<(&'static str, String)> {
        let v = &self.volume;
        let known = [&v.device, &v.file_system].into_iter().flatten().cloned();
        let rotates = v.rotates.filter(|&rotates| rotates).map(|_| "reported as rotational".to_owned());
        let on = known.chain(rotates).collect::<Vec<_>>().join(", ");
        let on = if on.is_empty() { on } else { format!(" on {on}") };
        let list =
            |of: fn(&(usize, f64)) -> String| self.depths.iter().map(of).collect::<Vec<_>>().join(", ");
        let depths = list(|(depth, _)| depth.to_string());
        let speeds = list(|(_, speed)| format!("{:.1}", speed / 1e9));
        let endurance = match &self.endurance {
            None => "not measured (--quick)".into(),
            Some(e) => {
                let verdict = if e.throttles() { "it slows down" } else { "it keeps its speed" };
                format!("{} at first, {} after {:.0} s: {verdict}", rate(e.first), rate(e.last), e.seconds)
            }
        };
        vec![
            ("drive", format!("{}{on}", self.path.display())),
            ("read method", self.how.clone()),
            (
                "drive reads",
                format!("{speeds} GB/s with {depths} experts of {} at once", Bytes(self.expert_bytes)),
            ),
            ("sustained reads", endurance),
        ]
    }

    pub fn json(&self) -> Value {
        let depth = |&(depth, speed): &(usize, f64)| json!({ "together": depth, "bytes_per_second": speed });
        let endurance = |e: &Endurance| {
            json!({
                "seconds": e.seconds,
                "first_bytes_per_second": e.first,
                "last_bytes_per_second": e.last,
                "throttles": e.throttles(),
            })
        };
        json!({
            "path": self.path,
            "volume": self.volume.json(),
            "reads": self.how,
            "read_bytes": self.expert_bytes,
            "depths": self.depths.iter().map(depth).collect::<Vec<_>>(),
            "endurance": self.endurance.as_ref().map(endurance),
        })
    }
}

/// Reads for a while, and compares the first third with the last.
fn endure(
    probe: &mut DriveProbe,
    duration: Duration,
    cancel: &Cancel,
    bar: &Progress,
) -> Result<Option<Endurance>> {
    if duration.is_zero() {
        return Ok(None);
    }
    let start = Instant::now();
    let mut speeds = Vec::new();
    while start.elapsed() < duration {
        cancel.check()?;
        let left = duration.saturating_sub(start.elapsed()).as_secs();
        bar.say(format!("whether the drive keeps its speed, {left} s left"));
        speeds.push(probe.speed(DriveProbe::MOST_TOGETHER, duration / 30)?);
    }
    let third = speeds.len().div_ceil(3);
    let median = |speeds: &[f64]| {
        let mut sorted = speeds.to_vec();
        sorted.sort_by(f64::total_cmp);
        sorted[sorted.len() / 2]
    };
    Ok(Some(Endurance {
        seconds: start.elapsed().as_secs_f64(),
        first: median(&speeds[..third]),
        last: median(&speeds[speeds.len() - third..]),
    }))
}

fn volume(path: &Path) -> Volume {
    device(path).map_or_else(Volume::default, |(major, minor)| Volume::look(Path::new("/"), major, minor))
}

/// The number of the device that a file is on, where the system has such numbers.
#[cfg(target_os = "linux")]
fn device(path: &Path) -> Option<(u64, u64)> {
    use std::os::unix::fs::MetadataExt;
    // Split in the same way as by the C library.
    let number = std::fs::metadata(path).ok()?.dev();
    let major = (number >> 32 & 0xffff_f000) | (number >> 8 & 0xfff);
    let minor = (number >> 12 & 0xffff_ff00) | (number & 0xff);
    Some((major, minor))
}

#[cfg(not(target_os = "linux"))]
fn device(_: &Path) -> Option<(u64, u64)> {
    None
}

#[cfg(test)]
pub mod tests {
    use super::*;

    /// An SSD.
    pub fn drive() -> Drive {
        Drive {
            path: "model.gguf".into(),
            volume: Volume {
                device: Some("/dev/nvme0n1p2".into()),
                file_system: Some("ext4".into()),
                rotates: Some(false),
                ..Volume::default()
            },
            how: "io_uring, direct".into(),
            expert_bytes: 3 << 20,
            depths: vec![(1, 1.1e9), (2, 1.6e9), (4, 2.1e9), (8, 2.3e9)],
            endurance: Some(Endurance { seconds: 15.0, first: 2.3e9, last: 2.2e9 }),
        }
    }

    #[test]
    fn a_drive_throttles_that_loses_a_third_of_its_speed() {
        let endurance = |last| Endurance { seconds: 15.0, first: 2e9, last };
        assert!(endurance(1.3e9).throttles() && !endurance(1.5e9).throttles());
    }
}
