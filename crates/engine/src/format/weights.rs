//! Finds the tensors of a weight. In formats other than GGUF, a quantised matrix has its codes, scales and biases in
//! separate tensors.

use std::collections::HashSet;

use forebay_kernels::{Affine, DType, Encoding, Tiles};

use super::{Format, ModelFile, TensorInfo, UnknownTensor, Value};
use crate::error::{Error, Result};

/// A weight as it is stored.
#[derive(Clone, Debug)]
pub struct StoredWeight<'a> {
    /// Its encoding.
    pub encoding: Encoding,
    /// The logical shape, whatever the shapes of its planes.
    pub shape: Vec<usize>,
    /// Codes, scales and biases.
    pub planes: [Option<&'a TensorInfo>; 3],
    /// A factor of all weights of a matrix: one number, or one for each matrix of a stack.
    pub scale: Option<&'a TensorInfo>,
    /// The scale for quantising the matrix's input. It is not used: the kernels decide how activations are quantised.
    pub input_scale: Option<&'a TensorInfo>,
}

impl<'a> StoredWeight<'a> {
    /// A weight that has only planes.
    fn of(encoding: Encoding, shape: Vec<usize>, planes: [Option<&'a TensorInfo>; 3]) -> StoredWeight<'a> {
        StoredWeight { encoding, shape, planes, scale: None, input_scale: None }
    }
}

impl ModelFile {
    /// The weight with this name: a tensor, or codes with other planes.
    ///
    /// # Errors
    /// If a plane is missing or does not match the codes, or the quantisation is not supported.
    pub fn weight(&self, name: &str) -> Result<Option<StoredWeight<'_>>> {
        let Some(codes) = self.tensor(name) else { return self.mxfp4(name) };
        match codes.dtype {
            DType::U32 => self.affine(name, codes).map(Some),
            DType::F8_E4M3 => self.tiles(name, codes).map(Some),
            dtype => Ok(Some(StoredWeight {
                scale: self.companion(name, "scale"),
                input_scale: self.companion(name, "input_scale"),
                ..StoredWeight::of(dtype.into(), codes.shape.clone(), [Some(codes), None, None])
            })),
        }
    }

    /// The number of parameters, without scales and biases.
    pub fn parameters(&self) -> u64 {
        // Tensors that belong to another tensor's codes, or that are not understood, count with their own elements.
        let mut planes = HashSet::new();
        let mut count = 0;
        for tensor in &self.tensors {
            let name = tensor.name.strip_suffix("_blocks").unwrap_or(&tensor.name);
            let Ok(Some(weight)) = self.weight(name) else { continue };
            if weight.planes[1].is_some() {
                planes.extend(weight.planes.iter().flatten().map(|plane| plane.name.as_str()));
                count += weight.shape.iter().map(|&d| d as u64).product::<u64>();
            }
        }
        let others = self.tensors.iter().filter(|t| !planes.contains(t.name.as_str()));
        let unknown = self.unknown.iter().map(UnknownTensor::elements);
        count + others.map(TensorInfo::elements).chain(unknown).sum::<u64>()
    }

    /// A tensor that GGUF files have next to a weight: `blk.0.attn_q.scale` next to `blk.0.attn_q.weight`.
    fn companion(&self, name: &str, suffix: &str) -> Option<&TensorInfo> {
        let module = name.strip_suffix(".weight").filter(|_| self.format == Format::Gguf)?;
        self.tensor(&format!("{module}.{suffix}"))
    }

    /// MLX: codes in 32-bit words, scales and biases for groups.
    fn affine<'a>(&'a self, name: &str, codes: &'a TensorInfo) -> Result<StoredWeight<'a>> {
        let module = name.strip_suffix(".weight").unwrap_or(name);
        let (scales, biases) = (
            self.plane(codes, &format!("{module}.scales"))?,
            self.plane(codes, &format!("{module}.biases"))?,
        );
        // The settings use the module's name in the file, with all prefixes.
        let own = codes.name.strip_suffix(".weight").unwrap_or(&codes.name);
        let setting = |key: &str| {
            let of_module = self.metadata.get(&format!("quantization.{own}.{key}"));
            of_module.or_else(|| self.metadata.get(&format!("quantization.{key}")))
        };
        if let Some(mode) = setting("mode").and_then(Value::as_str).filter(|&mode| mode != "affine") {
            return Err(self.unsupported(codes, &format!("is quantised in MLX's mode {mode:?}")));
        }
        let number = |key: &str| {
            let value = setting(key).and_then(Value::as_u64).and_then(|v| usize::try_from(v).ok());
            value.ok_or_else(|| self.misfit(codes, &format!("is quantised, but the settings have no {key}")))
        };
        let (bits, group) = (number("bits")?, number("group_size")?);
        let encoding = Encoding::Affine(Affine { bits, group, scales: scales.dtype });
        if !encoding.is_computable() {
            return Err(self.unsupported(codes, &format!("is {encoding}")));
        }
        let mut shape = scales.shape.clone();
        let (Some(groups), Some(words)) = (shape.last_mut(), codes.shape.last()) else {
            return Err(self.misfit(codes, "has no dimensions"));
        };
        *groups = groups.checked_mul(group).ok_or_else(|| self.misfit(codes, "is too large"))?;
        let fits = Some(*groups) == words.checked_mul(32).map(|b| b / bits)
            && (words * 32).is_multiple_of(bits)
            && codes.shape.len() == shape.len()
            && codes.shape[..shape.len() - 1] == shape[..shape.len() - 1]
            && biases.shape == scales.shape
            && biases.dtype == scales.dtype;
        if !fits {
            let message = format!(
                "has codes {:?}, scales {:?} and biases {:?}, which do not fit {bits} bits in groups of {group}",
                codes.shape, scales.shape, biases.shape
            );
            return Err(self.misfit(codes, &message));
        }
        Ok(StoredWeight::of(encoding, shape, [Some(codes), Some(scales), Some(biases)]))
    }

    /// FP8 with one scale per block.
    fn tiles<'a>(&'a self, name: &str, codes: &'a TensorInfo) -> Result<StoredWeight<'a>> {
        let scales = self.plane(codes, &format!("{name}_scale_inv"))?;
        let sizes = self.metadata.get("quantization_config.weight_block_size").and_then(Value::as_numbers);
        let sizes: Vec<usize> = sizes
            .map(|sizes| sizes.iter().filter_map(|v| usize::try_from(v.as_u64()?).ok()).collect())
            .unwrap_or_default();
        let [rows, cols] = sizes[..] else {
            return Err(
                self.misfit(codes, "is quantised in blocks, but weight_block_size is not two numbers")
            );
        };
        let encoding = Encoding::Tiles(Tiles { rows, cols, scales: scales.dtype });
        if !encoding.is_computable() {
            return Err(self.unsupported(codes, &format!("is {encoding}")));
        }
        let tiled = |shape: &[usize]| match shape {
            [outer @ .., r, c] => Some([outer, &[r.div_ceil(rows), c.div_ceil(cols)]].concat()),
            _ => None,
        };
        if tiled(&codes.shape).as_ref() != Some(&scales.shape) {
            let message = format!(
                "has shape {:?} and scales {:?}, which do not fit blocks of {rows}×{cols}",
                codes.shape, scales.shape
            );
            return Err(self.misfit(codes, &message));
        }
        Ok(StoredWeight::of(encoding, codes.shape.clone(), [Some(codes), Some(scales), None]))
    }

    /// MXFP4: `NAME_blocks` with 32 codes in the last dimension, and `NAME_scales` without that dimension.
    fn mxfp4(&self, name: &str) -> Result<Option<StoredWeight<'_>>> {
        let Some(codes) = self.tensor(&format!("{name}_blocks")) else { return Ok(None) };
        let scales = self.plane(codes, &format!("{name}_scales"))?;
        let bytes = codes.dtype == DType::U8 && scales.dtype == DType::U8;
        match (&codes.shape[..], &scales.shape[..]) {
            ([outer @ .., 16], [.., _]) if bytes && outer == scales.shape => {
                let mut shape = outer.to_vec();
                let groups = shape.last_mut().expect("the pattern has one");
                *groups = groups.checked_mul(32).ok_or_else(|| self.misfit(codes, "is too large"))?;
                let planes = [Some(codes), Some(scales), None];
                Ok(Some(StoredWeight::of(Encoding::Mxfp4, shape, planes)))
            }
            (blocks, scales) => {
                let message = format!("has blocks {blocks:?} and scales {scales:?}, which are not MXFP4");
                Err(self.misfit(codes, &message))
            }
        }
    }

    /// A plane that belongs to `codes`.
    fn plane(&self, codes: &TensorInfo, name: &str) -> Result<&TensorInfo> {
        self.tensor(name).ok_or_else(|| {
            self.misfit(codes, &format!("has type {}, but tensor {name} is missing", codes.dtype))
        })
    }

    fn misfit(&self, tensor: &TensorInfo, problem: &str) -> Error {
        Error::format(&self.files[tensor.file.0].path, format!("tensor {} {problem}", tensor.name))
    }

    fn unsupported(&self, tensor: &TensorInfo, what: &str) -> Error {
        let path = self.files[tensor.file.0].path.display();
        Error::Unsupported(format!("{path}: tensor {} {what}, which is not supported", tensor.name))
    }
}
