
// Blocks of 36 bytes: a scale for each 16 lanes, and 8 bytes of nibbles for each, all low ones first.
// A scale is a float with four bits of exponent and three of mantissa, without a sign; 0x7f counts as zero. This is
// 2^14 of it, for the lanes of `fp4_values$`: its half, times 2^15.
fn nvfp4_scale$(byte: u32) -> f32 {
    let exponent = (byte >> 3u) & 15u;
    let steps = select(byte & 7u, 8u | (byte & 7u), exponent > 0u);
    let step = bitcast<f32>((132u + max(exponent, 1u) - 1u) << 23u);
    return select(f32(steps) * step, 0.0, byte == 0x7fu);
}
fn unpack$(m: Matrix, at: Planes, row: u32, index: u32) -> Group {
    let block = at.codes + row * m.code_step + 36u * (index / 2u);
    let low = code_four$(block + 4u + 16u * (index % 2u));
    let high = low >> vec4<u32>(4u);
    let lanes = array<vec4<f32>, 8>(
        fp4_values$(low.x), fp4_values$(low.y), fp4_values$(high.x), fp4_values$(high.y),
        fp4_values$(low.z), fp4_values$(low.w), fp4_values$(high.z), fp4_values$(high.w),
    );
    let scales = code_half$(block + 2u * (index % 2u));
    return Group(lanes, vec2<f32>(nvfp4_scale$(scales & 255u), nvfp4_scale$(scales >> 8u)), vec2<f32>(0.0));
}
