
const HAS_MIN$: bool = false;
fn unpack$(m: Matrix, at: Planes, row: u32, index: u32) -> Group {
    var g: Group;
    let first = at.codes + row * m.code_step + 128u * index;
    for (var i = 0u; i < 8u; i++) {
        for (var j = 0u; j < 4u; j++) {
            let column = 4u * i + j;
            g.lanes[i][j] = 0.0;
            if 32u * index + column < m.cols { g.lanes[i][j] = bitcast<f32>(code_word$(first + 4u * column)); }
        }
    }
    g.scale = vec2<f32>(1.0);
    g.min = vec2<f32>(0.0);
    return g;
}
