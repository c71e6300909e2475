
// The scale and the minimum of part `i` of a block of Q4_K or Q5_K, six bits each, from the block's first 16 bytes.
fn scale_and_min$(head: vec4<u32>, i: u32) -> vec2<f32> {
    let j = 8u * (i & 3u);
    let a = (head.y >> j) & 255u;
    let b = (head.z >> j) & 255u;
    let c = (head.w >> j) & 255u;
    let first = vec2<u32>(a & 63u, b & 63u);
    let second = vec2<u32>((c & 15u) | ((a >> 6u) << 4u), (c >> 4u) | ((b >> 6u) << 4u));
    let both = unpack2x16float(head.x) * vec2<f32>(select(second, first, i < 4u));
    return vec2<f32>(both.x, -both.y);
}
