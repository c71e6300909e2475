
// A transposed matrix of floats: `m.code_step` bytes between rows, `m.group` between columns.
fn unpack$(m: Matrix, at: Planes, row: u32, index: u32) -> Group {
    var g: Group;
    let first = at.codes + row * m.code_step;
    for (var i = 0u; i < 32u; i++) {
        let column = 32u * index + i;
        var value = 0.0;
        if column < m.cols { value = float_at$(first + column * m.group); }
        g.lanes[i / 4u][i % 4u] = value;
    }
    g.scale = vec2<f32>(1.0);
    g.min = vec2<f32>(0.0);
    return g;
}
