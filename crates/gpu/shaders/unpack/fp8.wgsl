
// Eight-bit floats: a sign, four bits of exponent, three of mantissa. Scales are in a plane of their own, each for a
// tile that may begin and end at any column.
// Two codes, in the low bytes of a word's halves, times 2^-8: that makes them halves. 127 is not a number.
fn fp8_two$(codes: u32) -> vec2<f32> {
    let magnitude = codes & 0x007f007fu;
    let none = ((magnitude + 0x00010001u) & 0x00800080u) << 7u;
    return unpack2x16float((magnitude << 7u) | none | ((codes & 0x00800080u) << 8u));
}
fn fp8_four$(codes: u32) -> vec4<f32> {
    let a = fp8_two$(codes);
    let b = fp8_two$(codes >> 8u);
    return vec4<f32>(a.x, b.x, a.y, b.y);
}
// The scale of a column, times 2^8. Columns beyond the last have the last one's.
fn fp8_scale$(m: Matrix, at: Planes, row: u32, column: u32) -> f32 {
    return 256.0 * scales_float$(m, at.scales + row / m.share * m.scale_step, min(column, m.cols - 1u) / m.group);
}
fn unpack$(m: Matrix, at: Planes, row: u32, index: u32) -> Group {
    let first = at.codes + row * m.code_step + 32u * index;
    let left = m.cols - min(m.cols, 32u * index);
    var g = scaled(array<vec4<f32>, 8>(), 1.0);
    if left >= 32u {
        let a = code_four$(first);
        let b = code_four$(first + 16u);
        g.lanes = array<vec4<f32>, 8>(
            fp8_four$(a.x), fp8_four$(a.y), fp8_four$(a.z), fp8_four$(a.w),
            fp8_four$(b.x), fp8_four$(b.y), fp8_four$(b.z), fp8_four$(b.w),
        );
    } else {
        for (var i = 0u; i < left; i++) { g.lanes[i / 4u][i % 4u] = fp8_two$(code_byte$(first + i)).x; }
    }
    if m.group % 16u == 0u {
        g.scale = vec2<f32>(
            fp8_scale$(m, at, row, 32u * index),
            fp8_scale$(m, at, row, 32u * index + 16u),
        );
        return g;
    }
    for (var i = 0u; i < 32u; i++) { g.lanes[i / 4u][i % 4u] *= fp8_scale$(m, at, row, 32u * index + i); }
    return g;
}
