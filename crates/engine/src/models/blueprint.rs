//! What a model is made of, before any weight is read.
//!
//! A family's `describe` declares matrices, vectors, buffers and experts and gets handles for them. Every
//! declaration is checked against the file at once, so a file that cannot be run is refused before the first
//! byte is loaded, and the memory plan is the sum of the declarations.

use std::collections::HashSet;

use std::sync::Arc;

use crate::backend::{Backend, Buf, BufShape, HostMatrix, Matrix, Router, Vector, Weight};
use crate::error::{Error, Result};
use crate::format::{ModelFile, TensorInfo};
use crate::memory::{ALIGNMENT, Region};
use crate::store::{ByteRange, ByteSource, ExpertLayer, PartShape, RowPick};
use forebay_kernels::DType;
use forebay_kernels::quant::dequantise_row;

use super::Model;
use super::config::quoted;

/// No real model has more experts in a layer. The limit keeps the lists of them far smaller than the model.
const MAX_EXPERTS: usize = 1 << 16;

/// A described model.
pub struct Blueprint {
    /// The arithmetic.
    pub model: Box<dyn Model>,
    /// The longest context it was trained for.
    pub context: usize,
    /// The experts of each layer that has any.
    pub experts: Vec<Option<ExpertLayer>>,
    buffers: Vec<Scratch>,
    weights: Vec<Declared>,
}

enum Declared {
    Matrix(TensorInfo),
    /// A matrix of which a token reads one row.
    Table(TensorInfo),
    Vector(TensorInfo),
}

impl Declared {
    fn tensor(&self) -> &TensorInfo {
        match self {
            Declared::Matrix(tensor) | Declared::Table(tensor) | Declared::Vector(tensor) => tensor,
        }
    }
}

impl Blueprint {
    /// Bytes of the dense weights.
    pub fn dense_bytes(&self) -> u64 {
        self.weights
            .iter()
            .map(|w| match w {
                Declared::Matrix(t) | Declared::Table(t) => t.len,
                Declared::Vector(t) => t.elements() * 4,
            })
            .sum()
    }

    /// Bytes of dense weights that one token reads: every matrix whole, of the embedding table one row. A table
    /// that is also the output matrix is read whole for that, besides its row.
    pub fn dense_bytes_per_token(&self) -> u64 {
        let output = self.model.head().output;
        let matrices = self.weights.iter().filter(|w| !matches!(w, Declared::Vector(_)));
        let read = matrices.enumerate().map(|(i, w)| match w {
            Declared::Table(t) => {
                let row = t.len / t.shape[0] as u64;
                if Matrix(i) == output { t.len + row } else { row }
            }
            other => other.tensor().len,
        });
        let vectors = self.weights.iter().map(|w| match w {
            Declared::Vector(t) => t.elements() * 4,
            Declared::Matrix(_) | Declared::Table(_) => 0,
        });
        read.chain(vectors).sum()
    }

    /// Bytes of routed experts that one token reads.
    pub fn expert_bytes_per_token(&self) -> u64 {
        self.experts.iter().flatten().map(|l| l.expert_bytes() * l.used as u64).sum()
    }

    /// Bytes of all routed experts.
    pub fn expert_bytes(&self) -> u64 {
        self.experts.iter().flatten().map(|l| l.expert_bytes() * l.experts.len() as u64).sum()
    }

    /// The scratch buffers for chunks of this many tokens.
    pub fn buffers(&self, chunk: usize) -> Vec<BufShape> {
        let shape = |b: &Scratch| BufShape { rows: b.rows.unwrap_or(chunk), width: b.width };
        self.buffers.iter().map(shape).collect()
    }

    /// Bytes of the scratch memory for chunks of this many tokens: the buffers, and a quantised copy of what a product
    /// reads, which is less than the widest of them.
    pub fn scratch_bytes(&self, chunk: usize) -> u64 {
        let bytes = |b: &BufShape| (b.rows as u64).saturating_mul(b.width as u64).saturating_mul(4);
        let buffers = self.buffers(chunk);
        let widest = buffers.iter().map(bytes).max().unwrap_or(0);
        buffers.iter().map(bytes).fold(widest / 3, u64::saturating_add)
    }

    /// Reads the dense weights and gives them to the backend. `progress` is told of each tensor's bytes.
    ///
    /// # Errors
    /// If reading fails or the backend refuses.
    pub fn load_dense(
        &self,
        source: &dyn ByteSource,
        backend: &mut dyn Backend,
        progress: &mut dyn FnMut(u64),
    ) -> Result<()> {
        // Everything lies in one region, so that huge pages are shared by small tensors.
        let mut end = 0;
        let mut place = |tensor: &TensorInfo| {
            let start = end;
            end = (start + tensor.len as usize).next_multiple_of(ALIGNMENT);
            start..start + tensor.len as usize
        };
        let places: Vec<_> = self.weights.iter().map(|declared| place(declared.tensor())).collect();
        let mut region = Region::new(end)?;
        for (declared, place) in self.weights.iter().zip(&places) {
            let tensor = declared.tensor();
            source.read_exact_at(tensor.file, tensor.offset, &mut region[place.clone()])?;
            progress(tensor.len);
        }
        let region = Arc::new(region);
        for (declared, place) in self.weights.iter().zip(places) {
            backend.load(match declared {
                Declared::Matrix(t) | Declared::Table(t) => Weight::Matrix(HostMatrix {
                    encoding: t.dtype.into(),
                    rows: t.shape[0],
                    cols: t.shape[1],
                    planes: [region.share(place), region.share(0..0), region.share(0..0)],
                }),
                Declared::Vector(t) => {
                    let mut values = vec![0.0; t.shape[0]];
                    dequantise_row(t.dtype, &region[place], &mut values);
                    Weight::Vector(values)
                }
            })?;
        }
        Ok(())
    }
}

/// A declared buffer.
struct Scratch {
    /// As many as a chunk has tokens, if not given.
    rows: Option<usize>,
    width: usize,
}

/// Takes a family's declarations.
pub struct Builder<'a> {
    file: &'a ModelFile,
    weights: Vec<Declared>,
    matrices: usize,
    vectors: usize,
    buffers: Vec<Scratch>,
    experts: Vec<Option<ExpertLayer>>,
    /// The names of all tensors asked for.
    declared: HashSet<&'a str>,
}

impl<'a> Builder<'a> {
    /// A builder for a model in `file`.
    pub fn new(file: &'a ModelFile) -> Builder<'a> {
        Builder {
            file,
            weights: Vec::new(),
            matrices: 0,
            vectors: 0,
            buffers: Vec::new(),
            experts: Vec::new(),
            declared: HashSet::new(),
        }
    }

    /// Whether the file has a tensor.
    pub fn has(&self, name: &str) -> bool {
        self.file.tensor(name).is_some()
    }

    /// The first dimension of a matrix, where it is not in the configuration: a vocabulary.
    ///
    /// # Errors
    /// If the tensor is missing or not a matrix.
    pub fn rows_of(&self, name: &str) -> Result<usize> {
        match self.tensor(name)?.shape[..] {
            [rows, _] => Ok(rows),
            ref shape => Err(self.error(format!("tensor {name} has shape {shape:?}, not that of a matrix"))),
        }
    }

    /// A dense weight matrix.
    ///
    /// # Errors
    /// If it is missing, has another shape, or a type that cannot be computed.
    pub fn matrix(&mut self, name: &str, rows: usize, cols: usize) -> Result<Matrix> {
        let tensor = self.checked(name, &[rows, cols])?.clone();
        Ok(self.push_matrix(Declared::Matrix(tensor)))
    }

    /// A matrix of which a token reads one row: the embeddings. It may be the output matrix, too.
    ///
    /// # Errors
    /// As [`matrix`](Self::matrix).
    pub fn table(&mut self, name: &str, rows: usize, cols: usize) -> Result<Matrix> {
        let tensor = self.checked(name, &[rows, cols])?.clone();
        Ok(self.push_matrix(Declared::Table(tensor)))
    }

    /// A vector of weights, kept in f32.
    ///
    /// # Errors
    /// If it is missing, has another length, or is not of a float type.
    pub fn vector(&mut self, name: &str, len: usize) -> Result<Vector> {
        let tensor = self.checked(name, &[len])?.clone();
        if !tensor.dtype.is_float() {
            return Err(self.cannot_compute(&tensor, "F32, F16, BF16"));
        }
        self.weights.push(Declared::Vector(tensor));
        self.vectors += 1;
        Ok(Vector(self.vectors - 1))
    }

    /// A scratch buffer of `width` floats for each token of a batch.
    pub fn buffer(&mut self, width: usize) -> Buf {
        self.declare(Scratch { rows: None, width })
    }

    /// A scratch buffer of a given shape.
    pub fn buffer_of(&mut self, shape: BufShape) -> Buf {
        self.declare(Scratch { rows: Some(shape.rows), width: shape.width })
    }

    fn declare(&mut self, scratch: Scratch) -> Buf {
        let width = scratch.width;
        self.buffers.push(scratch);
        Buf { id: self.buffers.len() - 1, width }
    }

    /// The routed experts of the next layer, as many as `router` has in each of the three tensors
    /// `[experts, rows, cols]`: gate, up and down.
    ///
    /// # Errors
    /// If a tensor is missing, has another shape, or a type that cannot be computed.
    pub fn experts(&mut self, router: &Router, parts: [(&str, usize, usize); 3]) -> Result<()> {
        let count = router.experts;
        if count > MAX_EXPERTS {
            return Err(self.error(format!("{count} experts in a layer are more than {MAX_EXPERTS}")));
        }
        let mut shapes = Vec::new();
        let mut places: Vec<Vec<ByteRange>> = Vec::new();
        for (name, rows, cols) in parts {
            let tensor = self.checked(name, &[count, rows, cols])?;
            let len = tensor.len / count as u64;
            shapes.push(PartShape {
                encoding: tensor.dtype.into(),
                rows,
                cols,
                planes: [Some(shapes.len()), None, None],
                pick: RowPick::ALL,
            });
            let range = |i| ByteRange {
                file: tensor.file,
                offset: tensor.offset + i as u64 * len,
                len: len as usize,
            };
            places.push((0..count).map(range).collect());
        }
        self.experts.push(Some(ExpertLayer {
            parts: [shapes[0], shapes[1], shapes[2]],
            experts: (0..count).map(|i| [places[0][i], places[1][i], places[2][i]].into()).collect(),
            used: router.top_k,
        }));
        Ok(())
    }

    /// The finished blueprint.
    ///
    /// # Errors
    /// If the file has a tensor that nobody asked for: a model computed without it would be another model.
    pub fn finish(self, model: Box<dyn Model>, context: usize) -> Result<Blueprint> {
        if let Some(unknown) = self.file.tensors.iter().find(|t| !self.declared.contains(t.name.as_str())) {
            return Err(Error::Unsupported(format!(
                "{}: tensor {} is not known for this architecture, and the model would be wrong without it",
                self.file.files[unknown.file.0].path.display(),
                quoted(&unknown.name)
            )));
        }
        let Builder { experts, buffers, weights, .. } = self;
        Ok(Blueprint { model, context, experts, buffers, weights })
    }

    fn push_matrix(&mut self, declared: Declared) -> Matrix {
        self.weights.push(declared);
        self.matrices += 1;
        Matrix(self.matrices - 1)
    }

    fn tensor(&self, name: &str) -> Result<&'a TensorInfo> {
        self.file.tensor(name).ok_or_else(|| self.error(format!("tensor {name} is missing")))
    }

    fn checked(&mut self, name: &str, shape: &[usize]) -> Result<&'a TensorInfo> {
        let tensor = self.tensor(name)?;
        self.declared.insert(&tensor.name);
        if tensor.shape != shape {
            let message = format!(
                "tensor {name} has shape {:?}, but the model's configuration says {shape:?}",
                tensor.shape
            );
            return Err(self.error(message));
        }
        if !tensor.dtype.is_computable() {
            let known: Vec<_> = DType::computable().map(DType::name).collect();
            return Err(self.cannot_compute(tensor, &known.join(", ")));
        }
        Ok(tensor)
    }

    fn cannot_compute(&self, tensor: &TensorInfo, instead: &str) -> Error {
        Error::Unsupported(format!(
            "{}: tensor {} has type {}, which cannot be computed; supported here: {instead}",
            self.file.files[tensor.file.0].path.display(),
            tensor.name,
            tensor.dtype
        ))
    }

    fn error(&self, message: String) -> Error {
        Error::format(self.file.path(), message)
    }
}
