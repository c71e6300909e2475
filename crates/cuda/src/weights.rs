//! Weights on the GPU.
//!
//! A matrix lies there as in its file, but blocks whose length would leave their codes unaligned are cut: codes in one
//! plane, scales in others. Matrices that are stored in another order are put in order first.

use std::sync::Arc;

use forebay_engine::backend::HostMatrix;
use forebay_engine::{Error, Result};
use forebay_kernels::{Affine, DType, Encoding, MatRef};

use crate::driver::{Address, Gpu, Memory};
use crate::program::Args;

/// How the kernels call an encoding. The order is that of matrix.cuh.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(non_camel_case_types, missing_docs)]
pub enum Kind {
    F32,
    F16,
    BF16,
    Q8_0,
    Q4_0,
    Q4_K,
    Q5_K,
    Q6_K,
    IQ4_XS,
    MXFP4,
    /// Two codes in a byte are neighbours.
    MXFP4_PAIRS,
    AFFINE4,
    AFFINE8,
    Q4_1,
    Q5_0,
    Q5_1,
    Q3_K,
    IQ4_NL,
}

impl Kind {
    /// The kind of an encoding, if there are kernels for it.
    pub fn of(encoding: Encoding) -> Option<Kind> {
        Some(match encoding {
            Encoding::Blocks(DType::F32) | Encoding::Columns(DType::F32) => Kind::F32,
            Encoding::Blocks(DType::F16) | Encoding::Columns(DType::F16) => Kind::F16,
            Encoding::Blocks(DType::BF16) | Encoding::Columns(DType::BF16) => Kind::BF16,
            Encoding::Blocks(DType::Q8_0) => Kind::Q8_0,
            Encoding::Blocks(DType::Q4_0) => Kind::Q4_0,
            Encoding::Blocks(DType::Q4_K) => Kind::Q4_K,
            Encoding::Blocks(DType::Q5_K) => Kind::Q5_K,
            Encoding::Blocks(DType::Q6_K) => Kind::Q6_K,
            Encoding::Blocks(DType::IQ4_XS) => Kind::IQ4_XS,
            Encoding::Blocks(DType::MXFP4) => Kind::MXFP4,
            Encoding::Blocks(DType::Q4_1) => Kind::Q4_1,
            Encoding::Blocks(DType::Q5_0) => Kind::Q5_0,
            Encoding::Blocks(DType::Q5_1) => Kind::Q5_1,
            Encoding::Blocks(DType::Q3_K) => Kind::Q3_K,
            Encoding::Blocks(DType::IQ4_NL) => Kind::IQ4_NL,
            Encoding::Mxfp4 => Kind::MXFP4_PAIRS,
            Encoding::Affine(Affine { bits, scales, .. }) if scales.is_float() => match bits {
                4 => Kind::AFFINE4,
                8 => Kind::AFFINE8,
                _ => return None,
            },
            _ => return None,
        })
    }

    /// Whether weights are floats: products with them are as good as those of floats on every device.
    pub fn is_float(self) -> bool {
        matches!(self, Kind::F32 | Kind::F16 | Kind::BF16)
    }

    /// Which bytes of a block go to each plane, if it is cut.
    fn cuts(self) -> Option<[std::ops::Range<usize>; 3]> {
        match self {
            Kind::Q8_0 => Some([2..34, 0..2, 0..0]),
            Kind::Q4_0 | Kind::IQ4_NL => Some([2..18, 0..2, 0..0]),
            Kind::Q4_1 => Some([4..20, 0..4, 0..0]),
            Kind::Q5_0 => Some([6..22, 2..6, 0..2]),
            Kind::Q5_1 => Some([8..24, 0..8, 0..0]),
            Kind::Q3_K => Some([0..96, 96..108, 108..110]),
            Kind::Q6_K => Some([0..128, 128..208, 208..210]),
            Kind::IQ4_XS => Some([8..136, 0..8, 0..0]),
            Kind::MXFP4 => Some([1..17, 0..1, 0..0]),
            _ => None,
        }
    }
}

/// The planes of a matrix in the computer's memory, as they will lie on the GPU.
struct Arranged {
    planes: [Vec<u8>; 3],
}

/// Brings rows into the GPU's order.
fn arrange(kind: Kind, w: MatRef<'_>) -> Arranged {
    let mut planes: [Vec<u8>; 3] = Default::default();
    if let Encoding::Columns(dtype) = w.encoding {
        let mut row = vec![0.0f32; w.cols];
        for r in 0..w.rows {
            w.dequantise_row(r, &mut row);
            // They were of this type, so nothing is rounded.
            for &x in &row {
                match dtype {
                    DType::F32 => planes[0].extend(x.to_le_bytes()),
                    DType::F16 => planes[0].extend(half::f16::from_f32(x).to_le_bytes()),
                    _ => planes[0].extend(half::bf16::from_f32(x).to_le_bytes()),
                }
            }
        }
        return Arranged { planes };
    }
    for r in 0..w.rows {
        let Some(cuts) = kind.cuts() else {
            planes[0].extend_from_slice(w.row(r));
            if matches!(w.encoding, Encoding::Affine(_) | Encoding::Mxfp4) {
                planes[1].extend_from_slice(w.scales(r));
            }
            if matches!(w.encoding, Encoding::Affine(_)) {
                planes[2].extend_from_slice(w.biases(r));
            }
            continue;
        };
        let block = cuts.iter().map(|cut| cut.end).max().expect("there are three");
        for (plane, cut) in planes.iter_mut().zip(cuts) {
            for block in w.row(r).chunks_exact(block) {
                plane.extend_from_slice(&block[cut.clone()]);
            }
        }
    }
    Arranged { planes }
}

/// A matrix on the GPU, or one of each of a layer's experts.
pub struct DeviceMatrix {
    planes: [Memory; 3],
    strides: [usize; 3],
    /// Of one expert.
    pub rows: usize,
    /// Input features.
    pub cols: usize,
    /// How it is stored.
    pub kind: Kind,
    group: usize,
    floats: Kind,
}

/// Bytes that are brought into order at a time.
const PORTION: usize = 64 << 20;

impl DeviceMatrix {
    /// Room for `count` matrices like this one.
    fn like(gpu: &Arc<Gpu>, w: MatRef<'_>, count: usize, what: &'static str) -> Result<DeviceMatrix> {
        let refused = || Error::Unsupported(format!("weights of type {} on the GPU", w.encoding));
        let kind = Kind::of(w.encoding).ok_or_else(refused)?;
        let (group, floats) = match w.encoding {
            Encoding::Affine(Affine { group, scales, .. }) => {
                (group, Kind::of(scales.into()).ok_or_else(refused)?)
            }
            _ => (32, Kind::F32),
        };
        let one = arrange(kind, w.rows(0..1));
        let strides = one.planes.map(|plane| plane.len());
        // Kernels read whole groups: those of the last row may end beyond it.
        let bytes = strides.map(|stride| if stride == 0 { 0 } else { stride * w.rows * count + 128 });
        let memory = |bytes: usize| gpu.allocate(bytes, what);
        let planes = [memory(bytes[0])?, memory(bytes[1])?, memory(bytes[2])?];
        Ok(DeviceMatrix { planes, strides, rows: w.rows, cols: w.cols, kind, group, floats })
    }

    /// Writes the `index`-th of the matrices.
    fn fill(&self, gpu: &Gpu, w: MatRef<'_>, index: usize) -> Result<()> {
        assert!(w.rows == self.rows && w.cols == self.cols, "experts of a layer are alike");
        let portion = (PORTION / self.strides.iter().sum::<usize>().max(1)).max(1);
        for first in (0..w.rows).step_by(portion) {
            let rows = first..w.rows.min(first + portion);
            let arranged = arrange(self.kind, w.rows(rows));
            for (i, bytes) in arranged.planes.iter().enumerate().filter(|(_, bytes)| !bytes.is_empty()) {
                let at = (index * self.rows + first) * self.strides[i];
                assert!(at + bytes.len() <= self.planes[i].bytes());
                gpu.write(self.planes[i].address() + at as u64, bytes)?;
            }
        }
        Ok(())
    }

    /// Takes a matrix of the dense part.
    ///
    /// # Errors
    /// If its type is not supported or there is no memory for it.
    pub fn dense(gpu: &Arc<Gpu>, matrix: &HostMatrix) -> Result<DeviceMatrix> {
        let there = DeviceMatrix::like(gpu, matrix.view(), 1, "dense weights")?;
        there.fill(gpu, matrix.view(), 0)?;
        Ok(there)
    }

    /// Takes one of `count` experts' matrices; the first makes room for all.
    ///
    /// # Errors
    /// If its type is not supported or there is no memory for it.
    pub fn expert(
        gpu: &Arc<Gpu>,
        there: &mut Option<DeviceMatrix>,
        w: MatRef<'_>,
        index: usize,
        count: usize,
    ) -> Result<()> {
        if there.is_none() {
            *there = Some(DeviceMatrix::like(gpu, w, count, "experts")?);
        }
        there.as_ref().expect("it was just made").fill(gpu, w, index)
    }

    /// Where its first plane is: all there is of floats.
    pub fn first(&self) -> Address {
        self.planes[0].address()
    }

    /// Bytes of a row, in all planes.
    pub fn row_bytes(&self) -> usize {
        self.strides.iter().sum()
    }

    /// The `Mat` of the kernels.
    pub fn put(&self, args: Args) -> Args {
        let args = self.planes.iter().fold(args, |args, plane| args.at(plane.address()));
        let args = self.strides.iter().fold(args, |args, &stride| args.int(stride));
        args.int(self.rows).int(self.cols).int(self.kind as usize).int(self.group).int(self.floats as usize)
    }

    /// The place of no matrix.
    pub fn put_none(args: Args) -> Args {
        let args = (0..3).fold(args, |args, _| args.at(0));
        (0..8).fold(args, |args, _| args.int(0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_cut_without_losing_a_byte() {
        let kinds = [
            (Kind::Q8_0, DType::Q8_0),
            (Kind::Q4_0, DType::Q4_0),
            (Kind::Q6_K, DType::Q6_K),
            (Kind::IQ4_XS, DType::IQ4_XS),
            (Kind::MXFP4, DType::MXFP4),
            (Kind::Q4_1, DType::Q4_1),
            (Kind::Q5_0, DType::Q5_0),
            (Kind::Q5_1, DType::Q5_1),
            (Kind::Q3_K, DType::Q3_K),
            (Kind::IQ4_NL, DType::IQ4_NL),
        ];
        for (kind, dtype) in kinds {
            assert_eq!(Kind::of(dtype.into()).unwrap(), kind);
            let mut covered: Vec<usize> = kind.cuts().unwrap().into_iter().flatten().collect();
            covered.sort_unstable();
            assert_eq!(covered, (0..dtype.block_bytes()).collect::<Vec<_>>(), "{dtype}");
            // Codes are read sixteen bytes at a time.
            assert!(kind.cuts().unwrap()[0].len().is_multiple_of(16));
        }
    }
}
