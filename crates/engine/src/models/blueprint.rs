//! What a model is made of, before any weight is read.
//!
//! A family's `describe` declares matrices, vectors, buffers and experts and gets handles for them. Every
//! declaration is checked against the file at once, so a file that cannot be run is refused before the first
//! byte is loaded, and the memory plan is the sum of the declarations.

use std::collections::HashSet;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use forebay_kernels::quant::dequantise_row;
use forebay_kernels::{DType, Encoding};

use super::declared::{Declared, Planes, Prepared, elements};
use super::experts::{self, ExpertShape};
use super::names::{ExpertNames, Name};
use super::needs::{Discovery, Need, NeedKind};
use super::product::Product;
use super::{Model, keys};
use crate::backend::{Backend, Buf, BufShape, Device, HostMatrix, Matrix, Router, Vector, Weight};
use crate::error::{Error, Result};
use crate::experts::{ByteRange, ByteSource, ExpertLayer, PartShape};
use crate::format::{Format, ModelFile, Quoted, StoredWeight, TensorInfo, Value};
use crate::memory::{ALIGNMENT, Region};

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
    /// The ways in which matrices are stored, and the first tensor of each.
    encodings: Vec<(Encoding, String)>,
    /// A matrix that has a scale of its own, if there is one.
    scaled: Option<String>,
    /// Which of the weights are routers, in the order of the layers that have experts.
    routers: Vec<usize>,
}

impl Blueprint {
    /// Bytes of the dense weights.
    pub fn dense_bytes(&self) -> u64 {
        self.weights.iter().map(Declared::bytes).sum()
    }

    /// Sees to it that a device has a way to compute with every matrix.
    ///
    /// # Errors
    /// [`Error::Unsupported`], which names a tensor that it cannot compute with, and its type.
    pub fn check_device(&self, device: &dyn Device, file: &Path) -> Result<()> {
        if let Some(name) = &self.scaled {
            return Err(Error::Unsupported(format!(
                "{}: tensor {name} is multiplied by a scale of its own, which cannot be computed on the GPU; \
                 use Options::device = None",
                file.display()
            )));
        }
        match self.encodings.iter().find(|(encoding, _)| !device.computes(*encoding)) {
            None => Ok(()),
            Some((encoding, name)) => Err(Error::Unsupported(format!(
                "{}: tensor {name} has type {encoding}, which cannot be computed on the GPU; use Options::device = None",
                file.display()
            ))),
        }
    }

    /// Bytes of dense weights that one token reads: every matrix whole, of the embedding table one row. A table
    /// that is also the output matrix is read whole for that, besides its row.
    pub fn dense_bytes_per_token(&self) -> u64 {
        let output = self.model.head().output;
        let (vectors, matrices): (Vec<_>, Vec<_>) =
            self.weights.iter().partition(|w| matches!(w, Declared::Vector(..)));
        let read = matrices.into_iter().enumerate().map(|(i, w)| match w {
            Declared::Table(t) => {
                let row = w.bytes() / t.rows as u64;
                if Matrix(i) == output { w.bytes() + row } else { row }
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

    /// The products that a token takes part in: those of the dense part, and those of the experts.
    pub fn products(&self) -> (Vec<Product>, Vec<Product>) {
        let output = self.model.head().output;
        let matrices = self.weights.iter().filter_map(|w| match w {
            Declared::Matrix(m) => Some((m, w.bytes(), false)),
            Declared::Table(m) => Some((m, w.bytes(), true)),
            Declared::Vector(..) => None,
        });
        let mut dense = Vec::new();
        for (i, (m, bytes, table)) in matrices.enumerate() {
            if !table || Matrix(i) == output {
                let (encoding, rows, cols) = (m.encoding, m.rows, m.cols);
                let product = Product { encoding, rows, cols, together: 1, read: bytes, stored: bytes };
                product.join(&mut dense);
            }
        }
        let mut experts = Vec::new();
        for layer in self.experts.iter().flatten() {
            for &PartShape { encoding, rows, cols, .. } in &layer.parts {
                let bytes = encoding.plane_bytes(rows, cols).map_or(0, |planes| planes.iter().sum());
                let all = |count: usize| (bytes as u64).saturating_mul(count as u64);
                let (read, stored) = (all(layer.used), all(layer.experts.len()));
                let together = layer.used;
                Product { encoding, rows, cols, together, read, stored }.join(&mut experts);
            }
        }
        (dense, experts)
    }

    /// The lengths of the rows of routers, for a few layers and with the number of experts that a token uses there. Layers whose
    /// routers are not stored as plain numbers are left out.
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

    /// The scratch buffers for chunks of this many tokens.
    pub fn buffers(&self, chunk: usize) -> Vec<BufShape> {
        let shape = |b: &Scratch| BufShape { rows: b.rows.unwrap_or(chunk), width: b.width };
        self.buffers.iter().map(shape).collect()
    }

    /// Bytes of the scratch memory for chunks of this many tokens: the buffers, and quantised copies of what a product
    /// reads, each less than a third of the widest of them.
    pub fn scratch_bytes(&self, chunk: usize) -> u64 {
        let bytes = |b: &BufShape| (b.rows as u64).saturating_mul(b.width as u64).saturating_mul(4);
        let buffers = self.buffers(chunk);
        let widest = buffers.iter().map(bytes).max().unwrap_or(0);
        let copies = (widest / 3).saturating_mul(self.activation_blocks().max(1) as u64);
        buffers.iter().map(bytes).fold(copies, u64::saturating_add)
    }

    /// Of how many block lengths activations are quantised: each is a copy.
    fn activation_blocks(&self) -> usize {
        let dense = self.weights.iter().filter_map(|w| match w {
            Declared::Matrix(m) | Declared::Table(m) => Some(m.encoding),
            Declared::Vector(..) => None,
        });
        let experts = self.experts.iter().flatten().flat_map(|l| l.parts.map(|part| part.encoding));
        dense.chain(experts).filter_map(Encoding::activation_block).collect::<HashSet<_>>().len()
    }

    /// Reads the dense weights into one region and gives them to the backend. `progress` is told of each tensor's bytes.
    ///
    /// # Errors
    /// If reading fails or the backend refuses.
    pub fn load_dense(
        &self,
        source: &dyn ByteSource,
        backend: &mut dyn Backend,
        progress: &mut dyn FnMut(u64),
    ) -> Result<Arc<Region>> {
        let (places, end) = self.dense_places();
        let mut region = Region::new(end)?;
        for (range, place) in &places {
            source.read_exact_at(range.file, range.offset, &mut region[place.clone()])?;
            progress(range.len as u64);
        }
        let region = Arc::new(region);
        self.hand_over(&region, backend)?;
        Ok(region)
    }

    /// Gives a backend the dense weights, which have been read.
    pub fn hand_over(&self, region: &Arc<Region>, backend: &mut dyn Backend) -> Result<()> {
        let mut places = self.dense_places().0.into_iter().map(|(_, place)| place);
        let mut next = || places.next().expect("a place for every range");
        for declared in &self.weights {
            backend.load(match declared {
                Declared::Matrix(m) | Declared::Table(m) => Weight::Matrix(HostMatrix {
                    encoding: m.encoding,
                    rows: m.rows,
                    cols: m.cols,
                    planes: m.ranges.map(|range| region.share(range.map_or(0..0, |_| next()))),
                    scale: m.scale.map_or(1.0, |_| {
                        f32::from_le_bytes(region[next()].try_into().expect("a scale has four bytes"))
                    }),
                }),
                Declared::Vector(t, prepared) => {
                    let mut values = vec![0.0; t.elements() as usize];
                    dequantise_row(t.dtype, &region[next()], &mut values);
                    Weight::Vector(prepared.apply(values))
                }
            })?;
        }
        Ok(())
    }

    /// Where each range of the dense weights goes, and where the last one ends: everything lies in one region, so that huge pages are
    /// shared by small tensors.
    fn dense_places(&self) -> (Vec<(ByteRange, Range<usize>)>, usize) {
        let mut end = 0;
        let mut place = |range: ByteRange| {
            let start = end;
            end = (start + range.len).next_multiple_of(ALIGNMENT);
            (range, start..start + range.len)
        };
        let places = self.weights.iter().flat_map(Declared::ranges).map(&mut place).collect();
        (places, end)
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
    encodings: Vec<(Encoding, String)>,
    scaled: Option<String>,
    matrices: usize,
    vectors: usize,
    buffers: Vec<Scratch>,
    experts: Vec<Option<ExpertLayer>>,
    routers: Vec<usize>,
    /// Layers that tensors were asked for.
    layers: usize,
    /// The names of all tensors asked for.
    declared: HashSet<&'a str>,
    /// Set while it is being found out which tensors a file needs.
    discovery: Option<Discovery<'a>>,
}

impl<'a> Builder<'a> {
    /// A builder for a model in `file`.
    pub fn new(file: &'a ModelFile) -> Builder<'a> {
        Builder {
            file,
            weights: Vec::new(),
            encodings: Vec::new(),
            scaled: None,
            matrices: 0,
            vectors: 0,
            buffers: Vec::new(),
            experts: Vec::new(),
            routers: Vec::new(),
            layers: 0,
            declared: HashSet::new(),
            discovery: None,
        }
    }

    /// A builder that finds out which tensors `file` needs.
    pub(super) fn discovering(file: &'a ModelFile, discovery: Discovery<'a>) -> Builder<'a> {
        Builder { discovery: Some(discovery), ..Builder::new(file) }
    }

    pub(super) fn is_discovering(&self) -> bool {
        self.discovery.is_some()
    }

    /// The tensor that a discovering builder missed.
    pub(super) fn into_missing(self) -> Option<Need> {
        self.discovery.and_then(|discovery| discovery.missing)
    }

    /// The container, where a family's arithmetic depends on it.
    pub fn format(&self) -> Format {
        self.file.format
    }

    /// Whether the file has a tensor.
    pub fn has(&self, name: Name) -> bool {
        let name = name.in_format(self.format());
        self.file.tensor(&name).is_some() || self.discovery.as_ref().is_some_and(|d| (d.optional)(&name))
    }

    /// The first dimension of a matrix, where it is not in the configuration: a vocabulary.
    ///
    /// # Errors
    /// If the tensor is missing or not a matrix.
    pub fn rows_of(&self, name: Name) -> Result<usize> {
        if let Some(discovery) = &self.discovery {
            return Ok(discovery.vocabulary);
        }
        let name = name.in_format(self.format());
        let weight = self.find(&name)?.ok_or_else(|| self.is_missing(&name))?;
        match weight.shape[..] {
            [rows, _] => Ok(rows),
            ref shape => Err(self.error(format!("tensor {name} has shape {shape:?}, not that of a matrix"))),
        }
    }

    /// A dense weight matrix.
    ///
    /// # Errors
    /// If it is missing, has another shape, or a type that cannot be computed.
    pub fn matrix(&mut self, name: Name, rows: usize, cols: usize) -> Result<Matrix> {
        let planes = self.planes(name, rows, cols)?;
        Ok(self.push_matrix(Declared::Matrix(planes)))
    }

    /// The matrix that chooses among the experts of the layer that was declared last.
    ///
    /// # Errors
    /// As [`matrix`](Self::matrix).
    pub fn router(&mut self, name: Name, rows: usize, cols: usize) -> Result<Matrix> {
        self.routers.push(self.weights.len());
        self.matrix(name, rows, cols)
    }

    /// A matrix of which a token reads one row: the embeddings. It may be the output matrix, too.
    ///
    /// # Errors
    /// As [`matrix`](Self::matrix).
    pub fn table(&mut self, name: Name, rows: usize, cols: usize) -> Result<Matrix> {
        let planes = self.planes(name, rows, cols)?;
        Ok(self.push_matrix(Declared::Table(planes)))
    }

    /// Matrices of so many rows that are one tensor, each above the next.
    ///
    /// # Errors
    /// As [`matrix`](Self::matrix), or if they cannot be parted.
    pub fn matrix_in_parts<const N: usize>(
        &mut self,
        name: Name,
        rows: [usize; N],
        cols: usize,
    ) -> Result<[Matrix; N]> {
        let planes = self.planes(name, rows.iter().sum(), cols)?;
        let mut end = 0;
        let parts = rows.map(|rows| {
            end += rows;
            planes.part(end - rows..end)
        });
        if parts.iter().any(Option::is_none) {
            return Err(self.cannot_part(name));
        }
        Ok(parts.map(|part| self.push_matrix(Declared::Matrix(part.expect("none is missing")))))
    }

    /// `count` matrices of the same shape in one tensor, as one with all their rows.
    ///
    /// # Errors
    /// As [`matrix`](Self::matrix), or if they cannot be joined.
    pub fn matrices(&mut self, name: Name, count: usize, rows: usize, cols: usize) -> Result<Matrix> {
        self.count_layer(name);
        let weight = self.single_weight(&name.in_format(self.format()), &[count, rows, cols])?;
        let planes = Planes::of(&weight, count * rows, cols);
        // Each matrix must begin where one does that is cut out of the whole.
        if planes.part(rows..count * rows).is_none() {
            return Err(self.cannot_part(name));
        }
        Ok(self.push_matrix(Declared::Matrix(planes)))
    }

    fn cannot_part(&self, name: Name) -> Error {
        let name = name.in_format(self.format());
        self.error(format!("tensor {name}: its matrices share scales, so they cannot be parted"))
    }

    /// A vector of weights, kept in f32.
    ///
    /// # Errors
    /// If it is missing, has another length, or is not of a float type.
    pub fn vector(&mut self, name: Name, len: usize) -> Result<Vector> {
        self.prepared(name, &[len], Prepared::Plainly)
    }

    /// A vector of weights, each of which becomes what a function makes of it.
    ///
    /// # Errors
    /// As [`vector`](Self::vector).
    pub fn vector_of(&mut self, name: Name, len: usize, function: fn(f32) -> f32) -> Result<Vector> {
        self.prepared(name, &[len], Prepared::By(function))
    }

    /// The weights of a convolution of each channel by itself: `[kernel, channels]`, which files have transposed.
    ///
    /// # Errors
    /// As [`vector`](Self::vector).
    pub fn filters(&mut self, name: Name, channels: usize, kernel: usize) -> Result<Vector> {
        let shape: &[usize] = match self.format() {
            Format::Gguf => &[channels, kernel],
            Format::HuggingFace => &[channels, 1, kernel],
            Format::Mlx => &[channels, kernel, 1],
        };
        self.prepared(name, shape, Prepared::Transposed(kernel))
    }

    /// Weights of a tensor of this shape, in their order.
    ///
    /// # Errors
    /// As [`vector`](Self::vector).
    pub fn flat(&mut self, name: Name, shape: &[usize]) -> Result<Vector> {
        self.prepared(name, shape, Prepared::Plainly)
    }

    /// Every other of the weights of a tensor of this shape, from the first or the second on.
    ///
    /// # Errors
    /// As [`vector`](Self::vector).
    pub fn every_other(&mut self, name: Name, shape: &[usize], first: usize) -> Result<Vector> {
        self.prepared(name, shape, Prepared::EveryOther(first))
    }

    /// Vectors of so many weights that are one tensor, one after the other.
    ///
    /// # Errors
    /// As [`vector`](Self::vector).
    pub fn vector_in_parts<const N: usize>(&mut self, name: Name, lens: [usize; N]) -> Result<[Vector; N]> {
        let tensor = self.floats(name, &[lens.iter().sum()])?;
        let mut end = 0;
        Ok(lens.map(|len| {
            end += len;
            self.push_vector(Declared::Vector(elements(tensor, end - len, len), Prepared::Plainly))
        }))
    }

    fn prepared(&mut self, name: Name, shape: &[usize], prepared: Prepared) -> Result<Vector> {
        let tensor = self.floats(name, shape)?;
        Ok(self.push_vector(Declared::Vector(tensor.clone(), prepared)))
    }

    /// A tensor of plain numbers.
    fn floats(&mut self, name: Name, shape: &[usize]) -> Result<&'a TensorInfo> {
        self.count_layer(name);
        let weight = self.stored(&name.in_format(self.format()), shape, NeedKind::Vector)?;
        let tensor = weight.planes[0].expect("a weight has codes");
        match tensor.dtype.is_float() {
            true => Ok(tensor),
            false => Err(self.cannot_compute(tensor, "F32, F16, BF16")),
        }
    }

    fn push_vector(&mut self, declared: Declared) -> Vector {
        self.weights.push(declared);
        self.vectors += 1;
        Vector(self.vectors - 1)
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

    /// The routed experts of the next layer, `inner` channels wide inside; and what multiplies the weights of each
    /// expert's gate, up and down, where a file has such scales.
    ///
    /// # Errors
    /// If a tensor is missing, has another shape, or a type that cannot be computed.
    pub fn experts(
        &mut self,
        names: &ExpertNames,
        router: &Router,
        hidden: usize,
        inner: usize,
    ) -> Result<[Option<Vector>; 3]> {
        let count = router.experts;
        if count > MAX_EXPERTS {
            return Err(self.error(format!("{count} experts in a layer are more than {MAX_EXPERTS}")));
        }
        let shape = ExpertShape { experts: count, used: router.top_k, hidden, inner };
        let (layer, scales) = experts::find(self, self.experts.len(), names, shape)?;
        self.experts.push(Some(layer));
        Ok(scales)
    }

    /// The scales of a weight that is a stack of matrices, one for each, if it has any.
    ///
    /// # Errors
    /// If they are not one number for each matrix.
    pub(super) fn scales_of(&mut self, weight: &StoredWeight<'a>) -> Result<Option<Vector>> {
        let Some(scale) = weight.scale else { return Ok(None) };
        self.check_scale(scale, weight.shape[0])?;
        Ok(Some(self.push_vector(Declared::Vector(scale.clone(), Prepared::Plainly))))
    }

    /// The next layer has no routed experts.
    pub fn no_experts(&mut self) {
        self.experts.push(None);
    }

    /// The finished blueprint.
    ///
    /// # Errors
    /// If the file has a tensor that nobody asked for: a model computed without it would be another model.
    pub fn finish(self, model: Box<dyn Model>, context: usize) -> Result<Blueprint> {
        let unknown = self.file.tensors.iter().filter(|t| !self.declared.contains(t.name.as_str()));
        let mut beyond = 0;
        for tensor in unknown {
            if self.is_beyond(&tensor.name) {
                beyond += 1;
                continue;
            }
            return Err(Error::Unsupported(format!(
                "{}: tensor {} is not known for this architecture, and the model would be wrong without it",
                self.file.files[tensor.file.0].path.display(),
                Quoted(&tensor.name)
            )));
        }
        if beyond > 0 {
            let path = self.file.path().display();
            tracing::info!("{path}: {beyond} tensors are not of the text model and are skipped");
        }
        let Builder { experts, buffers, weights, encodings, scaled, routers, .. } = self;
        Ok(Blueprint { model, context, experts, buffers, weights, encodings, scaled, routers })
    }

    /// Whether a tensor belongs to something other than the text model: to layers that predict further
    /// tokens, to what sees and hears, or to tables that follow from the settings.
    fn is_beyond(&self, name: &str) -> bool {
        if self.format() == Format::Gguf {
            return name.strip_prefix("blk.").is_some_and(|rest| self.is_in_extra_layer(rest));
        }
        const OTHERS: [&str; 7] = [
            "mtp.",
            "visual.",
            "model.visual.",
            "vision_tower.",
            "model.vision_tower.",
            "multi_modal_projector.",
            "model.multi_modal_projector.",
        ];
        let name = name.strip_prefix("language_model.").unwrap_or(name);
        if OTHERS.iter().any(|prefix| name.starts_with(prefix)) || name.ends_with(".rotary_emb.inv_freq") {
            return true;
        }
        let layer =
            name.strip_prefix("model.layers.").or_else(|| name.strip_prefix("model.language_model.layers."));
        layer.is_some_and(|rest| self.is_in_extra_layer(rest))
    }

    /// Whether a tensor, whose name begins with its layer's number here, is of a layer that predicts further tokens.
    fn is_in_extra_layer(&self, name: &str) -> bool {
        let layer = name.split('.').next().and_then(|number| number.parse::<usize>().ok());
        let extra =
            self.file.setting(&keys::EXTRA_LAYERS).and_then(|(_, value)| Value::as_u64(value)).unwrap_or(0);
        layer.is_some_and(|l| l >= self.layers && ((l - self.layers) as u64) < extra)
    }

    fn push_matrix(&mut self, declared: Declared) -> Matrix {
        self.weights.push(declared);
        self.matrices += 1;
        Matrix(self.matrices - 1)
    }

    fn planes(&mut self, name: Name, rows: usize, cols: usize) -> Result<Planes> {
        self.count_layer(name);
        let name = name.in_format(self.format());
        let shape = [rows, cols];
        // A matrix of one row may be stored as a vector.
        let from = usize::from(rows == 1 && self.find(&name)?.is_some_and(|w| w.shape.len() == 1));
        let weight = self.single_weight(&name, &shape[from..])?;
        Ok(Planes::of(&weight, rows, cols))
    }

    /// A weight with at most one scale.
    fn single_weight(&mut self, name: &str, shape: &[usize]) -> Result<StoredWeight<'a>> {
        let weight = self.weight(name, shape)?;
        weight.scale.map_or(Ok(()), |scale| self.check_scale(scale, 1))?;
        Ok(weight)
    }

    /// Refuses scales of a weight that are not so many numbers of type F32.
    fn check_scale(&self, scale: &TensorInfo, count: usize) -> Result<()> {
        if scale.dtype == DType::F32 && scale.elements() == count as u64 {
            return Ok(());
        }
        Err(self.error(format!(
            "tensor {} has type {} and shape {:?}, but the weight it belongs to needs {count} of type F32",
            scale.name, scale.dtype, scale.shape
        )))
    }

    fn count_layer(&mut self, name: Name) {
        self.layers = self.layers.max(name.layer.map_or(0, |layer| layer + 1));
    }

    /// The weight of that name, if there is one.
    pub(super) fn find(&self, name: &str) -> Result<Option<StoredWeight<'a>>> {
        self.file.weight(name)
    }

    /// A matrix, or several in one tensor, of this shape that can be computed, and that is now asked for.
    pub(super) fn weight(&mut self, name: &str, shape: &[usize]) -> Result<StoredWeight<'a>> {
        let weight = self.stored(name, shape, NeedKind::Matrix)?;
        if !self.encodings.iter().any(|(known, _)| *known == weight.encoding) {
            self.encodings.push((weight.encoding, name.to_owned()));
        }
        if weight.scale.is_some() {
            self.scaled.get_or_insert_with(|| name.to_owned());
        }
        let companions = [weight.scale, weight.input_scale];
        self.declared.extend(companions.iter().flatten().map(|tensor| tensor.name.as_str()));
        Ok(weight)
    }

    fn stored(&mut self, name: &str, shape: &[usize], kind: NeedKind) -> Result<StoredWeight<'a>> {
        let Some(weight) = self.find(name)? else { return Err(self.miss(name, shape, kind)) };
        self.declared.extend(weight.planes.iter().flatten().map(|plane| plane.name.as_str()));
        if weight.shape != shape {
            let message = format!(
                "tensor {name} has shape {:?}, but the model's configuration says {shape:?}",
                weight.shape
            );
            return Err(self.error(message));
        }
        if !weight.encoding.is_computable() {
            let known: Vec<_> = DType::computable().map(DType::name).collect();
            let tensor = weight.planes[0].expect("a weight has codes");
            return Err(self.cannot_compute(tensor, &known.join(", ")));
        }
        Ok(weight)
    }

    /// Says that a tensor is missing, and notes it where that is being found out.
    pub(super) fn miss(&mut self, name: &str, shape: &[usize], kind: NeedKind) -> Error {
        if let Some(discovery) = &mut self.discovery {
            let need = || Need { name: name.to_owned(), shape: shape.to_vec(), kind };
            discovery.missing.get_or_insert_with(need);
        }
        self.is_missing(name)
    }

    fn is_missing(&self, name: &str) -> Error {
        self.error(format!("tensor {name} is missing"))
    }

    fn cannot_compute(&self, tensor: &TensorInfo, instead: &str) -> Error {
        Error::Unsupported(format!(
            "{}: tensor {} has type {}, which cannot be computed; use a file with one of these: {instead}",
            self.file.files[tensor.file.0].path.display(),
            tensor.name,
            tensor.dtype
        ))
    }

    pub(super) fn error(&self, message: String) -> Error {
        Error::format(self.file.path(), message)
    }
}
