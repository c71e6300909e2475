
// Blocks of 18 bytes: a scale and nibbles.
fn unpack$(m: Matrix, at: Planes, row: u32, index: u32) -> Group {
    let block = at.codes + row * m.code_step + 18u * index;
    return scaled(iq4_lanes$(code_four$(block + 2u)), half_of(code_half$(block)));
}
