//! Hy3: attention with norms of queries and keys; the first layers dense, the others mixtures with a shared expert,
//! whose router uses sigmoids and a correction.

use super::attention::{Grouped, QkNorm};
use super::feed_forward::{self, Dense, Mixture, Shared};
use super::recipe::{LayerRecipe, Recipe};
use super::{Arch, Builder, Config, Model, Name, Reference, decoder, keys};
use crate::backend::Router;
use crate::error::Result;
use crate::format::{Format, Key, Value};

/// The family's entry in the registry.
pub const ARCH: Arch = Arch {
    gguf: "hy_v3",
    name: "Hy3",
    models: "Hy3 (295B-A21B)",
    mlx: false,
    reference: Reference::Transformers,
    hugging_face: &["HYV3ForCausalLM", "hy_v3"],
    describe,
};

const ROUTER: Name = Name::new("ffn_gate_inp.weight", "mlp.router.gate.weight");
const CORRECTION: Name = Name::new("exp_probs_b", "mlp.expert_bias");
const SHARED: [Name; 3] = [
    Name::new("ffn_gate_shexp.weight", "mlp.shared_mlp.gate_proj.weight"),
    Name::new("ffn_up_shexp.weight", "mlp.shared_mlp.up_proj.weight"),
    Name::new("ffn_down_shexp.weight", "mlp.shared_mlp.down_proj.weight"),
];
const ROUTER_SCALE: Key = Key { gguf: "expert_weights_scale", hugging_face: &["router_scaling_factor"] };
const ROUTER_NORMALISES: Key = Key { gguf: "expert_weights_norm", hugging_face: &["route_norm"] };
const SHARED_INNER: Key = Key { gguf: "expert_shared_feed_forward_length", hugging_face: &[] };
const SHARED_EXPERTS: Key = Key { gguf: "", hugging_face: &["num_shared_experts"] };

fn describe(config: &Config<'_>, b: &mut Builder<'_>) -> Result<Box<dyn Model>> {
    config.assume(&[("rope_theta", Value::Float(11_158_840.0)), ("head_dim", Value::Unsigned(128))]);
    for key in [keys::QKV_BIAS, keys::MLP_BIAS] {
        config.refuse_true(key)?;
    }
    config.refuse_false(ROUTER_NORMALISES)?;
    let inner = config.count(keys::EXPERT_INNER)?;
    let scale = config.optional_float(ROUTER_SCALE)?.unwrap_or(1.0);
    let shared = match config.format() {
        Format::Gguf => config.optional_count(SHARED_INNER)?.unwrap_or(inner),
        Format::HuggingFace | Format::Mlx => inner * config.count(SHARED_EXPERTS)?,
    };
    let mixture = Mixture {
        gate: ROUTER,
        correction: Some(CORRECTION),
        shared: Some(Shared::named(shared, SHARED)),
        ..Mixture::new(Router { scale, ..feed_forward::sigmoid_router(config)? }, inner)
    };
    let attention = Grouped { qk_norm: QkNorm::Head, ..Grouped::read(config)? };
    let dense = LayerRecipe::new(attention.clone(), Dense::new(config.count(keys::INNER)?));
    let mixture = LayerRecipe::new(attention, mixture);
    // GGUF files have no setting for the dense layers, but their tensors.
    let layers = config.layers()?;
    let dense_layers = match config.optional_texts(keys::FEED_FORWARD_TYPES)? {
        Some(_) => feed_forward::dense_layers(config)?,
        None => (0..layers).take_while(|&l| !b.has(ROUTER.of_layer(l))).count(),
    };
    decoder::describe(config, b, &Recipe::dense_first(config, dense_layers, &dense, &mixture)?)
}
