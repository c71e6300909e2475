
// Blocks of 56 bytes: low bytes of points; for each point three more bits and the shift; four times four scales of
// three bits and four bits of their factor.
fn unpack$(m: Matrix, at: Planes, row: u32, index: u32) -> Group {
    let block = at.codes + row * m.code_step + 56u * (index / 8u);
    let part = index % 8u;
    let low = (vec4<u32>(code_word$(block + 4u * part)) >> vec4<u32>(0u, 8u, 16u, 24u)) & vec4<u32>(255u);
    let rest = vec4<u32>(code_half$(block + 32u + 2u * part)) >> vec4<u32>(0u, 4u, 8u, 12u);
    let lanes = shifted_eights$(low | ((rest & vec4<u32>(7u)) << vec4<u32>(8u)), rest & vec4<u32>(8u));
    let x = code_word$(block + 48u);
    let y = code_word$(block + 52u);
    let factor = ((x >> 12u) & 15u) | ((x >> 28u) << 4u) | (((y >> 12u) & 15u) << 8u) | ((y >> 28u) << 12u);
    let scales = select(y, x, part < 4u) >> (16u * ((part / 2u) & 1u) + 6u * (part & 1u));
    let d = 0.125 * half_of(factor);
    let scale = vec2<f32>(odd_scale$(d, scales & 7u), odd_scale$(d, (scales >> 3u) & 7u));
    return Group(lanes, scale, vec2<f32>(0.0));
}
