
// Blocks of a scale, perhaps a minimum, 32 fifth bits, and 16 bytes of nibbles: all low ones first. Lanes are less by
// LESS$.
// Four bits each, lowest first, as the fifth bits of four bytes.
fn fifth_bits$(bits: vec4<u32>) -> vec4<u32> {
    let four = bits & vec4<u32>(15u);
    let spread = four | (four << vec4<u32>(7u)) | (four << vec4<u32>(14u)) | (four << vec4<u32>(21u));
    return (spread & vec4<u32>(ONES)) << vec4<u32>(4u);
}
fn unpack$(m: Matrix, at: Planes, row: u32, index: u32) -> Group {
    let head = select(2u, 4u, HAS_MIN$);
    let block = at.codes + row * m.code_step + (head + 20u) * index;
    let fifth = vec4<u32>(code_word$(block + head));
    let codes = code_four$(block + head + 4u);
    let low = (codes & vec4<u32>(NIBBLES)) | fifth_bits$(fifth >> vec4<u32>(0u, 4u, 8u, 12u));
    let high = ((codes >> vec4<u32>(4u)) & vec4<u32>(NIBBLES)) | fifth_bits$(fifth >> vec4<u32>(16u, 20u, 24u, 28u));
    let lanes = lanes_of(low, high, LESS$);
    if !HAS_MIN$ { return scaled(lanes, half_of(code_half$(block))); }
    let both = unpack2x16float(code_word$(block));
    return Group(lanes, both.xx, both.yy);
}
