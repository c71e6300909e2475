//! Llama and families with the same architecture: Mistral and, with experts, Mixtral.

use forebay_kernels::RopePairs;

use super::decoder::{self, FeedForward, Mixture, Recipe};
use super::{Arch, Builder, Config, ExpertNames, Fused, Model, Name, keys};
use crate::error::Result;
use crate::format::Format;

/// The family's entry in the registry.
pub const ARCH: Arch = Arch {
    gguf: "llama",
    hugging_face: &[
        "LlamaForCausalLM",
        "MistralForCausalLM",
        "MixtralForCausalLM",
        "llama",
        "mistral",
        "mixtral",
    ],
    describe,
};

const ROUTER: Name = Name::new("ffn_gate_inp.weight", "block_sparse_moe.gate.weight");
const EXPERTS: ExpertNames =
    ExpertNames { module: "block_sparse_moe", parts: ["w1", "w3", "w2"], fused: Fused::Stacked };

fn describe(config: &Config<'_>, b: &mut Builder<'_>) -> Result<Box<dyn Model>> {
    let context = config.count(keys::CONTEXT)?;
    if let Some(window) = config.optional_count(keys::WINDOW)?.filter(|&window| window < context) {
        return Err(config.unsupported(keys::WINDOW, &window.to_string()));
    }
    let inner = config.count(keys::INNER)?;
    let feed_forward = if config.optional_count(keys::EXPERTS)?.is_some() {
        let router = decoder::softmax_router(config, true)?;
        FeedForward::Mixture(Mixture { gate: ROUTER, names: EXPERTS, ..Mixture::new(router, inner) })
    } else {
        FeedForward::Dense(inner)
    };
    // GGUF files store the rows of queries and keys in another order.
    let pairs = match config.format() {
        Format::Gguf => RopePairs::Interleaved,
        Format::HuggingFace | Format::Mlx => RopePairs::HalfSplit,
    };
    let recipe = Recipe { pairs, ..Recipe::new(feed_forward) };
    decoder::describe(config, b, &recipe)
}
