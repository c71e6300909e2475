
// Blocks of 66 bytes: the factor of scales; for each 32 lanes a word of points and one of signs and a scale.
fn unpack$(m: Matrix, at: Planes, row: u32, index: u32) -> Group {
    let block = at.codes + row * m.code_step + 66u * (index / 8u);
    let codes = block + 2u + 8u * (index % 8u);
    let points = (vec4<u32>(code_word$(codes)) >> vec4<u32>(0u, 8u, 16u, 24u)) & vec4<u32>(255u);
    let rest = code_word$(codes + 4u);
    let signs = vec4<u32>(
        even_signs$(rest), even_signs$(rest >> 7u), even_signs$(rest >> 14u), even_signs$(rest >> 21u),
    );
    return scaled(signed_eights$(points, signs), odd_scale$(0.125 * half_of(code_half$(block)), rest >> 28u));
}
