
// Blocks of 50 bytes: the factor of scales, low bytes of points; for each 32 lanes three more bits of each point, a
// scale and the shift.
fn unpack$(m: Matrix, at: Planes, row: u32, index: u32) -> Group {
    let block = at.codes + row * m.code_step + 50u * (index / 8u);
    let part = index % 8u;
    let low = (vec4<u32>(code_word$(block + 2u + 4u * part)) >> vec4<u32>(0u, 8u, 16u, 24u)) & vec4<u32>(255u);
    let rest = code_half$(block + 34u + 2u * part);
    let high = (vec4<u32>(rest) >> vec4<u32>(0u, 3u, 6u, 9u)) & vec4<u32>(7u);
    let lanes = shifted_eights$(low | (high << vec4<u32>(8u)), vec4<u32>(rest >> 15u));
    return scaled(lanes, odd_scale$(0.125 * half_of(code_half$(block)), (rest >> 12u) & 7u));
}
