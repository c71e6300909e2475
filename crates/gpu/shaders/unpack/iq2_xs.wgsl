
// Blocks of 74 bytes: the factor of scales; for each eight lanes nine bits of a point and seven signs; nibbles of scales.
fn unpack$(m: Matrix, at: Planes, row: u32, index: u32) -> Group {
    let block = at.codes + row * m.code_step + 74u * (index / 8u);
    let part = index % 8u;
    let two = vec2<u32>(code_word$(block + 2u + 8u * part), code_word$(block + 6u + 8u * part));
    let codes = vec4<u32>(two.x & 0xffffu, two.x >> 16u, two.y & 0xffffu, two.y >> 16u);
    let signs = vec4<u32>(
        even_signs$(codes.x >> 9u), even_signs$(codes.y >> 9u), even_signs$(codes.z >> 9u), even_signs$(codes.w >> 9u),
    );
    let d = 0.125 * half_of(code_half$(block));
    let scales = code_byte$(block + 66u + part);
    let scale = vec2<f32>(odd_scale$(d, scales & 15u), odd_scale$(d, scales >> 4u));
    return Group(signed_eights$(codes & vec4<u32>(511u), signs), scale, vec2<f32>(0.0));
}
