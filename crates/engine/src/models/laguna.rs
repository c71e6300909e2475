//! Laguna: attention with norms of queries and keys and a gate of its own. In some models most layers have a window, and
//! then another number of heads and another rotation. The first layers are dense, the others mixtures with a shared
//! expert, whose router uses sigmoids and a correction.

use super::attention::{self, Grouped, OutputGate, QkNorm};
use super::config::LayerKind;
use super::feed_forward::{self, Dense, FeedForward, Mixture, Shared};
use super::positions::Rotating;
use super::recipe::{LayerRecipe, Recipe};
use super::{Arch, Builder, Config, Model, Name, Reference, decoder, keys};
use crate::backend::{Gate, Router, Window};
use crate::error::Result;
use crate::format::{Format, Key};

/// The family's entry in the registry.
pub const ARCH: Arch = Arch {
    gguf: "laguna",
    name: "Laguna",
    models: "Laguna-XS (33B), Laguna-S (118B)",
    mlx: true,
    reference: Reference::Transformers,
    hugging_face: &["LagunaForCausalLM", "laguna"],
    describe,
};

const GATE: Name = Name::new("attn_gate.weight", "self_attn.g_proj.weight");

/// The names of the router and of the correction of its scores, as Hugging Face's folders have them.
const PUBLISHED: [Name; 2] =
    [Mixture::GATE, Name::new("exp_probs_b.bias", "mlp.experts.e_score_correction_bias")];
/// As MLX's folders have them.
const MLX: [Name; 2] = [Name::new("", "mlp.gate.proj.weight"), Mixture::CORRECTION];

/// The number of query heads of each layer, in folders.
const HEADS: Key = Key { gguf: "attention.head_count", hugging_face: &["num_attention_heads_per_layer"] };
/// The dense layers, in some folders.
const DENSE_LAYERS: Key = Key { gguf: "", hugging_face: &["mlp_only_layers"] };
/// Whether an expert's weight multiplies its input.
const WEIGHS_INPUT: Key = Key { gguf: "", hugging_face: &["moe_apply_router_weight_on_input"] };
/// The bound of the router's logits.
const ROUTER_SOFTCAP: Key = Key { gguf: "", hugging_face: &["moe_router_logit_softcapping"] };

fn describe(config: &Config<'_>, b: &mut Builder<'_>) -> Result<Box<dyn Model>> {
    config.refuse_true(WEIGHS_INPUT)?;
    config.refuse_false(keys::ROUTER_NORMALISES)?;
    if let Some(bound) = config.nonzero_float(ROUTER_SOFTCAP)? {
        return Err(config.unsupported(ROUTER_SOFTCAP, &bound.to_string()));
    }
    let [gate, correction] = if config.format() == Format::Mlx { MLX } else { PUBLISHED };
    let router = Router { scale: config.router_scale()?, ..feed_forward::sigmoid_router(config)? };
    let mixture = Mixture {
        gate,
        correction: Some(correction),
        shared: Some(Shared::named(config.count(keys::SHARED_INNER)?, Shared::SINGLE)),
        ..Mixture::new(router, config.count(keys::EXPERT_INNER)?)
    };
    let dense = Dense::new(config.count(keys::INNER)?);
    let dense_layers = (0..config.layers()?).take_while(|&l| !b.has(gate.of_layer(l))).count();
    let listed = config.optional_counts(DENSE_LAYERS, dense_layers)?;
    if listed.is_some_and(|listed| !listed.into_iter().eq(0..dense_layers)) {
        return Err(config.error(DENSE_LAYERS, "does not list the layers without a router"));
    }
    let mut layers = Vec::new();
    for (l, window) in windows(config)?.into_iter().enumerate() {
        let attention = attention(config, b, l, window)?;
        let feed_forward: FeedForward = if l < dense_layers { dense.into() } else { mixture.clone().into() };
        layers.push(LayerRecipe::new(attention, feed_forward));
    }
    decoder::describe(config, b, &Recipe::new(config, layers)?)
}

/// The window of each layer. If a GGUF file has one, all but every fourth layer have it, or all but those at another
/// distance, from the second layer on.
fn windows(config: &Config<'_>) -> Result<Vec<Option<Window>>> {
    let has_window = config.format() == Format::Gguf && config.number(keys::WINDOW)? > 0;
    let period = attention::window_period(config, 4)?;
    attention::windows(config, config.layers()?, |l| has_window && l % period != 0)
}

/// The attention of layer `l`.
fn attention(config: &Config<'_>, b: &Builder<'_>, l: usize, window: Option<Window>) -> Result<Grouped> {
    let kind = if window.is_some() { LayerKind::Windowed } else { LayerKind::Full };
    let config = &config.of_layer(l, kind);
    let heads = match config.optional_count(HEADS)? {
        Some(heads) => heads,
        None => config.count(keys::HEADS)?,
    };
    let dim = config.count(keys::KEY_DIM)?;
    // Every published model sets the base.
    config.float(keys::ROPE_BASE)?;
    Ok(Grouped {
        value_dim: config.optional_count(keys::VALUE_DIM)?.unwrap_or(dim),
        window,
        rotation: Some(Rotating::read(config, dim)?),
        qk_norm: QkNorm::Head,
        gate: Some(OutputGate::Own {
            name: GATE,
            // GGUF files have no setting for this.
            per_head: b.rows_or(GATE.of_layer(l), heads)? == heads,
            function: Gate::Softplus,
        }),
        ..Grouped::of(config, [heads, config.count(keys::KV_HEADS)?], dim)?
    })
}
