
// Four-bit codes of values that are not evenly spaced.
// The values of four codes. They are in words, four each, larger by 127.
fn iq4_values$(codes: u32) -> vec4<f32> {
    let code = vec4<u32>(codes & 15u, (codes >> 8u) & 15u, (codes >> 16u) & 15u, (codes >> 24u) & 15u);
    let second = (code & vec4<u32>(4u)) != vec4<u32>(0u);
    let low = select(vec4<u32>(0x3e2c1700u), vec4<u32>(0x75695c4eu), second);
    let high = select(vec4<u32>(0xa5988c80u), vec4<u32>(0xf0d8c4b4u), second);
    let word = select(low, high, code > vec4<u32>(7u));
    let value = (word >> (vec4<u32>(8u) * (code & vec4<u32>(3u)))) & vec4<u32>(255u);
    return bitcast<vec4<f32>>(value | vec4<u32>(0x4b000000u)) - (8388608.0 + 127.0);
}
// 16 bytes of nibbles: all low ones first.
fn iq4_lanes$(codes: vec4<u32>) -> array<vec4<f32>, 8> {
    let high = codes >> vec4<u32>(4u);
    return array<vec4<f32>, 8>(
        iq4_values$(codes.x), iq4_values$(codes.y), iq4_values$(codes.z), iq4_values$(codes.w),
        iq4_values$(high.x), iq4_values$(high.y), iq4_values$(high.z), iq4_values$(high.w),
    );
}
