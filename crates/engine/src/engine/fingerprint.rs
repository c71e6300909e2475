//! A number that identifies a model, so that saved conversations are never loaded into another one.

use std::fs::File;
use std::io::Read;

use crate::error::{Error, Result};
use crate::experts::{ByteSource, ExpertLayer, FileSource};
use crate::format::{FileIdx, Format, ModelFile};
use crate::hash::Fnv;
use crate::models::Span;

/// How many samples are taken of the dense weights, and how many of the experts, which must be read from the drive.
const DENSE_SAMPLES: usize = 1 << 14;
const EXPERT_SAMPLES: usize = 64;

/// Bytes per sample.
const SAMPLE: usize = 64;

/// Hashes the model's settings, its tensor table, and samples of its weights. The result does not depend on the file's
/// path.
///
/// # Errors
/// If reading fails.
pub fn fingerprint(
    model: &ModelFile,
    span: Span,
    dense: &[u8],
    experts: &[Option<ExpertLayer>],
) -> Result<u64> {
    let mut hash = settings_hash(model)?;
    span.part().iter().for_each(|layers| hash.add_range(layers));
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

/// Hashes what all stages of a model have in common: its settings and its tensor table.
///
/// # Errors
/// If reading fails.
pub fn settings_hash(model: &ModelFile) -> Result<Fnv> {
    let mut hash = Fnv::default();
    hash.add_table(model);
    add_settings(model, &mut hash)?;
    Ok(hash)
}

/// Hashes the settings file of a folder, or everything before the weights in a GGUF file.
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
