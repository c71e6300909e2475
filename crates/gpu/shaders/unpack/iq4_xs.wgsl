
// Blocks of 136 bytes: the factor of scales, two high bits and four low ones of each scale, and nibbles.
fn unpack$(m: Matrix, at: Planes, row: u32, index: u32) -> Group {
    let block = at.codes + row * m.code_step + 136u * (index / 8u);
    let part = index % 8u;
    let head = code_word$(block);
    let low = (code_word$(block + 4u) >> (4u * part)) & 15u;
    let high = (head >> (16u + 2u * part)) & 3u;
    let scale = half_of(head & 0xffffu) * (f32(low | (high << 4u)) - 32.0);
    return scaled(iq4_lanes$(code_four$(block + 8u + 16u * part)), scale);
}
