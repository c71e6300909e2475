
// Matrices. What is common to all encodings; `unpack/` has the rest.

// The order is that of `Descriptor` in weights.rs.
struct Matrix {
    // Bytes from a buffer's start to codes, scales and biases; of experts, see experts.wgsl.
    codes: u32,
    scales: u32,
    biases: u32,
    // Bytes between rows of each.
    code_step: u32,
    scale_step: u32,
    bias_step: u32,
    rows: u32,
    cols: u32,
    group: u32,  // columns that share a scale; of transposed matrices, bytes between columns
    share: u32,  // rows that share scales
    floats: u32, // the type of scales in planes of their own: 0 for f32, 1 for f16, 2 for bf16
    factor: f32, // of all weights
}

// Where the planes of a matrix begin, in bytes.
struct Planes { codes: u32, scales: u32, biases: u32 }

fn planes_of(m: Matrix) -> Planes { return Planes(m.codes, m.scales, m.biases); }

// 32 columns of a row: weight = scale * lane + min, with one scale and minimum for each half.
struct Group {
    lanes: array<vec4<f32>, 8>,
    scale: vec2<f32>,
    min: vec2<f32>,
}

// Four bytes of a word as numbers without sign.
fn bytes_of(word: u32) -> vec4<f32> {
    return vec4<f32>(vec4<u32>(word & 255u, (word >> 8u) & 255u, (word >> 16u) & 255u, word >> 24u));
}

// A half, in the low bits of a word.
fn half_of(bits: u32) -> f32 { return unpack2x16float(bits).x; }
fn brain_of(bits: u32) -> f32 { return bitcast<f32>(bits << 16u); }
