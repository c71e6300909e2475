
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

// A weight of a group, rounded twice as on the processor: no compiler fuses a product with a sum across a minimum.
fn weight_of(g: Group, i: u32, has_min: bool) -> f32 {
    let product = g.scale[i / 16u] * g.lanes[i / 4u][i % 4u];
    if !has_min { return product; }
    return min(product, INFINITE) + g.min[i / 16u];
}

const NIBBLES: u32 = 0x0f0f0f0fu;
const PAIRS: u32 = 0x03030303u;
const ONES: u32 = 0x01010101u;

// The four bytes of a word, less a number. In the low bits of 2^23 they need no conversion, which is slow on some GPUs.
fn bytes_of(word: u32, less: f32) -> vec4<f32> {
    let bytes = vec4<u32>(word & 255u, (word >> 8u) & 255u, (word >> 16u) & 255u, word >> 24u);
    return bitcast<vec4<f32>>(bytes | vec4<u32>(0x4b000000u)) - (8388608.0 + less);
}

// 32 bytes as lanes, less a number.
fn lanes_of(a: vec4<u32>, b: vec4<u32>, less: f32) -> array<vec4<f32>, 8> {
    return array<vec4<f32>, 8>(
        bytes_of(a.x, less), bytes_of(a.y, less), bytes_of(a.z, less), bytes_of(a.w, less),
        bytes_of(b.x, less), bytes_of(b.y, less), bytes_of(b.z, less), bytes_of(b.w, less),
    );
}

// Groups with one scale.
fn scaled(lanes: array<vec4<f32>, 8>, scale: f32) -> Group {
    return Group(lanes, vec2<f32>(scale), vec2<f32>(0.0));
}

// A half, in the low bits of a word.
fn half_of(bits: u32) -> f32 { return unpack2x16float(bits).x; }
fn brain_of(bits: u32) -> f32 { return bitcast<f32>(bits << 16u); }
