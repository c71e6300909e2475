//! GGUF files, versions 2 and 3, whole or split into parts.
//!
//! Only the header is read: the metadata and the directory of tensors. A header may be hostile: every length and
//! count is compared with the bytes that are left before anything is allocated for it, so memory stays proportional
//! to the bytes read. A damaged file is an [`Error::Format`]; a sound but unsupported one is an
//! [`Error::Unsupported`].

mod reader;
mod split;
mod tensors;
mod values;

use std::fs::{self, File};
use std::io::{self, Read};
use std::path::Path;

use reader::Reader;

use super::foreign::{self, CUT_SHORT};
use super::{FilePart, Format, ModelFile, Quoted, UnknownTensor};
use crate::error::{Error, Result};

/// The most metadata entries of a file. Real files have a few dozen.
pub const MAX_METADATA_ENTRIES: u64 = 65_536;

/// The most tensors of a model, in all its parts. Real models have a few thousand.
pub const MAX_TENSORS: u64 = 65_536;

/// The most bytes of a header. Real headers, mostly vocabulary, are smaller than 32 MiB. Without the limit, a damaged
/// length in a 400 GB file would cause its weights to be read into memory as text.
pub const MAX_HEADER_BYTES: u64 = 128 << 20;

/// Opens the model at `path`: a GGUF file, or any part of a split one (`NAME-00001-of-00003.gguf`). Its tensors may
/// have [unknown](ModelFile::unknown) types.
pub fn open(path: &Path) -> Result<ModelFile> {
    split::complete(load(path)?, load)
}

/// Parses the header of one file, which `source` yields from its first byte.
///
/// `len` is the length of the whole file, including the tensors' data, which is not read from `source`. A part of a
/// split model yields only its own tensors. Tensors may have [unknown](ModelFile::unknown) types. `path` is only used
/// in messages.
pub fn parse(path: &Path, source: &mut dyn Read, len: u64) -> Result<ModelFile> {
    let mut reader = Reader::new(path, source, len);
    let counts = read_preamble(&mut reader)?;
    let metadata = values::read_metadata(&mut reader, counts.metadata_entries)?;
    let alignment = tensors::alignment(&reader, &metadata)?;
    let directory = tensors::read_directory(&mut reader, counts.tensors, alignment)?;
    let files = vec![FilePart { path: path.to_owned(), len }];
    let model = ModelFile::new(Format::Gguf, files, metadata, directory.tensors)?;
    Ok(ModelFile { unknown: directory.unknown, ..model })
}

/// The error for a tensor whose type is not a [`DType`](super::DType).
pub(super) fn unknown_type(model: &ModelFile, tensor: &UnknownTensor) -> Error {
    let (name, id) = (Quoted(&tensor.name), tensor.type_id);
    let removed = match id {
        4 => Some("Q4_2"),
        5 => Some("Q4_3"),
        31 => Some("Q4_0_4_4"),
        32 => Some("Q4_0_4_8"),
        33 => Some("Q4_0_8_8"),
        36 => Some("IQ4_NL_4_4"),
        37 => Some("IQ4_NL_4_8"),
        38 => Some("IQ4_NL_8_8"),
        _ => None,
    };
    let problem = match removed {
        Some(removed) => format!("{id} ({removed}), which was removed from the format; quantise it again"),
        None => format!("{id}, which is unknown"),
    };
    let path = model.files[tensor.file.0].path.display();
    Error::Unsupported(format!("{path}: tensor {name} has the type {problem}"))
}

/// The counts at the start of a file.
struct Counts {
    tensors: u64,
    metadata_entries: u64,
}

/// Reads one file, whether it is a whole model or a part.
fn load(path: &Path) -> Result<ModelFile> {
    let cannot_open = |e| Error::io(path, "cannot open", e);
    // Opening a pipe would wait for a writer, so check the kind of file first.
    let kind = fs::metadata(path).map_err(cannot_open)?;
    if kind.is_dir() {
        return Err(cannot_open(io::Error::new(io::ErrorKind::IsADirectory, "it is a directory")));
    }
    if !kind.is_file() {
        return Err(cannot_open(io::Error::new(io::ErrorKind::InvalidInput, "it is not a regular file")));
    }
    let mut file = File::open(path).map_err(cannot_open)?;
    let len = file.metadata().map_err(cannot_open)?.len();
    parse(path, &mut file, len)
}

fn read_preamble(reader: &mut Reader) -> Result<Counts> {
    if reader.is_empty_file() {
        return Err(reader.damaged("the file is empty; download it again"));
    }
    let magic = reader.array::<4>(format_args!("the magic number"))?;
    if &magic != b"GGUF" {
        let mut head = magic.to_vec();
        head.extend_from_slice(reader.peek()?);
        return Err(reader.damaged(format!("not a GGUF file: {}", foreign::describe(&head))));
    }

    let version = reader.u32(format_args!("the version"))?;
    match version {
        2 | 3 => {}
        1 => {
            return Err(
                reader.unsupported("GGUF version 1, which versions 2 and 3 replaced; convert it again")
            );
        }
        _ if (1..=0xffff).contains(&version.swap_bytes()) => {
            return Err(reader.unsupported("a big-endian GGUF file; only little-endian ones are supported"));
        }
        _ => {
            let message = format!("GGUF version {version}; versions 2 and 3 are supported");
            return Err(reader.unsupported(message));
        }
    }

    let tensors = reader.u64(format_args!("the number of tensors"))?;
    let metadata_entries = reader.u64(format_args!("the number of metadata entries"))?;
    check_count(reader, "tensors", tensors, MAX_TENSORS, tensors::MIN_ENTRY_BYTES)?;
    check_count(reader, "metadata entries", metadata_entries, MAX_METADATA_ENTRIES, values::MIN_ENTRY_BYTES)?;
    Ok(Counts { tensors, metadata_entries })
}

/// Checks a count against `limit`, and against what the rest of the file could hold.
fn check_count(reader: &Reader, what: &str, count: u64, limit: u64, min_bytes: u64) -> Result<()> {
    if count > limit {
        return Err(reader.damaged(format!("it claims {count} {what}, more than the limit of {limit}")));
    }
    if count > reader.remaining() / min_bytes {
        let left = reader.remaining();
        return Err(reader.damaged(format!(
            "it claims {count} {what}, which its last {left} bytes cannot hold; {CUT_SHORT}"
        )));
    }
    Ok(())
}
