//! The layout of a GGUF file to be written: its header and the places of tensors.

use std::collections::HashMap;

use forebay_kernels::DType;

use super::noise::{Blocks, Content};
use super::types::is_router;
use crate::error::{Error, Result};
use crate::format::{Metadata, NumberKind, Value};
use crate::models::{Need, NeedKind};

/// The default alignment of tensors in GGUF files.
const ALIGNMENT: u64 = 32;

/// A tensor to be written.
pub struct Tensor {
    /// Its name.
    pub name: String,
    /// Its type.
    pub dtype: DType,
    /// The distribution of its numbers.
    pub content: Content,
    /// Numbers in a row.
    pub cols: usize,
    /// Bytes of a row.
    pub row_bytes: usize,
    /// The rows of all its matrices.
    pub rows: usize,
    /// Zero bytes between its end and the next tensor.
    pub padding: usize,
    shape: Vec<usize>,
    /// Counted from the start of the data.
    offset: u64,
}

/// A file to be written.
pub struct Layout {
    /// Everything before the data.
    pub header: Vec<u8>,
    /// The data.
    pub tensors: Vec<Tensor>,
    /// Bytes of the whole file.
    pub bytes: u64,
}

impl Layout {
    /// The layout of a file with this metadata and one tensor of the given type per need.
    pub fn new(metadata: &Metadata, needs: Vec<(Need, DType)>, skew: f32) -> Result<Layout> {
        let too_large = || Error::Invalid("the model would exceed the largest possible file".into());
        let tied = needs.iter().all(|(need, _)| need.name != "output.weight");
        let mut calibrated = Calibrated { tied, blocks: HashMap::new() };
        let mut end = 0u64;
        let mut tensors = Vec::with_capacity(needs.len());
        for (need, dtype) in needs {
            let content = calibrated.content(&need, dtype, skew);
            let tensor = tensor(need, dtype, content, end).ok_or_else(too_large)?;
            end = tensor.bytes().and_then(|bytes| end.checked_add(bytes)).ok_or_else(too_large)?;
            tensors.push(tensor);
        }
        let header = header(metadata, &tensors);
        let bytes = end.checked_add(header.len() as u64).ok_or_else(too_large)?;
        Ok(Layout { header, tensors, bytes })
    }
}

impl Tensor {
    /// Its bytes with the padding.
    fn bytes(&self) -> Option<u64> {
        (self.rows as u64).checked_mul(self.row_bytes as u64)?.checked_add(self.padding as u64)
    }
}

/// The tensor that starts at `offset`; `None` if its size overflows.
fn tensor(need: Need, dtype: DType, content: Content, offset: u64) -> Option<Tensor> {
    let Need { name, shape, .. } = need;
    let (&cols, outer) = shape.split_last()?;
    let rows = outer.iter().try_fold(1usize, |product, &d| product.checked_mul(d))?;
    let row_bytes = dtype.row_bytes(cols)?;
    let bytes = (rows as u64).checked_mul(row_bytes as u64)?;
    let padding = (bytes.checked_next_multiple_of(ALIGNMENT)? - bytes) as usize;
    Some(Tensor { name, dtype, content, cols, row_bytes, rows, padding, shape, offset })
}

/// The deviations of a model's weights.
struct Calibrated {
    /// Whether the embeddings are also the output matrix.
    tied: bool,
    /// The calibrated blocks, by type and the bits of the deviation, because many tensors share them.
    blocks: HashMap<(DType, u32), Option<Blocks>>,
}

impl Calibrated {
    /// The distribution of a tensor's numbers, chosen so that activations keep their size from layer to layer.
    fn content(&mut self, need: &Need, dtype: DType, skew: f32) -> Content {
        let name = need.name.as_str();
        match need.kind {
            NeedKind::Vector => vector(name, need.shape.iter().product()),
            NeedKind::Matrix if is_router(name) => Content::Router(skew),
            NeedKind::Matrix => {
                let cols = need.shape.last().copied().unwrap_or(1);
                // Longer embeddings would make every token predict itself if they are the output matrix, too.
                let long = name == "token_embd.weight" && !self.tied;
                let deviation = if long { 1.0 } else { 1.0 / (cols as f32).sqrt() };
                let blocks = self.blocks.entry((dtype, deviation.to_bits()));
                match blocks.or_insert_with(|| Blocks::new(dtype, deviation)) {
                    Some(blocks) => Content::Blocks(*blocks),
                    None => {
                        let bound = 3f32.sqrt() * deviation;
                        Content::Between(-bound, bound)
                    }
                }
            }
        }
    }
}

/// The numbers of a vector of length `len`.
fn vector(name: &str, len: usize) -> Content {
    if name.contains("ffn_gate_inp") {
        // Factors of the router's input, which is also divided by the root.
        Content::Constant((len as f32).sqrt())
    } else if ["norm", "scale", "rope_f"].iter().any(|part| name.contains(part)) {
        Content::Constant(1.0)
    } else if name.contains("attn_sinks") {
        Content::Constant(0.0)
    } else if name.ends_with("ssm_a") {
        // Decay rates of states.
        Content::Between(-2.0, -0.1)
    } else if name.contains("ssm_conv1d") {
        Content::Gaussian(0.5)
    } else {
        Content::Gaussian(0.02)
    }
}

/// The header, up to where the data starts.
fn header(metadata: &Metadata, tensors: &[Tensor]) -> Vec<u8> {
    let mut out = b"GGUF".to_vec();
    out.extend(3u32.to_le_bytes());
    out.extend((tensors.len() as u64).to_le_bytes());
    out.extend((metadata.iter().count() as u64).to_le_bytes());
    for (key, value) in metadata.iter() {
        string(&mut out, key);
        entry(&mut out, value);
    }
    for tensor in tensors {
        string(&mut out, &tensor.name);
        out.extend((tensor.shape.len() as u32).to_le_bytes());
        // The innermost dimension comes first.
        tensor.shape.iter().rev().for_each(|&d| out.extend((d as u64).to_le_bytes()));
        out.extend(type_id(tensor.dtype).to_le_bytes());
        out.extend(tensor.offset.to_le_bytes());
    }
    out.resize(out.len().next_multiple_of(ALIGNMENT as usize), 0);
    out
}

/// A value after its type. Numbers have the width that files usually use.
fn entry(out: &mut Vec<u8>, value: &Value) {
    const U32: u32 = 4;
    const I32: u32 = 5;
    const F32: u32 = 6;
    const BOOL: u32 = 7;
    const STRING: u32 = 8;
    const ARRAY: u32 = 9;
    const U64: u32 = 10;
    const I64: u32 = 11;
    let mut raw = |kind: u32, bytes: &[u8]| {
        out.extend(kind.to_le_bytes());
        out.extend(bytes);
    };
    match value {
        Value::Unsigned(v) => match u32::try_from(*v) {
            Ok(v) => raw(U32, &v.to_le_bytes()),
            Err(_) => raw(U64, &v.to_le_bytes()),
        },
        Value::Signed(v) => raw(I64, &v.to_le_bytes()),
        Value::Float(v) => raw(F32, &(*v as f32).to_le_bytes()),
        Value::Bool(v) => raw(BOOL, &[u8::from(*v)]),
        Value::String(v) => {
            raw(STRING, &[]);
            string(out, v);
        }
        Value::Strings(texts) => {
            raw(ARRAY, &STRING.to_le_bytes());
            out.extend((texts.len() as u64).to_le_bytes());
            texts.iter().for_each(|text| string(out, text));
        }
        Value::Numbers(numbers) => {
            debug_assert_eq!(numbers.kind(), NumberKind::I32, "the vocabulary has no others");
            raw(ARRAY, &I32.to_le_bytes());
            out.extend((numbers.len() as u64).to_le_bytes());
            for number in numbers.iter() {
                let number = match number {
                    Value::Signed(number) => number as i32,
                    _ => 0,
                };
                out.extend(number.to_le_bytes());
            }
        }
    }
}

fn string(out: &mut Vec<u8>, text: &str) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}

fn type_id(dtype: DType) -> u32 {
    (0..=u8::MAX.into())
        .find(|&id| DType::from_ggml(id) == Some(dtype))
        .expect("types that can be computed are in files")
}
