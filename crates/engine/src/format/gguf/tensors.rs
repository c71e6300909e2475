//! The tensor section of a header: names, types, shapes and offsets.

use forebay_kernels::DType;

use super::reader::Reader;
use crate::error::Result;
use crate::format::foreign::CUT_SHORT;
use crate::format::{FileIdx, Metadata, Quoted, TensorInfo, UnknownTensor};

/// The smallest entry: the length of a name and one byte of it, the number of dimensions and one dimension, the type
/// and the offset.
pub(super) const MIN_ENTRY_BYTES: u64 = 8 + 1 + 4 + 8 + 4 + 8;

const ALIGNMENT_KEY: &str = "general.alignment";
const DEFAULT_ALIGNMENT: u64 = 32;
/// Larger than any page or stripe; larger values would only make offsets overflow.
const MAX_ALIGNMENT: u64 = 16 << 20;

/// The format allows 64 bytes. Some converters write longer names, which do no harm.
const MAX_NAME_BYTES: u64 = 255;

const MAX_DIMENSIONS: u32 = 4;

/// The alignment of tensors in the file.
pub(super) fn alignment(reader: &Reader, metadata: &Metadata) -> Result<u64> {
    let Some(value) = metadata.get(ALIGNMENT_KEY) else { return Ok(DEFAULT_ALIGNMENT) };
    match value.as_u64() {
        Some(alignment) if alignment.is_power_of_two() && alignment <= MAX_ALIGNMENT => Ok(alignment),
        Some(alignment) => Err(reader.damaged(format!(
            "{ALIGNMENT_KEY} is {alignment}, not a power of two from 1 to {MAX_ALIGNMENT}"
        ))),
        None => Err(reader.damaged(format!("{ALIGNMENT_KEY} is not a whole number"))),
    }
}

/// The tensors of a file.
#[derive(Default)]
pub(super) struct Directory {
    pub tensors: Vec<TensorInfo>,
    pub unknown: Vec<UnknownTensor>,
}

/// An entry of the directory.
enum Entry {
    Known(TensorInfo),
    Unknown(UnknownTensor),
}

/// Reads `count` entries. The data start after them, at the next multiple of `alignment`.
pub(super) fn read_directory(reader: &mut Reader, count: u64, alignment: u64) -> Result<Directory> {
    let mut directory = Directory::default();
    for index in 0..count {
        match read_entry(reader, index, alignment)? {
            Entry::Known(tensor) => directory.tensors.push(tensor),
            Entry::Unknown(tensor) => directory.unknown.push(tensor),
        }
    }
    locate(reader, &mut directory, alignment)?;
    check_overlaps(reader, &directory.tensors)?;
    Ok(directory)
}

/// Reads one entry, whose offset counts from the start of the data.
fn read_entry(reader: &mut Reader, index: u64, alignment: u64) -> Result<Entry> {
    let start = reader.offset();
    let name = reader.string(MAX_NAME_BYTES, format_args!("the name of tensor {index}"))?;
    if name.is_empty() {
        return Err(reader.damaged(format!("the name of tensor {index} at offset {start} is empty")));
    }
    let quoted = Quoted(&name);

    let dimensions = reader.u32(format_args!("the number of dimensions of tensor {quoted}"))?;
    if !(1..=MAX_DIMENSIONS).contains(&dimensions) {
        return Err(
            reader.damaged(format!("tensor {quoted} has {dimensions} dimensions, not 1 to {MAX_DIMENSIONS}"))
        );
    }
    let mut shape = Vec::with_capacity(MAX_DIMENSIONS as usize);
    for _ in 0..dimensions {
        let size = reader.u64(format_args!("the dimensions of tensor {quoted}"))?;
        if size == 0 {
            return Err(reader.damaged(format!("tensor {quoted} has a dimension of size 0")));
        }
        shape.push(size);
    }

    let type_id = reader.u32(format_args!("the type of tensor {quoted}"))?;
    let offset = reader.u64(format_args!("the offset of tensor {quoted}"))?;
    if !offset.is_multiple_of(alignment) {
        return Err(reader.damaged(format!(
            "tensor {quoted} has the offset {offset}, not a multiple of the alignment {alignment}"
        )));
    }

    let damaged = |why: String| reader.damaged(format!("tensor {quoted} {why}"));
    elements(&shape).map_err(damaged)?;
    let dtype = DType::from_ggml(type_id);
    let len = dtype.map(|dtype| byte_len(dtype, &shape)).transpose().map_err(damaged)?;
    // GGUF lists the innermost dimension first. All dimensions and their product fit `usize`.
    let shape = shape.iter().rev().map(|&size| size as usize).collect();
    let file = FileIdx(0);
    Ok(match dtype.zip(len) {
        Some((dtype, len)) => Entry::Known(TensorInfo { name, dtype, shape, file, offset, len }),
        None => Entry::Unknown(UnknownTensor { name, type_id, shape, file, offset }),
    })
}

/// The number of elements, or the problem with the dimensions.
fn elements(shape: &[u64]) -> Result<usize, String> {
    let product =
        shape.iter().try_fold(1usize, |product, &size| product.checked_mul(usize::try_from(size).ok()?));
    product.ok_or_else(|| format!("has more elements than can be counted: {shape:?}"))
}

/// The bytes of a tensor with these dimensions, innermost first; or the problem with them.
fn byte_len(dtype: DType, shape: &[u64]) -> Result<u64, String> {
    let elements = elements(shape)?;
    let row = shape.first().copied().unwrap_or(1) as usize;
    if !row.is_multiple_of(dtype.block_len()) {
        return Err(format!(
            "has rows of {row} elements, not a multiple of the {} in a block of {dtype}",
            dtype.block_len()
        ));
    }
    let bytes = dtype.row_bytes(row).and_then(|bytes| bytes.checked_mul(elements / row));
    bytes
        .map(|bytes| bytes as u64)
        .ok_or_else(|| format!("has more bytes than can be counted: {shape:?} of {dtype}"))
}

/// Makes offsets count from the start of the file, and checks that the file contains all the data.
fn locate(reader: &Reader, directory: &mut Directory, alignment: u64) -> Result<()> {
    let data_start = reader.offset().next_multiple_of(alignment);
    for tensor in &mut directory.unknown {
        tensor.offset = data_start.saturating_add(tensor.offset);
    }
    let mut needed = 0;
    let mut first_missing = None;
    for tensor in &mut directory.tensors {
        let place = data_start
            .checked_add(tensor.offset)
            .and_then(|start| Some((start, start.checked_add(tensor.len)?)));
        let Some((start, end)) = place else {
            return Err(reader.damaged(format!(
                "tensor {} has the offset {} and {} bytes, which is beyond the largest possible file",
                Quoted(&tensor.name),
                tensor.offset,
                tensor.len
            )));
        };
        tensor.offset = start;
        if end > reader.file_len() && first_missing.is_none() {
            first_missing = Some(&*tensor);
        }
        needed = needed.max(end);
    }
    match first_missing {
        None => Ok(()),
        Some(tensor) => Err(reader.damaged(format!(
            "the file is incomplete: it has {} bytes and needs {needed} (tensor {} takes {} bytes at offset {}); \
             {CUT_SHORT}",
            reader.file_len(),
            Quoted(&tensor.name),
            tensor.len,
            tensor.offset,
        ))),
    }
}

/// Refuses tensors that overlap. None is empty, so comparing neighbours suffices.
fn check_overlaps(reader: &Reader, tensors: &[TensorInfo]) -> Result<()> {
    let mut by_offset: Vec<&TensorInfo> = tensors.iter().collect();
    by_offset.sort_unstable_by_key(|tensor| tensor.offset);
    for (before, after) in by_offset.iter().zip(by_offset.iter().skip(1)) {
        if after.offset - before.offset < before.len {
            return Err(reader.damaged(format!(
                "tensors {} and {} overlap: the first has {} bytes at offset {}, the second starts at {}",
                Quoted(&before.name),
                Quoted(&after.name),
                before.len,
                before.offset,
                after.offset
            )));
        }
    }
    Ok(())
}
