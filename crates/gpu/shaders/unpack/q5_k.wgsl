
// Blocks of 176 bytes: as of Q4_K, with 32 bytes of fifth bits before the nibbles.
fn unpack$(m: Matrix, at: Planes, row: u32, index: u32) -> Group {
    let block = at.codes + row * m.code_step + 176u * (index / 8u);
    let part = index % 8u;
    let codes = block + 48u + 32u * (part / 2u);
    let shift = vec4<u32>(4u * (part & 1u));
    let low_a = (code_four$(codes) >> shift) & vec4<u32>(NIBBLES);
    let low_b = (code_four$(codes + 16u) >> shift) & vec4<u32>(NIBBLES);
    let fifth_a = (code_four$(block + 16u) >> vec4<u32>(part)) & vec4<u32>(ONES);
    let fifth_b = (code_four$(block + 32u) >> vec4<u32>(part)) & vec4<u32>(ONES);
    let lanes = lanes_of(low_a | (fifth_a << vec4<u32>(4u)), low_b | (fifth_b << vec4<u32>(4u)), 0.0);
    let both = scale_and_min$(code_four$(block), part);
    return Group(lanes, both.xx, both.yy);
}
