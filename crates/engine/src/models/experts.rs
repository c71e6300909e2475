//! The routed experts of a layer, however a file arranges them, as lists of byte ranges.
//!
//! - one tensor for each matrix, `[experts, rows, cols]`: GGUF's `ffn_gate_exps` and MLX's `switch_mlp.gate_proj`
//! - a tensor for each matrix of each expert: `experts.7.gate_proj.weight`
//! - gate and up in one tensor, `[gate; up]`: GGUF's `ffn_gate_up_exps`, Hugging Face's `experts.gate_up_proj`
//! - gate and up alternating, in rows or, transposed, in columns ([`Fused::Alternating`])

use forebay_kernels::Encoding;

use super::blueprint::Builder;
use super::names::{ExpertNames, Fused};
use crate::error::{Error, Result};
use crate::format::{Format, StoredWeight};
use crate::store::{ByteRange, ExpertLayer, PartShape, Ranges, RowPick};

/// What an expert looks like.
#[derive(Clone, Copy, Debug)]
pub struct ExpertShape {
    /// Experts of a layer.
    pub experts: usize,
    /// How many of them a token uses.
    pub used: usize,
    /// Channels that they read and write.
    pub hidden: usize,
    /// Channels between.
    pub inner: usize,
}

/// One matrix of every expert.
struct Stack {
    encoding: Encoding,
    rows: usize,
    cols: usize,
    /// By expert: codes, scales, biases.
    planes: Vec<[Option<ByteRange>; 3]>,
    pick: RowPick,
}

/// Finds the experts of a layer.
pub(super) fn find(
    b: &mut Builder<'_>,
    layer: usize,
    names: &ExpertNames,
    shape: ExpertShape,
) -> Result<ExpertLayer> {
    let prefix = match b.format() {
        Format::Gguf => format!("blk.{layer}"),
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
        Some(stacks) => Ok(join(stacks, shape.used)),
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

    /// Rows and columns of gate, up and down.
    fn matrices(&self) -> [(usize, usize); 3] {
        let ExpertShape { hidden, inner, .. } = self.shape;
        [(inner, hidden), (inner, hidden), (hidden, inner)]
    }

    /// One tensor for each matrix.
    fn stacked(&mut self) -> Result<Option<[Stack; 3]>> {
        let patterns: &[(&str, &str)] = match self.b.format() {
            Format::Gguf => &[("ffn_", "_exps.weight")],
            Format::HuggingFace | Format::Mlx => {
                &[("switch_mlp.", "_proj.weight"), ("experts.", "_proj.weight")]
            }
        };
        for (before, after) in patterns {
            let names = ["gate", "up", "down"].map(|part| self.name(&format!("{before}{part}{after}")));
            if self.b.find(&names[0])?.is_some() {
                let mut stacks = Vec::new();
                for (name, (rows, cols)) in names.iter().zip(self.matrices()) {
                    let weight = self.b.weight(name, &[self.shape.experts, rows, cols])?;
                    stacks.push(Stack::of(&weight, self.shape.experts));
                }
                return Ok(stacks.try_into().ok());
            }
        }
        Ok(None)
    }

    /// A tensor for each matrix of each expert.
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
                            "tensor {name} is {}, but that of the first expert is {}",
                            one.encoding, stack.encoding
                        )));
                    }
                }
            }
            stacks.extend(stack);
        }
        Ok(stacks.try_into().ok())
    }

    /// Gate and up in one tensor.
    fn fused(&mut self) -> Result<Option<[Stack; 3]>> {
        let (both, down) = match self.b.format() {
            Format::Gguf => (self.name("ffn_gate_up_exps.weight"), self.name("ffn_down_exps.weight")),
            Format::HuggingFace | Format::Mlx => {
                (self.name("experts.gate_up_proj"), self.name("experts.down_proj"))
            }
        };
        let Some(found) = self.b.find(&both)? else { return Ok(None) };
        let ExpertShape { experts, hidden, inner, .. } = self.shape;
        let alternating = self.names.fused == Fused::Alternating && self.b.format() != Format::Gguf;
        if alternating && found.encoding != Encoding::Mxfp4 {
            let both = self.b.weight(&both, &[experts, hidden, 2 * inner])?;
            let down = self.b.weight(&down, &[experts, inner, hidden])?;
            let (both, down) = (self.transposed(&both)?, self.transposed(&down)?);
            return Ok(Some([both.every_other(0), both.every_other(1), down]));
        }
        let stack = Stack::of(&self.b.weight(&both, &[experts, 2 * inner, hidden])?, experts);
        let down = Stack::of(&self.b.weight(&down, &[experts, hidden, inner])?, experts);
        if alternating {
            return Ok(Some([stack.every_other(0), stack.every_other(1), down]));
        }
        match stack.halves() {
            Some([gate, up]) => Ok(Some([gate, up, down])),
            None => Err(self
                .b
                .error(format!("tensor {both}: gate and up share scales, so they cannot be parted"))),
        }
    }

    /// A weight whose matrices are stored transposed.
    fn transposed(&self, weight: &StoredWeight<'_>) -> Result<Stack> {
        let stack = Stack::of(weight, self.shape.experts);
        match stack.encoding {
            Encoding::Blocks(dtype) if dtype.is_float() => {
                Ok(Stack { encoding: Encoding::Columns(dtype), rows: stack.cols, cols: stack.rows, ..stack })
            }
            other => Err(self.b.error(format!("experts that are stored transposed are {other}, not floats"))),
        }
    }

    /// Names what is missing the way in which most files have it.
    fn missing(&self) -> Error {
        let expected = match self.b.format() {
            Format::Gguf => self.name("ffn_gate_exps.weight"),
            Format::Mlx => self.name("switch_mlp.gate_proj.weight"),
            Format::HuggingFace => self.name(&format!("experts.0.{}.weight", self.names.parts[0])),
        };
        self.b.error(format!("tensor {expected} is missing"))
    }
}

impl Stack {
    /// A weight that holds `count` matrices.
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
        }
    }

    /// Every other row, from the first or the second on.
    fn every_other(&self, first: usize) -> Stack {
        Stack {
            encoding: self.encoding,
            rows: self.rows / 2,
            cols: self.cols,
            planes: self.planes.clone(),
            pick: RowPick { first, step: 2 },
        }
    }

    /// The upper and the lower half of the rows; `None` if a scale belongs to both.
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
        };
        Some([half(false), half(true)])
    }
}

/// The experts made of these matrices. What two of them share is listed once.
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
