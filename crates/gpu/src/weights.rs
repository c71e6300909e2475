//! Matrices as kernels find them: as in the file, in buffers of the GPU or in the process's memory.

use std::sync::Arc;

use forebay_engine::internals::backend::HostMatrix;
use forebay_engine::internals::experts::{PartShape, RowPick};
use forebay_engine::{Error, Result};
use forebay_kernels::{Affine, DType, Encoding, Tiles};

use crate::adopt::Adoption;
use crate::device::{Gpu, Memory, Span};

/// The kernels' name for an encoding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(non_camel_case_types)]
pub enum WeightKind {
    F32,
    F16,
    BF16,
    COLUMNS_F32,
    COLUMNS_F16,
    COLUMNS_BF16,
    Q8_0,
}

impl WeightKind {
    /// The kind of an encoding, if there are kernels for it.
    pub fn of(encoding: Encoding) -> Option<WeightKind> {
        Some(match encoding {
            Encoding::Blocks(DType::F32) => WeightKind::F32,
            Encoding::Blocks(DType::F16) => WeightKind::F16,
            Encoding::Blocks(DType::BF16) => WeightKind::BF16,
            Encoding::Columns(DType::F32) => WeightKind::COLUMNS_F32,
            Encoding::Columns(DType::F16) => WeightKind::COLUMNS_F16,
            Encoding::Columns(DType::BF16) => WeightKind::COLUMNS_BF16,
            Encoding::Blocks(DType::Q8_0) => WeightKind::Q8_0,
            _ => return None,
        })
    }

    /// The kind of an encoding.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if there are no kernels for it.
    pub fn named(encoding: Encoding) -> Result<WeightKind> {
        WeightKind::of(encoding)
            .ok_or_else(|| Error::Unsupported(format!("weights of type {encoding} on the GPU")))
    }

    /// Its unpacker.
    fn text(self) -> &'static [&'static str] {
        const F16: &str = "fn from_half$(bits: u32) -> f32 { return half_of(bits); }\n";
        const BF16: &str = "fn from_half$(bits: u32) -> f32 { return brain_of(bits); }\n";
        const SINGLE: &str = "fn float_at$(byte: u32) -> f32 { return bitcast<f32>(code_word$(byte)); }\n";
        const HALF: &str = "fn float_at$(byte: u32) -> f32 { return half_of(code_half$(byte)); }\n";
        const BRAIN: &str = "fn float_at$(byte: u32) -> f32 { return brain_of(code_half$(byte)); }\n";
        const HALVES: &str = include_str!("../shaders/unpack/halves.wgsl");
        const COLUMNS: &str = include_str!("../shaders/unpack/columns.wgsl");
        match self {
            WeightKind::F32 => &[include_str!("../shaders/unpack/f32.wgsl")],
            WeightKind::F16 => &[F16, HALVES],
            WeightKind::BF16 => &[BF16, HALVES],
            WeightKind::COLUMNS_F32 => &[SINGLE, COLUMNS],
            WeightKind::COLUMNS_F16 => &[HALF, COLUMNS],
            WeightKind::COLUMNS_BF16 => &[BRAIN, COLUMNS],
            WeightKind::Q8_0 => &[include_str!("../shaders/unpack/q8_0.wgsl")],
        }
    }

    /// Whether scales are in planes of their own.
    fn has_planes(self) -> bool {
        false
    }

    /// Whether weights are floats.
    pub fn is_float(self) -> bool {
        use WeightKind::{BF16, COLUMNS_BF16, COLUMNS_F16, COLUMNS_F32, F16, F32};
        matches!(self, F32 | F16 | BF16 | COLUMNS_F32 | COLUMNS_F16 | COLUMNS_BF16)
    }
}

/// How kernels read a matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Source {
    /// Its encoding.
    pub kind: WeightKind,
    /// Whether all its rows start at multiples of four bytes.
    pub aligned: bool,
    /// Whether it is one of experts, which are in slots.
    pub experts: bool,
}

impl Source {
    /// The text for slot `$`.
    pub fn text(self) -> String {
        let mut text = format!("const ALIGNED$: bool = {};\n", self.aligned);
        if self.experts {
            text.push_str(include_str!("../shaders/slot.wgsl"));
        } else {
            text.push_str(include_str!("../shaders/dense.wgsl"));
            if self.kind.has_planes() {
                text.push_str(include_str!("../shaders/dense_planes.wgsl"));
            }
        }
        text.push_str(include_str!("../shaders/words.wgsl"));
        self.kind.text().iter().for_each(|part| text.push_str(part));
        text
    }
}

/// What kernels know of a matrix: the struct `Matrix` of matrix.wgsl.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, bytemuck::Pod, bytemuck::Zeroable)]
pub struct Descriptor {
    /// Bytes from the start of the buffers to the planes.
    pub planes: [u32; 3],
    /// Bytes between rows of the planes.
    pub steps: [u32; 3],
    pub rows: u32,
    pub cols: u32,
    pub group: u32,
    pub share: u32,
    pub floats: u32,
    pub factor: f32,
}

impl Descriptor {
    /// The matrix of these rows of an encoding's stored rows.
    ///
    /// # Errors
    /// If there are no kernels for it.
    pub fn new(encoding: Encoding, [rows, cols]: [usize; 2], pick: RowPick) -> Result<Descriptor> {
        WeightKind::named(encoding)?;
        let stored = rows * pick.of;
        let bytes = encoding
            .plane_bytes(stored, cols)
            .ok_or_else(|| Error::Unsupported(format!("{cols} columns of type {encoding} on the GPU")))?;
        let small = |number: usize| {
            u32::try_from(number)
                .map_err(|_| Error::Unsupported(format!("a matrix of {rows} rows of {cols} on the GPU")))
        };
        let mut planes = [0; 3];
        let mut steps = [0; 3];
        let (mut group, mut share, mut floats) = (32, 1, 0);
        if let Encoding::Columns(dtype) = encoding {
            let unit = dtype.block_bytes();
            planes[0] = small(pick.first * unit)?;
            steps[0] = small(pick.step * unit)?;
            group = small(stored * unit)?;
        } else {
            for plane in 0..3 {
                let (rows_there, pick) = match encoding {
                    // Scales that several rows share are found by the stored row.
                    Encoding::Tiles(tiles) if plane == 1 => (stored.div_ceil(tiles.rows), RowPick::ALL),
                    _ => (stored, pick),
                };
                let step = bytes[plane] / rows_there.max(1);
                planes[plane] = small(step * pick.first)?;
                steps[plane] = small(step * pick.step)?;
            }
            match encoding {
                Encoding::Affine(Affine { group: columns, scales, .. }) => {
                    (group, floats) = (small(columns)?, float_number(scales)?);
                }
                Encoding::Tiles(Tiles { rows, cols: columns, scales }) => {
                    if !rows.is_multiple_of(pick.step) {
                        let message = format!(
                            "every {} rows of {encoding} on the GPU; use Options::device = None",
                            pick.step
                        );
                        return Err(Error::Unsupported(message));
                    }
                    share = small(rows / pick.step)?;
                    (group, floats) = (small(columns)?, float_number(scales)?);
                }
                _ => {}
            }
        }
        let (rows, cols) = (small(rows)?, small(cols)?);
        Ok(Descriptor { planes, steps, rows, cols, group, share, floats, factor: 1.0 })
    }

    /// The matrix of each expert of a layer. Its planes' offsets are added to those of the expert's ranges.
    ///
    /// # Errors
    /// If there are no kernels for it.
    pub fn of_part(shape: &PartShape) -> Result<Descriptor> {
        Descriptor::new(shape.encoding, [shape.rows, shape.cols], shape.pick)
    }

    /// Whether all rows start at multiples of four bytes if the first plane does.
    pub fn steps_are_aligned(&self) -> bool {
        self.planes[0].is_multiple_of(4) && self.steps[0].is_multiple_of(4)
    }
}

/// The number of a float type in `Matrix::floats`.
fn float_number(dtype: DType) -> Result<u32> {
    match dtype {
        DType::F32 => Ok(0),
        DType::F16 => Ok(1),
        DType::BF16 => Ok(2),
        _ => Err(Error::Unsupported(format!("scales of type {dtype} on the GPU"))),
    }
}

/// A dense matrix.
pub struct DenseMatrix {
    pub source: Source,
    pub descriptor: Descriptor,
    /// The buffers of its planes.
    pub spans: Vec<Span>,
    _memory: Vec<Memory>,
    _adopted: Vec<Adoption>,
}

impl DenseMatrix {
    /// Adopts a matrix, or copies it to the GPU.
    ///
    /// # Errors
    /// If its type is not supported, or there is not enough memory.
    pub fn load(gpu: &Arc<Gpu>, matrix: &HostMatrix) -> Result<DenseMatrix> {
        let kind = WeightKind::named(matrix.encoding)?;
        let mut descriptor = Descriptor::new(matrix.encoding, [matrix.rows, matrix.cols], RowPick::ALL)?;
        descriptor.factor = matrix.scale;
        let (mut spans, mut memory, mut adopted) = (Vec::new(), Vec::new(), Vec::new());
        let count = if kind.has_planes() { 3 } else { 1 };
        for (plane, bytes) in matrix.planes.iter().enumerate().take(count) {
            let span = if bytes.is_empty() {
                memory.push(gpu.allocate(16, "dense weights")?);
                memory.last().expect("it was just made").whole()
            } else if gpu.unified {
                let (span, adoption) = gpu.adopt_weights(bytes)?;
                adopted.extend(adoption);
                span
            } else {
                // Kernels read whole words, and the word after the last one of a group.
                let there = gpu.allocate(bytes.len() as u64 + 16, "dense weights")?;
                let padded = bytes.len().next_multiple_of(4);
                let mut last = bytes[bytes.len() / 4 * 4..].to_vec();
                last.resize(padded - bytes.len() / 4 * 4, 0);
                let whole = there.whole();
                gpu.queue.write_buffer(&whole.buffer, 0, &bytes[..bytes.len() / 4 * 4]);
                gpu.queue.write_buffer(&whole.buffer, (bytes.len() / 4 * 4) as u64, &last);
                memory.push(there);
                whole
            };
            let (span, lead) = span.aligned(gpu.limits.min_storage_buffer_offset_alignment.into());
            if span.bytes > gpu.limits.max_storage_buffer_binding_size {
                return Err(Error::Unsupported(format!(
                    "a matrix of {} rows of {} has {} bytes, but kernels of {} reach {}; use Options::device = None",
                    matrix.rows,
                    matrix.cols,
                    span.bytes,
                    gpu.name(),
                    gpu.limits.max_storage_buffer_binding_size
                )));
            }
            descriptor.planes[plane] += lead as u32;
            spans.push(span);
        }
        let aligned = descriptor.steps_are_aligned();
        let source = Source { kind, aligned, experts: false };
        Ok(DenseMatrix { source, descriptor, spans, _memory: memory, _adopted: adopted })
    }
}
