
fn single_four$(byte: u32) -> vec4<f32> { return bitcast<vec4<f32>>(code_four$(byte)); }
fn unpack$(m: Matrix, at: Planes, row: u32, index: u32) -> Group {
    let first = at.codes + row * m.code_step + 128u * index;
    let left = m.cols - min(m.cols, 32u * index);
    if left >= 32u {
        let lanes = array<vec4<f32>, 8>(
            single_four$(first), single_four$(first + 16u), single_four$(first + 32u), single_four$(first + 48u),
            single_four$(first + 64u), single_four$(first + 80u), single_four$(first + 96u), single_four$(first + 112u),
        );
        return scaled(lanes, 1.0);
    }
    var g = scaled(array<vec4<f32>, 8>(), 1.0);
    for (var i = 0u; i < left; i++) { g.lanes[i / 4u][i % 4u] = bitcast<f32>(code_word$(first + 4u * i)); }
    return g;
}
