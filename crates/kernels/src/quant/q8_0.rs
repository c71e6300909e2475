//! Q8_0: 32 signed bytes and one f16 scale.

use super::{Quant, Unpacked, f16_at};
use crate::DType;

/// `d: f16 · lanes: [i8; 32]`
pub struct Q8_0;

impl Quant for Q8_0 {
    const DTYPE: DType = DType::Q8_0;
    const BLOCK: usize = 32;
    const HAS_MINS: bool = false;

    fn unpack(block: &[u8], out: &mut Unpacked) {
        out.d = f16_at(block, 0);
        out.scales[..2].fill(1);
        for (lane, byte) in out.lanes[..32].iter_mut().zip(&block[2..34]) {
            *lane = *byte as i8;
        }
    }
}
