//! A blueprint: everything that a model needs, known before any weight is read.
//!
//! A family's `describe` declares matrices, vectors, buffers and experts to a [`Builder`](super::Builder) and gets handles
//! for them. Each declaration is checked against the file, so a file that cannot be run is refused before its weights are
//! read, and the memory plan is the sum of the declarations.

use std::collections::HashSet;
use std::path::Path;

use forebay_kernels::Encoding;
use forebay_kernels::quant::dequantise_row;

use super::declared::{Declared, Planes};
use super::product::Product;
use super::{Model, Span};
use crate::backend::{BufShape, Matrix, StateShape};
use crate::error::{Error, Result};
use crate::experts::{ByteSource, Device, ExpertLayer, PartShape};

/// Everything that a model needs.
pub struct Blueprint {
    /// The model's forward pass.
    pub model: Box<dyn Model>,
    /// The longest context that the model was trained for.
    pub context: usize,
    /// The layers that are here.
    pub span: Span,
    /// The experts of each layer; `None` for layers without experts, and for those of other stages.
    pub experts: Vec<Option<ExpertLayer>>,
    pub(super) buffers: Vec<Scratch>,
    pub(super) weights: Vec<Declared>,
    /// The encodings in use, each with the first tensor that has it.
    pub(super) encodings: Vec<(Encoding, String)>,
    /// The first feature that no device has, if there is one.
    pub(super) host_only: Option<String>,
    /// The indices of the routers among the weights, in the order of the layers that have experts.
    pub(super) routers: Vec<usize>,
    /// The index of the first weight of each layer.
    pub(super) starts: Vec<usize>,
}

impl Blueprint {
    /// Bytes of the dense weights.
    pub fn dense_bytes(&self) -> u64 {
        self.weights.iter().map(Declared::bytes).sum()
    }

    /// Checks that a device can compute with all matrices of the model, and the attention of all layers.
    ///
    /// # Errors
    /// [`Error::Unsupported`], with the first tensor that the device cannot compute with, and its type, or with the
    /// heads that are too large for it.
    pub fn check_device(&self, device: &dyn Device, file: &Path) -> Result<()> {
        if let Some(feature) = &self.host_only {
            return Err(Error::Unsupported(format!(
                "{}: {feature}, which the GPU backend does not support; use Options::device = None",
                file.display()
            )));
        }
        for shape in self.model.state().into_iter().flatten() {
            if let StateShape::Attention(kv) = shape
                && !device.attends(&kv)
            {
                return Err(Error::Unsupported(format!(
                    "{}: keys have {} channels and values {}, which are too many for the GPU backend; \
                     use Options::device = None",
                    file.display(),
                    kv.key_dim,
                    kv.value_dim
                )));
            }
        }
        match self.encodings.iter().find(|(encoding, _)| !device.computes(*encoding)) {
            None => Ok(()),
            Some((encoding, name)) => Err(Error::Unsupported(format!(
                "{}: tensor {name} has type {encoding}, which the GPU backend does not support; use Options::device = None",
                file.display()
            ))),
        }
    }

    /// Bytes of dense weights that one token reads: all matrices whole, but one row of the embedding table. A table
    /// that is also the output matrix counts whole, plus the row.
    pub fn dense_bytes_per_token(&self) -> u64 {
        let output = self.model.head().map(|head| head.output);
        let (vectors, matrices): (Vec<_>, Vec<_>) =
            self.weights.iter().partition(|w| !matches!(w, Declared::Matrix(_) | Declared::Table(_)));
        let read = matrices.into_iter().enumerate().map(|(i, w)| match w {
            Declared::Table(t) => {
                let row = w.bytes() / t.rows as u64;
                if Some(Matrix(i)) == output { w.bytes() + row } else { row }
            }
            other => other.bytes(),
        });
        read.chain(vectors.into_iter().map(Declared::bytes)).sum()
    }

    /// Bytes of routed experts that one token reads.
    pub fn expert_bytes_per_token(&self) -> u64 {
        self.experts.iter().flatten().map(|l| l.expert_bytes() * l.used as u64).sum()
    }

    /// Bytes of all routed experts.
    pub fn expert_bytes(&self) -> u64 {
        self.experts.iter().flatten().map(|l| l.expert_bytes() * l.experts.len() as u64).sum()
    }

    /// The matrix products of a token: those of the dense weights, and those of the experts.
    pub fn products(&self) -> (Vec<Product>, Vec<Product>) {
        let output = self.model.head().map(|head| head.output);
        let matrices = self.weights.iter().filter_map(|w| match w {
            Declared::Matrix(m) => Some((m, w.bytes(), false)),
            Declared::Table(m) => Some((m, w.bytes(), true)),
            _ => None,
        });
        let mut dense = Vec::new();
        for (i, (m, bytes, table)) in matrices.enumerate() {
            if !table || Some(Matrix(i)) == output {
                let (encoding, rows, cols) = (m.encoding, m.rows, m.cols);
                let product = Product { encoding, rows, cols, together: 1, read: bytes, stored: bytes };
                product.join(&mut dense);
            }
        }
        let mut experts = Vec::new();
        for layer in self.experts.iter().flatten() {
            for &PartShape { encoding, rows, cols, .. } in layer.matrices() {
                let bytes = encoding.plane_bytes(rows, cols).map_or(0, |planes| planes.iter().sum());
                let all = |count: usize| (bytes as u64).saturating_mul(count as u64);
                let (read, stored) = (all(layer.used), all(layer.experts.len()));
                let together = layer.used;
                Product { encoding, rows, cols, together, read, stored }.join(&mut experts);
            }
        }
        (dense, experts)
    }

    /// The lengths of the rows of the first `layers` routers, each with the number of experts that a token uses in
    /// its layer. Skips routers that are not stored as floats.
    ///
    /// # Errors
    /// If reading fails.
    pub fn router_lengths(&self, source: &dyn ByteSource, layers: usize) -> Result<Vec<(Vec<f32>, usize)>> {
        let mut lengths = Vec::new();
        let routed: Vec<_> = self.routers.iter().zip(self.experts.iter().flatten()).collect();
        for (router, layer) in routed.iter().copied().step_by(routed.len().div_ceil(layers).max(1)) {
            let Declared::Matrix(Planes {
                encoding: Encoding::Blocks(dtype), cols, ranges, scale: None, ..
            }) = self.weights[*router]
            else {
                continue;
            };
            let Some(range) = ranges[0] else { continue };
            let mut bytes = vec![0; range.len];
            source.read_exact_at(range.file, range.offset, &mut bytes)?;
            let mut row = vec![0.0f32; cols];
            let mut length = |bytes: &[u8]| {
                dequantise_row(dtype, bytes, &mut row);
                row.iter().map(|x| x * x).sum::<f32>().sqrt()
            };
            let row_bytes = bytes.len() / layer.experts.len();
            lengths.push((bytes.chunks_exact(row_bytes).map(&mut length).collect(), layer.used));
        }
        Ok(lengths)
    }

    /// The scratch buffers for chunks of `chunk` tokens.
    pub fn buffers(&self, chunk: usize) -> Vec<BufShape> {
        let shape = |b: &Scratch| BufShape { rows: b.rows.unwrap_or(chunk), width: b.width };
        self.buffers.iter().map(shape).collect()
    }

    /// Bytes of scratch memory for chunks of `chunk` tokens: the buffers, and quantised copies of products' inputs.
    /// Each copy is smaller than a third of the widest buffer.
    pub fn scratch_bytes(&self, chunk: usize) -> u64 {
        let bytes = |b: &BufShape| (b.rows as u64).saturating_mul(b.width as u64).saturating_mul(4);
        let buffers = self.buffers(chunk);
        let widest = buffers.iter().map(bytes).max().unwrap_or(0);
        let copies = (widest / 3).saturating_mul(self.activation_blocks().max(1) as u64);
        buffers.iter().map(bytes).fold(copies, u64::saturating_add)
    }

    /// The number of block lengths in which activations are quantised; each needs a copy.
    fn activation_blocks(&self) -> usize {
        let dense = self.weights.iter().filter_map(|w| match w {
            Declared::Matrix(m) | Declared::Table(m) => Some(m.encoding),
            _ => None,
        });
        let experts = self.experts.iter().flatten().flat_map(|l| l.matrices().map(|matrix| matrix.encoding));
        dense.chain(experts).filter_map(Encoding::activation_block).collect::<HashSet<_>>().len()
    }
}

/// A declared buffer.
pub(super) struct Scratch {
    /// The number of rows; `None` for as many as a chunk has tokens.
    pub rows: Option<usize>,
    pub width: usize,
}
