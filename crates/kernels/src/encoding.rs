//! How a weight matrix is stored: as one plane of blocks, or as planes of codes, scales and biases.

use std::fmt;

use crate::DType;
use crate::quant::activation_block;

/// How the weights of a matrix are stored.
///
/// A plane is a contiguous run of bytes; different planes may be far apart. Every matrix has a plane of codes. Scales
/// and biases that are not inside the codes' blocks are separate planes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Encoding {
    /// One plane: elements or blocks of a type, row after row.
    Blocks(DType),
    /// One plane: elements of a float type, column after column. The file stores the transposed matrix.
    Columns(DType),
    /// Three planes: small integers, and one scale and bias per group of weights in a row. MLX calls this affine.
    Affine(Affine),
    /// Two planes: FP8 (E4M3) numbers, and a scale for every tile of them.
    Tiles(Tiles),
    /// Two planes: FP4 (E2M1) numbers, and a power of two for every 32 of a row.
    ///
    /// Byte `i` of 16 holds elements `2i` (low nibble) and `2i + 1`. A scale is an exponent plus 127.
    Mxfp4,
}

/// `weight = code · scale + bias`, codes packed one after the other, lowest bits first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Affine {
    /// Bits of a code: 2, 3, 4, 5, 6 or 8.
    pub bits: usize,
    /// Weights of a row that share a scale and a bias: 32, 64 or 128.
    pub group: usize,
    /// The float type of scales and biases.
    pub scales: DType,
}

/// `weight = code · scale`, one scale for `rows × cols` weights; fewer at the matrix's edges.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Tiles {
    /// Rows of a tile.
    pub rows: usize,
    /// Columns of a tile.
    pub cols: usize,
    /// The type of the scales.
    pub scales: DType,
}

/// Lanes of MXFP4 that share a scale.
pub(crate) const MXFP4_GROUP: usize = 32;

impl Encoding {
    /// Whether the kernels support it.
    pub fn is_computable(self) -> bool {
        match self {
            Encoding::Blocks(dtype) => dtype.is_computable(),
            Encoding::Columns(dtype) => dtype.is_float(),
            Encoding::Affine(Affine { bits, group, scales }) => {
                matches!(bits, 2..=6 | 8) && matches!(group, 32 | 64 | 128) && scales.is_float()
            }
            Encoding::Tiles(Tiles { rows, cols, scales }) => {
                rows > 0 && cols > 0 && (scales.is_float() || scales == DType::F8_E8M0)
            }
            Encoding::Mxfp4 => true,
        }
    }

    /// Lanes that share one activation scale in products with this encoding; `None` if activations stay f32 at every
    /// precision.
    pub fn activation_block(self) -> Option<usize> {
        match self {
            Encoding::Blocks(dtype) if dtype.is_float() => None,
            Encoding::Blocks(dtype) => Some(activation_block(dtype)),
            Encoding::Columns(_) | Encoding::Tiles(_) => None,
            Encoding::Affine(affine) => Some(affine.group),
            Encoding::Mxfp4 => Some(MXFP4_GROUP),
        }
    }

    /// Bytes of a matrix in each of its planes: codes, scales, biases; zero if there is no such plane. `None` if the
    /// shape does not fit the encoding.
    pub fn plane_bytes(self, rows: usize, cols: usize) -> Option<[usize; 3]> {
        let whole = |rows: usize, row: Option<usize>| rows.checked_mul(row?);
        match self {
            Encoding::Blocks(dtype) => Some([whole(rows, dtype.row_bytes(cols))?, 0, 0]),
            Encoding::Columns(dtype) => Some([whole(cols, dtype.row_bytes(rows))?, 0, 0]),
            Encoding::Affine(Affine { bits, group, scales }) => {
                if !cols.is_multiple_of(group) {
                    return None;
                }
                let floats = whole(rows, scales.row_bytes(cols / group))?;
                Some([whole(rows, (cols / 8).checked_mul(bits))?, floats, floats])
            }
            Encoding::Tiles(tiles) => {
                let scales =
                    whole(rows.div_ceil(tiles.rows), tiles.scales.row_bytes(cols.div_ceil(tiles.cols)))?;
                Some([whole(rows, Some(cols))?, scales, 0])
            }
            Encoding::Mxfp4 => {
                let groups = whole(rows, cols.is_multiple_of(MXFP4_GROUP).then_some(cols / MXFP4_GROUP))?;
                Some([groups.checked_mul(MXFP4_GROUP / 2)?, groups, 0])
            }
        }
    }
}

impl From<DType> for Encoding {
    fn from(dtype: DType) -> Encoding {
        Encoding::Blocks(dtype)
    }
}

impl fmt::Display for Encoding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Encoding::Blocks(dtype) => write!(f, "{dtype}"),
            Encoding::Columns(dtype) => write!(f, "{dtype}, transposed"),
            Encoding::Affine(Affine { bits, group, scales }) => {
                write!(f, "affine {bits}-bit in groups of {group} with {scales} scales")
            }
            Encoding::Tiles(Tiles { rows, cols, scales }) => {
                write!(f, "F8_E4M3 in tiles of {rows}×{cols} with {scales} scales")
            }
            Encoding::Mxfp4 => f.write_str("MXFP4 in two planes"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn planes_are_as_long_as_the_shape_says() {
        let affine = |bits, group| Encoding::Affine(Affine { bits, group, scales: DType::BF16 });
        assert_eq!(affine(4, 64).plane_bytes(3, 128), Some([192, 12, 12]));
        assert_eq!(affine(3, 32).plane_bytes(1, 32), Some([12, 2, 2]));
        assert_eq!(affine(4, 64).plane_bytes(3, 96), None);
        let tiles = Encoding::Tiles(Tiles { rows: 128, cols: 128, scales: DType::F32 });
        assert_eq!(tiles.plane_bytes(129, 130), Some([129 * 130, 2 * 2 * 4, 0]));
        assert_eq!(Encoding::Mxfp4.plane_bytes(2, 64), Some([64, 4, 0]));
        assert_eq!(Encoding::Mxfp4.plane_bytes(2, 48), None);
        assert_eq!(Encoding::Columns(DType::BF16).plane_bytes(3, 5), Some([30, 0, 0]));
        assert_eq!(affine(8, 32).plane_bytes(usize::MAX, 32), None);
    }
}
