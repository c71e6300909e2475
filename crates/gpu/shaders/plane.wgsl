
// Slot $'s plane of PLANE: bytes, and floats at any byte.
fn PLANE_byte$(byte: u32) -> u32 { return (PLANE$(byte / 4u) >> (8u * (byte % 4u))) & 255u; }
fn PLANE_half$(byte: u32) -> u32 { return PLANE_byte$(byte) | (PLANE_byte$(byte + 1u) << 8u); }

// Float `i` of a row that starts at a byte.
fn PLANE_float$(m: Matrix, first: u32, i: u32) -> f32 {
    switch m.floats {
        case 0u: {
            let byte = first + 4u * i;
            return bitcast<f32>(PLANE_half$(byte) | (PLANE_half$(byte + 2u) << 16u));
        }
        case 1u: { return half_of(PLANE_half$(first + 2u * i)); }
        default: { return brain_of(PLANE_half$(first + 2u * i)); }
    }
}
