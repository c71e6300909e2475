//! Telling models apart.

use std::fs::File;
use std::io::Read;

use crate::error::{Error, Result};
use crate::format::{FileIdx, Format, ModelFile};
use crate::store::{ByteSource, ExpertLayer, FileSource};

/// How many places of the dense weights are looked at, and how many of the experts, which are on the drive.
const DENSE_SAMPLES: usize = 1 << 14;
const EXPERT_SAMPLES: usize = 64;

/// Bytes looked at in each place.
const SAMPLE: usize = 64;

/// The number of a model by its settings, its table of tensors, and its weights at many places. It is the same
/// wherever the model lies.
///
/// # Errors
/// If reading fails.
pub fn fingerprint(model: &ModelFile, dense: &[u8], experts: &[Option<ExpertLayer>]) -> Result<u64> {
    let mut hash = Fnv::default();
    hash.add_table(model);
    add_settings(model, &mut hash)?;
    let step = (dense.len() / DENSE_SAMPLES).max(SAMPLE);
    for sample in dense.chunks(step) {
        hash.add(&sample[..sample.len().min(SAMPLE)]);
    }
    let source: &dyn ByteSource = &FileSource::open(model)?;
    let all: Vec<_> = experts.iter().flatten().flat_map(|layer| &layer.experts).collect();
    for expert in all.iter().step_by(all.len().div_ceil(EXPERT_SAMPLES).max(1)) {
        for range in expert.iter() {
            let mut sample = [0; SAMPLE];
            let sample = &mut sample[..range.len.min(SAMPLE)];
            source.read_exact_at(range.file, range.offset + (range.len - sample.len()) as u64 / 2, sample)?;
            hash.add(sample);
        }
    }
    Ok(hash.0)
}

/// The file of settings, or what stands before the weights.
fn add_settings(model: &ModelFile, hash: &mut Fnv) -> Result<()> {
    let path = model.settings_path();
    let len = match model.format {
        Format::Gguf => {
            let here = model.tensors.iter().filter(|tensor| tensor.file == FileIdx(0));
            here.map(|tensor| tensor.offset).min().unwrap_or(0)
        }
        Format::HuggingFace | Format::Mlx => u64::MAX,
    };
    let mut bytes = Vec::new();
    let read = File::open(&path).and_then(|file| file.take(len).read_to_end(&mut bytes));
    read.map_err(|error| Error::io(&path, "cannot read the settings", error))?;
    hash.add(&bytes);
    Ok(())
}

/// FNV-1a of 128 bits, for names of which no two may be the same by chance.
pub fn fnv_128(bytes: impl IntoIterator<Item = u8>) -> u128 {
    let (basis, prime) = (0x6c62_272e_07bb_0142_62b8_2175_6295_c58d, 0x0100_0000_0000_0000_0000_013b);
    bytes.into_iter().fold(basis, |hash: u128, byte| (hash ^ u128::from(byte)).wrapping_mul(prime))
}

/// FNV-1a: the same on every machine and in every version.
pub struct Fnv(pub u64);

impl Default for Fnv {
    fn default() -> Self {
        Fnv(0xcbf2_9ce4_8422_2325)
    }
}

impl Fnv {
    /// The number of some bytes.
    pub fn of(bytes: &[u8]) -> u64 {
        let mut hash = Fnv::default();
        hash.add(bytes);
        hash.0
    }

    /// Goes on with more bytes.
    pub fn add(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.0 = (self.0 ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
        }
    }

    /// A model's table of tensors.
    pub(crate) fn add_table(&mut self, model: &ModelFile) {
        for tensor in &model.tensors {
            self.add(tensor.name.as_bytes());
            self.add(tensor.dtype.name().as_bytes());
            self.add(&tensor.offset.to_le_bytes());
            self.add(&tensor.len.to_le_bytes());
        }
    }
}
