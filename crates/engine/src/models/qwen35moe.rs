//! Qwen3-Next, Qwen3.5-MoE and Qwen3.6-MoE: three layers with linear attention, then one with gated attention; every
//! layer is a mixture with a gated shared expert.

use super::decoder::{self, FeedForward, Mixture, NormSpan, Recipe, Shared};
use super::{Arch, Builder, Config, Model, Name, keys, linear};
use crate::backend::HeadOrder;
use crate::error::Result;
use crate::format::Format;

/// Qwen3.5's and 3.6's entry in the registry.
pub const ARCH: Arch = Arch {
    gguf: "qwen35moe",
    hugging_face: &[
        "Qwen3_5MoeForCausalLM",
        "Qwen3_5MoeForConditionalGeneration",
        "qwen3_5_moe",
        "qwen3_5_moe_text",
    ],
    describe: |config, b| {
        // GGUF files of this family interleave the value heads of the key heads.
        let order = match config.format() {
            Format::Gguf => HeadOrder::Interleaved,
            Format::HuggingFace | Format::Mlx => HeadOrder::Grouped,
        };
        describe(config, b, order)
    },
};

/// Qwen3-Next's entry in the registry.
pub const QWEN3_NEXT: Arch = Arch {
    gguf: "qwen3next",
    hugging_face: &["Qwen3NextForCausalLM", "qwen3_next"],
    describe: |config, b| describe(config, b, HeadOrder::Grouped),
};

const FFN_NORM: Name = Name::new("post_attention_norm.weight", "post_attention_layernorm.weight");
const SHARED: [Name; 3] = [
    Name::new("ffn_gate_shexp.weight", "mlp.shared_expert.gate_proj.weight"),
    Name::new("ffn_up_shexp.weight", "mlp.shared_expert.up_proj.weight"),
    Name::new("ffn_down_shexp.weight", "mlp.shared_expert.down_proj.weight"),
];
const SHARED_GATE: Name = Name::new("ffn_gate_inp_shexp.weight", "mlp.shared_expert_gate.weight");

fn describe(config: &Config<'_>, b: &mut Builder<'_>, order: HeadOrder) -> Result<Box<dyn Model>> {
    let normalise = config.optional_bool(keys::ROUTER_NORMALISES)?.unwrap_or(true);
    let router = decoder::softmax_router(config, normalise)?;
    let shared = Shared { inner: config.count(keys::SHARED_INNER)?, names: SHARED, gate: Some(SHARED_GATE) };
    let mixture = Mixture { shared: Some(shared), ..Mixture::new(router, config.count(keys::EXPERT_INNER)?) };
    if config.format() != Format::Gguf {
        // Without this setting all channels would rotate, which is wrong for these families.
        config.float(keys::ROPE_SHARE)?;
    }
    let recipe = Recipe {
        qk_norm: Some(NormSpan::Head),
        partial_rope: true,
        gated: true,
        linear: Some(linear::shape(config, order)?),
        ffn_norm: FFN_NORM,
        zero_centred_norms: config.format() == Format::HuggingFace,
        ..Recipe::new(FeedForward::Mixture(mixture))
    };
    decoder::describe(config, b, &recipe)
}
