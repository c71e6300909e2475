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
use crate::backend::{Parts, Vector};
use crate::error::{Error, Result};
use crate::experts::{ByteRange, ExpertLayer, PartShape, Ranges, RowPick};
use crate::format::{Format, StoredWeight};

/// The routed experts of a layer.
#[derive(Clone, Copy, Debug)]
pub struct ExpertShape {
    /// The block of each expert.
    pub block: BlockShape,
    /// The smaller blocks, each of which consecutive experts share, if there are any. Their number divides that of the
    /// experts.
    pub adjugate: Option<BlockShape>,
    /// How many experts a token uses.
    pub used: usize,
}

/// The feed-forward blocks of a layer's experts.
#[derive(Clone, Copy, Debug)]
pub struct BlockShape {
    /// The names of their tensors.
    pub names: ExpertNames,
    /// The number of blocks.
    pub count: usize,
    /// Their input and output channels.
    pub width: usize,
    /// Their inner channels.
    pub inner: usize,
    /// Whether they have gates.
    pub is_gated: bool,
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

/// Finds the experts of a layer, and the scales of their blocks' matrices.
pub(super) fn find(
    b: &mut Builder<'_>,
    layer: usize,
    shape: &ExpertShape,
) -> Result<(ExpertLayer, Parts<Option<Vector>>)> {
    let stacks = find_blocks(b, layer, &shape.block)?;
    let scales = stacks.each(|stack| stack.scales);
    let adjugate = match &shape.adjugate {
        None => None,
        Some(adjugate) => {
            let stacks = find_blocks(b, layer, adjugate)?;
            if stacks.iter().any(|stack| stack.scales.is_some()) {
                return Err(b.error(format!(
                    "adjugate experts of layer {layer} have scales, which is not supported"
                )));
            }
            Some(stacks)
        }
    };
    Ok((join(&stacks, adjugate.as_ref(), shape.used), scales))
}

fn find_blocks(b: &mut Builder<'_>, layer: usize, shape: &BlockShape) -> Result<Parts<Stack>> {
    let prefix = match (b.format(), shape.names.module) {
        (Format::Gguf, _) => format!("blk.{layer}"),
        (_, "") => format!("model.layers.{layer}"),
        (_, module) => format!("model.layers.{layer}.{module}"),
    };
    let mut search = Search { b, prefix, shape };
    if let Some(stacked) = search.stacked()? {
        return Ok(stacked);
    }
    if let Some(found) = search.one_by_one()? {
        return Ok(found);
    }
    match search.fused()? {
        Some(found) => Ok(found),
        None => Err(search.missing()),
    }
}

/// The search for the experts of one layer.
struct Search<'s, 'a> {
    b: &'s mut Builder<'a>,
    prefix: String,
    shape: &'s BlockShape,
}

impl Search<'_, '_> {
    fn name(&self, rest: &str) -> String {
        format!("{}.{rest}", self.prefix)
    }

    /// Something for each matrix: from its name as a number of `[gate, up, down]`, its rows and its columns.
    fn each<T>(
        &mut self,
        mut make: impl FnMut(&mut Self, usize, [usize; 2]) -> Result<T>,
    ) -> Result<Parts<T>> {
        let BlockShape { width, inner, is_gated, .. } = *self.shape;
        let gate = if is_gated { Some(make(self, 0, [inner, width])?) } else { None };
        Ok(Parts { gate, up: make(self, 1, [inner, width])?, down: make(self, 2, [width, inner])? })
    }

    /// The first of `[gate, up, down]` that the blocks have.
    fn first<T: Copy>(&self, parts: [T; 3]) -> T {
        parts[usize::from(!self.shape.is_gated)]
    }

    /// The layout with one tensor for each matrix.
    fn stacked(&mut self) -> Result<Option<Parts<Stack>>> {
        const PARTS: [&str; 3] = ["gate", "up", "down"];
        let names = &self.shape.names;
        let (prefixes, after): (&[&str], _) = match self.b.format() {
            Format::Gguf => (&["ffn_"], format!("{}.weight", names.gguf)),
            Format::HuggingFace | Format::Mlx => (names.stacked, "_proj.weight".to_owned()),
        };
        for before in prefixes {
            let name = |search: &Self, part: &str| search.name(&format!("{before}{part}{after}"));
            if self.b.find(&name(self, self.first(PARTS)))?.is_some() {
                return self
                    .each(|search, part, shape| search.stack(&name(search, PARTS[part]), shape))
                    .map(Some);
            }
        }
        Ok(None)
    }

    /// A tensor with one matrix of all experts.
    fn stack(&mut self, name: &str, [rows, cols]: [usize; 2]) -> Result<Stack> {
        let weight = self.b.weight(name, &[self.shape.count, rows, cols])?;
        let scales = self.b.scales_of(&weight)?;
        // While needed tensors are being discovered, the experts' places do not matter.
        let listed = if self.b.is_discovering() { 1 } else { self.shape.count };
        Ok(Stack { scales, ..Stack::of(&weight, listed) })
    }

    /// The name of a matrix of one expert.
    fn name_of_one(&self, expert: usize, part: &str) -> String {
        self.name(&format!("{}.{expert}.{part}.weight", self.shape.names.list))
    }

    /// The layout with a tensor for each matrix of each expert.
    fn one_by_one(&mut self) -> Result<Option<Parts<Stack>>> {
        let parts = self.shape.names.parts;
        let first = self.name_of_one(0, self.first(parts));
        if self.b.format() == Format::Gguf || self.b.find(&first)?.is_none() {
            return Ok(None);
        }
        let stacks = self.each(|search, part, shape| {
            let mut stack = search.one(0, parts[part], shape)?;
            for expert in 1..search.shape.count {
                let one = search.one(expert, parts[part], shape)?;
                if stack.encoding != one.encoding {
                    return Err(search.b.error(format!(
                        "tensor {} is {}, but the first expert's is {}",
                        search.name_of_one(expert, parts[part]),
                        one.encoding,
                        stack.encoding
                    )));
                }
                stack.planes.extend(one.planes);
            }
            Ok(stack)
        })?;
        Ok(Some(stacks))
    }

    /// A matrix of one expert.
    fn one(&mut self, expert: usize, part: &str, shape: [usize; 2]) -> Result<Stack> {
        let name = self.name_of_one(expert, part);
        Ok(Stack::of(&self.b.weight(&name, &shape)?, 1))
    }

    /// The layout with gate and up in one tensor.
    fn fused(&mut self) -> Result<Option<Parts<Stack>>> {
        let BlockShape { ref names, count, width, inner, is_gated } = *self.shape;
        let gguf = self.b.format() == Format::Gguf;
        let [both, down] = match gguf {
            true => ["gate_up", "down"].map(|part| self.name(&format!("ffn_{part}{}.weight", names.gguf))),
            false => names.together.map(|name| self.name(name)),
        };
        let found = self.b.find(&both)?;
        if !is_gated || found.is_none() && !self.b.imagines(&both) {
            return Ok(None);
        }
        let parts = |[gate, up]: [Stack; 2], down| Ok(Some(Parts { gate: Some(gate), up, down }));
        let alternating = names.fused == Fused::Alternating && !gguf;
        let shape = [count, width, 2 * inner];
        // One of the two tensors may be square, but not both.
        let down_shape = [count, inner, width];
        let is_transposed = found.as_ref().is_some_and(|both| both.shape[..] == shape)
            && self.b.find(&down)?.is_some_and(|down| down.shape[..] == down_shape);
        if names.fused == Fused::Columns && !gguf && is_transposed {
            let both = self.b.weight(&both, &shape)?;
            let down = self.b.weight(&down, &down_shape)?;
            let (both, down) = (self.transposed(&both)?, self.transposed(&down)?);
            return parts([0, 1].map(|half| both.half_of_rows(half)), down);
        }
        if alternating && found.is_some_and(|weight| weight.encoding != Encoding::Mxfp4) {
            let both = self.b.weight(&both, &shape)?;
            let down = self.b.weight(&down, &down_shape)?;
            let (both, down) = (self.transposed(&both)?, self.transposed(&down)?);
            return parts([0, 1].map(|first| both.every_other(first)), down);
        }
        let stack = self.stack(&both, [2 * inner, width])?;
        let down = self.stack(&down, [width, inner])?;
        if alternating {
            return parts([0, 1].map(|first| stack.every_other(first)), down);
        }
        match stack.halves() {
            Some(halves) => parts(halves, down),
            None => {
                Err(self.b.error(format!("tensor {both}: gate and up share scales, so they cannot be split")))
            }
        }
    }

    /// A weight whose matrices are stored transposed.
    fn transposed(&self, weight: &StoredWeight<'_>) -> Result<Stack> {
        let stack = Stack::of(weight, self.shape.count);
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
        let BlockShape { ref names, count, width, inner, .. } = *self.shape;
        let first = self.first(["gate", "up", "down"]);
        let expected = match self.b.format() {
            Format::Gguf => self.name(&format!("ffn_{first}{}.weight", names.gguf)),
            Format::HuggingFace if names.stacked.contains(&&*format!("{}.", names.list)) => {
                self.name_of_one(0, self.first(names.parts))
            }
            Format::HuggingFace | Format::Mlx => {
                self.name(&format!("{}{first}_proj.weight", names.stacked[0]))
            }
        };
        self.b.miss(&expected, &[count, inner, width], NeedKind::Matrix)
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
fn join(block: &Parts<Stack>, adjugate: Option<&Parts<Stack>>, used: usize) -> ExpertLayer {
    let experts = block.up.planes.len();
    let mut lists = vec![Ranges::new(); experts];
    let mut part = |stack: &Stack| {
        let sharing = experts / stack.planes.len();
        let mut planes = [None; 3];
        for (expert, list) in lists.iter_mut().enumerate() {
            for (plane, range) in planes.iter_mut().zip(stack.planes[expert / sharing]) {
                *plane = range.map(|range| {
                    list.iter().position(|&r| r == range).unwrap_or_else(|| {
                        list.push(range);
                        list.len() - 1
                    })
                });
            }
        }
        PartShape { encoding: stack.encoding, rows: stack.rows, cols: stack.cols, planes, pick: stack.pick }
    };
    let parts = block.each(&mut part);
    let adjugate = adjugate.map(|adjugate| adjugate.each(&mut part));
    ExpertLayer { parts, adjugate, experts: lists, used }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use forebay_kernels::{MatRef, Planes};

    use super::*;
    use crate::experts::policy::PolicyKind;
    use crate::experts::{Access, ExpertStore, IoMethod, SlotClasses, StoreOptions};
    use crate::format::ModelFile;
    use crate::{ExpertIdx, LayerIdx};

    const EXPERTS: usize = 3;
    const ALTERNATING: ExpertNames = ExpertNames { fused: Fused::Alternating, ..ExpertNames::USUAL };

    fn shape(names: ExpertNames) -> ExpertShape {
        let block = BlockShape { names, count: EXPERTS, width: 64, inner: 32, is_gated: true };
        ExpertShape { block, adjugate: None, used: 2 }
    }

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
    fn weights(model: &ModelFile, names: ExpertNames, ranges: usize) -> Vec<[Vec<f32>; 3]> {
        let (layer, _) = find(&mut Builder::new(model), 0, &shape(names)).unwrap();
        assert!(layer.experts.iter().all(|expert| expert.len() == ranges));
        let layers = vec![Some(layer)];
        let classes = SlotClasses::new(&layers);
        let options = StoreOptions {
            slots: vec![EXPERTS],
            io: IoMethod::Pool,
            policy: PolicyKind::default(),
            patience: StoreOptions::PATIENCE,
        };
        let store = ExpertStore::new(model, layers, &classes, &options).unwrap();
        let weights = |expert: u32| {
            let mut acquisition = store.acquire(LayerIdx(0), &[ExpertIdx(expert)], Access::Token);
            let leases = acquisition.next_ready().unwrap().unwrap();
            let Parts { gate, up, down } = leases[0].weights().parts;
            [gate.unwrap(), up, down].map(values)
        };
        (0..EXPERTS as u32).map(weights).collect()
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
        for (e, [gate, up, downs]) in weights(&model, ALTERNATING, 4).iter().enumerate() {
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
        for (e, [gate, up, downs]) in weights(&model, ALTERNATING, 2).iter().enumerate() {
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
        let error = find(&mut Builder::new(&model), 0, &shape(ExpertNames::USUAL)).err().unwrap();
        assert!(error.to_string().contains("share scales"), "{error}");
    }
}
