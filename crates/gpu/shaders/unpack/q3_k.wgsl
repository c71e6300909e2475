
// Blocks of 110 bytes: 32 bytes of third bits, 64 of the other two, 12 of six-bit scales, and their factor.
// The scale `i` of 16: four of its bits are in the first two words, two in the last.
fn scale_of$(words: vec3<u32>, i: u32) -> f32 {
    let low = (select(words.x, words.y, (i & 4u) != 0u) >> (8u * (i & 3u) + select(4u, 0u, i < 8u))) & 15u;
    let high = (words.z >> (8u * (i & 3u) + 2u * (i / 4u))) & 3u;
    return f32(low | (high << 4u)) - 32.0;
}
fn unpack$(m: Matrix, at: Planes, row: u32, index: u32) -> Group {
    let block = at.codes + row * m.code_step + 110u * (index / 8u);
    let part = index % 8u;
    let codes = block + 32u + 32u * (part / 4u);
    let shift = vec4<u32>(2u * (part % 4u));
    let third = vec4<u32>(part);
    let low_a = (code_four$(codes) >> shift) & vec4<u32>(PAIRS);
    let low_b = (code_four$(codes + 16u) >> shift) & vec4<u32>(PAIRS);
    let high_a = (code_four$(block) >> third) & vec4<u32>(ONES);
    let high_b = (code_four$(block + 16u) >> third) & vec4<u32>(ONES);
    let lanes = lanes_of(low_a | (high_a << vec4<u32>(2u)), low_b | (high_b << vec4<u32>(2u)), 4.0);
    let words = vec3<u32>(code_word$(block + 96u), code_word$(block + 100u), code_word$(block + 104u));
    let scale = vec2<f32>(scale_of$(words, 2u * part), scale_of$(words, 2u * part + 1u));
    return Group(lanes, half_of(code_half$(block + 108u)) * scale, vec2<f32>(0.0));
}
