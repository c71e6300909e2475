//! The quantised types, one file per family: the layout of a block, and what its numbers mean.
//!
//! All types have the same structure. A block holds small integers ("lanes"), one integer scale (and possibly one
//! integer minimum) per sixteen lanes, and one or two floats for the whole block. One type has a float for every
//! sixteen lanes instead:
//!
//! ```text
//! weight[i] = (d · scale[i / 16]) · lane[i] − dmin · min[i / 16]
//! ```
//!
//! A type says how to unpack its bytes to this form. Dequantisation and dot products are written once over it.

pub(crate) mod fp4;
pub mod grids;
pub(crate) mod iq;
mod k;
mod plain;
pub mod planes;

pub use fp4::{Mxfp4, Nvfp4};
pub use iq::{Iq1M, Iq1S, Iq2S, Iq2Xs, Iq2Xxs, Iq3S, Iq3Xxs, Iq4Nl, Iq4Xs};
pub use k::{Q2K, Q3K, Q4K, Q5K, Q6K};
pub use plain::{Q4_0, Q4_1, Q5_0, Q5_1, Q8_0};

use half::f16;

use crate::DType;

/// Lanes that share one integer scale.
pub const SUB: usize = 16;
/// The most lanes a block has.
pub const MAX_BLOCK: usize = 256;
/// The most float scales in a block.
pub const MAX_FLOATS: usize = 4;

/// A block in the common form.
#[derive(Clone, Debug)]
pub struct Unpacked {
    /// The integers. Only the first [`Quant::BLOCK`] are meaningful.
    pub lanes: [i8; MAX_BLOCK],
    /// One scale for every [`SUB`] lanes.
    pub scales: [i16; MAX_BLOCK / SUB],
    /// One minimum for every [`SUB`] lanes; unchanged if the type has none.
    pub mins: [i16; MAX_BLOCK / SUB],
    /// The block's scale, or [`Quant::FLOATS`] scales, each for an equal part of the lanes.
    pub d: [f32; MAX_FLOATS],
    /// The scale of the minima; unchanged if the type has none.
    pub dmin: f32,
}

impl Default for Unpacked {
    fn default() -> Self {
        Unpacked {
            lanes: [0; MAX_BLOCK],
            scales: [0; MAX_BLOCK / SUB],
            mins: [0; MAX_BLOCK / SUB],
            d: [0.0; MAX_FLOATS],
            dmin: 0.0,
        }
    }
}

/// A quantised type.
pub trait Quant {
    /// The file's name for the type, which also determines the block's geometry.
    const DTYPE: DType;
    /// Lanes in a block: a multiple of [`SUB`] that divides [`MAX_BLOCK`].
    const BLOCK: usize;
    /// Float scales per block: a power of two, each for equally many lanes. Types with minima have one.
    const FLOATS: usize = 1;
    /// Whether the type has minima.
    const HAS_MINS: bool;

    /// Unpacks one block of `DTYPE.block_bytes()` bytes.
    fn unpack(block: &[u8], out: &mut Unpacked);

    /// The weights of one block. The order of operations is that of the `gguf` package, to the bit.
    #[inline(always)]
    fn dequantise(block: &[u8], unpacked: &mut Unpacked, out: &mut [f32]) {
        Self::unpack(block, unpacked);
        for (sub, out) in out[..Self::BLOCK].chunks_exact_mut(SUB).enumerate() {
            let scale = unpacked.d[sub * SUB * Self::FLOATS / Self::BLOCK] * f32::from(unpacked.scales[sub]);
            let min = if Self::HAS_MINS { unpacked.dmin * f32::from(unpacked.mins[sub]) } else { 0.0 };
            for (out, lane) in out.iter_mut().zip(&unpacked.lanes[sub * SUB..]) {
                *out = scale * f32::from(*lane) - min;
            }
        }
    }
}

/// Runs `$body` with `$q` bound to the quantised type that `$dtype` names.
///
/// A new type is added here for all kernels.
macro_rules! with_quant {
    ($dtype:expr, $q:ident => $body:expr) => {
        $crate::quant::with_quant! { $dtype, $q => $body,
            Q4_0 => Q4_0,
            Q4_1 => Q4_1,
            Q5_0 => Q5_0,
            Q5_1 => Q5_1,
            Q8_0 => Q8_0,
            Q2_K => Q2K,
            Q3_K => Q3K,
            Q4_K => Q4K,
            Q5_K => Q5K,
            Q6_K => Q6K,
            IQ1_S => Iq1S,
            IQ1_M => Iq1M,
            IQ2_XXS => Iq2Xxs,
            IQ2_XS => Iq2Xs,
            IQ2_S => Iq2S,
            IQ3_XXS => Iq3Xxs,
            IQ3_S => Iq3S,
            IQ4_NL => Iq4Nl,
            IQ4_XS => Iq4Xs,
            MXFP4 => Mxfp4,
            NVFP4 => Nvfp4,
        }
    };
    ($dtype:expr, $q:ident => $body:expr, $($name:ident => $quant:ident,)*) => {
        match $dtype {
            $($crate::DType::$name => {
                type $q = $crate::quant::$quant;
                $body
            })*
            other => panic!("{other} is not a quantised type that can be computed"),
        }
    };
}
pub(crate) use with_quant;

/// Lanes that share one activation scale when multiplied with weights of this quantised type.
pub fn activation_block(dtype: DType) -> usize {
    with_quant!(dtype, Q => (Q::BLOCK / Q::FLOATS).max(32))
}

/// Dequantises a row of any computable type.
#[inline(always)]
pub fn dequantise_row(dtype: DType, row: &[u8], out: &mut [f32]) {
    assert_eq!(dtype.row_bytes(out.len()), Some(row.len()), "{dtype} row of {} weights", out.len());
    match dtype {
        DType::F32 => {
            for (out, b) in out.iter_mut().zip(row.chunks_exact(4)) {
                *out = f32::from_le_bytes([b[0], b[1], b[2], b[3]]);
            }
        }
        DType::F16 => {
            for (out, b) in out.iter_mut().zip(row.chunks_exact(2)) {
                *out = f16_at(b, 0);
            }
        }
        DType::BF16 => {
            for (out, b) in out.iter_mut().zip(row.chunks_exact(2)) {
                *out = f32::from_bits(u32::from(u16::from_le_bytes([b[0], b[1]])) << 16);
            }
        }
        _ => with_quant!(dtype, Q => {
            let mut unpacked = Unpacked::default();
            let blocks = row.chunks_exact(Q::DTYPE.block_bytes());
            for (block, out) in blocks.zip(out.chunks_exact_mut(Q::BLOCK)) {
                Q::dequantise(block, &mut unpacked, out);
            }
        }),
    }
}

/// The little-endian f16 at byte `at`.
fn f16_at(bytes: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([bytes[at], bytes[at + 1]]).to_f32()
}
