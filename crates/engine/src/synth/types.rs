//! Chooses the type of each tensor.

use std::collections::BTreeSet;

use forebay_kernels::DType;

use crate::models::{Need, NeedKind};

/// The types of a model's matrices.
#[derive(Clone, Copy)]
pub struct Types {
    /// The type of most matrices.
    pub matrices: DType,
    /// The type of gate and up of routed experts.
    pub experts: DType,
    /// The type of down projections of feed-forward blocks.
    pub down: DType,
    /// The type of the output matrix and of value projections.
    pub output: DType,
}

impl Types {
    /// Almost as in Q4_K_M files.
    pub const Q4_K_M: Types =
        Types { matrices: DType::Q4_K, experts: DType::Q4_K, down: DType::Q6_K, output: DType::Q6_K };
    /// As in gpt-oss: experts in MXFP4.
    pub const GPT_OSS: Types =
        Types { matrices: DType::Q8_0, experts: DType::MXFP4, down: DType::MXFP4, output: DType::Q8_0 };

    /// One type for all, but with Q4_K the types that go with it.
    pub fn all(dtype: DType) -> Types {
        match dtype {
            DType::Q4_K => Types::Q4_K_M,
            other => Types { matrices: other, experts: other, down: other, output: other },
        }
    }

    /// The type of a tensor. Adds to `fallbacks` a type whose blocks do not divide the tensor's rows, and the type
    /// used instead.
    pub(super) fn of(&self, need: &Need, fallbacks: &mut BTreeSet<(&'static str, &'static str)>) -> DType {
        let name = need.name.as_str();
        if need.kind == NeedKind::Vector || is_router(name) {
            return DType::F32;
        }
        let wanted = if name.contains("ffn_down") {
            self.down
        } else if name.contains("_exps.") {
            self.experts
        } else if name == "output.weight" || name.contains("attn_v.") {
            self.output
        } else {
            self.matrices
        };
        let cols = need.shape.last().copied().unwrap_or(1);
        let fitting = fitting(wanted, cols);
        if fitting != wanted {
            fallbacks.insert((wanted.name(), fitting.name()));
        }
        fitting
    }
}

/// Whether a matrix is a router or the gate of a shared expert. Files store them in F32.
pub(super) fn is_router(name: &str) -> bool {
    name.contains("ffn_gate_inp")
}

/// The type, or the next larger one whose blocks divide a row.
fn fitting(wanted: DType, cols: usize) -> DType {
    let bits = |dtype: DType| dtype.block_bytes() as f64 / dtype.block_len() as f64;
    let others = [DType::Q4_0, DType::Q5_0, DType::Q8_0].into_iter().filter(|&t| bits(t) >= bits(wanted));
    [wanted].into_iter().chain(others).find(|t| t.row_bytes(cols).is_some()).unwrap_or(DType::F16)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_that_blocks_do_not_divide_have_the_next_larger_type() {
        assert_eq!(fitting(DType::Q4_K, 768), DType::Q4_K);
        assert_eq!(fitting(DType::Q4_K, 1408), DType::Q4_0);
        assert_eq!(fitting(DType::Q5_K, 1408), DType::Q5_0);
        assert_eq!(fitting(DType::Q6_K, 1408), DType::Q8_0);
        assert_eq!(fitting(DType::IQ1_S, 96), DType::Q4_0);
        assert_eq!(fitting(DType::MXFP4, 2880), DType::MXFP4);
        assert_eq!(fitting(DType::Q4_K, 100), DType::F16);
        assert_eq!(fitting(DType::F32, 7), DType::F32);
    }
}
