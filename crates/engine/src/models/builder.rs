//! Receives what a family's `describe` declares, and checks each declaration against the file.

use std::collections::HashSet;
use std::ops::Range;

use forebay_kernels::{DType, Encoding};

use super::blueprint::{Blueprint, Scratch};
use super::declared::{Declared, Planes, Prepared, elements};
use super::experts::{self, ExpertShape};
use super::names::Name;
use super::needs::{Discovery, Need, NeedKind};
use super::parts::TextModel;
use super::{Model, Span, keys};
use crate::backend::{Buf, BufShape, Matrix, Parts, Vector};
use crate::error::{Error, Result};
use crate::experts::ExpertLayer;
use crate::format::{Format, Key, ModelFile, Quoted, StoredWeight, TensorInfo, Value, known_name};

/// The most experts in a layer. No real model has more; the limit keeps lists of experts small for hostile files.
const MAX_EXPERTS: usize = 1 << 16;

/// The handle of a weight that another stage has. Using it panics.
const ELSEWHERE: usize = usize::MAX;

/// Receives a family's declarations.
pub struct Builder<'a> {
    file: &'a ModelFile,
    weights: Vec<Declared>,
    encodings: Vec<(Encoding, String)>,
    host_only: Option<String>,
    matrices: usize,
    vectors: usize,
    buffers: Vec<Scratch>,
    experts: Vec<Option<ExpertLayer>>,
    routers: Vec<usize>,
    /// The number of layers that the model has used tensors of.
    layers: usize,
    /// The layers that were asked for; `None` for all.
    asked: Option<Range<usize>>,
    /// The layers that are loaded, once the model has said how many it has.
    span: Option<Span>,
    /// Whether the weights that are declared now are loaded. Those of other stages are only checked.
    keeps: bool,
    /// The index of the first weight of each layer.
    starts: Vec<usize>,
    /// The longest context that the family supports, if it is less than the model's.
    longest: usize,
    /// The names of all declared tensors.
    declared: HashSet<&'a str>,
    /// Set while finding out which tensors a file needs.
    discovery: Option<Discovery<'a>>,
}

impl<'a> Builder<'a> {
    /// A builder for a model in `file`.
    pub fn new(file: &'a ModelFile) -> Builder<'a> {
        Builder {
            file,
            weights: Vec::new(),
            encodings: Vec::new(),
            host_only: None,
            matrices: 0,
            vectors: 0,
            buffers: Vec::new(),
            experts: Vec::new(),
            routers: Vec::new(),
            layers: 0,
            asked: None,
            span: None,
            keeps: true,
            starts: Vec::new(),
            longest: usize::MAX,
            declared: HashSet::new(),
            discovery: None,
        }
    }

    /// A builder for some layers of a model.
    pub(super) fn for_layers(file: &'a ModelFile, asked: Option<Range<usize>>) -> Builder<'a> {
        Builder { asked, ..Builder::new(file) }
    }

    /// A builder that finds out which tensors `file` needs.
    pub(super) fn discovering(file: &'a ModelFile, discovery: Discovery<'a>) -> Builder<'a> {
        Builder { discovery: Some(discovery), ..Builder::new(file) }
    }

    pub(super) fn is_discovering(&self) -> bool {
        self.discovery.is_some()
    }

    /// The tensor that a discovering builder did not find.
    pub(super) fn into_missing(self) -> Option<Need> {
        self.discovery.and_then(|discovery| discovery.missing)
    }

    /// The layers to load, of this many. A family calls it before it declares any weight.
    ///
    /// # Errors
    /// If the caller asked for layers that do not exist.
    pub fn span_of(&mut self, layers: usize) -> Result<Span> {
        let span = Span::of(self.asked.as_ref(), layers)?;
        self.span = Some(span);
        Ok(span)
    }

    /// Whether the following weights are loaded, or only checked because another stage has them. The handle of a weight
    /// that is not loaded must not be used.
    pub fn keep(&mut self, keeps: bool) {
        self.keeps = keeps;
    }

    /// The following weights belong to the next layer.
    pub fn begin_layer(&mut self) {
        let layer = self.starts.len();
        self.keeps = self.span.is_none_or(|span| span.contains(layer));
        self.starts.push(self.weights.len());
    }

    /// The file format; some families compute differently depending on it.
    pub fn format(&self) -> Format {
        self.file.format
    }

    /// A list of this many positive numbers in the settings.
    ///
    /// # Errors
    /// If it is missing, has another length or other numbers.
    pub fn numbers(&self, key: Key, count: usize) -> Result<Vec<f64>> {
        let list = self.file.setting(&key).and_then(|(_, value)| value.as_numbers());
        let numbers: Option<Vec<f64>> =
            list.and_then(|list| list.iter().map(|number| number.as_f64()).collect());
        numbers.filter(|n| n.len() == count && n.iter().all(|n| n.is_finite() && *n > 0.0)).ok_or_else(|| {
            let name = self.file.setting_name(&key);
            Error::format(
                &self.file.settings_path(),
                format!("{name} is not a list of {count} positive numbers"),
            )
        })
    }

    /// Whether the file has this tensor.
    pub fn has(&self, name: Name) -> bool {
        let name = name.in_format(self.format());
        self.file.tensor(&name).is_some() || self.imagines(&name)
    }

    /// Whether needed tensors are being discovered, and this optional one should exist.
    pub(super) fn imagines(&self, name: &str) -> bool {
        self.discovery.as_ref().is_some_and(|d| (d.optional)(name))
    }

    /// Declares a tensor that nothing reads, if the file has it.
    pub fn ignore(&mut self, name: Name) {
        let tensor = self.file.tensor(&name.in_format(self.format()));
        self.declared.extend(tensor.map(|tensor| tensor.name.as_str()));
    }

    /// The number of rows of a matrix if the configuration does not have it, such as the vocabulary size.
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

    /// The rows of a matrix, or `by_default` while needed tensors are being discovered.
    ///
    /// # Errors
    /// As [`rows_of`](Self::rows_of).
    pub fn rows_or(&self, name: Name, by_default: usize) -> Result<usize> {
        if self.is_discovering() { Ok(by_default) } else { self.rows_of(name) }
    }

    /// Declares a dense weight matrix.
    ///
    /// # Errors
    /// If it is missing, or its shape or type is not supported.
    pub fn matrix(&mut self, name: Name, rows: usize, cols: usize) -> Result<Matrix> {
        let planes = self.planes(name, rows, cols)?;
        Ok(self.push_matrix(Declared::Matrix(planes)))
    }

    /// Declares the router of the layer with the experts declared last.
    ///
    /// # Errors
    /// Those of [`matrix`](Self::matrix).
    pub fn router(&mut self, name: Name, rows: usize, cols: usize) -> Result<Matrix> {
        if self.keeps {
            self.routers.push(self.weights.len());
        }
        self.matrix(name, rows, cols)
    }

    /// Declares a matrix of which each token reads one row: the embeddings. It may also be the output matrix.
    ///
    /// # Errors
    /// Those of [`matrix`](Self::matrix).
    pub fn table(&mut self, name: Name, rows: usize, cols: usize) -> Result<Matrix> {
        let planes = self.planes(name, rows, cols)?;
        Ok(self.push_matrix(Declared::Table(planes)))
    }

    /// Declares several matrices with these numbers of rows that are stored in one tensor, one after another.
    ///
    /// # Errors
    /// Those of [`matrix`](Self::matrix), or if the tensor cannot be split.
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
        Ok(parts.map(|part| self.push_matrix(Declared::Matrix(part.expect("all were checked")))))
    }

    /// Declares `count` matrices of the same shape that are stored in one tensor, as one matrix with all their rows.
    ///
    /// # Errors
    /// Those of [`matrix`](Self::matrix), or if they cannot be joined.
    pub fn matrices(&mut self, name: Name, count: usize, rows: usize, cols: usize) -> Result<Matrix> {
        self.count_layer(name);
        let weight = self.single_weight(&name.in_format(self.format()), &[count, rows, cols])?;
        let planes = Planes::of(&weight, count * rows, cols);
        // Each matrix must start where the whole can be split.
        if planes.part(rows..count * rows).is_none() {
            return Err(self.cannot_part(name));
        }
        Ok(self.push_matrix(Declared::Matrix(planes)))
    }

    fn cannot_part(&self, name: Name) -> Error {
        let name = name.in_format(self.format());
        self.error(format!("tensor {name}: its matrices share scales, so they cannot be split"))
    }

    /// Declares a vector of weights, loaded as f32.
    ///
    /// # Errors
    /// If it is missing, has another length, or is not of a float type.
    pub fn vector(&mut self, name: Name, len: usize) -> Result<Vector> {
        self.prepared(name, &[len], Prepared::Unchanged)
    }

    /// Declares a vector of weights to which `function` is applied.
    ///
    /// # Errors
    /// Those of [`vector`](Self::vector).
    pub fn vector_of(&mut self, name: Name, len: usize, function: fn(f32) -> f32) -> Result<Vector> {
        self.prepared(name, &[len], Prepared::By(function))
    }

    /// Declares a vector of weights that are multiplied by `factor`.
    ///
    /// # Errors
    /// Those of [`vector`](Self::vector).
    pub fn vector_times(&mut self, name: Name, len: usize, factor: f32) -> Result<Vector> {
        self.prepared(name, &[len], Prepared::Times(factor))
    }

    /// Declares a vector with the same number `len` times.
    pub fn constant(&mut self, value: f32, len: usize) -> Vector {
        self.push_vector(Declared::Constant(value, len))
    }

    /// Declares a vector with the reciprocal of the length of each column of a matrix.
    pub fn inverse_column_lengths(&mut self, matrix: Matrix) -> Vector {
        let is_matrix = |w: &&Declared| matches!(w, Declared::Matrix(_) | Declared::Table(_));
        let found = self.weights.iter().filter(is_matrix).nth(matrix.index());
        match found {
            Some(&(Declared::Matrix(planes) | Declared::Table(planes))) => {
                self.push_vector(Declared::InverseColumnLengths(planes))
            }
            // It belongs to another stage, and so does the vector.
            _ => Vector(ELSEWHERE),
        }
    }

    /// Declares the weights of a depthwise convolution: `[kernel, channels]`, which files store transposed.
    ///
    /// # Errors
    /// Those of [`vector`](Self::vector).
    pub fn filters(&mut self, name: Name, channels: usize, kernel: usize) -> Result<Vector> {
        let shape: &[usize] = match self.format() {
            Format::Gguf => &[channels, kernel],
            Format::HuggingFace => &[channels, 1, kernel],
            Format::Mlx => &[channels, kernel, 1],
        };
        self.prepared(name, shape, Prepared::Transposed(kernel))
    }

    /// Declares a tensor of this shape as one vector.
    ///
    /// # Errors
    /// Those of [`vector`](Self::vector).
    pub fn flat(&mut self, name: Name, shape: &[usize]) -> Result<Vector> {
        self.prepared(name, shape, Prepared::Unchanged)
    }

    /// Declares every other weight of a tensor of this shape, starting at weight `first`, which is 0 or 1.
    ///
    /// # Errors
    /// Those of [`vector`](Self::vector).
    pub fn every_other(&mut self, name: Name, shape: &[usize], first: usize) -> Result<Vector> {
        self.prepared(name, shape, Prepared::EveryOther(first))
    }

    /// Declares vectors of these lengths that are stored in one tensor, one after another.
    ///
    /// # Errors
    /// Those of [`vector`](Self::vector).
    pub fn vector_in_parts<const N: usize>(&mut self, name: Name, lens: [usize; N]) -> Result<[Vector; N]> {
        let tensor = self.floats(name, &[lens.iter().sum()])?;
        let mut end = 0;
        Ok(lens.map(|len| {
            end += len;
            self.push_vector(Declared::Vector(elements(tensor, end - len, len), Prepared::Unchanged))
        }))
    }

    /// Declares the first `len` of a vector of `stored` weights.
    ///
    /// # Errors
    /// Those of [`vector`](Self::vector).
    pub fn vector_start(&mut self, name: Name, stored: usize, len: usize) -> Result<Vector> {
        let tensor = self.floats(name, &[stored])?;
        Ok(self.push_vector(Declared::Vector(elements(tensor, 0, len), Prepared::Unchanged)))
    }

    fn prepared(&mut self, name: Name, shape: &[usize], prepared: Prepared) -> Result<Vector> {
        let tensor = self.floats(name, shape)?;
        Ok(self.push_vector(Declared::Vector(tensor.clone(), prepared)))
    }

    /// A tensor of floats.
    fn floats(&mut self, name: Name, shape: &[usize]) -> Result<&'a TensorInfo> {
        self.count_layer(name);
        let name = name.in_format(self.format());
        // A vector may be stored as a matrix with one row.
        let row = [1, shape[0]];
        let is_row = shape.len() == 1 && self.find(&name)?.is_some_and(|weight| weight.shape == row);
        let weight = self.stored(&name, if is_row { &row } else { shape }, NeedKind::Vector)?;
        let tensor = weight.planes[0].expect("a weight has codes");
        match tensor.dtype.is_float() {
            true => Ok(tensor),
            false => Err(self.cannot_compute(tensor, "F32, F16, BF16")),
        }
    }

    fn push_vector(&mut self, declared: Declared) -> Vector {
        if !self.keeps {
            return Vector(ELSEWHERE);
        }
        self.weights.push(declared);
        self.vectors += 1;
        Vector(self.vectors - 1)
    }

    /// Declares a scratch buffer of `width` floats for each token of a batch.
    pub fn buffer(&mut self, width: usize) -> Buf {
        self.declare(Scratch { rows: None, width })
    }

    /// Declares a scratch buffer of this shape.
    pub fn buffer_of(&mut self, shape: BufShape) -> Buf {
        self.declare(Scratch { rows: Some(shape.rows), width: shape.width })
    }

    fn declare(&mut self, scratch: Scratch) -> Buf {
        let width = scratch.width;
        self.buffers.push(scratch);
        Buf { id: self.buffers.len() - 1, width }
    }

    /// Declares the routed experts of the next layer. Returns the scales of each expert's matrices, if the file has such
    /// scales.
    ///
    /// # Errors
    /// If a tensor is missing, has another shape, or a type that cannot be computed.
    pub fn experts(&mut self, shape: &ExpertShape) -> Result<Parts<Option<Vector>>> {
        let count = shape.block.count;
        if count > MAX_EXPERTS {
            return Err(
                self.error(format!("a layer has {count} experts, more than the limit of {MAX_EXPERTS}"))
            );
        }
        let (layer, scales) = experts::find(self, self.experts.len(), shape)?;
        self.experts.push(self.keeps.then_some(layer));
        Ok(scales)
    }

    /// The scales of a stack of matrices, one for each, if it has any.
    ///
    /// # Errors
    /// If there is not one scale for each matrix.
    pub(super) fn scales_of(&mut self, weight: &StoredWeight<'a>) -> Result<Option<Vector>> {
        let Some(scale) = weight.scale else { return Ok(None) };
        self.check_scale(scale, weight.shape[0])?;
        Ok(Some(self.push_vector(Declared::Vector(scale.clone(), Prepared::Unchanged))))
    }

    /// Declares that the next layer has no routed experts.
    pub fn no_experts(&mut self) {
        self.experts.push(None);
    }

    /// Limits the context to what the family supports.
    pub fn limit_context(&mut self, longest: usize) {
        self.longest = self.longest.min(longest);
    }

    /// The finished blueprint.
    ///
    /// # Errors
    /// If the file has a tensor that the family did not declare: ignoring it would compute another model.
    pub fn finish(self, model: Box<dyn Model>, context: usize) -> Result<Blueprint> {
        let text_model = TextModel::of(self.file, &self.declared);
        let unknown = self.file.tensors.iter().filter(|t| !self.declared.contains(t.name.as_str()));
        let mut beyond = 0;
        for tensor in unknown {
            if self.is_beyond(&text_model, &tensor.name) {
                beyond += 1;
                continue;
            }
            return Err(Error::Unsupported(format!(
                "{}: tensor {} is unknown in this architecture; a result without it would be wrong, so the model is refused",
                self.file.files[tensor.file.0].path.display(),
                Quoted(&tensor.name)
            )));
        }
        if beyond > 0 {
            let path = self.file.path().display();
            tracing::info!("{path}: skips {beyond} tensors that do not belong to the text model");
        }
        let Builder {
            experts, buffers, weights, encodings, host_only, routers, span, starts, longest, ..
        } = self;
        let span = span.expect("every family asks for its layers");
        let context = context.min(longest);
        Ok(Blueprint {
            model,
            context,
            span,
            experts,
            buffers,
            weights,
            encodings,
            host_only,
            routers,
            starts,
        })
    }

    /// Whether a tensor belongs to something other than the text model: to layers for multi-token prediction, to
    /// vision or audio, or to tables that can be computed from the settings.
    fn is_beyond(&self, text_model: &TextModel<'_>, name: &str) -> bool {
        if self.format() == Format::Gguf {
            return name.strip_prefix("blk.").is_some_and(|rest| self.is_in_extra_layer(rest));
        }
        if text_model.excludes(name) || name.ends_with(".rotary_emb.inv_freq") {
            return true;
        }
        let name = known_name(self.format(), name);
        let predicts = ["mtp.", "model.mtp."].iter().any(|prefix| name.starts_with(prefix));
        predicts || name.strip_prefix("model.layers.").is_some_and(|rest| self.is_in_extra_layer(rest))
    }

    /// Whether a tensor belongs to a layer for multi-token prediction. `name` starts with the layer's number.
    fn is_in_extra_layer(&self, name: &str) -> bool {
        let layer = name.split('.').next().and_then(|number| number.parse::<usize>().ok());
        let extra =
            self.file.setting(&keys::EXTRA_LAYERS).and_then(|(_, value)| Value::as_u64(value)).unwrap_or(0);
        layer.is_some_and(|l| l >= self.layers && ((l - self.layers) as u64) < extra)
    }

    fn push_matrix(&mut self, declared: Declared) -> Matrix {
        if !self.keeps {
            return Matrix(ELSEWHERE);
        }
        self.weights.push(declared);
        self.matrices += 1;
        Matrix(self.matrices - 1)
    }

    fn planes(&mut self, name: Name, rows: usize, cols: usize) -> Result<Planes> {
        self.count_layer(name);
        let name = name.in_format(self.format());
        let shape = [rows, cols];
        // A matrix with one row may be stored as a vector.
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

    /// Checks that a weight's scale has `count` numbers of type F32.
    fn check_scale(&self, scale: &TensorInfo, count: usize) -> Result<()> {
        if scale.dtype == DType::F32 && scale.elements() == count as u64 {
            return Ok(());
        }
        Err(self.error(format!(
            "tensor {} has type {} and shape {:?}, but its weight needs {count} scales of type F32",
            scale.name, scale.dtype, scale.shape
        )))
    }

    fn count_layer(&mut self, name: Name) {
        self.layers = self.layers.max(name.layer.map_or(0, |layer| layer + 1));
    }

    /// The weight with this name, if there is one.
    pub(super) fn find(&self, name: &str) -> Result<Option<StoredWeight<'a>>> {
        self.file.weight(name)
    }

    /// Declares a matrix of this shape, or several in one tensor.
    pub(super) fn weight(&mut self, name: &str, shape: &[usize]) -> Result<StoredWeight<'a>> {
        let mut weight = self.stored(name, shape, NeedKind::Matrix)?;
        // Some families have other vectors with the name of a scale, and declare them first.
        weight.scale = weight.scale.filter(|scale| !self.declared.contains(scale.name.as_str()));
        if self.keeps && !self.encodings.iter().any(|(known, _)| *known == weight.encoding) {
            self.encodings.push((weight.encoding, name.to_owned()));
        }
        if self.keeps && weight.scale.is_some() {
            self.host_only.get_or_insert_with(|| format!("tensor {name} has a scale"));
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
                "tensor {name} has shape {:?}, but by the model's configuration it must be {shape:?}",
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

    /// The error for a missing tensor. A discovering builder also records the tensor.
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
            "{}: tensor {} has type {}, which is not supported; use a file with one of these types: {instead}",
            self.file.files[tensor.file.0].path.display(),
            tensor.name,
            tensor.dtype
        ))
    }

    pub(super) fn error(&self, message: String) -> Error {
        Error::format(self.file.path(), message)
    }
}
