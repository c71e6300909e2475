//! Weights on the GPU.
//!
//! A matrix lies there as in its file, but blocks whose length would leave their codes unaligned are cut: codes in one
//! plane, scales in others. Matrices that are stored in another order are put in order first.

use std::sync::Arc;

use forebay_engine::backend::HostMatrix;
use forebay_engine::store::{ExpertPart, Lease};
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
}

impl Kind {
    /// The kind of an encoding.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if the kernels have none for it.
    pub fn of(encoding: Encoding) -> Result<Kind> {
        Ok(match encoding {
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
            Encoding::Mxfp4 => Kind::MXFP4_PAIRS,
            Encoding::Affine(Affine { bits: 4, .. }) => Kind::AFFINE4,
            Encoding::Affine(Affine { bits: 8, .. }) => Kind::AFFINE8,
            other => {
                return Err(Error::Unsupported(format!(
                    "weights of type {other} cannot be computed on the GPU; run with --device cpu"
                )));
            }
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
            Kind::Q4_0 => Some([2..18, 0..2, 0..0]),
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

/// A matrix on the GPU, or that of each of a layer's experts.
pub struct DeviceMatrix {
    /// Where the planes are; of experts, how far into an expert's slot.
    planes: [Address; 3],
    /// Where it is told where each expert's slot is; none for other matrices.
    pub slots: Address,
    strides: [usize; 3],
    /// Output features.
    pub rows: usize,
    /// Input features.
    pub cols: usize,
    /// How it is stored.
    pub kind: Kind,
    group: usize,
    floats: Kind,
    _memory: Vec<Memory>,
}

/// Bytes that are brought into order at a time.
const PORTION: usize = 64 << 20;

/// Kernels read whole groups: those of the last row may end so far beyond it.
const OVERHANG: usize = 128;

/// Where planes start in a slot.
const PLANE_ALIGNMENT: usize = 256;

impl DeviceMatrix {
    /// A matrix like this one, which is nowhere yet.
    fn like(w: MatRef<'_>) -> Result<DeviceMatrix> {
        let kind = Kind::of(w.encoding)?;
        let (group, floats) = match w.encoding {
            Encoding::Affine(Affine { group, scales, .. }) => (group, Kind::of(scales.into())?),
            _ => (32, Kind::F32),
        };
        let strides = arrange(kind, w.rows(0..1)).planes.map(|plane| plane.len());
        let (rows, cols) = (w.rows, w.cols);
        Ok(DeviceMatrix {
            planes: [0; 3],
            slots: 0,
            strides,
            rows,
            cols,
            kind,
            group,
            floats,
            _memory: Vec::new(),
        })
    }

    /// Bytes of each plane.
    fn plane_bytes(&self) -> [usize; 3] {
        self.strides.map(|stride| if stride == 0 { 0 } else { stride * self.rows + OVERHANG })
    }

    /// Writes the matrix whose planes are there.
    fn fill(&self, gpu: &Gpu, w: MatRef<'_>, slot: Address) -> Result<()> {
        assert!(w.rows == self.rows && w.cols == self.cols, "experts of a layer are alike");
        let portion = (PORTION / self.strides.iter().sum::<usize>().max(1)).max(1);
        for first in (0..w.rows).step_by(portion) {
            let rows = first..w.rows.min(first + portion);
            let arranged = arrange(self.kind, w.rows(rows));
            for (i, bytes) in arranged.planes.iter().enumerate().filter(|(_, bytes)| !bytes.is_empty()) {
                gpu.write(slot + self.planes[i] + (first * self.strides[i]) as u64, bytes)?;
            }
        }
        Ok(())
    }

    /// Takes a matrix of the dense part.
    ///
    /// # Errors
    /// If its type is not supported or there is no memory for it.
    pub fn dense(gpu: &Arc<Gpu>, matrix: &HostMatrix) -> Result<DeviceMatrix> {
        let mut there = DeviceMatrix::like(matrix.view())?;
        for (plane, bytes) in there.plane_bytes().into_iter().enumerate() {
            let memory = gpu.allocate(bytes, "dense weights")?;
            there.planes[plane] = memory.address();
            there._memory.push(memory);
        }
        there.fill(gpu, matrix.view(), 0)?;
        Ok(there)
    }

    /// The `Mat` of the kernels.
    pub fn put(&self, args: Args) -> Args {
        let args = self.planes.iter().fold(args, |args, &plane| args.at(plane)).at(self.slots);
        let args = self.strides.iter().fold(args, |args, &stride| args.int(stride));
        args.int(self.rows).int(self.cols).int(self.kind as usize).int(self.group).int(self.floats as usize)
    }

    /// The place of no matrix.
    pub fn put_none(args: Args) -> Args {
        let args = (0..4).fold(args, |args, _| args.at(0));
        (0..8).fold(args, |args, _| args.int(0))
    }
}

/// The experts of a layer, each in a slot.
pub struct LayerExperts {
    /// Gate, up and down.
    pub parts: [DeviceMatrix; 3],
    slots: Memory,
    slot_bytes: usize,
    _table: Memory,
}

impl LayerExperts {
    /// Room for `count` experts like this one.
    ///
    /// # Errors
    /// If its type is not supported or there is no memory for them.
    pub fn like(gpu: &Arc<Gpu>, expert: &Lease, count: usize) -> Result<LayerExperts> {
        let [gate, up, down] = PARTS.map(|part| DeviceMatrix::like(expert.part(part)));
        let mut parts = [gate?, up?, down?];
        let mut slot_bytes = 0;
        for part in &mut parts {
            let lengths = part.plane_bytes();
            for (plane, len) in part.planes.iter_mut().zip(lengths) {
                *plane = slot_bytes as Address;
                slot_bytes += len.next_multiple_of(PLANE_ALIGNMENT);
            }
        }
        let slots = gpu.allocate(count * slot_bytes, "experts")?;
        let places: Vec<u64> = (0..count).map(|i| slots.address() + (i * slot_bytes) as u64).collect();
        let table = gpu.allocate(count * 8, "experts")?;
        gpu.write(table.address(), bytemuck::cast_slice(&places))?;
        for part in &mut parts {
            part.slots = table.address();
        }
        Ok(LayerExperts { parts, slots, slot_bytes, _table: table })
    }

    /// Takes an expert.
    ///
    /// # Errors
    /// If the GPU refuses.
    pub fn fill(&self, gpu: &Gpu, expert: &Lease) -> Result<()> {
        let at = expert.expert().0 as usize * self.slot_bytes;
        assert!(at + self.slot_bytes <= self.slots.bytes());
        let pairs = self.parts.iter().zip(PARTS);
        pairs
            .into_iter()
            .try_for_each(|(w, part)| w.fill(gpu, expert.part(part), self.slots.address() + at as u64))
    }
}

const PARTS: [ExpertPart; 3] = [ExpertPart::Gate, ExpertPart::Up, ExpertPart::Down];

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

    #[test]
    fn what_cannot_be_computed_is_refused_by_name() {
        let refusal = Kind::of(DType::IQ2_XS.into()).unwrap_err().to_string();
        assert!(refusal.contains("IQ2_XS") && refusal.contains("--device cpu"), "{refusal}");
    }
}
