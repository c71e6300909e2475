//! Names of tensors in GGUF files and in folders.

use crate::format::Format;

/// A tensor's name in each kind of file. MLX uses Hugging Face's names.
#[derive(Clone, Copy, Debug)]
pub struct Name {
    gguf: &'static str,
    hugging_face: &'static str,
    pub(super) layer: Option<usize>,
    bias: bool,
}

impl Name {
    /// A tensor with these names. Tensors of a layer are given without the layer's prefix.
    pub const fn new(gguf: &'static str, hugging_face: &'static str) -> Name {
        Name { gguf, hugging_face, layer: None, bias: false }
    }

    /// This tensor of a layer.
    pub const fn of_layer(self, layer: usize) -> Name {
        Name { layer: Some(layer), ..self }
    }

    /// The bias that belongs to this weight.
    pub const fn bias(self) -> Name {
        Name { bias: true, ..self }
    }

    /// The name in a file of this format.
    pub fn in_format(&self, format: Format) -> String {
        let name = self.in_layer(format);
        match name.strip_suffix("weight") {
            Some(module) if self.bias => format!("{module}bias"),
            _ => name,
        }
    }

    fn in_layer(&self, format: Format) -> String {
        match (format, self.layer) {
            (Format::Gguf, None) => self.gguf.to_owned(),
            (Format::Gguf, Some(layer)) => format!("blk.{layer}.{}", self.gguf),
            (_, None) => self.hugging_face.to_owned(),
            (_, Some(layer)) => format!("model.layers.{layer}.{}", self.hugging_face),
        }
    }
}

/// The names of a layer's routed experts. Experts without gates do not use the names of gates.
#[derive(Clone, Copy, Debug)]
pub struct ExpertNames {
    /// The module that contains them: `mlp` in `model.layers.3.mlp.experts`. Empty if it is the layer itself.
    pub module: &'static str,
    /// Their list in this module: `experts`.
    pub list: &'static str,
    /// What ends the names in GGUF files: `_exps` in `ffn_gate_exps`.
    pub gguf: &'static str,
    /// Gate, up and down of one expert, if each expert has its own tensors: `experts.7.gate_proj.weight`.
    pub parts: [&'static str; 3],
    /// What precedes the name of a matrix of all experts, if they are one tensor: `switch_mlp.` in
    /// `mlp.switch_mlp.gate_proj.weight`.
    pub stacked: &'static [&'static str],
    /// Gate with up, and down, of all experts, if gate and up are one tensor.
    pub together: [&'static str; 2],
    /// The layout of gate and up if they are one tensor.
    pub fused: Fused,
}

/// The names of the biases of a layer's routed experts.
#[derive(Clone, Copy, Debug)]
pub struct BiasNames {
    /// The biases of gate and up, `[experts, inner]`, if they are separate tensors.
    pub separate: [Name; 2],
    /// Both in one tensor, `[experts, 2 · inner]`, alternating.
    pub alternating: Name,
    /// The biases of down, `[experts, hidden]`, in files with `separate` and in files with `alternating`.
    pub down: [Name; 2],
}

/// The layout of a tensor that has both gate and up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fused {
    /// `experts.gate_up_proj` is `[experts, 2 · inner, hidden]`, gate before up; `experts.down_proj` is
    /// `[experts, hidden, inner]`.
    Stacked,
    /// Like `Stacked`, or both transposed: `[experts, hidden, 2 · inner]` and `[experts, inner, hidden]`. Published
    /// checkpoints are transposed; some libraries save them the other way round.
    Columns,
    /// Gate and up alternate: by row if the weights are MXFP4 (`[experts, 2 · inner, hidden]`), by column if they are
    /// floats, which are stored transposed (`[experts, hidden, 2 · inner]`, `[experts, inner, hidden]`).
    Alternating,
}

impl ExpertNames {
    /// The usual names.
    pub const USUAL: ExpertNames = ExpertNames {
        module: "mlp",
        list: "experts",
        gguf: "_exps",
        parts: ["gate_proj", "up_proj", "down_proj"],
        stacked: &["switch_mlp.", "experts.switch_glu.", "experts."],
        together: ["experts.gate_up_proj", "experts.down_proj"],
        fused: Fused::Stacked,
    };
}
