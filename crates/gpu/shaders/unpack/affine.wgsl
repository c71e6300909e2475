
// Codes of BITS$ bits one after the other, lowest bits first; scales and biases in planes of their own.
// The codes of four columns of 32, whose codes begin at a byte.
fn affine_four$(first: u32, four: u32) -> vec4<f32> {
    let bit = 4u * BITS$ * four;
    let shift = bit % 32u;
    let byte = first + 4u * (bit / 32u);
    var bits = code_word$(byte) >> shift;
    if shift + 4u * BITS$ > 32u { bits |= code_word$(byte + 4u) << (32u - shift); }
    let codes = (vec4<u32>(bits) >> vec4<u32>(0u, BITS$, 2u * BITS$, 3u * BITS$)) & vec4<u32>((1u << BITS$) - 1u);
    return bitcast<vec4<f32>>(codes | vec4<u32>(0x4b000000u)) - 8388608.0;
}
fn unpack$(m: Matrix, at: Planes, row: u32, index: u32) -> Group {
    let first = at.codes + row * m.code_step + 4u * BITS$ * index;
    let lanes = array<vec4<f32>, 8>(
        affine_four$(first, 0u), affine_four$(first, 1u), affine_four$(first, 2u), affine_four$(first, 3u),
        affine_four$(first, 4u), affine_four$(first, 5u), affine_four$(first, 6u), affine_four$(first, 7u),
    );
    let group = 32u * index / m.group;
    let scale = scales_float$(m, at.scales + row * m.scale_step, group);
    let bias = biases_float$(m, at.biases + row * m.bias_step, group);
    return Group(lanes, vec2<f32>(scale), vec2<f32>(bias));
}
