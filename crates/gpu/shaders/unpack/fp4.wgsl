
// Four-bit floats: a sign, two bits of exponent, one of mantissa.
// Two codes in the halves of a word, times 2^-14: that makes them halves. A zero has no sign.
fn fp4_two$(codes: u32) -> vec2<f32> {
    let magnitude = codes & 0x00070007u;
    let minus = (magnitude + 0x00070007u) & codes & 0x00080008u;
    return unpack2x16float((magnitude << 9u) | (minus << 12u));
}
// Those in the low nibbles of four bytes.
fn fp4_values$(codes: u32) -> vec4<f32> {
    let a = fp4_two$(codes);
    let b = fp4_two$(codes >> 8u);
    return vec4<f32>(a.x, b.x, a.y, b.y);
}
// 2^(exponent - 127 + 14). Scales that no lane can be multiplied with are the largest power.
fn fp4_scale$(exponent: u32) -> f32 { return bitcast<f32>(min(exponent + 14u, 254u) << 23u); }
