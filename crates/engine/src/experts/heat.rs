//! The heat file records how often each expert of a model was used, so that the next run loads the hottest experts
//! first.
//!
//! It only saves time: a file that cannot be read is ignored, and one that cannot be written causes a warning.

use std::fs;
use std::io::Write;
use std::ops::Range;
use std::path::{Path, PathBuf};

use crate::files::write_whole;
use crate::format::ModelFile;
use crate::hash::Fnv;

/// The first bytes of the file: its type and version.
const MAGIC: &[u8; 8] = b"FBHEAT\0\x01";

/// The heat file of one model.
pub struct Heat {
    path: PathBuf,
}

impl Heat {
    /// The heat file of a model in `folder`, or of some of its layers. The model is identified by its tensor directory,
    /// so it is recognised after it was moved.
    pub fn of(folder: &Path, model: &ModelFile, expert_bytes: u64, layers: Option<Range<usize>>) -> Heat {
        let mut hash = Fnv::default();
        hash.add_table(model);
        hash.add(&expert_bytes.to_le_bytes());
        layers.iter().for_each(|layers| hash.add_range(layers));
        Heat { path: folder.join(format!("{:016x}.heat", hash.0)) }
    }

    /// How often each expert was used; `None` without a readable file.
    pub fn read(&self) -> Option<Vec<f32>> {
        let bytes = match fs::read(&self.path) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return None,
            Err(error) => {
                tracing::warn!("{}: cannot read how often experts were used: {error}", self.path.display());
                return None;
            }
        };
        let parsed = parse(&bytes);
        if parsed.is_none() {
            tracing::warn!("{}: this record of expert use is damaged and is ignored", self.path.display());
        }
        parsed
    }

    /// Writes how often each expert was used. Replaces the file as a whole.
    pub fn write(&self, heat: &[f32]) {
        if heat.iter().all(|&h| h == 0.0) {
            return;
        }
        if let Err(error) = self.try_write(heat) {
            tracing::warn!("{}: cannot save how often experts were used: {error}", self.path.display());
        }
    }

    fn try_write(&self, heat: &[f32]) -> std::io::Result<()> {
        let mut bytes = MAGIC.to_vec();
        bytes.extend(heat.iter().flat_map(|h| h.to_le_bytes()));
        let mut hash = Fnv::default();
        hash.add(&bytes);
        bytes.extend(hash.0.to_le_bytes());
        if let Some(folder) = self.path.parent() {
            fs::create_dir_all(folder)?;
        }
        write_whole(&self.path, |file| file.write_all(&bytes))
    }
}

/// The experts from the most used to the least used, without those never used.
pub fn hottest_first(heat: &[f32]) -> Vec<usize> {
    let mut experts: Vec<usize> = (0..heat.len()).filter(|&e| heat[e] > 0.0).collect();
    experts.sort_by(|&a, &b| heat[b].total_cmp(&heat[a]));
    experts
}

fn parse(bytes: &[u8]) -> Option<Vec<f32>> {
    let (bytes, checksum) = bytes.split_last_chunk()?;
    let mut hash = Fnv::default();
    hash.add(bytes);
    let numbers = bytes.strip_prefix(MAGIC).filter(|_| hash.0 == u64::from_le_bytes(*checksum))?;
    let (numbers, rest) = numbers.as_chunks();
    rest.is_empty().then(|| numbers.iter().map(|n| f32::from_le_bytes(*n)).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_read_back_and_a_damaged_file_is_ignored() {
        let folder = tempfile::tempdir().unwrap();
        let heat = Heat { path: folder.path().join("deeper/x.heat") };
        assert_eq!(heat.read(), None);
        heat.write(&[0.5, 0.0, 3.0]);
        assert_eq!(heat.read(), Some(vec![0.5, 0.0, 3.0]));
        let whole = fs::read(&heat.path).unwrap();
        for at in 0..whole.len() {
            let mut damaged = whole.clone();
            damaged[at] ^= 1;
            assert_eq!(parse(&damaged), None, "byte {at}");
            assert_eq!(parse(&whole[..at]), None, "cut at {at}");
        }
        assert_eq!(hottest_first(&[0.5, 0.0, 3.0]), [2, 0]);
    }

    #[test]
    fn a_folder_that_cannot_be_written_is_no_error() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("file"), "").unwrap();
        let heat = Heat { path: folder.path().join("file/x.heat") };
        heat.write(&[1.0]);
        assert_eq!(heat.read(), None);
    }
}
