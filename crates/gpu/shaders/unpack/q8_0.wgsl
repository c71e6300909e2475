
// Blocks of 34 bytes: a half and 32 signed bytes.
const HAS_MIN$: bool = false;
fn unpack$(m: Matrix, at: Planes, row: u32, index: u32) -> Group {
    var g: Group;
    let block = at.codes + row * m.code_step + 34u * index;
    for (var i = 0u; i < 8u; i++) {
        g.lanes[i] = bytes_of(code_word$(block + 2u + 4u * i) ^ 0x80808080u) - 128.0;
    }
    g.scale = vec2<f32>(half_of(code_half$(block)));
    g.min = vec2<f32>(0.0);
    return g;
}
