
// Blocks of 17 bytes: an exponent and nibbles, all low ones first.
fn unpack$(m: Matrix, at: Planes, row: u32, index: u32) -> Group {
    let block = at.codes + row * m.code_step + 17u * index;
    let low = code_four$(block + 1u);
    let high = low >> vec4<u32>(4u);
    let lanes = array<vec4<f32>, 8>(
        fp4_values$(low.x), fp4_values$(low.y), fp4_values$(low.z), fp4_values$(low.w),
        fp4_values$(high.x), fp4_values$(high.y), fp4_values$(high.z), fp4_values$(high.w),
    );
    return scaled(lanes, fp4_scale$(code_byte$(block)));
}
