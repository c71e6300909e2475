
// Words, halves and bytes at any byte of slot $.
fn code_word$(byte: u32) -> u32 {
    let word = byte / 4u;
    if ALIGNED$ { return codes$(word); }
    let shift = 8u * (byte % 4u);
    if shift == 0u { return codes$(word); }
    return (codes$(word) >> shift) | (codes$(word + 1u) << (32u - shift));
}
fn code_byte$(byte: u32) -> u32 { return (codes$(byte / 4u) >> (8u * (byte % 4u))) & 255u; }
fn code_half$(byte: u32) -> u32 {
    let shift = 8u * (byte % 4u);
    if shift == 24u { return code_byte$(byte) | (code_byte$(byte + 1u) << 8u); }
    return (codes$(byte / 4u) >> shift) & 0xffffu;
}
