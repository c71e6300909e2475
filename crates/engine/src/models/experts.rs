//! Finds the routed experts of a layer and describes them as byte ranges, for each layout that files use:
//!
//! - one tensor for each matrix, `[experts, rows, cols]`: GGUF's `ffn_gate_exps`, MLX's `switch_mlp.gate_proj` and
//!   `experts.switch_glu.gate_proj` ([`ExpertNames::stacked`])
//! - a tensor for each matrix of each expert: `experts.7.gate_proj.weight`
//! - gate and up in one tensor, `[gate; up]`: GGUF's `ffn_gate_up_exps`, Hugging Face's `experts.gate_up_proj`
//! - gate and up alternating, in rows or, transposed, in columns ([`Fused::Alternating`])
//! - gate before up in columns, transposed ([`Fused::Columns`])

use forebay_kernels::Encoding;

use super::builder::Builder;
use super::names::{ExpertNames, Fused};
use super::needs::NeedKind;
use crate::backend::Vector;
use crate::error::{Error, Result};
use crate::experts::{ByteRange, ExpertLayer, PartShape, Ranges, RowPick};
use crate::format::{Format, StoredWeight};

/// The sizes of a layer's experts.
#[derive(Clone, Copy, Debug)]
pub struct ExpertShape {
    /// The number of experts of a layer.
    pub experts: usize,
    /// How many experts a token uses.
    pub used: usize,
    /// Their input and output channels.
    pub hidden: usize,
    /// Their inner channels.
    pub inner: usize,
}

/// The same matrix of all experts, such as the gate.
struct Stack {
    encoding: Encoding,
    rows: usize,
    cols: usize,
    /// For each expert: codes, scales, biases.
    planes: Vec<[Option<ByteRange>; 3]>,
    pick: RowPick,
    /// `[experts]` The factor of each matrix, if there is one.
    scales: Option<Vector>,
}

/// Finds the experts of a layer, and the scales of their gate, up and down.
pub(super) fn find(
    b: &mut Builder<'_>,
    layer: usize,
    names: &ExpertNames,
    shape: ExpertShape,
) -> Result<(ExpertLayer, [Option<Vector>; 3])> {
    let prefix = match b.format() {
        Format::Gguf => format!("blk.{layer}"),
        Format::HuggingFace | Format::Mlx if names.module.is_empty() => format!("model.layers.{layer}"),
        Format::HuggingFace | Format::Mlx => format!("model.layers.{layer}.{}", names.module),
    };
    let mut search = Search { b, prefix, names, shape };
    let found = match search.stacked()? {
        Some(found) => Some(found),
        None => match search.one_by_one()? {
            Some(found) => Some(found),
            None => search.fused()?,
        },
    };
    match found {
        Some(stacks) => {
            let scales = [0, 1, 2].map(|part| stacks[part].scales);
            Ok((join(stacks, shape.used), scales))
        }
        None => Err(search.missing()),
    }
}

/// The search for the experts of one layer.
struct Search<'s, 'a> {
    b: &'s mut Builder<'a>,
    prefix: String,
    names: &'s ExpertNames,
    shape: ExpertShape,
}

impl Search<'_, '_> {
    fn name(&self, rest: &str) -> String {
        format!("{}.{rest}", self.prefix)
    }

    /// The rows and columns of gate, up and down.
    fn matrices(&self) -> [(usize, usize); 3] {
        let ExpertShape { hidden, inner, .. } = self.shape;
        [(inner, hidden), (inner, hidden), (hidden, inner)]
    }

    /// The layout with one tensor for each matrix.
    fn stacked(&mut self) -> Result<Option<[Stack; 3]>> {
        let (prefixes, after): (&[&str], _) = match self.b.format() {
            Format::Gguf => (&["ffn_"], "_exps.weight"),
            Format::HuggingFace | Format::Mlx => (self.names.stacked, "_proj.weight"),
        };
        for before in prefixes {
            let names = ["gate", "up", "down"].map(|part| self.name(&format!("{before}{part}{after}")));
            if self.b.find(&names[0])?.is_some() {
                let mut stacks = Vec::new();
                for (name, (rows, cols)) in names.iter().zip(self.matrices()) {
                    stacks.push(self.stack(name, [rows, cols])?);
                }
                return Ok(stacks.try_into().ok());
            }
        }
        Ok(None)
    }

    /// A tensor with one matrix of all experts.
    fn stack(&mut self, name: &str, [rows, cols]: [usize; 2]) -> Result<Stack> {
        let weight = self.b.weight(name, &[self.shape.experts, rows, cols])?;
        let scales = self.b.scales_of(&weight)?;
        // While needed tensors are being discovered, the experts' places do not matter.
        let listed = if self.b.is_discovering() { 1 } else { self.shape.experts };
        Ok(Stack { scales, ..Stack::of(&weight, listed) })
    }

    /// The layout with a tensor for each matrix of each expert.
    fn one_by_one(&mut self) -> Result<Option<[Stack; 3]>> {
        let first = self.name(&format!("experts.0.{}.weight", self.names.parts[0]));
        if self.b.format() == Format::Gguf || self.b.find(&first)?.is_none() {
            return Ok(None);
        }
        let mut stacks = Vec::new();
        for (part, (rows, cols)) in self.names.parts.into_iter().zip(self.matrices()) {
            let mut stack: Option<Stack> = None;
            for expert in 0..self.shape.experts {
                let name = self.name(&format!("experts.{expert}.{part}.weight"));
                let one = Stack::of(&self.b.weight(&name, &[rows, cols])?, 1);
                match &mut stack {
                    None => stack = Some(one),
                    Some(stack) if stack.encoding == one.encoding => stack.planes.extend(one.planes),
                    Some(stack) => {
                        return Err(self.b.error(format!(
                            "tensor {name} is {}, but the first expert's is {}",
                            one.encoding, stack.encoding
                        )));
                    }
                }
            }
            stacks.extend(stack);
        }
        Ok(stacks.try_into().ok())
    }

    /// The layout with gate and up in one tensor.
    fn fused(&mut self) -> Result<Option<[Stack; 3]>> {
        let (both, down) = match self.b.format() {
            Format::Gguf => (self.name("ffn_gate_up_exps.weight"), self.name("ffn_down_exps.weight")),
            Format::HuggingFace | Format::Mlx => {
                let [both, down] = self.names.together;
                (self.name(both), self.name(down))
            }
        };
        let found = self.b.find(&both)?;
        if found.is_none() && !self.b.imagines(&both) {
            return Ok(None);
        }
        let ExpertShape { experts, hidden, inner, .. } = self.shape;
        let gguf = self.b.format() == Format::Gguf;
        let alternating = self.names.fused == Fused::Alternating && !gguf;
        let shape = [experts, hidden, 2 * inner];
        // One of the two tensors may be square, but not both.
        let down_shape = [experts, inner, hidden];
        let is_transposed = found.as_ref().is_some_and(|both| both.shape[..] == shape)
            && self.b.find(&down)?.is_some_and(|down| down.shape[..] == down_shape);
        if self.names.fused == Fused::Columns && !gguf && is_transposed {
            let both = self.b.weight(&both, &shape)?;
            let down = self.b.weight(&down, &down_shape)?;
            let (both, down) = (self.transposed(&both)?, self.transposed(&down)?);
            return Ok(Some([both.half_of_rows(0), both.half_of_rows(1), down]));
        }
        if alternating && found.is_some_and(|weight| weight.encoding != Encoding::Mxfp4) {
            let both = self.b.weight(&both, &[experts, hidden, 2 * inner])?;
            let down = self.b.weight(&down, &[experts, inner, hidden])?;
            let (both, down) = (self.transposed(&both)?, self.transposed(&down)?);
            return Ok(Some([both.every_other(0), both.every_other(1), down]));
        }
        let stack = self.stack(&both, [2 * inner, hidden])?;
        let down = self.stack(&down, [hidden, inner])?;
        if alternating {
            return Ok(Some([stack.every_other(0), stack.every_other(1), down]));
        }
        match stack.halves() {
            Some([gate, up]) => Ok(Some([gate, up, down])),
            None => {
                Err(self.b.error(format!("tensor {both}: gate and up share scales, so they cannot be split")))
            }
        }
    }

    /// A weight whose matrices are stored transposed.
    fn transposed(&self, weight: &StoredWeight<'_>) -> Result<Stack> {
        let stack = Stack::of(weight, self.shape.experts);
        match stack.encoding {
            Encoding::Blocks(dtype) if dtype.is_float() => {
                Ok(Stack { encoding: Encoding::Columns(dtype), rows: stack.cols, cols: stack.rows, ..stack })
            }
            other => {
                Err(self.b.error(format!("transposed experts have type {other}; only floats are supported")))
            }
        }
    }

    /// The error for missing experts, with the tensor name that most files use.
    fn missing(&mut self) -> Error {
        let expected = match self.b.format() {
            Format::Gguf => self.name("ffn_gate_exps.weight"),
            Format::HuggingFace if self.names.stacked.contains(&"experts.") => {
                self.name(&format!("experts.0.{}.weight", self.names.parts[0]))
            }
            Format::HuggingFace | Format::Mlx => {
                self.name(&format!("{}gate_proj.weight", self.names.stacked[0]))
            }
        };
        let ExpertShape { experts, hidden, inner, .. } = self.shape;
        self.b.miss(&expected, &[experts, inner, hidden], NeedKind::Matrix)
    }
}

impl Stack {
    /// The `count` matrices in a weight.
    fn of(weight: &StoredWeight<'_>, count: usize) -> Stack {
        let range = |expert: usize| {
            weight.planes.map(|plane| {
                let plane = plane?;
                let len = plane.len / count as u64;
                Some(ByteRange {
                    file: plane.file,
                    offset: plane.offset + expert as u64 * len,
                    len: len as usize,
                })
            })
        };
        let [.., rows, cols] = weight.shape[..] else { unreachable!("its shape was checked") };
        Stack {
            encoding: weight.encoding,
            rows,
            cols,
            planes: (0..count).map(range).collect(),
            pick: RowPick::ALL,
            scales: None,
        }
    }

    /// Every other row, starting at row `first`, which is 0 or 1.
    fn every_other(&self, first: usize) -> Stack {
        Stack {
            encoding: self.encoding,
            rows: self.rows / 2,
            cols: self.cols,
            planes: self.planes.clone(),
            pick: RowPick { first, step: 2, of: 2 },
            scales: self.scales,
        }
    }

    /// The first or the second half of the rows of a matrix that is stored column after column.
    fn half_of_rows(&self, half: usize) -> Stack {
        let rows = self.rows / 2;
        let pick = RowPick { first: half * rows, step: 1, of: 2 };
        let Stack { encoding, cols, ref planes, scales, .. } = *self;
        Stack { encoding, rows, cols, planes: planes.clone(), pick, scales }
    }

    /// The upper and the lower half of the rows; `None` if they share a scale.
    fn halves(&self) -> Option<[Stack; 2]> {
        if let Encoding::Tiles(tiles) = self.encoding
            && !(self.rows / 2).is_multiple_of(tiles.rows)
        {
            return None;
        }
        let half = |second: bool| Stack {
            encoding: self.encoding,
            rows: self.rows / 2,
            cols: self.cols,
            planes: self
                .planes
                .iter()
                .map(|planes| {
                    planes.map(|plane| {
                        let ByteRange { file, offset, len } = plane?;
                        let offset = if second { offset + len as u64 / 2 } else { offset };
                        Some(ByteRange { file, offset, len: len / 2 })
                    })
                })
                .collect(),
            pick: RowPick::ALL,
            scales: self.scales,
        };
        Some([half(false), half(true)])
    }
}

/// The experts that consist of these matrices. A range that two matrices share is listed once.
fn join(stacks: [Stack; 3], used: usize) -> ExpertLayer {
    let experts = stacks[0].planes.len();
    let mut lists = vec![Ranges::new(); experts];
    let parts = stacks.map(|stack| {
        let mut planes = [None; 3];
        for (expert, list) in lists.iter_mut().enumerate() {
            for (plane, range) in planes.iter_mut().zip(stack.planes[expert]) {
                *plane = range.map(|range| {
                    list.iter().position(|&r| r == range).unwrap_or_else(|| {
                        list.push(range);
                        list.len() - 1
                    })
                });
            }
        }
        PartShape { encoding: stack.encoding, rows: stack.rows, cols: stack.cols, planes, pick: stack.pick }
    });
    ExpertLayer { parts, experts: lists, used }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use forebay_kernels::{MatRef, Planes};

    use super::*;
    use crate::experts::policy::PolicyKind;
    use crate::experts::{Access, ExpertPart, ExpertStore, IoMethod, SlotClasses, StoreOptions};
    use crate::format::ModelFile;
    use crate::{ExpertIdx, LayerIdx};

    const SHAPE: ExpertShape = ExpertShape { experts: 3, used: 2, hidden: 64, inner: 32 };
    const ALTERNATING: ExpertNames = ExpertNames { fused: Fused::Alternating, ..ExpertNames::USUAL };

    /// A folder whose only layer has experts with these tensors.
    fn folder(path: &Path, tensors: &[(&str, &str, &[usize], &[u8])]) -> ModelFile {
        let mut header = serde_json::Map::new();
        let mut data: Vec<u8> = Vec::new();
        for (name, dtype, shape, bytes) in tensors {
            let offsets = [data.len(), data.len() + bytes.len()];
            let entry = serde_json::json!({ "dtype": dtype, "shape": shape, "data_offsets": offsets });
            header.insert(format!("model.layers.0.mlp.experts.{name}"), entry);
            data.extend_from_slice(bytes);
        }
        let header = serde_json::Value::Object(header).to_string();
        let file = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &data].concat();
        std::fs::write(path.join("model.safetensors"), file).unwrap();
        std::fs::write(path.join("config.json"), "{}").unwrap();
        ModelFile::open(path).unwrap()
    }

    fn noise(len: usize, seed: u32) -> Vec<u8> {
        (0..len as u32).map(|i| ((i ^ seed).wrapping_mul(0x9e37_79b9) >> 24) as u8 & 0xbf).collect()
    }

    /// The weights of every expert, gate, up and down, as an executor sees them.
    fn weights(model: &ModelFile, names: &ExpertNames, ranges: usize) -> Vec<[Vec<f32>; 3]> {
        let (layer, _) = find(&mut Builder::new(model), 0, names, SHAPE).unwrap();
        assert!(layer.experts.iter().all(|expert| expert.len() == ranges));
        let layers = vec![Some(layer)];
        let classes = SlotClasses::new(&layers);
        let options = StoreOptions {
            slots: vec![SHAPE.experts],
            io: IoMethod::Pool,
            policy: PolicyKind::default(),
            patience: StoreOptions::PATIENCE,
        };
        let store = ExpertStore::new(model, layers, &classes, &options).unwrap();
        let weights = |expert: u32| {
            let mut acquisition = store.acquire(LayerIdx(0), &[ExpertIdx(expert)], Access::Token);
            let leases = acquisition.next_ready().unwrap().unwrap();
            [ExpertPart::Gate, ExpertPart::Up, ExpertPart::Down].map(|part| values(leases[0].part(part)))
        };
        (0..SHAPE.experts as u32).map(weights).collect()
    }

    fn values(w: MatRef<'_>) -> Vec<f32> {
        let mut out = vec![f32::NAN; w.rows * w.cols];
        for (r, row) in out.chunks_exact_mut(w.cols).enumerate() {
            w.dequantise_row(r, row);
        }
        out
    }

    #[test]
    fn gate_and_up_alternate_in_the_rows_of_mxfp4() {
        let temporary = tempfile::tempdir().unwrap();
        let (both, both_scales) = (noise(3 * 64 * 2 * 16, 1), noise(3 * 64 * 2, 2));
        let (down, down_scales) = (noise(3 * 64 * 16, 3), noise(3 * 64, 4));
        let model = folder(
            temporary.path(),
            &[
                ("gate_up_proj_blocks", "U8", &[3, 64, 2, 16], &both),
                ("gate_up_proj_scales", "U8", &[3, 64, 2], &both_scales),
                ("down_proj_blocks", "U8", &[3, 64, 1, 16], &down),
                ("down_proj_scales", "U8", &[3, 64, 1], &down_scales),
            ],
        );
        // Gate and up share their ranges.
        for (e, [gate, up, downs]) in weights(&model, &ALTERNATING, 4).iter().enumerate() {
            let planes = Planes {
                codes: &both[e * 2048..][..2048],
                scales: &both_scales[e * 128..][..128],
                biases: &[],
            };
            let stored = values(MatRef::from_planes(Encoding::Mxfp4, 64, 64, planes));
            for (r, row) in stored.chunks_exact(64).enumerate() {
                let ours = if r % 2 == 0 { gate } else { up };
                assert_eq!(&ours[r / 2 * 64..][..64], row, "expert {e}, row {r}");
            }
            let planes = Planes {
                codes: &down[e * 1024..][..1024],
                scales: &down_scales[e * 64..][..64],
                biases: &[],
            };
            assert_eq!(*downs, values(MatRef::from_planes(Encoding::Mxfp4, 64, 32, planes)));
        }
    }

    #[test]
    fn gate_and_up_alternate_in_the_columns_of_transposed_floats() {
        let temporary = tempfile::tempdir().unwrap();
        let (both, down) = (noise(3 * 64 * 64 * 2, 1), noise(3 * 32 * 64 * 2, 2));
        let model = folder(
            temporary.path(),
            &[("gate_up_proj", "BF16", &[3, 64, 64], &both), ("down_proj", "BF16", &[3, 32, 64], &down)],
        );
        let at = |bytes: &[u8], i: usize| {
            f32::from_bits(u32::from(u16::from_le_bytes([bytes[2 * i], bytes[2 * i + 1]])) << 16)
        };
        for (e, [gate, up, downs]) in weights(&model, &ALTERNATING, 2).iter().enumerate() {
            for c in 0..64 {
                for r in 0..32 {
                    let stored = |column: usize| at(&both, (e * 64 + c) * 64 + column);
                    assert_eq!(gate[r * 64 + c], stored(2 * r));
                    assert_eq!(up[r * 64 + c], stored(2 * r + 1));
                    assert_eq!(downs[c * 32 + r], at(&down, (e * 32 + r) * 64 + c));
                }
            }
        }
    }

    #[test]
    fn scales_that_belong_to_gate_and_up_alike_are_refused() {
        let temporary = tempfile::tempdir().unwrap();
        let config = r#"{"quantization_config": {"quant_method": "fp8", "weight_block_size": [48, 64]}}"#;
        let codes = noise(3 * 64 * 64, 1);
        let scales = vec![0; 3 * 2 * 4];
        let tensors: &[(&str, &str, &[usize], &[u8])] = &[
            ("gate_up_proj", "F8_E4M3", &[3, 64, 64], &codes),
            ("gate_up_proj_scale_inv", "F32", &[3, 2, 1], &scales),
            ("down_proj", "F8_E4M3", &[3, 64, 32], &codes[..3 * 64 * 32]),
            ("down_proj_scale_inv", "F32", &[3, 2, 1], &scales),
        ];
        folder(temporary.path(), tensors);
        std::fs::write(temporary.path().join("config.json"), config).unwrap();
        let model = ModelFile::open(temporary.path()).unwrap();
        let error = find(&mut Builder::new(&model), 0, &ExpertNames::USUAL, SHAPE).err().unwrap();
        assert!(error.to_string().contains("share scales"), "{error}");
    }
}
