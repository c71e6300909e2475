
// Blocks of 110 bytes: the factor of scales, low bytes of points of four lanes, their ninth bits, signs, nibbles of
// scales.
fn unpack$(m: Matrix, at: Planes, row: u32, index: u32) -> Group {
    let block = at.codes + row * m.code_step + 110u * (index / 8u);
    let part = index % 8u;
    let bytes = vec4<u32>(0u, 8u, 16u, 24u);
    let ninth = vec4<u32>(code_byte$(block + 66u + part));
    let low_a = (vec4<u32>(code_word$(block + 2u + 8u * part)) >> bytes) & vec4<u32>(255u);
    let low_b = (vec4<u32>(code_word$(block + 6u + 8u * part)) >> bytes) & vec4<u32>(255u);
    let a = GRID$ + (low_a | ((ninth << vec4<u32>(8u, 7u, 6u, 5u)) & vec4<u32>(256u)));
    let b = GRID$ + (low_b | ((ninth << vec4<u32>(4u, 3u, 2u, 1u)) & vec4<u32>(256u)));
    let signs = code_word$(block + 74u + 4u * part);
    let lanes = array<vec4<f32>, 8>(
        signed_four$(grids[a.x], signs), signed_four$(grids[a.y], signs >> 4u),
        signed_four$(grids[a.z], signs >> 8u), signed_four$(grids[a.w], signs >> 12u),
        signed_four$(grids[b.x], signs >> 16u), signed_four$(grids[b.y], signs >> 20u),
        signed_four$(grids[b.z], signs >> 24u), signed_four$(grids[b.w], signs >> 28u),
    );
    let scale = (code_byte$(block + 106u + part / 2u) >> (4u * (part & 1u))) & 15u;
    return scaled(lanes, odd_scale$(half_of(code_half$(block)), scale));
}
