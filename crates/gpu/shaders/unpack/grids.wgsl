
// Types whose lanes are points of a grid, chosen by index. The bytes of a word of `grids` are lanes.
// Four lanes, negative where a bit is set.
fn signed_four$(word: u32, signs: u32) -> vec4<f32> {
    let minus = (vec4<u32>(signs) << vec4<u32>(31u, 30u, 29u, 28u)) & vec4<u32>(0x80000000u);
    return bitcast<vec4<f32>>(bitcast<vec4<u32>>(bytes_of(word, 0.0)) ^ minus);
}
// Seven signs, and an eighth that makes the number of minus signs even.
fn even_signs$(bits: u32) -> u32 {
    let seven = bits & 127u;
    return seven | ((countOneBits(seven) & 1u) << 7u);
}
// A scale of `n` and a half units, where `d` is the scale of two units.
fn odd_scale$(d: f32, n: u32) -> f32 { return d * f32(2u * n + 1u); }
