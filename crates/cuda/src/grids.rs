//! The grids of the IQ types, in the form that the kernels need.

use std::fmt::Write;

use forebay_kernels::quant::grids;

/// Added to the lanes of the one-bit grid so that none is negative.
const LIFT: i8 = 8;

/// Source code of the grids. The bytes of a word are a point's lanes, the first in the lowest byte.
pub fn source() -> String {
    let mut text = String::new();
    table(&mut text, "IQ1", &grids::IQ1, LIFT);
    table(&mut text, "IQ2_XXS", &grids::IQ2_XXS, 0);
    table(&mut text, "IQ2_XS", &grids::IQ2_XS, 0);
    table(&mut text, "IQ2_S", &grids::IQ2_S, 0);
    table(&mut text, "IQ3_XXS", &grids::IQ3_XXS, 0);
    table(&mut text, "IQ3_S", &grids::IQ3_S, 0);
    text
}

fn table<const LANES: usize>(text: &mut String, name: &str, points: &[[i8; LANES]], lift: i8) {
    let word = if LANES == 4 { "unsigned" } else { "unsigned long long" };
    let _ = write!(text, "__device__ const {word} GRID_{name}[{}] = {{", points.len());
    for point in points {
        let lanes = point.iter().rev().fold(0u64, |word, lane| word << 8 | (lane + lift) as u64);
        let _ = write!(text, "{lanes:#x},");
    }
    text.push_str("};\n");
}
