//! Hunyuan-A13B: attention with norms of queries and keys after their rotation; every layer is a mixture with a shared
//! expert.

use super::attention::{AttentionNames, Grouped, QkNorm};
use super::feed_forward::{self, Mixture, Shared};
use super::recipe::{LayerRecipe, Recipe};
use super::{Arch, Builder, Config, Model, Name, Reference, decoder, keys};
use crate::error::Result;
use crate::format::Key;

/// The family's entry in the registry.
pub const ARCH: Arch = Arch {
    gguf: "hunyuan-moe",
    name: "Hunyuan-MoE",
    models: "Hunyuan-A13B (80B-A13B)",
    mlx: true,
    reference: Reference::Transformers,
    hugging_face: &["HunYuanMoEV1ForCausalLM", "HunYuanMoEForCausalLM", "hunyuan_v1_moe"],
    describe,
};

const ROUTER: Name = Name::new("ffn_gate_inp.weight", "mlp.gate.wg.weight");
const SHARED: [Name; 3] = [
    Name::new("ffn_gate_shexp.weight", "mlp.shared_mlp.gate_proj.weight"),
    Name::new("ffn_up_shexp.weight", "mlp.shared_mlp.up_proj.weight"),
    Name::new("ffn_down_shexp.weight", "mlp.shared_mlp.down_proj.weight"),
];
const NAMES: AttentionNames = AttentionNames {
    q_norm: Name::new("attn_q_norm.weight", "self_attn.query_layernorm.weight"),
    k_norm: Name::new("attn_k_norm.weight", "self_attn.key_layernorm.weight"),
    ..AttentionNames::USUAL
};
/// In folders, one for each layer.
const EXPERTS_USED: Key = Key { gguf: "expert_used_count", hugging_face: &["moe_topk"] };
const EXPERT_INNER: Key =
    Key { gguf: "expert_feed_forward_length", hugging_face: &["moe_intermediate_size"] };
const SHARED_EXPERTS: Key = Key { gguf: "expert_shared_count", hugging_face: &["num_shared_expert"] };
const SHARED_INNER: Key = Key { gguf: "expert_shared_feed_forward_length", hugging_face: &[] };

fn describe(config: &Config<'_>, b: &mut Builder<'_>) -> Result<Box<dyn Model>> {
    config.refuse_true(keys::QKV_BIAS)?;
    config.refuse_false(keys::QK_NORM)?;
    let layers = config.layers()?;
    let router = feed_forward::softmax_router_of(config, keys::EXPERTS, EXPERTS_USED, true)?;
    let inner =
        config.optional_uniform(EXPERT_INNER, layers)?.map_or_else(|| config.count(keys::INNER), Ok)?;
    let shared = match config.optional_count(SHARED_INNER)? {
        Some(inner) => inner,
        None => config.count(keys::INNER)? * config.optional_uniform(SHARED_EXPERTS, layers)?.unwrap_or(1),
    };
    let mixture =
        Mixture { gate: ROUTER, shared: Some(Shared::named(shared, SHARED)), ..Mixture::new(router, inner) };
    let attention = Grouped { qk_norm: QkNorm::HeadAfterRotation, names: NAMES, ..Grouped::read(config)? };
    decoder::describe(config, b, &Recipe::uniform(config, &LayerRecipe::new(attention, mixture))?)
}
