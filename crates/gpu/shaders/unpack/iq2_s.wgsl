
// Blocks of 82 bytes: the factor of scales, low bytes of points, signs, two high bits of points, nibbles of scales.
fn unpack$(m: Matrix, at: Planes, row: u32, index: u32) -> Group {
    let block = at.codes + row * m.code_step + 82u * (index / 8u);
    let part = index % 8u;
    let bytes = vec4<u32>(0u, 8u, 16u, 24u);
    let low = (vec4<u32>(code_word$(block + 2u + 4u * part)) >> bytes) & vec4<u32>(255u);
    let high = (vec4<u32>(code_byte$(block + 66u + part)) >> vec4<u32>(0u, 2u, 4u, 6u)) & vec4<u32>(3u);
    let signs = vec4<u32>(code_word$(block + 34u + 4u * part)) >> bytes;
    let d = 0.125 * half_of(code_half$(block));
    let scales = code_byte$(block + 74u + part);
    let scale = vec2<f32>(odd_scale$(d, scales & 15u), odd_scale$(d, scales >> 4u));
    return Group(signed_eights$(low | (high << vec4<u32>(8u)), signs), scale, vec2<f32>(0.0));
}
