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
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q2_K,
    Q3_K,
    Q4_K,
    Q5_K,
    Q6_K,
    IQ1_S,
    IQ1_M,
    IQ2_XXS,
    IQ2_XS,
    IQ2_S,
    IQ3_XXS,
    IQ3_S,
    IQ4_NL,
    IQ4_XS,
    MXFP4,
    MXFP4_PAIRS,
    NVFP4,
    AFFINE2,
    AFFINE3,
    AFFINE4,
    AFFINE5,
    AFFINE6,
    AFFINE8,
    FP8,
}

/// The text of an unpacker.
macro_rules! unpack {
    ($name:literal) => {
        include_str!(concat!("../shaders/unpack/", $name, ".wgsl"))
    };
}

impl WeightKind {
    /// Every kind.
    pub const ALL: [WeightKind; 35] = {
        use WeightKind::*;
        [
            F32,
            F16,
            BF16,
            COLUMNS_F32,
            COLUMNS_F16,
            COLUMNS_BF16,
            Q8_0,
            Q4_0,
            Q4_1,
            Q5_0,
            Q5_1,
            Q2_K,
            Q3_K,
            Q4_K,
            Q5_K,
            Q6_K,
            IQ1_S,
            IQ1_M,
            IQ2_XXS,
            IQ2_XS,
            IQ2_S,
            IQ3_XXS,
            IQ3_S,
            IQ4_NL,
            IQ4_XS,
            MXFP4,
            MXFP4_PAIRS,
            NVFP4,
            AFFINE2,
            AFFINE3,
            AFFINE4,
            AFFINE5,
            AFFINE6,
            AFFINE8,
            FP8,
        ]
    };

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
            Encoding::Blocks(DType::Q4_0) => WeightKind::Q4_0,
            Encoding::Blocks(DType::Q4_1) => WeightKind::Q4_1,
            Encoding::Blocks(DType::Q5_0) => WeightKind::Q5_0,
            Encoding::Blocks(DType::Q5_1) => WeightKind::Q5_1,
            Encoding::Blocks(DType::Q2_K) => WeightKind::Q2_K,
            Encoding::Blocks(DType::Q3_K) => WeightKind::Q3_K,
            Encoding::Blocks(DType::Q4_K) => WeightKind::Q4_K,
            Encoding::Blocks(DType::Q5_K) => WeightKind::Q5_K,
            Encoding::Blocks(DType::Q6_K) => WeightKind::Q6_K,
            Encoding::Blocks(DType::IQ1_S) => WeightKind::IQ1_S,
            Encoding::Blocks(DType::IQ1_M) => WeightKind::IQ1_M,
            Encoding::Blocks(DType::IQ2_XXS) => WeightKind::IQ2_XXS,
            Encoding::Blocks(DType::IQ2_XS) => WeightKind::IQ2_XS,
            Encoding::Blocks(DType::IQ2_S) => WeightKind::IQ2_S,
            Encoding::Blocks(DType::IQ3_XXS) => WeightKind::IQ3_XXS,
            Encoding::Blocks(DType::IQ3_S) => WeightKind::IQ3_S,
            Encoding::Blocks(DType::IQ4_NL) => WeightKind::IQ4_NL,
            Encoding::Blocks(DType::IQ4_XS) => WeightKind::IQ4_XS,
            Encoding::Blocks(DType::MXFP4) => WeightKind::MXFP4,
            Encoding::Blocks(DType::NVFP4) => WeightKind::NVFP4,
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
        const COLUMNS: &str = unpack!("columns");
        match self {
            WeightKind::F32 => &[unpack!("f32")],
            WeightKind::F16 => &[F16, unpack!("halves")],
            WeightKind::BF16 => &[BF16, unpack!("halves")],
            WeightKind::COLUMNS_F32 => &[SINGLE, COLUMNS],
            WeightKind::COLUMNS_F16 => &[HALF, COLUMNS],
            WeightKind::COLUMNS_BF16 => &[BRAIN, COLUMNS],
            WeightKind::Q8_0 => &[unpack!("q8_0")],
            WeightKind::Q4_0 => &["const LESS$ = 8.0;\n", unpack!("q4")],
            WeightKind::Q4_1 => &["const LESS$ = 0.0;\n", unpack!("q4")],
            WeightKind::Q5_0 => &["const LESS$ = 16.0;\n", unpack!("q5")],
            WeightKind::Q5_1 => &["const LESS$ = 0.0;\n", unpack!("q5")],
            WeightKind::Q2_K => &[unpack!("q2_k")],
            WeightKind::Q3_K => &[unpack!("q3_k")],
            WeightKind::Q4_K => &[unpack!("k_scales"), unpack!("q4_k")],
            WeightKind::Q5_K => &[unpack!("k_scales"), unpack!("q5_k")],
            WeightKind::Q6_K => &[unpack!("q6_k")],
            WeightKind::IQ1_S => {
                &["const GRID$ = IQ1;\n", unpack!("grids"), unpack!("iq1"), unpack!("iq1_s")]
            }
            WeightKind::IQ1_M => {
                &["const GRID$ = IQ1;\n", unpack!("grids"), unpack!("iq1"), unpack!("iq1_m")]
            }
            WeightKind::IQ2_XXS => {
                &["const GRID$ = IQ2_XXS;\n", unpack!("grids"), unpack!("iq2"), unpack!("iq2_xxs")]
            }
            WeightKind::IQ2_XS => {
                &["const GRID$ = IQ2_XS;\n", unpack!("grids"), unpack!("iq2"), unpack!("iq2_xs")]
            }
            WeightKind::IQ2_S => {
                &["const GRID$ = IQ2_S;\n", unpack!("grids"), unpack!("iq2"), unpack!("iq2_s")]
            }
            WeightKind::IQ3_XXS => &["const GRID$ = IQ3_XXS;\n", unpack!("grids"), unpack!("iq3_xxs")],
            WeightKind::IQ3_S => &["const GRID$ = IQ3_S;\n", unpack!("grids"), unpack!("iq3_s")],
            WeightKind::IQ4_NL => &[unpack!("iq4"), unpack!("iq4_nl")],
            WeightKind::IQ4_XS => &[unpack!("iq4"), unpack!("iq4_xs")],
            WeightKind::MXFP4 => &[unpack!("fp4"), unpack!("mxfp4")],
            WeightKind::MXFP4_PAIRS => &[unpack!("fp4"), unpack!("mxfp4_pairs")],
            WeightKind::NVFP4 => &[unpack!("fp4"), unpack!("nvfp4")],
            WeightKind::AFFINE2 => &["const BITS$ = 2u;\n", unpack!("affine")],
            WeightKind::AFFINE3 => &["const BITS$ = 3u;\n", unpack!("affine")],
            WeightKind::AFFINE4 => &["const BITS$ = 4u;\n", unpack!("affine")],
            WeightKind::AFFINE5 => &["const BITS$ = 5u;\n", unpack!("affine")],
            WeightKind::AFFINE6 => &["const BITS$ = 6u;\n", unpack!("affine")],
            WeightKind::AFFINE8 => &["const BITS$ = 8u;\n", unpack!("affine")],
            WeightKind::FP8 => &[unpack!("fp8")],
        }
    }

    /// Whether scales are in planes of their own.
    pub fn has_planes(self) -> bool {
        use WeightKind::{AFFINE2, AFFINE3, AFFINE4, AFFINE5, AFFINE6, AFFINE8, FP8, MXFP4_PAIRS};
        matches!(self, AFFINE2 | AFFINE3 | AFFINE4 | AFFINE5 | AFFINE6 | AFFINE8 | FP8 | MXFP4_PAIRS)
    }

    /// Whether weights are products plus something.
    pub fn has_min(self) -> bool {
        use WeightKind::{
            AFFINE2, AFFINE3, AFFINE4, AFFINE5, AFFINE6, AFFINE8, Q2_K, Q4_1, Q4_K, Q5_1, Q5_K,
        };
        matches!(
            self,
            AFFINE2 | AFFINE3 | AFFINE4 | AFFINE5 | AFFINE6 | AFFINE8 | Q2_K | Q4_1 | Q4_K | Q5_1 | Q5_K
        )
    }

    /// Whether lanes are points of a grid.
    pub fn has_grid(self) -> bool {
        use WeightKind::{IQ1_M, IQ1_S, IQ2_S, IQ2_XS, IQ2_XXS, IQ3_S, IQ3_XXS};
        matches!(self, IQ1_M | IQ1_S | IQ2_S | IQ2_XS | IQ2_XXS | IQ3_S | IQ3_XXS)
    }

    /// Whether blocks start at multiples of four bytes if rows do.
    fn is_of_words(self) -> bool {
        use WeightKind::{COLUMNS_BF16, COLUMNS_F16, IQ1_S};
        use WeightKind::{
            IQ2_S, IQ2_XS, IQ2_XXS, IQ3_S, IQ3_XXS, IQ4_NL, MXFP4, Q3_K, Q4_0, Q5_0, Q6_K, Q8_0,
        };
        !matches!(
            self,
            COLUMNS_BF16
                | COLUMNS_F16
                | IQ1_S
                | IQ2_S
                | IQ2_XS
                | IQ2_XXS
                | IQ3_S
                | IQ3_XXS
                | IQ4_NL
                | MXFP4
                | Q3_K
                | Q4_0
                | Q5_0
                | Q6_K
                | Q8_0
        )
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
        let mut text = format!("const ALIGNED$ = {};\n", self.aligned && self.kind.is_of_words());
        text.push_str(&format!("const HAS_MIN$ = {};\n", self.kind.has_min()));
        if self.experts {
            text.push_str(include_str!("../shaders/slot.wgsl"));
        } else {
            text.push_str(include_str!("../shaders/dense.wgsl"));
            if self.kind.has_planes() {
                text.push_str(include_str!("../shaders/dense_planes.wgsl"));
            }
        }
        text.push_str(include_str!("../shaders/words.wgsl"));
        if self.kind.has_planes() {
            for plane in ["scales", "biases"] {
                text.push_str(&include_str!("../shaders/plane.wgsl").replace("PLANE", plane));
            }
        }
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
