
// Blocks of 34 bytes: a half and 32 signed bytes.
fn unpack$(m: Matrix, at: Planes, row: u32, index: u32) -> Group {
    let block = at.codes + row * m.code_step + 34u * index;
    let a = code_four$(block + 2u) ^ vec4<u32>(0x80808080u);
    let b = code_four$(block + 18u) ^ vec4<u32>(0x80808080u);
    return scaled(lanes_of(a, b, 128.0), half_of(code_half$(block)));
}
