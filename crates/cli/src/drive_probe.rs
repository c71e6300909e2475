//! Measures a drive without a model on it, with a temporary file.

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use forebay_engine::Cancel;
use forebay_engine::internals::experts::IoMethod;
use forebay_engine::internals::forecast::DriveProbe;

/// Bytes of a read: an expert of a typical size.
const READ: usize = 3 << 20;

/// A probe of the drive of a folder, with a temporary file of this many bytes.
///
/// # Errors
/// If the file cannot be written or read.
pub fn probe_of_folder(folder: &Path, bytes: usize, io: IoMethod, cancel: &Cancel) -> Result<DriveProbe> {
    let path = folder.join(format!(".forebay-probe-{}", std::process::id()));
    let file = Temporary(path.clone());
    write(&path, bytes, cancel)
        .with_context(|| format!("cannot write a file to measure the drive with in {}", folder.display()))?;
    let probe = DriveProbe::of_file(path, bytes as u64, READ, io)?;
    // The probe keeps the file open. Removed now, it is not left behind if the program is killed.
    drop(file);
    Ok(probe)
}

/// A file that is removed when this is dropped.
struct Temporary(PathBuf);

impl Drop for Temporary {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

/// Writes incompressible bytes, and waits until the drive has them.
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

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_drive_is_measured_and_nothing_is_left_behind() {
        let folder = tempfile::tempdir().unwrap();
        let probe = probe_of_folder(folder.path(), 8 << 20, IoMethod::Pool, &Cancel::default());
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
        assert!(probe.unwrap().speed(2, Duration::from_millis(1)).unwrap() > 0.0);
        let missing = folder.path().join("missing");
        let error = probe_of_folder(&missing, 8 << 20, IoMethod::Pool, &Cancel::default()).err().unwrap();
        assert!(format!("{error:#}").contains("missing"), "{error:#}");
    }
}
