//! The drive, measured as experts are read from it.

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use forebay_engine::internals::experts::IoMethod;
use forebay_engine::internals::forecast::DriveProbe;
use forebay_engine::{Cancel, Prospect};
use serde_json::{Value, json};

use super::system::Volume;
use crate::progress::Progress;

/// How many experts are asked for at a time: what a layer misses is anything up to all that it uses.
const DEPTHS: [usize; 4] = [1, 2, 4, 8];

/// What is read where no model says: an expert of a usual size.
const GENERIC: usize = 3 << 20;

/// A drive that falls below this share of its first seconds is throttled.
const THROTTLED: f64 = 0.7;

/// How much is measured.
#[derive(Clone, Copy)]
pub struct Effort {
    /// For each depth.
    pub moment: Duration,
    /// For the drive to become warm; none if zero.
    pub endurance: Duration,
    /// Bytes of the file where there is no model.
    pub file: usize,
}

/// What was found.
pub struct Drive {
    pub path: PathBuf,
    pub volume: Volume,
    /// How bytes are read, and why so.
    pub how: String,
    /// Bytes of a read.
    pub expert_bytes: u64,
    /// Bytes a second by depth.
    pub depths: Vec<(usize, f64)>,
    pub endurance: Option<Endurance>,
}

/// What the drive keeps up.
pub struct Endurance {
    pub seconds: f64,
    /// Bytes a second in the first part of it, and in the last.
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

    /// The drive of a folder, on a file that is written for this and gone afterwards.
    pub fn of_folder(folder: &Path, io: IoMethod, effort: Effort, cancel: &Cancel) -> Result<Drive> {
        let path = folder.join(format!(".forebay-doctor-{}", std::process::id()));
        let file = Temporary(path.clone());
        write(&path, effort.file, cancel)
            .with_context(|| format!("cannot write a file to read again in {}", folder.display()))?;
        let probe = DriveProbe::of_file(path, effort.file as u64, GENERIC, io)?;
        // The probe has it open, and a program that is killed leaves nothing behind.
        drop(file);
        Drive::measure(folder.to_owned(), probe, effort, cancel)
    }

    fn measure(path: PathBuf, mut probe: DriveProbe, effort: Effort, cancel: &Cancel) -> Result<Drive> {
        let bar = Progress::measuring();
        let mut depths = Vec::new();
        for depth in DEPTHS {
            cancel.check()?;
            bar.say(format!("the drive, {depth} at a time"));
            depths.push((depth, probe.speed(depth, effort.moment)?));
        }
        let volume = volume(&path);
        let endurance = endure(&mut probe, effort.endurance, cancel, &bar)?;
        Ok(Drive { path, volume, how: probe.how(), expert_bytes: probe.expert_bytes(), depths, endurance })
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

/// Reads for long, and compares the first third with the last.
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
        bar.say(format!("whether the drive keeps it up, {left} s left"));
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

/// A file that is removed when this is dropped.
struct Temporary(PathBuf);

impl Drop for Temporary {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

/// Writes bytes that no drive can compress away, and waits until the drive has them.
fn write(path: &Path, len: usize, cancel: &Cancel) -> Result<()> {
    let mut file = File::create_new(path)?;
    let mut state = 0_u64;
    let mut block = vec![0_u8; 1 << 20];
    for _ in 0..len.div_ceil(block.len()) {
        cancel.check()?;
        for word in block.chunks_exact_mut(8) {
            state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
            word.copy_from_slice(&(state ^ (state >> 29)).to_le_bytes());
        }
        file.write_all(&block)?;
    }
    file.sync_all()?;
    Ok(())
}

fn volume(path: &Path) -> Volume {
    device(path).map_or_else(Volume::default, |(major, minor)| Volume::look(Path::new("/"), major, minor))
}

/// The number of the device that a file is on, where the system has such numbers.
#[cfg(target_os = "linux")]
fn device(path: &Path) -> Option<(u64, u64)> {
    use std::os::unix::fs::MetadataExt;
    // As the C library takes device numbers apart.
    let number = fs::metadata(path).ok()?.dev();
    let major = (number >> 32 & 0xffff_f000) | (number >> 8 & 0xfff);
    let minor = (number >> 12 & 0xffff_ff00) | (number & 0xff);
    Some((major, minor))
}

#[cfg(not(target_os = "linux"))]
fn device(_: &Path) -> Option<(u64, u64)> {
    None
}
