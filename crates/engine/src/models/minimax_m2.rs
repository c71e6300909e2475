//! MiniMax-M2: attention with norms over all heads of queries and keys, and partial rotation; every layer is a
//! mixture, whose router uses sigmoids and a correction.

use super::decoder::{self, FeedForward, Mixture, NormSpan, Recipe};
use super::{Arch, Builder, Config, ExpertNames, Fused, Model, Name, keys};
use crate::error::Result;

/// The family's entry in the registry.
pub const ARCH: Arch =
    Arch { gguf: "minimax-m2", hugging_face: &["MiniMaxM2ForCausalLM", "minimax_m2"], describe };

const ROUTER: Name = Name::new("ffn_gate_inp.weight", "block_sparse_moe.gate.weight");
const CORRECTION: Name = Name::new("exp_probs_b.bias", "block_sparse_moe.e_score_correction_bias");
const EXPERTS: ExpertNames =
    ExpertNames { module: "block_sparse_moe", parts: ["w1", "w3", "w2"], fused: Fused::Stacked };

fn describe(config: &Config<'_>, b: &mut Builder<'_>) -> Result<Box<dyn Model>> {
    let mixture = Mixture {
        gate: ROUTER,
        correction: Some(CORRECTION),
        names: EXPERTS,
        ..Mixture::new(decoder::sigmoid_router(config)?, config.count(keys::INNER)?)
    };
    let recipe = Recipe {
        qk_norm: Some(NormSpan::Projection),
        partial_rope: true,
        ..Recipe::new(FeedForward::Mixture(mixture))
    };
    decoder::describe(config, b, &recipe)
}
