//! SmallThinker: every fourth layer sees all positions and has no rotation, the others have a window; every layer is a
//! mixture whose router reads the layer's input.

use super::attention::Grouped;
use super::feed_forward::{self, Mixture, Reads};
use super::recipe::{LayerRecipe, Recipe};
use super::{Arch, Builder, Config, ExpertNames, Model, Name, Reference, decoder, keys};
use crate::backend::{Activation, Router, Scores, Window};
use crate::error::Result;
use crate::format::{Format, Key};

/// The family's entry in the registry.
pub const ARCH: Arch = Arch {
    gguf: "smallthinker",
    name: "SmallThinker",
    models: "SmallThinker-4B-A0.6B, 21B-A3B",
    mlx: false,
    reference: Reference::Formulas,
    hugging_face: &["SmallThinkerForCausalLM", "smallthinker"],
    describe,
};

const EXPERTS: Key = Key { gguf: "expert_count", hugging_face: &["moe_num_primary_experts"] };
const EXPERTS_USED: Key =
    Key { gguf: "expert_used_count", hugging_face: &["moe_num_active_primary_experts"] };
const EXPERT_INNER: Key = Key { gguf: "expert_feed_forward_length", hugging_face: &["moe_ffn_hidden_size"] };
const HAS_SOFTMAX: Key = Key { gguf: "", hugging_face: &["moe_primary_router_apply_softmax"] };
const ROUTES_EARLY: Key = Key { gguf: "", hugging_face: &["moe_enable_early_router"] };
const HAS_SECONDARY: Key = Key { gguf: "", hugging_face: &["moe_enable_secondary_experts"] };
/// For each layer, whether it is a mixture, has a window, and rotates queries and keys.
const MIXTURES: Key = Key { gguf: "", hugging_face: &["moe_layer_layout"] };
const WINDOWS: Key =
    Key { gguf: "attention.sliding_window_pattern", hugging_face: &["sliding_window_layout"] };
const ROTATIONS: Key = Key { gguf: "", hugging_face: &["rope_layout"] };
const WINDOW: Key = Key { gguf: "attention.sliding_window", hugging_face: &["sliding_window_size"] };

const ROUTER: Name = Name::new("ffn_gate_inp.weight", "block_sparse_moe.primary_router.weight");
const NAMES: ExpertNames =
    ExpertNames { module: "block_sparse_moe", parts: ["gate", "up", "down"], ..ExpertNames::USUAL };

fn describe(config: &Config<'_>, b: &mut Builder<'_>) -> Result<Box<dyn Model>> {
    config.refuse_false(ROUTES_EARLY)?;
    config.refuse_true(HAS_SECONDARY)?;
    config.refuse_false(keys::ROUTER_NORMALISES)?;
    let layers = config.layers()?;
    if config.optional_bools(MIXTURES, layers)?.is_some_and(|mixtures| mixtures.contains(&false)) {
        return Err(config.unsupported(MIXTURES, "0"));
    }
    let mixture = Mixture {
        gate: ROUTER,
        reads: Reads::LayerInput,
        names: NAMES,
        activation: Activation::ReGlu,
        ..Mixture::new(router(config)?, config.count(EXPERT_INNER)?)
    };
    let attention = Grouped::read(config)?;
    let layer = |(window, rotates): (Option<Window>, bool)| {
        let rotation = attention.rotation.filter(|_| rotates);
        LayerRecipe::new(Grouped { window, rotation, ..attention.clone() }, mixture.clone())
    };
    let recipe = Recipe::new(config, kinds(config, layers)?.into_iter().map(layer).collect())?;
    // The setting of the activation function is not that of the experts, which always have ReLU.
    decoder::describe(config, b, &Recipe { reads_activation: true, ..recipe })
}

fn router(config: &Config<'_>) -> Result<Router> {
    // The softmax over the chosen experts equals the normalised softmax over all.
    let router = feed_forward::softmax_router_of(config, EXPERTS, EXPERTS_USED, true)?;
    let scores = match (config.optional_count(keys::ROUTER_FUNCTION)?, config.optional_bool(HAS_SOFTMAX)?) {
        (Some(1), _) | (None, Some(true)) => Scores::Softmax,
        (Some(2), _) | (None, Some(false)) => Scores::Sigmoid,
        (Some(other), _) => return Err(config.unsupported(keys::ROUTER_FUNCTION, &other.to_string())),
        (None, None) if config.format() == Format::Gguf => Scores::Softmax,
        (None, None) => Scores::Sigmoid,
    };
    Ok(Router { scores, ..router })
}

/// The window of each layer, and whether the layer rotates queries and keys.
fn kinds(config: &Config<'_>, layers: usize) -> Result<Vec<(Option<Window>, bool)>> {
    // Files that do not say it have this pattern if there is a window at all.
    let has_window = config.number(WINDOW)? > 0;
    let windowed = config.optional_bools(WINDOWS, layers)?;
    let windowed = windowed.unwrap_or_else(|| (0..layers).map(|l| has_window && l % 4 != 0).collect());
    let rotates = config.optional_bools(ROTATIONS, layers)?;
    let rotates = rotates.unwrap_or_else(|| (0..layers).map(|l| !has_window || l % 4 != 0).collect());
    let window = |windowed: bool| windowed.then(|| config.count(WINDOW).map(Window::Last)).transpose();
    windowed.into_iter().zip(rotates).map(|(windowed, rotates)| Ok((window(windowed)?, rotates))).collect()
}
