//! Weights on the GPU.
//!
//! A matrix is stored as in its file. But blocks whose length would leave their codes unaligned are split: codes in one
//! plane, scales in others. Matrices with another order are rearranged first.

use std::ops::Range;
use std::sync::Arc;

use forebay_engine::internals::backend::{HostMatrix, Parts};
use forebay_engine::internals::experts::{ExpertLayer, PartShape, RowPick};
use forebay_engine::{Error, Result};
use forebay_kernels::{Affine, DType, Encoding, MatRef, Tiles};

use crate::driver::{Address, Gpu, Memory};
use crate::program::Args;

/// The kernels' name for an encoding, in the order of matrix.cuh.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(non_camel_case_types, missing_docs)]
pub enum WeightKind {
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
    /// The two codes of a byte are neighbours.
    MXFP4_PAIRS,
    AFFINE4,
    AFFINE8,
    Q4_1,
    Q5_0,
    Q5_1,
    Q3_K,
    IQ4_NL,
    Q2_K,
    NVFP4,
    IQ1_S,
    IQ1_M,
    IQ2_XXS,
    IQ2_XS,
    IQ2_S,
    IQ3_XXS,
    IQ3_S,
    AFFINE2,
    AFFINE3,
    AFFINE5,
    AFFINE6,
    FP8,
}

// Each kind has one bit.
const _: () = assert!((WeightKind::FP8 as u32) < u32::BITS);

impl WeightKind {
    /// The kind of an encoding, if there are kernels for it.
    pub fn of(encoding: Encoding) -> Option<WeightKind> {
        Some(match encoding {
            Encoding::Blocks(DType::F32) | Encoding::Columns(DType::F32) => WeightKind::F32,
            Encoding::Blocks(DType::F16) | Encoding::Columns(DType::F16) => WeightKind::F16,
            Encoding::Blocks(DType::BF16) | Encoding::Columns(DType::BF16) => WeightKind::BF16,
            Encoding::Blocks(DType::Q8_0) => WeightKind::Q8_0,
            Encoding::Blocks(DType::Q4_0) => WeightKind::Q4_0,
            Encoding::Blocks(DType::Q4_K) => WeightKind::Q4_K,
            Encoding::Blocks(DType::Q5_K) => WeightKind::Q5_K,
            Encoding::Blocks(DType::Q6_K) => WeightKind::Q6_K,
            Encoding::Blocks(DType::IQ4_XS) => WeightKind::IQ4_XS,
            Encoding::Blocks(DType::MXFP4) => WeightKind::MXFP4,
            Encoding::Blocks(DType::Q4_1) => WeightKind::Q4_1,
            Encoding::Blocks(DType::Q5_0) => WeightKind::Q5_0,
            Encoding::Blocks(DType::Q5_1) => WeightKind::Q5_1,
            Encoding::Blocks(DType::Q3_K) => WeightKind::Q3_K,
            Encoding::Blocks(DType::IQ4_NL) => WeightKind::IQ4_NL,
            Encoding::Blocks(DType::Q2_K) => WeightKind::Q2_K,
            Encoding::Blocks(DType::NVFP4) => WeightKind::NVFP4,
            Encoding::Blocks(DType::IQ1_S) => WeightKind::IQ1_S,
            Encoding::Blocks(DType::IQ1_M) => WeightKind::IQ1_M,
            Encoding::Blocks(DType::IQ2_XXS) => WeightKind::IQ2_XXS,
            Encoding::Blocks(DType::IQ2_XS) => WeightKind::IQ2_XS,
            Encoding::Blocks(DType::IQ2_S) => WeightKind::IQ2_S,
            Encoding::Blocks(DType::IQ3_XXS) => WeightKind::IQ3_XXS,
            Encoding::Blocks(DType::IQ3_S) => WeightKind::IQ3_S,
            Encoding::Mxfp4 => WeightKind::MXFP4_PAIRS,
            Encoding::Affine(Affine { bits, scales, .. }) if scales.is_float() => match bits {
                2 => WeightKind::AFFINE2,
                3 => WeightKind::AFFINE3,
                4 => WeightKind::AFFINE4,
                5 => WeightKind::AFFINE5,
                6 => WeightKind::AFFINE6,
                8 => WeightKind::AFFINE8,
                _ => return None,
            },
            Encoding::Tiles(Tiles { scales, .. }) if scales.is_float() => WeightKind::FP8,
            _ => return None,
        })
    }

    /// The kind of an encoding.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if there are no kernels for it.
    fn named(encoding: Encoding) -> Result<WeightKind> {
        WeightKind::of(encoding)
            .ok_or_else(|| Error::Unsupported(format!("weights of type {encoding} on the GPU")))
    }

    /// Whether weights are floats. Products with them are computed at f32 precision.
    pub fn is_float(self) -> bool {
        matches!(self, WeightKind::F32 | WeightKind::F16 | WeightKind::BF16)
    }

    /// Which bytes of a block go to each plane, if it is split.
    fn cuts(self) -> Option<[Range<usize>; 3]> {
        match self {
            WeightKind::Q8_0 => Some([2..34, 0..2, 0..0]),
            WeightKind::Q4_0 | WeightKind::IQ4_NL => Some([2..18, 0..2, 0..0]),
            WeightKind::Q4_1 => Some([4..20, 0..4, 0..0]),
            WeightKind::Q5_0 => Some([6..22, 2..6, 0..2]),
            WeightKind::Q5_1 => Some([8..24, 0..8, 0..0]),
            WeightKind::Q2_K => Some([16..80, 0..16, 80..84]),
            WeightKind::Q3_K => Some([0..96, 96..108, 108..110]),
            WeightKind::Q6_K => Some([0..128, 128..208, 208..210]),
            WeightKind::IQ4_XS => Some([8..136, 0..8, 0..0]),
            WeightKind::MXFP4 => Some([1..17, 0..1, 0..0]),
            WeightKind::NVFP4 => Some([4..36, 0..4, 0..0]),
            WeightKind::IQ1_S => Some([2..34, 34..50, 0..2]),
            WeightKind::IQ1_M => Some([0..32, 32..48, 48..56]),
            WeightKind::IQ2_XXS => Some([2..66, 0..2, 0..0]),
            WeightKind::IQ2_XS => Some([2..66, 66..74, 0..2]),
            WeightKind::IQ2_S => Some([2..66, 66..82, 0..2]),
            WeightKind::IQ3_XXS => Some([2..98, 0..2, 0..0]),
            WeightKind::IQ3_S => Some([2..66, 66..110, 0..2]),
            _ => None,
        }
    }
}

/// Rows of each plane of a matrix in which `share` rows have common scales.
fn plane_rows(rows: usize, share: usize) -> [usize; 3] {
    [rows, rows.div_ceil(share), rows]
}

/// Rows of a matrix that have common scales: those rows of a tile that belong to the matrix.
///
/// # Errors
/// [`Error::Unsupported`] if tiles contain different numbers of its rows.
fn sharing(encoding: Encoding, pick: RowPick) -> Result<usize> {
    match encoding {
        Encoding::Tiles(tiles) if tiles.rows.is_multiple_of(pick.step) => Ok(tiles.rows / pick.step),
        Encoding::Tiles(_) => Err(Error::Unsupported(format!(
            "every {} rows of {encoding} on the GPU; use Options::device = None",
            pick.step
        ))),
        _ => Ok(1),
    }
}

/// The planes of a matrix in RAM, arranged as on the GPU.
struct Arranged {
    planes: [Vec<u8>; 3],
}

/// Arranges rows for the GPU.
fn arrange(kind: WeightKind, w: MatRef<'_>) -> Arranged {
    let mut planes: [Vec<u8>; 3] = Default::default();
    if let Encoding::Columns(dtype) = w.encoding {
        let mut row = vec![0.0f32; w.cols];
        for r in 0..w.rows {
            w.dequantise_row(r, &mut row);
            // They were converted from this type, so nothing is rounded.
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
            // Rows of a tile share their scales.
            let known = r > 0 && w.scales(r).as_ptr() == w.scales(r - 1).as_ptr();
            match w.encoding {
                Encoding::Tiles(_) if known => {}
                Encoding::Affine(_) | Encoding::Mxfp4 | Encoding::Tiles(_) => {
                    planes[1].extend_from_slice(w.scales(r));
                }
                _ => {}
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

/// A matrix on the GPU, or one matrix of each of a layer's experts.
pub struct DeviceMatrix {
    /// The addresses of the planes; for experts, offsets in an expert's slot.
    planes: [Address; 3],
    /// The address of the table of experts' slots; null for other matrices.
    pub slots: Address,
    strides: [usize; 3],
    /// Output features.
    pub rows: usize,
    /// Input features.
    pub cols: usize,
    /// Its encoding.
    pub kind: WeightKind,
    group: usize,
    floats: WeightKind,
    /// Rows that share their scales.
    share: usize,
    _memory: Vec<Memory>,
}

/// Bytes that are arranged at a time.
const PORTION: usize = 64 << 20;

/// Kernels read whole groups, so the last row's group may end this far beyond it.
const OVERHANG: usize = 128;

/// The alignment of planes in a slot.
const PLANE_ALIGNMENT: usize = 256;

impl DeviceMatrix {
    /// A matrix without addresses.
    fn nowhere(
        encoding: Encoding,
        [rows, cols]: [usize; 2],
        pick: RowPick,
        strides: [usize; 3],
    ) -> Result<DeviceMatrix> {
        let kind = WeightKind::named(encoding)?;
        let (group, floats) = match encoding {
            Encoding::Affine(Affine { group, scales, .. }) => (group, WeightKind::named(scales.into())?),
            Encoding::Tiles(tiles) => (tiles.cols.min(cols.max(1)), WeightKind::named(tiles.scales.into())?),
            _ => (32, WeightKind::F32),
        };
        let share = sharing(encoding, pick)?.min(rows.max(1));
        let (planes, slots, _memory) = ([0; 3], 0, Vec::new());
        Ok(DeviceMatrix { planes, slots, strides, rows, cols, kind, group, floats, share, _memory })
    }

    /// Rows of each plane.
    fn plane_rows(&self) -> [usize; 3] {
        plane_rows(self.rows, self.share)
    }

    /// Bytes of each plane.
    fn plane_bytes(&self) -> [usize; 3] {
        let rows = self.plane_rows();
        let bytes = |stride: usize, rows: usize| if stride == 0 { 0 } else { stride * rows + OVERHANG };
        [0, 1, 2].map(|plane| bytes(self.strides[plane], rows[plane]))
    }

    /// Whether a kernel may treat this matrix's rows like the other's.
    pub fn is_like(&self, other: &DeviceMatrix) -> bool {
        let form = |m: &DeviceMatrix| (m.kind, m.cols, m.strides, m.group, m.floats, m.share);
        form(self) == form(other)
    }

    /// Writes the weights to the matrix's planes.
    fn fill(&self, gpu: &Gpu, w: MatRef<'_>) -> Result<()> {
        let apart = self.share > 1;
        if apart {
            let rows = (0..w.rows).step_by(self.share);
            let scales: Vec<u8> = rows.flat_map(|row| w.scales(row)).copied().collect();
            gpu.write(self.planes[1], &scales)?;
        }
        let portion = (PORTION / self.strides.iter().sum::<usize>().max(1)).max(1);
        for first in (0..w.rows).step_by(portion) {
            let rows = first..w.rows.min(first + portion);
            let arranged = arrange(self.kind, w.rows(rows));
            for (i, bytes) in arranged.planes.iter().enumerate() {
                if !bytes.is_empty() && (i != 1 || !apart) {
                    gpu.write(self.planes[i] + (first * self.strides[i]) as u64, bytes)?;
                }
            }
        }
        Ok(())
    }

    /// Uploads a matrix of the dense weights.
    ///
    /// # Errors
    /// If its type is not supported or there is not enough memory.
    pub fn dense(gpu: &Arc<Gpu>, matrix: &HostMatrix) -> Result<DeviceMatrix> {
        if matrix.scale != 1.0 {
            let message = "a matrix with its own scale cannot be computed on the GPU";
            return Err(Error::Unsupported(message.to_owned()));
        }
        let w = matrix.view();
        let strides = arrange(WeightKind::named(w.encoding)?, w.rows(0..1)).planes.map(|plane| plane.len());
        let mut there = DeviceMatrix::nowhere(w.encoding, [w.rows, w.cols], RowPick::ALL, strides)?;
        for (plane, bytes) in there.plane_bytes().into_iter().enumerate() {
            let memory = gpu.allocate(bytes, "dense weights")?;
            there.planes[plane] = memory.address();
            there._memory.push(memory);
        }
        there.fill(gpu, w)?;
        Ok(there)
    }

    /// The address of its first plane; floats have no other.
    pub fn first(&self) -> Address {
        self.planes[0]
    }

    /// Bytes of a row in all planes.
    pub fn row_bytes(&self) -> usize {
        self.strides.iter().sum()
    }

    /// Adds the `Mat` struct of the kernels.
    pub fn put(&self, args: Args) -> Args {
        let args = self.planes.iter().fold(args, |args, &plane| args.at(plane)).at(self.slots);
        let args = self.strides.iter().fold(args, |args, &stride| args.int(stride));
        let args = args.int(self.rows).int(self.cols).int(self.kind as usize).int(self.group);
        // Padding: the kernels' struct is a multiple of an address in size.
        args.int(self.floats as usize).int(self.share).int(0)
    }

    /// Adds a null `Mat`.
    pub fn put_none(args: Args) -> Args {
        let args = (0..4).fold(args, |args, _| args.at(0));
        (0..10).fold(args, |args, _| args.int(0))
    }
}

/// How one plane of a matrix is gathered from the file's planes: rows of units, which are contiguous on the GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gather {
    /// The plane of the file that they come from.
    pub plane: usize,
    /// The offset of the first unit.
    pub start: usize,
    /// The distance between rows.
    pub row_step: usize,
    /// Bytes of a unit.
    pub unit: usize,
    /// The distance between units.
    pub unit_step: usize,
    /// Units per row.
    pub units: usize,
}

impl Gather {
    /// How each plane of a matrix is gathered. The order is that of [`arrange`].
    fn of(kind: WeightKind, shape: &PartShape) -> [Option<Gather>; 3] {
        let PartShape { encoding, rows, cols, pick, .. } = *shape;
        let stored = rows * pick.of;
        let planes = encoding.plane_bytes(stored, cols).expect("the model was checked");
        if let Encoding::Columns(dtype) = encoding {
            let unit = dtype.block_bytes();
            let (start, row_step) = (pick.first * unit, pick.step * unit);
            let columns = Gather { plane: 0, start, row_step, unit, unit_step: stored * unit, units: cols };
            return [Some(columns), None, None];
        }
        // A part of every block, or else whole rows.
        let rows_of = |plane: usize, part: Option<(Range<usize>, usize)>| {
            // Scales that several rows share are taken completely.
            let (stored, pick) = match encoding {
                Encoding::Tiles(tiles) if plane == 1 => (stored.div_ceil(tiles.rows), RowPick::ALL),
                _ => (stored, pick),
            };
            let row = planes[plane] / stored;
            let (cut, block) = part.unwrap_or((0..row, row));
            (!cut.is_empty()).then(|| Gather {
                plane,
                start: pick.first * row + cut.start,
                row_step: pick.step * row,
                unit: cut.len(),
                unit_step: block,
                units: row / block,
            })
        };
        match kind.cuts() {
            Some(cuts) => {
                let block = cuts.iter().map(|cut| cut.end).max().expect("there are three");
                cuts.map(|cut| rows_of(0, Some((cut, block))))
            }
            None => [0, 1, 2].map(|plane| rows_of(plane, None)),
        }
    }
}

/// Where a plane of an expert comes from, and where it goes.
pub struct PlaneSource {
    /// The index of the expert's byte range that contains it.
    pub range: usize,
    /// How it is gathered.
    pub gather: Gather,
    /// Its rows.
    pub rows: usize,
    /// Its offset in the slot.
    pub to: Address,
}

/// The experts of a layer: their matrices, and how they are arranged in slots.
pub struct LayerExperts {
    /// The matrices of an expert's block.
    pub parts: Parts<DeviceMatrix>,
    /// Those of its adjugate expert, if it has one.
    pub adjugate: Option<Parts<DeviceMatrix>>,
    /// The planes of all.
    pub planes: Vec<PlaneSource>,
    /// Bytes of a slot.
    pub slot_bytes: usize,
    /// The number of experts.
    pub count: usize,
}

impl LayerExperts {
    /// Experts of this form.
    ///
    /// # Errors
    /// If a type is not supported.
    pub fn new(layer: &ExpertLayer) -> Result<LayerExperts> {
        let mut planes = Vec::new();
        let mut slot_bytes = 0;
        let mut part = |shape: &PartShape| {
            let kind = WeightKind::named(shape.encoding)?;
            let gathers = Gather::of(kind, shape);
            let strides = gathers.map(|gather| gather.map_or(0, |gather| gather.unit * gather.units));
            let mut there =
                DeviceMatrix::nowhere(shape.encoding, [shape.rows, shape.cols], shape.pick, strides)?;
            for ((plane, gather), rows) in gathers.into_iter().enumerate().zip(there.plane_rows()) {
                let Some(gather) = gather else { continue };
                there.planes[plane] = slot_bytes as Address;
                let range = shape.planes[gather.plane].expect("the encoding has this plane");
                planes.push(PlaneSource { range, gather, rows, to: slot_bytes as Address });
                slot_bytes += there.plane_bytes()[plane].next_multiple_of(PLANE_ALIGNMENT);
            }
            Ok::<_, Error>(there)
        };
        let mut block = |Parts { gate, up, down }: &Parts<PartShape>| {
            let gate = gate.as_ref().map(&mut part).transpose()?;
            Ok::<_, Error>(Parts { gate, up: part(up)?, down: part(down)? })
        };
        let parts = block(&layer.parts)?;
        let adjugate = layer.adjugate.as_ref().map(block).transpose()?;
        Ok(LayerExperts { parts, adjugate, planes, slot_bytes, count: layer.experts.len() })
    }

    /// All matrices.
    pub fn matrices(&self) -> impl Iterator<Item = &DeviceMatrix> {
        self.parts.iter().chain(self.adjugate.iter().flat_map(Parts::iter))
    }

    /// Sets the table in which kernels look up the experts' slots.
    pub fn look_in(&mut self, table: Address) {
        for Parts { gate, up, down } in [Some(&mut self.parts), self.adjugate.as_mut()].into_iter().flatten()
        {
            gate.iter_mut().chain([up, down]).for_each(|part| part.slots = table);
        }
    }
}

#[cfg(test)]
mod tests {
    use forebay_engine::internals::experts::{ByteRange, SlotClasses};
    use forebay_engine::internals::format::FileIdx;
    use forebay_kernels::Planes;

    use super::*;

    #[test]
    fn blocks_are_cut_without_losing_a_byte() {
        for dtype in DType::computable() {
            let Some(cuts) = WeightKind::of(dtype.into()).expect("every type is computed").cuts() else {
                // Whole blocks are read sixteen bytes at a time.
                assert!(dtype.is_float() || dtype.block_bytes().is_multiple_of(16), "{dtype}");
                continue;
            };
            // So are codes.
            assert!(cuts[0].len().is_multiple_of(16), "{dtype}");
            let mut covered: Vec<usize> = cuts.into_iter().flatten().collect();
            covered.sort_unstable();
            assert_eq!(covered, (0..dtype.block_bytes()).collect::<Vec<_>>(), "{dtype}");
        }
    }

    /// The bytes that a gather collects.
    fn gathered(gather: &Gather, rows: usize, planes: [&[u8]; 3]) -> Vec<u8> {
        let unit = |row: usize, unit: usize| {
            let at = gather.start + row * gather.row_step + unit * gather.unit_step;
            &planes[gather.plane][at..at + gather.unit]
        };
        (0..rows).flat_map(|row| (0..gather.units).flat_map(move |u| unit(row, u).to_vec())).collect()
    }

    #[test]
    fn what_is_gathered_is_what_the_host_arranges() {
        use DType::*;
        let affine = |bits, group, scales| Encoding::Affine(Affine { bits, group, scales });
        let encodings = DType::computable().map(Encoding::Blocks);
        let planes = [
            Encoding::Mxfp4,
            Encoding::Columns(F32),
            Encoding::Columns(BF16),
            affine(4, 32, F16),
            affine(8, 64, BF16),
            affine(4, 128, F32),
            affine(3, 32, F16),
            Encoding::Tiles(Tiles { rows: 6, cols: 48, scales: BF16 }),
        ];
        let (rows, cols) = (5, 512);
        for encoding in encodings.chain(planes) {
            for pick in
                [RowPick::ALL, RowPick { first: 0, step: 2, of: 2 }, RowPick { first: 2, step: 3, of: 3 }]
            {
                let lengths = encoding.plane_bytes(rows * pick.step, cols).unwrap();
                // Never a NaN, which a conversion might change.
                let byte = |i: usize| (i.wrapping_mul(0x9e37_79b9) >> 13) as u8 & 0x3f;
                let stored = lengths.map(|len| (0..len).map(byte).collect::<Vec<u8>>());
                let [codes, scales, biases] = &stored;
                let whole =
                    MatRef::from_planes(encoding, rows * pick.step, cols, Planes { codes, scales, biases });
                let kind = WeightKind::of(encoding).unwrap();
                let expected = arrange(kind, whole.every(pick.first, pick.step));
                let shape = PartShape { encoding, rows, cols, planes: [Some(0), Some(1), Some(2)], pick };
                let gathers = Gather::of(kind, &shape);
                let rows = plane_rows(rows, sharing(encoding, pick).unwrap());
                for ((gather, expected), rows) in gathers.iter().zip(&expected.planes).zip(rows) {
                    let bytes = gather.map_or(Vec::new(), |g| gathered(&g, rows, [codes, scales, biases]));
                    assert_eq!(&bytes, expected, "{encoding}, {pick:?}");
                }
            }
        }
    }

    /// A layer with one expert. Gate and up have these rows and columns, and down has them swapped.
    fn layer(encoding: Encoding, rows: usize, cols: usize) -> ExpertLayer {
        let mut ranges = Vec::new();
        let [gate, up, down] = [(rows, cols), (rows, cols), (cols, rows)].map(|(rows, cols)| {
            let planes = encoding.plane_bytes(rows, cols).unwrap().map(|len| {
                (len > 0).then(|| {
                    ranges.push(ByteRange { file: FileIdx(0), offset: 0, len });
                    ranges.len() - 1
                })
            });
            PartShape { encoding, rows, cols, planes, pick: RowPick::ALL }
        });
        let parts = Parts { gate: Some(gate), up, down };
        ExpertLayer { parts, adjugate: None, experts: vec![ranges.into()], used: 1 }
    }

    #[test]
    fn slots_are_as_large_as_planned() {
        let affine = |bits| Encoding::Affine(Affine { bits, group: 32, scales: DType::F32 });
        let tiles = Encoding::Tiles(Tiles { rows: 128, cols: 128, scales: DType::F32 });
        let planes = [2, 3, 4, 5, 6, 8].map(affine).into_iter().chain([Encoding::Mxfp4, tiles]);
        for encoding in DType::computable().map(Encoding::Blocks).chain(planes) {
            let layer = layer(encoding, 768, 2048);
            let there = LayerExperts::new(&layer).unwrap();
            let classes = SlotClasses::new(&[Some(layer)]);
            let planned = classes.classes[0].device_bytes;
            assert!(there.slot_bytes <= planned, "{encoding}: {} and not {planned}", there.slot_bytes);
        }
    }

    #[test]
    fn matrices_are_alike_if_a_kernel_cannot_tell() {
        let of = |encoding| DeviceMatrix::nowhere(encoding, [64, 256], RowPick::ALL, [1; 3]).unwrap();
        let affine = |bits, group, scales| of(Encoding::Affine(Affine { bits, group, scales }));
        let tiles = |rows, cols| of(Encoding::Tiles(Tiles { rows, cols, scales: DType::F32 }));
        assert!(affine(4, 64, DType::F16).is_like(&affine(4, 64, DType::F16)));
        for other in [affine(3, 64, DType::F16), affine(4, 32, DType::F16), affine(4, 64, DType::BF16)] {
            assert!(!affine(4, 64, DType::F16).is_like(&other));
        }
        for other in [tiles(16, 128), tiles(32, 64)] {
            assert!(!tiles(32, 128).is_like(&other));
        }
    }

    #[test]
    fn rows_that_tiles_have_no_equal_number_of_are_refused() {
        let tiles = Encoding::Tiles(Tiles { rows: 127, cols: 128, scales: DType::F32 });
        let mut layer = layer(tiles, 256, 256);
        layer.parts.up.pick = RowPick { first: 0, step: 2, of: 2 };
        let refused = LayerExperts::new(&layer).err().expect("it is refused");
        assert!(refused.to_string().contains("F8_E4M3"), "{refused}");
    }
}
