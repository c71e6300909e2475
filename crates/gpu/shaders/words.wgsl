
// Words, halves and bytes at any byte of slot $. No word is read that has none of these bytes.
fn code_word$(byte: u32) -> u32 {
    let word = byte / 4u;
    let low = codes$(word);
    if ALIGNED$ { return low; }
    let shift = 8u * (byte % 4u);
    // A shift by 32 is not allowed.
    return (low >> shift) | ((codes$(word + u32(shift != 0u)) << 1u) << (31u - shift));
}
fn code_half$(byte: u32) -> u32 {
    let shift = 8u * (byte % 4u);
    let low = codes$(byte / 4u);
    if ALIGNED$ || shift != 24u { return (low >> shift) & 0xffffu; }
    return (low >> 24u) | ((codes$(byte / 4u + 1u) & 255u) << 8u);
}
fn code_byte$(byte: u32) -> u32 { return (codes$(byte / 4u) >> (8u * (byte % 4u))) & 255u; }

// Sixteen bytes.
fn code_four$(byte: u32) -> vec4<u32> {
    let word = byte / 4u;
    let low = vec4<u32>(codes$(word), codes$(word + 1u), codes$(word + 2u), codes$(word + 3u));
    if ALIGNED$ { return low; }
    let shift = 8u * (byte % 4u);
    let high = vec4<u32>(low.yzw, codes$(word + 3u + u32(shift != 0u)));
    return (low >> vec4<u32>(shift)) | ((high << vec4<u32>(1u)) << vec4<u32>(31u - shift));
}
