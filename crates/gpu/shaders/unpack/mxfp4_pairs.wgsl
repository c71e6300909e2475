
// Neighbours share a byte. Exponents are in a plane of their own.
fn unpack$(m: Matrix, at: Planes, row: u32, index: u32) -> Group {
    let low = code_four$(at.codes + row * m.code_step + 16u * index);
    let high = low >> vec4<u32>(4u);
    let a = array<vec4<f32>, 4>(fp4_values$(low.x), fp4_values$(low.y), fp4_values$(low.z), fp4_values$(low.w));
    let b = array<vec4<f32>, 4>(fp4_values$(high.x), fp4_values$(high.y), fp4_values$(high.z), fp4_values$(high.w));
    let lanes = array<vec4<f32>, 8>(
        vec4<f32>(a[0].x, b[0].x, a[0].y, b[0].y), vec4<f32>(a[0].z, b[0].z, a[0].w, b[0].w),
        vec4<f32>(a[1].x, b[1].x, a[1].y, b[1].y), vec4<f32>(a[1].z, b[1].z, a[1].w, b[1].w),
        vec4<f32>(a[2].x, b[2].x, a[2].y, b[2].y), vec4<f32>(a[2].z, b[2].z, a[2].w, b[2].w),
        vec4<f32>(a[3].x, b[3].x, a[3].y, b[3].y), vec4<f32>(a[3].z, b[3].z, a[3].w, b[3].w),
    );
    return scaled(lanes, fp4_scale$(scales_byte$(at.scales + row * m.scale_step + index)));
}
