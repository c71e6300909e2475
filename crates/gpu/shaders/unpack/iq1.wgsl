
// 32 lanes, in eighths: four points of eight lanes each, shifted down by one where a number is not zero and up by one
// elsewhere. The grid's bytes are larger by eight.
fn shifted_eights$(points: vec4<u32>, down: vec4<u32>) -> array<vec4<f32>, 8> {
    let at = vec4<u32>(GRID$) + 2u * points;
    let less = select(vec4<f32>(7.0), vec4<f32>(9.0), down != vec4<u32>(0u));
    return array<vec4<f32>, 8>(
        bytes_of(grids[at.x], less.x), bytes_of(grids[at.x + 1u], less.x),
        bytes_of(grids[at.y], less.y), bytes_of(grids[at.y + 1u], less.y),
        bytes_of(grids[at.z], less.z), bytes_of(grids[at.z + 1u], less.z),
        bytes_of(grids[at.w], less.w), bytes_of(grids[at.w + 1u], less.w),
    );
}
