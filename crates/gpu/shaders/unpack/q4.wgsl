
// Blocks of a scale, perhaps a minimum, and 16 bytes of nibbles: all low ones first. Lanes are less by LESS$.
fn unpack$(m: Matrix, at: Planes, row: u32, index: u32) -> Group {
    let head = select(2u, 4u, HAS_MIN$);
    let block = at.codes + row * m.code_step + (head + 16u) * index;
    let codes = code_four$(block + head);
    let lanes = lanes_of(codes & vec4<u32>(NIBBLES), (codes >> vec4<u32>(4u)) & vec4<u32>(NIBBLES), LESS$);
    if !HAS_MIN$ { return scaled(lanes, half_of(code_half$(block))); }
    let both = unpack2x16float(code_word$(block));
    return Group(lanes, both.xx, both.yy);
}
