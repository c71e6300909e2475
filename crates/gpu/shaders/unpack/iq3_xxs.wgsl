
// Blocks of 98 bytes: the factor of scales, a byte for each point of four lanes, and words of signs and a scale.
fn unpack$(m: Matrix, at: Planes, row: u32, index: u32) -> Group {
    let block = at.codes + row * m.code_step + 98u * (index / 8u);
    let part = index % 8u;
    let bytes = vec4<u32>(0u, 8u, 16u, 24u);
    let a = GRID$ + ((vec4<u32>(code_word$(block + 2u + 8u * part)) >> bytes) & vec4<u32>(255u));
    let b = GRID$ + ((vec4<u32>(code_word$(block + 6u + 8u * part)) >> bytes) & vec4<u32>(255u));
    let rest = code_word$(block + 66u + 4u * part);
    let signs = vec4<u32>(
        even_signs$(rest), even_signs$(rest >> 7u), even_signs$(rest >> 14u), even_signs$(rest >> 21u),
    );
    let lanes = array<vec4<f32>, 8>(
        signed_four$(grids[a.x], signs.x), signed_four$(grids[a.y], signs.x >> 4u),
        signed_four$(grids[a.z], signs.y), signed_four$(grids[a.w], signs.y >> 4u),
        signed_four$(grids[b.x], signs.z), signed_four$(grids[b.y], signs.z >> 4u),
        signed_four$(grids[b.z], signs.w), signed_four$(grids[b.w], signs.w >> 4u),
    );
    return scaled(lanes, odd_scale$(0.25 * half_of(code_half$(block)), rest >> 28u));
}
