
// 32 lanes: four points of a grid of eight lanes each, and their signs in the low bytes.
fn signed_eights$(points: vec4<u32>, signs: vec4<u32>) -> array<vec4<f32>, 8> {
    let at = vec4<u32>(GRID$) + 2u * points;
    return array<vec4<f32>, 8>(
        signed_four$(grids[at.x], signs.x), signed_four$(grids[at.x + 1u], signs.x >> 4u),
        signed_four$(grids[at.y], signs.y), signed_four$(grids[at.y + 1u], signs.y >> 4u),
        signed_four$(grids[at.z], signs.z), signed_four$(grids[at.z + 1u], signs.z >> 4u),
        signed_four$(grids[at.w], signs.w), signed_four$(grids[at.w + 1u], signs.w >> 4u),
    );
}
