
// Blocks of 210 bytes: 128 bytes of low nibbles, 64 of the other two bits, 16 signed scales, and their factor.
fn unpack$(m: Matrix, at: Planes, row: u32, index: u32) -> Group {
    let block = at.codes + row * m.code_step + 210u * (index / 8u);
    let part = index % 8u;
    let quarter = part % 4u;
    let low = block + 64u * (part / 4u) + 32u * (quarter & 1u);
    let high = block + 128u + 32u * (part / 4u);
    let nibble = vec4<u32>(4u * (quarter >> 1u));
    let pair = vec4<u32>(2u * quarter);
    let low_a = (code_four$(low) >> nibble) & vec4<u32>(NIBBLES);
    let low_b = (code_four$(low + 16u) >> nibble) & vec4<u32>(NIBBLES);
    let high_a = (code_four$(high) >> pair) & vec4<u32>(PAIRS);
    let high_b = (code_four$(high + 16u) >> pair) & vec4<u32>(PAIRS);
    let lanes = lanes_of(low_a | (high_a << vec4<u32>(4u)), low_b | (high_b << vec4<u32>(4u)), 32.0);
    let scales = bytes_of(code_half$(block + 192u + 2u * part) ^ 0x8080u, 128.0).xy;
    return Group(lanes, half_of(code_half$(block + 208u)) * scales, vec2<f32>(0.0));
}
