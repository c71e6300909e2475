//! Qwen3-Next, Qwen3.5 and Qwen3.6: three layers with linear attention, then one with gated attention; every layer is
//! a mixture with a gated shared expert or, in the dense sizes of Qwen3.5 and 3.6, dense.

use super::attention::{Grouped, OutputGate, QkNorm};
use super::feed_forward::{self, Dense, FeedForward, Mixture, Shared};
use super::linear::{self, Linear};
use super::recipe::{self, LayerRecipe, Norms, Recipe};
use super::{Arch, Builder, Config, Model, Name, Reference, decoder, keys};
use crate::backend::HeadOrder;
use crate::error::Result;
use crate::format::Format;

/// Qwen3.5's and 3.6's entry in the registry.
pub const ARCH: Arch = Arch {
    gguf: "qwen35moe",
    name: "Qwen3.5-MoE, Qwen3.6-MoE",
    models: "Qwen3.5-35B-A3B, 122B-A10B, 397B-A17B, Qwen3.6-35B-A3B",
    mlx: true,
    reference: Reference::Transformers,
    hugging_face: &[
        "Qwen3_5MoeForCausalLM",
        "Qwen3_5MoeForConditionalGeneration",
        "qwen3_5_moe",
        "qwen3_5_moe_text",
    ],
    describe: |config, b| describe(config, b, head_order(config), mixture(config)?.into()),
};

/// The entry of the dense sizes of Qwen3.5 and 3.6.
pub const DENSE: Arch = Arch {
    gguf: "qwen35",
    name: "Qwen3.5 and 3.6, dense",
    models: "Qwen3.5, 0.8B to 27B",
    mlx: true,
    reference: Reference::Transformers,
    hugging_face: &["Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration", "qwen3_5", "qwen3_5_text"],
    describe: |config, b| {
        describe(config, b, head_order(config), Dense::new(config.count(keys::INNER)?).into())
    },
};

/// Qwen3-Next's entry in the registry.
pub const QWEN3_NEXT: Arch = Arch {
    gguf: "qwen3next",
    name: "Qwen3-Next",
    models: "Qwen3-Next-80B-A3B",
    mlx: true,
    reference: Reference::Transformers,
    hugging_face: &["Qwen3NextForCausalLM", "qwen3_next"],
    describe: |config, b| describe(config, b, HeadOrder::Grouped, mixture(config)?.into()),
};

const SHARED_GATE: Name = Name::new("ffn_gate_inp_shexp.weight", "mlp.shared_expert_gate.weight");

/// GGUF files of Qwen3.5 and 3.6 interleave the value heads of the key heads.
fn head_order(config: &Config<'_>) -> HeadOrder {
    match config.format() {
        Format::Gguf => HeadOrder::Interleaved,
        Format::HuggingFace | Format::Mlx => HeadOrder::Grouped,
    }
}

fn mixture(config: &Config<'_>) -> Result<Mixture> {
    let normalise = config.optional_bool(keys::ROUTER_NORMALISES)?.unwrap_or(true);
    let router = feed_forward::softmax_router(config, normalise)?;
    let shared = Shared {
        gate: Some(SHARED_GATE),
        ..Shared::named(config.count(keys::SHARED_INNER)?, Shared::SINGLE)
    };
    Ok(Mixture { shared: Some(shared), ..Mixture::new(router, config.count(keys::EXPERT_INNER)?) })
}

fn describe(
    config: &Config<'_>,
    b: &mut Builder<'_>,
    order: HeadOrder,
    feed_forward: FeedForward,
) -> Result<Box<dyn Model>> {
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
        LayerRecipe::new(mixer, feed_forward.clone()).with_ffn_norm(LayerRecipe::POST_NORM)
    };
    let recipe = Recipe::new(config, (0..config.layers()?).map(layer).collect())?;
    let norms = Norms { zero_centred: config.format() == Format::HuggingFace, ..recipe.norms };
    decoder::describe(config, b, &Recipe { norms, ..recipe })
}
