//! AFMoE (Trinity): attention with norms of queries and keys and a gate of its own, in most layers with a window and
//! in the others without positions; norms before and after every block; the first layers dense, the others mixtures
//! with shared experts, whose router uses sigmoids and a correction.

use super::attention::{self, Grouped, OutputGate, QkNorm};
use super::feed_forward::{self, Dense, FeedForward, Mixture, Shared};
use super::recipe::{BlockNorms, LayerRecipe, Recipe};
use super::{Arch, Builder, Config, Model, Name, Reference, decoder, keys};
use crate::backend::{Gate, Router};
use crate::error::Result;
use crate::format::{Format, Key};

/// The family's entry in the registry.
pub const ARCH: Arch = Arch {
    gguf: "afmoe",
    name: "AFMoE (Trinity)",
    models: "Trinity-Nano (6B-A1B), Mini (26B-A3B), Large (400B-A13B)",
    mlx: true,
    reference: Reference::Transformers,
    hugging_face: &["AfmoeForCausalLM", "afmoe"],
    describe,
};

const ROUTER: Name = Name::new("ffn_gate_inp.weight", "mlp.router.gate.weight");
const CORRECTION: Name = Name::new("exp_probs_b.bias", "mlp.expert_bias");
const GATE: Name = Name::new("attn_gate.weight", "self_attn.gate_proj.weight");
const AFTER_ATTENTION: Name = Name::new("post_attention_norm.weight", "post_attention_layernorm.weight");
const BEFORE_FFN: Name = Name::new("ffn_norm.weight", "pre_mlp_layernorm.weight");
const AFTER_FFN: Name = Name::new("post_ffw_norm.weight", "post_mlp_layernorm.weight");

const ROUTER_SCALE: Key = Key { gguf: "expert_weights_scale", hugging_face: &["route_scale"] };
const ROUTER_NORMALISES: Key = Key { gguf: "expert_weights_norm", hugging_face: &["route_norm"] };
const ROUTER_SCORES: Key = Key { gguf: "", hugging_face: &["score_func"] };
const SHARED_EXPERTS: Key = Key { gguf: "expert_shared_count", hugging_face: &["num_shared_experts"] };
const DENSE_LAYERS: Key = Key { gguf: "leading_dense_block_count", hugging_face: &["num_dense_layers"] };
/// Whether embeddings are multiplied by the root of their length.
const SCALES_EMBEDDINGS: Key = Key { gguf: "", hugging_face: &["mup_enabled"] };
/// The distance between layers that see everything.
const EVERY: Key = Key { gguf: "", hugging_face: &["global_attn_every_n_layers"] };

fn describe(config: &Config<'_>, b: &mut Builder<'_>) -> Result<Box<dyn Model>> {
    config.refuse_true(keys::QKV_BIAS)?;
    if let Some(other) = config.optional_text(ROUTER_SCORES)?.filter(|&name| name != "sigmoid") {
        return Err(config.unsupported(ROUTER_SCORES, other));
    }
    let inner = config.count(keys::EXPERT_INNER)?;
    let router = Router {
        scale: config.optional_float(ROUTER_SCALE)?.unwrap_or(1.0),
        normalise: config.optional_bool(ROUTER_NORMALISES)?.unwrap_or(true),
        ..feed_forward::sigmoid_router(config)?
    };
    let mixture = Mixture {
        gate: ROUTER,
        correction: Some(CORRECTION),
        shared: Shared::plain(config.number(SHARED_EXPERTS)?, inner),
        ..Mixture::new(router, inner)
    };
    let dense = Dense::new(config.count(keys::INNER)?);
    let dense_layers = config.number(DENSE_LAYERS)?;
    let attention = Grouped {
        qk_norm: QkNorm::Head,
        gate: Some(OutputGate::Own { name: GATE, per_head: false, function: Gate::Sigmoid }),
        ..Grouped::read(config)?
    };
    let every = attention::window_period(config, config.optional_count(EVERY)?.unwrap_or(4))?;
    let windows = attention::windows(config, config.layers()?, |l| (l + 1) % every != 0)?;
    let layer = |(l, window): (usize, Option<_>)| {
        let rotation = attention.rotation.filter(|_| window.is_some());
        let feed_forward: FeedForward = if l < dense_layers { dense.into() } else { mixture.clone().into() };
        LayerRecipe {
            mixer_norms: BlockNorms { before: Some(LayerRecipe::MIXER_NORM), after: Some(AFTER_ATTENTION) },
            ffn_norms: BlockNorms { before: Some(BEFORE_FFN), after: Some(AFTER_FFN) },
            ..LayerRecipe::new(Grouped { window, rotation, ..attention.clone() }, feed_forward)
        }
    };
    let layers = windows.into_iter().enumerate().map(layer).collect();
    // GGUF files do not have this setting; the embeddings of their models are always scaled.
    let scales = match config.format() {
        Format::Gguf => true,
        Format::HuggingFace | Format::Mlx => config.optional_bool(SCALES_EMBEDDINGS)?.unwrap_or(false),
    };
    let embedding_scale = scales.then_some((attention.hidden as f32).sqrt());
    decoder::describe(config, b, &Recipe { embedding_scale, ..Recipe::new(config, layers)? })
}
