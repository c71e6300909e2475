//! GroveMoE: Qwen3-MoE whose experts have smaller ones beside them, each shared by two neighbours. llama.cpp computes
//! something else: it gives the small experts the output of the large ones.

use super::attention::{Grouped, QkNorm};
use super::feed_forward::{self, Adjugate, Mixture};
use super::recipe::{LayerRecipe, Recipe};
use super::{Arch, Builder, Config, ExpertNames, Model, Name, Reference, decoder, keys};
use crate::error::Result;
use crate::format::Key;

/// The family's entry in the registry.
pub const ARCH: Arch = Arch {
    gguf: "grovemoe",
    name: "GroveMoE",
    models: "GroveMoE-Base, Inst (33B-A3B)",
    mlx: false,
    reference: Reference::FormulasOnly,
    hugging_face: &["GroveMoeForCausalLM", "grove_moe"],
    describe,
};

/// Inner channels of a small expert, how many experts share it, and the factor of its output.
const SMALL_INNER: Key = Key { gguf: "expert_chunk_feed_forward_length", hugging_face: &[] };
const GROUP: Key = Key { gguf: "experts_per_group", hugging_face: &[] };
const SCALE: Key = Key { gguf: "expert_group_scale", hugging_face: &[] };

/// What folders do not say, because it is fixed in the model's code.
const USUAL_GROUP: usize = 2;
const USUAL_SCALE: f32 = 0.05;

const SMALL_EXPERTS: ExpertNames = ExpertNames {
    list: "chunk_experts",
    gguf: "_chexps",
    stacked: &["chunk_experts."],
    together: ["chunk_experts.gate_up_proj", "chunk_experts.down_proj"],
    ..ExpertNames::USUAL
};
/// A correction of the router's scores that the model's code does not use.
const UNUSED: Name = Name::new("", "mlp.expert_bias");

fn describe(config: &Config<'_>, b: &mut Builder<'_>) -> Result<Box<dyn Model>> {
    config.refuse_false(keys::ROUTER_NORMALISES)?;
    let attention = Grouped { qk_norm: QkNorm::Head, ..Grouped::read(config)? };
    let router = feed_forward::softmax_router(config, true)?;
    let group = config.optional_count(GROUP)?.unwrap_or(USUAL_GROUP);
    if !router.experts.is_multiple_of(group) {
        return Err(
            config.error(keys::EXPERTS, &format!("is not a multiple of {group}, the size of a group"))
        );
    }
    let adjugate = Adjugate {
        names: SMALL_EXPERTS,
        group,
        inner: config.optional_count(SMALL_INNER)?.unwrap_or(attention.key_dim),
        scale: config.optional_float(SCALE)?.unwrap_or(USUAL_SCALE),
    };
    let inner = config.count(keys::EXPERT_INNER)?;
    let mixture = Mixture { adjugate: Some(adjugate), ..Mixture::new(router, inner) };
    (0..config.layers()?).for_each(|l| b.ignore(UNUSED.of_layer(l)));
    decoder::describe(config, b, &Recipe::uniform(config, &LayerRecipe::new(attention, mixture))?)
}
