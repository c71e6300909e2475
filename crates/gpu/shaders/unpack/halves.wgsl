
// Floats of 16 bits. `from_half$` says of which kind.
fn two_halves$(word: u32) -> vec2<f32> { return vec2<f32>(from_half$(word & 0xffffu), from_half$(word >> 16u)); }
fn unpack$(m: Matrix, at: Planes, row: u32, index: u32) -> Group {
    let first = at.codes + row * m.code_step + 64u * index;
    let left = m.cols - min(m.cols, 32u * index);
    if left >= 32u {
        let a = code_four$(first);
        let b = code_four$(first + 16u);
        let c = code_four$(first + 32u);
        let d = code_four$(first + 48u);
        let lanes = array<vec4<f32>, 8>(
            vec4<f32>(two_halves$(a.x), two_halves$(a.y)), vec4<f32>(two_halves$(a.z), two_halves$(a.w)),
            vec4<f32>(two_halves$(b.x), two_halves$(b.y)), vec4<f32>(two_halves$(b.z), two_halves$(b.w)),
            vec4<f32>(two_halves$(c.x), two_halves$(c.y)), vec4<f32>(two_halves$(c.z), two_halves$(c.w)),
            vec4<f32>(two_halves$(d.x), two_halves$(d.y)), vec4<f32>(two_halves$(d.z), two_halves$(d.w)),
        );
        return scaled(lanes, 1.0);
    }
    var g = scaled(array<vec4<f32>, 8>(), 1.0);
    for (var i = 0u; i < left; i++) { g.lanes[i / 4u][i % 4u] = from_half$(code_half$(first + 2u * i)); }
    return g;
}
