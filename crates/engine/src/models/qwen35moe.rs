//! Qwen3-Next, Qwen3.5-MoE and Qwen3.6-MoE: three layers with linear attention, then one with gated attention; every
//! layer is a mixture with a gated shared expert.

use super::attention::{Grouped, OutputGate, QkNorm};
use super::feed_forward::{self, Mixture, Shared};
use super::linear::{self, Linear};
use super::recipe::{self, LayerRecipe, Norms, Recipe};
use super::{Arch, Builder, Config, Model, Name, decoder, keys};
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

const SHARED: [Name; 3] = [
    Name::new("ffn_gate_shexp.weight", "mlp.shared_expert.gate_proj.weight"),
    Name::new("ffn_up_shexp.weight", "mlp.shared_expert.up_proj.weight"),
    Name::new("ffn_down_shexp.weight", "mlp.shared_expert.down_proj.weight"),
];
const SHARED_GATE: Name = Name::new("ffn_gate_inp_shexp.weight", "mlp.shared_expert_gate.weight");

fn describe(config: &Config<'_>, b: &mut Builder<'_>, order: HeadOrder) -> Result<Box<dyn Model>> {
    let normalise = config.optional_bool(keys::ROUTER_NORMALISES)?.unwrap_or(true);
    let router = feed_forward::softmax_router(config, normalise)?;
    let shared = Shared { gate: Some(SHARED_GATE), ..Shared::named(config.count(keys::SHARED_INNER)?, SHARED) };
    let mixture = Mixture { shared: Some(shared), ..Mixture::new(router, config.count(keys::EXPERT_INNER)?) };
    if config.format() != Format::Gguf {
        // Without this setting all channels would rotate, which is wrong for these families.
        config.float(keys::ROPE_SHARE)?;
    }
    let attention = Grouped {
        qk_norm: QkNorm::Head,
        gate: Some(OutputGate::BesideQueries),
        ..Grouped::read_partial(config)?
    };
    let shape = linear::shape(config, order)?;
    let layer = |l: usize| {
        let mixer: recipe::Mixer = match Linear::is_layer(b, l) {
            true => shape.into(),
            false => attention.clone().into(),
        };
        LayerRecipe::new(mixer, mixture.clone()).with_ffn_norm(LayerRecipe::POST_NORM)
    };
    let recipe = Recipe::new(config, (0..config.layers()?).map(layer).collect())?;
    let norms = Norms { zero_centred: config.format() == Format::HuggingFace, ..recipe.norms };
    decoder::describe(config, b, &Recipe { norms, ..recipe })
}
