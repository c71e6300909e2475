//! Granite 3, dense and with experts: like Llama, with factors of embeddings, scores, residuals and logits.

use super::attention::Grouped;
use super::feed_forward::{self, Dense, FeedForward, Mixture, Shared};
use super::recipe::{LayerRecipe, Recipe};
use super::{Arch, Builder, Config, ExpertNames, Model, Name, Reference, decoder, keys};
use crate::backend::RopePairs;
use crate::error::Result;
use crate::format::{Format, Key};

/// The entry of Granite with experts in the registry.
pub const ARCH: Arch = Arch {
    gguf: "granitemoe",
    name: "Granite-MoE",
    models: "Granite-3.0 and 3.1, 1B-A400M and 3B-A800M",
    mlx: true,
    reference: Reference::Transformers,
    hugging_face: &["GraniteMoeForCausalLM", "GraniteMoeSharedForCausalLM", "granitemoe", "granitemoeshared"],
    describe,
};

/// The entry of dense Granite in the registry.
pub const DENSE: Arch = Arch {
    gguf: "granite",
    name: "Granite, dense",
    models: "Granite-3, 2B and 8B",
    mlx: true,
    reference: Reference::Transformers,
    hugging_face: &["GraniteForCausalLM", "granite"],
    describe,
};

const EMBEDDING_FACTOR: Key = Key { gguf: "embedding_scale", hugging_face: &["embedding_multiplier"] };
const RESIDUAL_FACTOR: Key = Key { gguf: "residual_scale", hugging_face: &["residual_multiplier"] };
const SCORE_FACTOR: Key = Key { gguf: "attention.scale", hugging_face: &["attention_multiplier"] };
const LOGIT_DIVISOR: Key = Key { gguf: "logit_scale", hugging_face: &["logits_scaling"] };
const SHARED_INNER: Key =
    Key { gguf: "expert_shared_feed_forward_length", hugging_face: &["shared_intermediate_size"] };

const ROUTER: Name = Name::new("ffn_gate_inp.weight", "block_sparse_moe.router.layer.weight");
const EXPERTS: ExpertNames = ExpertNames {
    module: "block_sparse_moe",
    together: ["input_linear.weight", "output_linear.weight"],
    ..ExpertNames::USUAL
};
const SHARED: [Name; 3] = [
    Name::new("ffn_gate_shexp.weight", ""),
    Name::new("ffn_up_shexp.weight", ""),
    Name::new("ffn_down_shexp.weight", "shared_mlp.output_linear.weight"),
];
const SHARED_TOGETHER: Name = Name::new("", "shared_mlp.input_linear.weight");

fn describe(config: &Config<'_>, b: &mut Builder<'_>) -> Result<Box<dyn Model>> {
    config.refuse_true(keys::QKV_BIAS)?;
    config.refuse_true(keys::MLP_BIAS)?;
    let gguf = config.format() == Format::Gguf;
    // GGUF files store the rows of queries and keys in another order.
    let pairs = if gguf { RopePairs::Interleaved } else { RopePairs::HalfSplit };
    let attention = Grouped::read(config)?.with_pairs(pairs);
    // Without the factor, GGUF files mean the usual one, folders none.
    let by_default = if gguf { attention.scale } else { 1.0 };
    let scale = config.optional_float(SCORE_FACTOR)?.unwrap_or(by_default);
    let residual_scale = config.optional_float(RESIDUAL_FACTOR)?;
    let layer = LayerRecipe {
        residual_scale,
        ..LayerRecipe::new(Grouped { scale, ..attention }, feed_forward(config)?)
    };
    let recipe = Recipe {
        embedding_scale: config.optional_float(EMBEDDING_FACTOR)?,
        logit_scale: config.optional_float(LOGIT_DIVISOR)?.map(f32::recip),
        ..Recipe::uniform(config, &layer)?
    };
    decoder::describe(config, b, &recipe)
}

fn feed_forward(config: &Config<'_>) -> Result<FeedForward> {
    let inner = config.count(keys::INNER)?;
    if config.number(keys::EXPERTS)? == 0 {
        return Ok(Dense::new(inner).into());
    }
    let shared = match config.number(SHARED_INNER)? {
        0 => None,
        inner => {
            let shared = Shared::named(inner, SHARED);
            Some(Shared { dense: Dense { together: Some(SHARED_TOGETHER), ..shared.dense }, ..shared })
        }
    };
    // The softmax over the chosen experts equals the normalised softmax over all.
    let router = feed_forward::softmax_router(config, true)?;
    Ok(Mixture { gate: ROUTER, names: EXPERTS, shared, ..Mixture::new(router, inner) }.into())
}
