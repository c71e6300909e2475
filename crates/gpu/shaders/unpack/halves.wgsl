
// Floats of 16 bits. `from_half$` says of which kind.
const HAS_MIN$: bool = false;
fn unpack$(m: Matrix, at: Planes, row: u32, index: u32) -> Group {
    var g: Group;
    let first = at.codes + row * m.code_step + 64u * index;
    let left = m.cols - 32u * index;
    for (var i = 0u; i < 8u; i++) {
        for (var j = 0u; j < 4u; j += 2u) {
            let column = 4u * i + j;
            g.lanes[i][j] = 0.0;
            g.lanes[i][j + 1u] = 0.0;
            if column + 1u < left {
                let two = code_word$(first + 2u * column);
                g.lanes[i][j] = from_half$(two & 0xffffu);
                g.lanes[i][j + 1u] = from_half$(two >> 16u);
            } else if column < left {
                g.lanes[i][j] = from_half$(code_half$(first + 2u * column));
            }
        }
    }
    g.scale = vec2<f32>(1.0);
    g.min = vec2<f32>(0.0);
    return g;
}
