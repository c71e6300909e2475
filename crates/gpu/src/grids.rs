//! The grids of the IQ types, as kernels find them: in one buffer of words, whose bytes are lanes.

use std::fmt::Write;

use forebay_kernels::quant::grids;

/// Added to the lanes of the one-bit grid so that none is negative.
const LIFT: i8 = 8;

/// The name of each grid in kernels, and its words.
fn all() -> [(&'static str, Vec<u32>); 6] {
    [
        ("IQ1", words(&grids::IQ1, LIFT)),
        ("IQ2_XXS", words(&grids::IQ2_XXS, 0)),
        ("IQ2_XS", words(&grids::IQ2_XS, 0)),
        ("IQ2_S", words(&grids::IQ2_S, 0)),
        ("IQ3_XXS", words(&grids::IQ3_XXS, 0)),
        ("IQ3_S", words(&grids::IQ3_S, 0)),
    ]
}

/// All grids, one after the other.
pub fn table() -> Vec<u32> {
    all().into_iter().flat_map(|(_, words)| words).collect()
}

/// Declares the buffer, and where in it each grid begins.
pub fn declaration() -> String {
    let mut text = String::from("@group(0) @binding(#) var<storage, read> grids: array<u32>;\n");
    let mut start = 0;
    for (name, words) in all() {
        let _ = writeln!(text, "const {name} = {start}u;");
        start += words.len();
    }
    text
}

fn words<const LANES: usize>(points: &[[i8; LANES]], lift: i8) -> Vec<u32> {
    let word = |lanes: &[i8]| lanes.iter().rev().fold(0, |word, lane| word << 8 | (lane + lift) as u32);
    points.iter().flat_map(|point| point.chunks_exact(4).map(word)).collect()
}
