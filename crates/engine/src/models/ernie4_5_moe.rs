//! ERNIE-4.5-MoE: plain attention; the first layers dense, the others mixtures with shared experts, whose router uses a
//! softmax with a correction.

use super::attention::Grouped;
use super::feed_forward::{self, Dense, FeedForward, Mixture, Shared};
use super::recipe::{LayerRecipe, Recipe};
use super::{Arch, Builder, Config, Model, Name, Reference, decoder, keys};
use crate::backend::{RopePairs, Router};
use crate::error::Result;
use crate::format::{Key, Value};

/// The family's entry in the registry.
pub const ARCH: Arch = Arch {
    gguf: "ernie4_5-moe",
    name: "ERNIE-4.5-MoE",
    models: "ERNIE-4.5-21B-A3B, 300B-A47B",
    mlx: true,
    reference: Reference::Transformers,
    hugging_face: &["Ernie4_5_MoeForCausalLM", "Ernie4_5_MoEForCausalLM", "ernie4_5_moe"],
    describe,
};

const CORRECTION: Name = Name::new("exp_probs_b.bias", "mlp.moe_statics.e_score_correction_bias");
const EXPERTS: Key = Key { gguf: "expert_count", hugging_face: &["moe_num_experts"] };
const EXPERTS_USED: Key = Key { gguf: "expert_used_count", hugging_face: &["moe_k"] };
const SHARED_EXPERTS: Key = Key { gguf: "expert_shared_count", hugging_face: &["moe_num_shared_experts"] };
/// The first and the last layer with experts, and the distance between such layers.
const FIRST: Key = Key { gguf: "leading_dense_block_count", hugging_face: &["moe_layer_start_index"] };
const LAST: Key = Key { gguf: "", hugging_face: &["moe_layer_end_index"] };
const INTERVAL: Key = Key { gguf: "interleave_moe_layer_step", hugging_face: &["moe_layer_interval"] };
const HAS_BIASES: Key = Key { gguf: "", hugging_face: &["use_bias"] };

fn describe(config: &Config<'_>, b: &mut Builder<'_>) -> Result<Box<dyn Model>> {
    config.assume(&[("rope_theta", Value::Float(500_000.0))]);
    config.refuse_true(HAS_BIASES)?;
    let inner = config.count(keys::EXPERT_INNER)?;
    let router = feed_forward::softmax_router_of(config, EXPERTS, EXPERTS_USED, true)?;
    let layers = config.layers()?;
    let (first, interval) = (config.number(FIRST)?, config.optional_count(INTERVAL)?.unwrap_or(1));
    let last = match config.optional_signed(LAST)? {
        // Minus one is the last layer.
        Some(last @ 0..) => last as usize,
        _ => layers - 1,
    };
    let has_experts = |l: usize| (first..=last).contains(&l) && (l + 1).is_multiple_of(interval);
    // Older checkpoints have no correction.
    let corrected = (0..layers).find(|&l| has_experts(l)).is_some_and(|l| b.has(CORRECTION.of_layer(l)));
    let mixture = Mixture {
        correction: corrected.then_some(CORRECTION),
        shared: Shared::plain(config.number(SHARED_EXPERTS)?, inner),
        ..Mixture::new(Router { scale: config.router_scale()?, ..router }, inner)
    };
    let dense = Dense::new(config.count(keys::INNER)?);
    let attention = Grouped::read(config)?.with_pairs(RopePairs::Interleaved);
    let layer = |l: usize| {
        let feed_forward: FeedForward = if has_experts(l) { mixture.clone().into() } else { dense.into() };
        LayerRecipe::new(attention.clone(), feed_forward)
    };
    decoder::describe(config, b, &Recipe::new(config, (0..layers).map(layer).collect())?)
}
