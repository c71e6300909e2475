
// Blocks of 144 bytes: factors of scales and minima, 12 bytes of these, and 128 of nibbles.
fn unpack$(m: Matrix, at: Planes, row: u32, index: u32) -> Group {
    let block = at.codes + row * m.code_step + 144u * (index / 8u);
    let part = index % 8u;
    let codes = block + 16u + 32u * (part / 2u);
    let shift = vec4<u32>(4u * (part & 1u));
    let a = (code_four$(codes) >> shift) & vec4<u32>(NIBBLES);
    let b = (code_four$(codes + 16u) >> shift) & vec4<u32>(NIBBLES);
    let both = scale_and_min$(code_four$(block), part);
    return Group(lanes_of(a, b, 0.0), both.xx, both.yy);
}
