//! What tensors are called, in GGUF files and in folders.

use crate::format::Format;

/// A tensor's name in each kind of file. MLX's names are Hugging Face's.
#[derive(Clone, Copy, Debug)]
pub struct Name {
    gguf: &'static str,
    hugging_face: &'static str,
    pub(super) layer: Option<usize>,
}

impl Name {
    /// The tensor with these names, which in a layer's case are without the layer's prefix.
    pub const fn new(gguf: &'static str, hugging_face: &'static str) -> Name {
        Name { gguf, hugging_face, layer: None }
    }

    /// That of a layer.
    pub const fn of_layer(self, layer: usize) -> Name {
        Name { layer: Some(layer), ..self }
    }

    /// The name in a file.
    pub fn in_format(&self, format: Format) -> String {
        match (format, self.layer) {
            (Format::Gguf, None) => self.gguf.to_owned(),
            (Format::Gguf, Some(layer)) => format!("blk.{layer}.{}", self.gguf),
            (_, None) => self.hugging_face.to_owned(),
            (_, Some(layer)) => format!("model.layers.{layer}.{}", self.hugging_face),
        }
    }
}

/// What the routed experts of a layer are called in folders. GGUF files have one way for all families.
#[derive(Clone, Copy, Debug)]
pub struct ExpertNames {
    /// The module that has them: `mlp` in `model.layers.3.mlp.experts`.
    pub module: &'static str,
    /// Gate, up and down of one expert, where experts are one by one: `experts.7.gate_proj.weight`.
    pub parts: [&'static str; 3],
    /// How gate and up lie in one tensor, where they do.
    pub fused: Fused,
}

/// What the biases of a layer's routed experts are called.
#[derive(Clone, Copy, Debug)]
pub struct BiasNames {
    /// Those of gate and up, `[experts, inner]`, where each has its own.
    pub apart: [Name; 2],
    /// Both in one tensor, `[experts, 2 · inner]`, in which they alternate.
    pub alternating: Name,
    /// Those of down, `[experts, hidden]`: beside the two, and beside the one.
    pub down: [Name; 2],
}

/// How gate and up are one tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fused {
    /// `experts.gate_up_proj` is `[experts, 2 · inner, hidden]`, gate before up; `experts.down_proj` is
    /// `[experts, hidden, inner]`.
    Stacked,
    /// Gate and up alternate: in rows where the weights are MXFP4 (`[experts, 2 · inner, hidden]`), in columns where
    /// they are floats, which are stored transposed (`[experts, hidden, 2 · inner]`, `[experts, inner, hidden]`).
    Alternating,
}

impl ExpertNames {
    /// What most families call them.
    pub const USUAL: ExpertNames =
        ExpertNames { module: "mlp", parts: ["gate_proj", "up_proj", "down_proj"], fused: Fused::Stacked };
}
