//! Llama and families with the same architecture: Mistral and, with experts, Mixtral.

use super::attention::Grouped;
use super::feed_forward::{self, Dense, FeedForward, Mixture};
use super::recipe::{LayerRecipe, Recipe};
use super::{Arch, Builder, Config, ExpertNames, Model, Name, Reference, decoder, keys};
use crate::backend::{RopePairs, Window};
use crate::error::Result;
use crate::format::Format;

/// The family's entry in the registry.
pub const ARCH: Arch = Arch {
    gguf: "llama",
    name: "Llama, Mistral, Mixtral",
    models: "dense Llama 2 and 3, Mistral-7B; Mixtral-8x7B and 8x22B",
    mlx: true,
    reference: Reference::Transformers,
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

/// The router in Mixtral's folders and GGUF files.
pub const ROUTER: Name = Name::new("ffn_gate_inp.weight", "block_sparse_moe.gate.weight");
/// The names of experts in Mixtral's folders.
pub const EXPERTS: ExpertNames =
    ExpertNames { module: "block_sparse_moe", parts: ["w1", "w3", "w2"], ..ExpertNames::USUAL };

fn describe(config: &Config<'_>, b: &mut Builder<'_>) -> Result<Box<dyn Model>> {
    // Mistral's first models have a window in all layers. GGUF files do not mention it.
    let window = config.optional_count(keys::WINDOW)?.map(Window::Last);
    let inner = config.count(keys::INNER)?;
    let feed_forward: FeedForward = if config.optional_count(keys::EXPERTS)?.is_some() {
        let router = feed_forward::softmax_router(config, true)?;
        Mixture { gate: ROUTER, names: EXPERTS, ..Mixture::new(router, inner) }.into()
    } else {
        Dense::new(inner).into()
    };
    // GGUF files store the rows of queries and keys in another order.
    let pairs = match config.format() {
        Format::Gguf => RopePairs::Interleaved,
        Format::HuggingFace | Format::Mlx => RopePairs::HalfSplit,
    };
    let attention = Grouped { window, ..Grouped::read(config)?.with_pairs(pairs) };
    decoder::describe(config, b, &Recipe::uniform(config, &LayerRecipe::new(attention, feed_forward))?)
}
