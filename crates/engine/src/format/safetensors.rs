//! Safetensors files: eight bytes of length, a JSON header, then the tensors' bytes without gaps.
//!
//! Only the header is read. It may be hostile: every length is compared with the file's before anything is allocated
//! for it. A damaged file is an [`Error::Format`]; a sound but unsupported one is an [`Error::Unsupported`].

use std::fmt;
use std::io::Read;
use std::path::Path;

use forebay_kernels::DType;
use serde::Deserialize;
use serde::de::{Deserializer, Error as _, IgnoredAny, MapAccess, Visitor};

use super::foreign::{self, CUT_SHORT};
use super::{FileIdx, Quoted, TensorInfo};
use crate::error::{Error, Result};

/// The most bytes of a header, the same limit as in the format's own library.
pub const MAX_HEADER_BYTES: u64 = 100_000_000;

/// The most tensors of a model, in all its files. Models with separate tensors for each expert and its scales have
/// more than a hundred thousand.
pub const MAX_TENSORS: usize = 1 << 20;

const MAX_DIMENSIONS: usize = 8;

/// The contents of a file's header.
#[derive(Debug)]
pub struct Header {
    /// The tensors, in the order of their offsets.
    pub tensors: Vec<TensorInfo>,
    /// The program that wrote the file, if the header has it: `pt`, `mlx`.
    pub format: Option<String>,
}

/// Parses the header of one file, which `source` yields from its first byte. `len` is the length of the whole file;
/// `path` is only used in messages.
///
/// # Errors
/// If the header or the places of its tensors are invalid, or a type is unknown.
pub fn parse(path: &Path, source: &mut dyn Read, len: u64, file: FileIdx) -> Result<Header> {
    let damaged = |message: String| Error::format(path, message);
    let cannot_read = |e| Error::io(path, "cannot read the header", e);
    if len < 8 {
        return Err(damaged(format!("not a safetensors file: it has only {len} bytes; {CUT_SHORT}")));
    }
    let mut prefix = [0; 8];
    source.read_exact(&mut prefix).map_err(cannot_read)?;
    let header_len = u64::from_le_bytes(prefix);
    if header_len > MAX_HEADER_BYTES {
        let mut head = prefix.to_vec();
        source.take(64).read_to_end(&mut head).map_err(cannot_read)?;
        return Err(damaged(match foreign::recognise(&head) {
            Some(what) => format!("not a safetensors file: it looks like {what}"),
            None => format!(
                "not a safetensors file: its header would have {header_len} bytes, more than {MAX_HEADER_BYTES}"
            ),
        }));
    }
    let data_start = 8 + header_len;
    if data_start > len {
        return Err(damaged(format!(
            "the file is incomplete: its header has {header_len} bytes, but the file only {len}; {CUT_SHORT}"
        )));
    }
    let mut text = Vec::new();
    source.take(header_len).read_to_end(&mut text).map_err(cannot_read)?;
    if text.len() as u64 != header_len {
        return Err(damaged(format!(
            "the file is incomplete: it ends in its header, after {} bytes; {CUT_SHORT}",
            text.len()
        )));
    }
    let raw: RawHeader = serde_json::from_slice(&text)
        .map_err(|e| damaged(format!("the header is not valid: {}", Quoted(&e.to_string()))))?;
    drop(text);

    let mut tensors = Vec::with_capacity(raw.tensors.len());
    for (name, entry) in raw.tensors {
        let tensor = locate(path, name, &entry, file)?;
        tensors.push(tensor);
    }
    check_places(path, &mut tensors, data_start, len)?;
    Ok(Header { tensors, format: raw.format })
}

/// Checks one tensor; its offset counts from the start of the data.
fn locate(path: &Path, name: String, entry: &Entry, file: FileIdx) -> Result<TensorInfo> {
    let quoted = Quoted(&name);
    let damaged = |message: String| Error::format(path, format!("tensor {quoted} {message}"));
    let Some(dtype) = DType::from_safetensors(&entry.dtype) else {
        let dtype = Quoted(&entry.dtype);
        return Err(Error::Unsupported(format!(
            "{}: tensor {quoted} has the type {dtype}, which is unknown",
            path.display()
        )));
    };
    if entry.shape.len() > MAX_DIMENSIONS {
        return Err(damaged(format!("has {} dimensions, more than {MAX_DIMENSIONS}", entry.shape.len())));
    }
    let [start, end] = entry.data_offsets;
    let Some(len) = end.checked_sub(start) else {
        return Err(damaged(format!("ends at {end}, before its start at {start}")));
    };
    let shape: Option<Vec<usize>> = entry.shape.iter().map(|&d| usize::try_from(d).ok()).collect();
    let elements = shape.as_ref().and_then(|s| s.iter().try_fold(1usize, |n, &d| n.checked_mul(d)));
    let (Some(shape), Some(bytes)) = (shape, elements.and_then(|n| dtype.row_bytes(n))) else {
        return Err(damaged(format!("has more elements than can be counted: {:?}", entry.shape)));
    };
    if bytes as u64 != len {
        return Err(damaged(format!("has {len} bytes, but {shape:?} of {dtype} are {bytes}")));
    }
    Ok(TensorInfo { name, dtype, shape, file, offset: start, len })
}

/// Sorts tensors by offset, makes offsets count from the start of the file, and checks that they fill the file
/// without gaps, as the format requires.
fn check_places(path: &Path, tensors: &mut [TensorInfo], data_start: u64, len: u64) -> Result<()> {
    let damaged = |message: String| Err(Error::format(path, message));
    tensors.sort_by_key(|t| (t.offset, t.len));
    let data_len = len - data_start;
    let mut end = 0;
    for i in 0..tensors.len() {
        let (offset, bytes) = (tensors[i].offset, tensors[i].len);
        let name = Quoted(&tensors[i].name);
        if offset < end {
            let before = Quoted(&tensors[i - 1].name);
            return damaged(format!("tensors {before} and {name} overlap at byte {offset} of the data"));
        }
        if offset > end {
            return damaged(format!("{} bytes before tensor {name} belong to no tensor", offset - end));
        }
        // Cannot overflow: `bytes` is the difference of this sum and `offset`.
        end = offset + bytes;
        if end > data_len {
            return damaged(format!(
                "the file is incomplete: tensor {name} ends at byte {end} of the data, but there are only {data_len}; \
                 {CUT_SHORT}"
            ));
        }
        tensors[i].offset = data_start + offset;
    }
    if end < data_len {
        return damaged(format!("{} bytes at the end of the file belong to no tensor", data_len - end));
    }
    Ok(())
}

/// The header as it is in the file.
struct RawHeader {
    tensors: Vec<(String, Entry)>,
    format: Option<String>,
}

#[derive(Deserialize)]
struct Entry {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: [u64; 2],
}

/// The `__metadata__` entry. Only its key `format` is used.
#[derive(Deserialize)]
struct About {
    #[serde(default)]
    format: Option<String>,
}

impl<'de> Deserialize<'de> for RawHeader {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<RawHeader, D::Error> {
        struct Entries;

        impl<'de> Visitor<'de> for Entries {
            type Value = RawHeader;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of tensors")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<RawHeader, A::Error> {
                let mut header = RawHeader { tensors: Vec::new(), format: None };
                while let Some(name) = map.next_key::<String>()? {
                    if name == "__metadata__" {
                        header.format = map.next_value::<About>()?.format;
                    } else if header.tensors.len() == MAX_TENSORS {
                        map.next_value::<IgnoredAny>()?;
                        return Err(A::Error::custom(format_args!("more than {MAX_TENSORS} tensors")));
                    } else {
                        header.tensors.push((name, map.next_value()?));
                    }
                }
                Ok(header)
            }
        }

        deserializer.deserialize_map(Entries)
    }
}
