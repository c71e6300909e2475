//! Writes small GGUF files for tests, valid and invalid.

use std::path::Path;

use forebay_engine::internals::format::{Metadata, ModelFile, Value};

/// Identifiers of value types.
pub mod value_type {
    pub const U8: u32 = 0;
    pub const U16: u32 = 2;
    pub const U32: u32 = 4;
    pub const I32: u32 = 5;
    pub const F32: u32 = 6;
    pub const BOOL: u32 = 7;
    pub const STRING: u32 = 8;
    pub const ARRAY: u32 = 9;
    pub const U64: u32 = 10;
    pub const I64: u32 = 11;
    pub const F64: u32 = 12;
}

/// Identifiers of tensor types.
pub mod tensor_type {
    pub const F32: u32 = 0;
    pub const Q8_0: u32 = 8;
    pub const Q4_K: u32 = 12;
    pub const BF16: u32 = 30;
    pub const F64: u32 = 28;
    pub const TQ2_0: u32 = 35;
    pub const NVFP4: u32 = 40;
}

/// A GGUF file in preparation. Everything that is not set gets a valid value.
#[derive(Clone)]
pub struct GgufBuilder {
    version: u32,
    /// Written instead of the true counts.
    tensor_count: Option<u64>,
    entry_count: Option<u64>,
    alignment: usize,
    entries: Vec<Vec<u8>>,
    /// How many entries are contained in another entry of the list.
    joined_entries: u64,
    tensors: Vec<Tensor>,
}

/// A tensor of a file.
#[derive(Clone)]
pub struct Tensor {
    pub name: Vec<u8>,
    pub tensor_type: u32,
    /// The innermost dimension first.
    pub dims: Vec<u64>,
    /// Written instead of the true offset.
    offset: Option<u64>,
    pub data: Vec<u8>,
}

impl Tensor {
    /// The header entry, up to the offset.
    fn head(&self) -> Vec<u8> {
        let mut head = string(&self.name);
        head.extend((self.dims.len() as u32).to_le_bytes());
        self.dims.iter().for_each(|d| head.extend(d.to_le_bytes()));
        head.extend(self.tensor_type.to_le_bytes());
        head
    }
}

impl Default for GgufBuilder {
    fn default() -> GgufBuilder {
        GgufBuilder {
            version: 3,
            tensor_count: None,
            entry_count: None,
            alignment: 32,
            entries: Vec::new(),
            joined_entries: 0,
            tensors: Vec::new(),
        }
    }
}

impl GgufBuilder {
    pub fn new() -> GgufBuilder {
        GgufBuilder::default()
    }

    /// A file with all entries and tensors of the one at `path`.
    pub fn copy_of(path: &Path) -> GgufBuilder {
        let (file, model) = (std::fs::read(path).unwrap(), ModelFile::open(path).unwrap());
        let mut builder = GgufBuilder::with_entries_of(&file, &model.tensors[0].name);
        let mut at = 24 + builder.entries[0].len();
        for tensor in &model.tensors {
            let dims: Vec<u64> = tensor.shape.iter().rev().map(|&d| d as u64).collect();
            at += 8 + tensor.name.len() + 4 + 8 * dims.len();
            let tensor_type = u32::from_le_bytes(file[at..at + 4].try_into().unwrap());
            let data = file[tensor.offset as usize..][..tensor.len as usize].to_vec();
            builder = builder.tensor_of(&tensor.name, tensor_type, &dims, data);
            at += 4 + 8;
        }
        builder
    }

    /// A file with all metadata of another, whose first tensor has this name.
    pub fn with_entries_of(file: &[u8], first_tensor: &str) -> GgufBuilder {
        let (name, counts) = (string(first_tensor.as_bytes()), 8..24);
        let end = file.windows(name.len()).position(|window| window == name).expect("the tensor is there");
        let count = u64::from_le_bytes(file[counts.end - 8..counts.end].try_into().unwrap());
        let entries = vec![file[counts.end..end].to_vec()];
        GgufBuilder { entries, joined_entries: count - 1, ..GgufBuilder::default() }
    }

    /// Replaces all entries by these.
    pub fn with_metadata(mut self, metadata: &Metadata) -> Self {
        (self.entries, self.joined_entries) = (Vec::new(), 0);
        metadata.iter().fold(self, |file, (key, value)| {
            let (value_type, bytes) = encoded(value);
            file.raw(key, value_type, bytes)
        })
    }

    pub fn version(mut self, version: u32) -> Self {
        self.version = version;
        self
    }

    /// Writes this number of tensors instead of the true one.
    pub fn claim_tensors(mut self, count: u64) -> Self {
        self.tensor_count = Some(count);
        self
    }

    /// Writes this number of metadata entries instead of the true one.
    pub fn claim_entries(mut self, count: u64) -> Self {
        self.entry_count = Some(count);
        self
    }

    /// Adds an entry whose key and value are these bytes.
    pub fn raw(mut self, key: impl AsRef<[u8]>, value_type: u32, value: impl AsRef<[u8]>) -> Self {
        let entry = [&string(key.as_ref())[..], &value_type.to_le_bytes(), value.as_ref()].concat();
        self.entries.push(entry);
        self
    }

    pub fn bool(self, key: &str, value: u8) -> Self {
        self.raw(key, value_type::BOOL, [value])
    }

    pub fn u16(self, key: &str, value: u16) -> Self {
        self.raw(key, value_type::U16, value.to_le_bytes())
    }

    pub fn u32(self, key: &str, value: u32) -> Self {
        self.raw(key, value_type::U32, value.to_le_bytes())
    }

    pub fn i32(self, key: &str, value: i32) -> Self {
        self.raw(key, value_type::I32, value.to_le_bytes())
    }

    pub fn f32(self, key: &str, value: f32) -> Self {
        self.raw(key, value_type::F32, value.to_le_bytes())
    }

    pub fn str(self, key: &str, value: &str) -> Self {
        self.raw(key, value_type::STRING, string(value.as_bytes()))
    }

    /// Adds an array whose elements are these bytes.
    pub fn array(self, key: &str, element_type: u32, count: u64, elements: impl AsRef<[u8]>) -> Self {
        let value = [&element_type.to_le_bytes()[..], &count.to_le_bytes(), elements.as_ref()].concat();
        self.raw(key, value_type::ARRAY, value)
    }

    pub fn strings(self, key: &str, values: &[&str]) -> Self {
        let elements: Vec<u8> = values.iter().flat_map(|s| string(s.as_bytes())).collect();
        self.array(key, value_type::STRING, values.len() as u64, elements)
    }

    /// Sets `general.alignment` and aligns the tensors by it.
    pub fn alignment(mut self, alignment: u32) -> Self {
        self.alignment = alignment as usize;
        self.u32("general.alignment", alignment)
    }

    /// Removes an entry.
    pub fn without(mut self, key: &str) -> Self {
        let before = self.entries.len();
        self.entries.retain(|entry| !entry.starts_with(&string(key.as_bytes())));
        assert!(self.entries.len() < before, "there is no {key}");
        self
    }

    /// Removes a tensor, which must exist.
    pub fn without_tensor(mut self, name: &str) -> Self {
        self.take(name).unwrap_or_else(|| panic!("there is no {name}"));
        self
    }

    /// Removes a tensor, if it exists.
    pub fn take(&mut self, name: &str) -> Option<Tensor> {
        let index = self.tensors.iter().position(|tensor| tensor.name == name.as_bytes())?;
        Some(self.tensors.remove(index))
    }

    /// The names of all tensors.
    pub fn names(&self) -> Vec<String> {
        let name = |tensor: &Tensor| String::from_utf8(tensor.name.clone()).unwrap();
        self.tensors.iter().map(name).collect()
    }

    /// Adds a tensor with any bytes. `dims` has the innermost dimension first, as the file does.
    pub fn tensor(self, name: impl AsRef<[u8]>, tensor_type: u32, dims: &[u64], bytes: usize) -> Self {
        self.tensor_of(name, tensor_type, dims, (0..bytes).map(|i| i as u8).collect())
    }

    /// Adds a tensor with these bytes.
    pub fn tensor_of(
        mut self,
        name: impl AsRef<[u8]>,
        tensor_type: u32,
        dims: &[u64],
        data: Vec<u8>,
    ) -> Self {
        let (name, dims) = (name.as_ref().to_vec(), dims.to_vec());
        self.tensors.push(Tensor { name, tensor_type, dims, offset: None, data });
        self
    }

    /// Makes the last tensor claim this offset from the start of the data.
    pub fn at(mut self, offset: u64) -> Self {
        self.tensors.last_mut().expect("a tensor was added").offset = Some(offset);
        self
    }

    /// The file. It ends with the last byte of the last tensor.
    pub fn build(&self) -> Vec<u8> {
        let entries = self.entries.len() as u64 + self.joined_entries;
        let mut file = b"GGUF".to_vec();
        file.extend(self.version.to_le_bytes());
        file.extend(self.tensor_count.unwrap_or(self.tensors.len() as u64).to_le_bytes());
        file.extend(self.entry_count.unwrap_or(entries).to_le_bytes());
        self.entries.iter().for_each(|entry| file.extend(entry));

        let mut data = Vec::new();
        for tensor in &self.tensors {
            pad(&mut data, self.alignment);
            file.extend(tensor.head());
            file.extend(tensor.offset.unwrap_or(data.len() as u64).to_le_bytes());
            data.extend(&tensor.data);
        }
        if !data.is_empty() {
            pad(&mut file, self.alignment);
            file.extend(data);
        }
        file
    }
}

/// A small valid file with every kind of value and three types of tensor.
pub fn sample() -> GgufBuilder {
    GgufBuilder::new()
        .str("general.architecture", "qwen3moe")
        .u32("qwen3moe.block_count", 2)
        .i32("qwen3moe.offset", -7)
        .f32("qwen3moe.rope.freq_base", 10_000.0)
        .bool("tokenizer.ggml.add_bos_token", 1)
        .raw("general.size", value_type::U64, (1u64 << 40).to_le_bytes())
        .strings("tokenizer.ggml.tokens", &["<s>", "", "grüße", "a b"])
        .array(
            "tokenizer.ggml.token_type",
            value_type::I32,
            4,
            [1i32, -2, 3, 4].map(i32::to_le_bytes).concat(),
        )
        .array("qwen3moe.flags", value_type::BOOL, 3, [1, 0, 1])
        .strings("tokenizer.ggml.merges", &[])
        .tensor("token_embd.weight", tensor_type::Q8_0, &[64, 4], 4 * 2 * 34)
        .tensor("output_norm.weight", tensor_type::F32, &[5], 20)
        .tensor("blk.0.ffn_up_exps.weight", tensor_type::Q4_K, &[256, 3, 2], 6 * 144)
}

/// A length and bytes, which is how the format writes a string.
pub fn string(bytes: &[u8]) -> Vec<u8> {
    [&(bytes.len() as u64).to_le_bytes()[..], bytes].concat()
}

/// The type of a value and its bytes.
fn encoded(value: &Value) -> (u32, Vec<u8>) {
    let array = |element_type: u32, count: usize, elements: Vec<u8>| {
        let head = [&element_type.to_le_bytes()[..], &(count as u64).to_le_bytes()].concat();
        (value_type::ARRAY, [head, elements].concat())
    };
    match value {
        Value::Unsigned(v) => (value_type::U64, v.to_le_bytes().into()),
        Value::Signed(v) => (value_type::I64, v.to_le_bytes().into()),
        Value::Float(v) => (value_type::F64, v.to_le_bytes().into()),
        Value::Bool(v) => (value_type::BOOL, vec![u8::from(*v)]),
        Value::String(v) => (value_type::STRING, string(v.as_bytes())),
        Value::Strings(list) => {
            array(value_type::STRING, list.len(), list.iter().flat_map(|v| string(v.as_bytes())).collect())
        }
        Value::Numbers(list) => {
            let elements: Vec<_> = list.iter().map(|element| encoded(&element)).collect();
            let element_type = elements.first().map_or(value_type::U64, |(element_type, _)| *element_type);
            array(element_type, list.len(), elements.into_iter().flat_map(|(_, bytes)| bytes).collect())
        }
    }
}

fn pad(bytes: &mut Vec<u8>, alignment: usize) {
    bytes.resize(bytes.len().next_multiple_of(alignment), 0);
}
