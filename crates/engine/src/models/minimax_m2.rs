//! MiniMax-M2: attention with norms over all heads of queries and keys, and partial rotation; every layer is a
//! mixture, whose router uses sigmoids and a correction.

use super::attention::{Grouped, QkNorm};
use super::feed_forward::{self, Mixture};
use super::recipe::{LayerRecipe, Recipe};
use super::{Arch, Builder, Config, ExpertNames, Model, Name, Reference, decoder, keys};
use crate::error::Result;

/// The family's entry in the registry.
pub const ARCH: Arch = Arch {
    gguf: "minimax-m2",
    name: "MiniMax-M2",
    models: "MiniMax-M2, M2.1, M2.5 (230B-A10B)",
    mlx: true,
    reference: Reference::Transformers,
    hugging_face: &["MiniMaxM2ForCausalLM", "minimax_m2"],
    describe,
};

const ROUTER: Name = Name::new("ffn_gate_inp.weight", "block_sparse_moe.gate.weight");
const CORRECTION: Name = Name::new("exp_probs_b.bias", "block_sparse_moe.e_score_correction_bias");
const EXPERTS: ExpertNames =
    ExpertNames { module: "block_sparse_moe", parts: ["w1", "w3", "w2"], ..ExpertNames::USUAL };

fn describe(config: &Config<'_>, b: &mut Builder<'_>) -> Result<Box<dyn Model>> {
    let attention = Grouped { qk_norm: QkNorm::Projection, ..Grouped::read_partial(config)? };
    let mixture = Mixture {
        gate: ROUTER,
        correction: Some(CORRECTION),
        names: EXPERTS,
        ..Mixture::new(feed_forward::sigmoid_router(config)?, config.count(keys::INNER)?)
    };
    decoder::describe(config, b, &Recipe::uniform(config, &LayerRecipe::new(attention, mixture))?)
}
