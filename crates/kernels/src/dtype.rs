//! The element types of weight files: names, identifiers and block geometry.

use std::fmt;

/// The type of a stored tensor's elements.
///
/// All types of the GGUF and safetensors formats are listed, so that any file can be described.
/// [`DType::is_computable`] tells which of them the kernels support.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs, non_camel_case_types)]
pub enum DType {
    F32,
    F16,
    BF16,
    F64,
    I8,
    I16,
    I32,
    I64,
    Q1_0,
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
    Q8_1,
    Q2_K,
    Q3_K,
    Q4_K,
    Q5_K,
    Q6_K,
    Q8_K,
    IQ1_S,
    IQ1_M,
    IQ2_XXS,
    IQ2_XS,
    IQ2_S,
    IQ3_XXS,
    IQ3_S,
    IQ4_NL,
    IQ4_XS,
    TQ1_0,
    TQ2_0,
    MXFP4,
    NVFP4,
    BOOL,
    U8,
    U16,
    U32,
    U64,
    F8_E4M3,
    F8_E5M2,
    F8_E8M0,
}

/// One row of the table below.
struct Entry {
    dtype: DType,
    /// The identifier in GGUF files, if the type occurs there.
    ggml: Option<u32>,
    name: &'static str,
    block_len: usize,
    block_bytes: usize,
}

const fn entry(dtype: DType, ggml: u32, name: &'static str, block_len: usize, block_bytes: usize) -> Entry {
    Entry { dtype, ggml: Some(ggml), name, block_len, block_bytes }
}

/// A plain type that does not occur in GGUF files.
const fn plain(dtype: DType, name: &'static str, bytes: usize) -> Entry {
    Entry { dtype, ggml: None, name, block_len: 1, block_bytes: bytes }
}

/// GGUF identifier if there is one, name, elements per block, bytes per block; in the order of the enum.
const TABLE: &[Entry] = &[
    entry(DType::F32, 0, "F32", 1, 4),
    entry(DType::F16, 1, "F16", 1, 2),
    entry(DType::BF16, 30, "BF16", 1, 2),
    entry(DType::F64, 28, "F64", 1, 8),
    entry(DType::I8, 24, "I8", 1, 1),
    entry(DType::I16, 25, "I16", 1, 2),
    entry(DType::I32, 26, "I32", 1, 4),
    entry(DType::I64, 27, "I64", 1, 8),
    entry(DType::Q1_0, 41, "Q1_0", 128, 18),
    entry(DType::Q4_0, 2, "Q4_0", 32, 18),
    entry(DType::Q4_1, 3, "Q4_1", 32, 20),
    entry(DType::Q5_0, 6, "Q5_0", 32, 22),
    entry(DType::Q5_1, 7, "Q5_1", 32, 24),
    entry(DType::Q8_0, 8, "Q8_0", 32, 34),
    entry(DType::Q8_1, 9, "Q8_1", 32, 40),
    entry(DType::Q2_K, 10, "Q2_K", 256, 84),
    entry(DType::Q3_K, 11, "Q3_K", 256, 110),
    entry(DType::Q4_K, 12, "Q4_K", 256, 144),
    entry(DType::Q5_K, 13, "Q5_K", 256, 176),
    entry(DType::Q6_K, 14, "Q6_K", 256, 210),
    entry(DType::Q8_K, 15, "Q8_K", 256, 292),
    entry(DType::IQ1_S, 19, "IQ1_S", 256, 50),
    entry(DType::IQ1_M, 29, "IQ1_M", 256, 56),
    entry(DType::IQ2_XXS, 16, "IQ2_XXS", 256, 66),
    entry(DType::IQ2_XS, 17, "IQ2_XS", 256, 74),
    entry(DType::IQ2_S, 22, "IQ2_S", 256, 82),
    entry(DType::IQ3_XXS, 18, "IQ3_XXS", 256, 98),
    entry(DType::IQ3_S, 21, "IQ3_S", 256, 110),
    entry(DType::IQ4_NL, 20, "IQ4_NL", 32, 18),
    entry(DType::IQ4_XS, 23, "IQ4_XS", 256, 136),
    entry(DType::TQ1_0, 34, "TQ1_0", 256, 54),
    entry(DType::TQ2_0, 35, "TQ2_0", 256, 66),
    entry(DType::MXFP4, 39, "MXFP4", 32, 17),
    entry(DType::NVFP4, 40, "NVFP4", 64, 36),
    plain(DType::BOOL, "BOOL", 1),
    plain(DType::U8, "U8", 1),
    plain(DType::U16, "U16", 2),
    plain(DType::U32, "U32", 4),
    plain(DType::U64, "U64", 8),
    plain(DType::F8_E4M3, "F8_E4M3", 1),
    plain(DType::F8_E5M2, "F8_E5M2", 1),
    plain(DType::F8_E8M0, "F8_E8M0", 1),
];

impl DType {
    /// The type with this identifier in GGUF files.
    pub fn from_ggml(id: u32) -> Option<DType> {
        TABLE.iter().find(|e| e.ggml == Some(id)).map(|e| e.dtype)
    }

    /// The plain type with this name in safetensors files.
    pub fn from_safetensors(name: &str) -> Option<DType> {
        let plain = TABLE.iter().filter(|e| e.block_len == 1);
        plain.map(|e| e.dtype).find(|dtype| dtype.name() == name)
    }

    /// The name that the format's tools use.
    pub fn name(self) -> &'static str {
        self.entry().name
    }

    /// Elements in one block: 1 for plain types.
    pub fn block_len(self) -> usize {
        self.entry().block_len
    }

    /// Bytes in one block.
    pub fn block_bytes(self) -> usize {
        self.entry().block_bytes
    }

    /// Bytes of a row of `cols` elements; `None` if the row is not a whole number of blocks or the size
    /// does not fit.
    pub fn row_bytes(self, cols: usize) -> Option<usize> {
        let e = self.entry();
        if !cols.is_multiple_of(e.block_len) {
            return None;
        }
        (cols / e.block_len).checked_mul(e.block_bytes)
    }

    /// Whether the elements are floating-point numbers, multiplied with activations that stay f32.
    pub fn is_float(self) -> bool {
        matches!(self, DType::F32 | DType::F16 | DType::BF16)
    }

    /// Whether the kernels can compute with the type.
    pub fn is_computable(self) -> bool {
        use DType::*;
        let plain = matches!(self, Q4_0 | Q4_1 | Q5_0 | Q5_1 | Q8_0);
        let k = matches!(self, Q2_K | Q3_K | Q4_K | Q5_K | Q6_K);
        let iq = matches!(self, IQ1_S | IQ1_M | IQ2_XXS | IQ2_XS | IQ2_S | IQ3_XXS | IQ3_S | IQ4_NL | IQ4_XS);
        self.is_float() || plain || k || iq || matches!(self, MXFP4 | NVFP4)
    }

    /// The types the kernels can compute with.
    pub fn computable() -> impl Iterator<Item = DType> {
        TABLE.iter().map(|e| e.dtype).filter(|t| t.is_computable())
    }

    fn entry(self) -> &'static Entry {
        &TABLE[self as usize]
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_in_the_order_of_the_enum() {
        for (i, e) in TABLE.iter().enumerate() {
            assert_eq!(e.dtype as usize, i, "{}", e.name);
            assert!(e.ggml.is_none_or(|id| DType::from_ggml(id) == Some(e.dtype)));
            assert_eq!(format!("{:?}", e.dtype), e.name);
        }
    }

    #[test]
    fn a_row_is_a_whole_number_of_blocks() {
        assert_eq!(DType::Q4_K.row_bytes(512), Some(288));
        assert_eq!(DType::Q4_K.row_bytes(511), None);
        assert_eq!(DType::F64.row_bytes(usize::MAX), None);
    }
}
