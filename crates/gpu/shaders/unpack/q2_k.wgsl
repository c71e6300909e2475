
// Blocks of 84 bytes: 16 bytes of a scale and a minimum each, 64 of two-bit codes, and the factors of both.
fn unpack$(m: Matrix, at: Planes, row: u32, index: u32) -> Group {
    let block = at.codes + row * m.code_step + 84u * (index / 8u);
    let part = index % 8u;
    let codes = block + 16u + 32u * (part / 4u);
    let shift = vec4<u32>(2u * (part % 4u));
    let a = (code_four$(codes) >> shift) & vec4<u32>(PAIRS);
    let b = (code_four$(codes + 16u) >> shift) & vec4<u32>(PAIRS);
    let both = code_half$(block + 2u * part);
    let factors = unpack2x16float(code_word$(block + 80u));
    let scale = vec2<f32>(vec2<u32>(both & 15u, (both >> 8u) & 15u));
    let minimum = vec2<f32>(vec2<u32>((both >> 4u) & 15u, both >> 12u));
    return Group(lanes_of(a, b, 0.0), factors.x * scale, -(factors.y * minimum));
}
