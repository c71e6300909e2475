//! Step-3.5-Flash and Step-3.7-Flash: attention with norms of queries and keys and a gate for each head. Most layers
//! have a window, and then another number of heads and another rotation. The first layers are dense, the others
//! mixtures with a shared expert, whose router uses sigmoids and a correction. Some layers bound inner values.

use super::attention::{self, Grouped, OutputGate, QkNorm};
use super::config::LayerKind;
use super::feed_forward::{self, Dense, FeedForward, Mixture, Shared};
use super::positions::Rotating;
use super::recipe::{LayerRecipe, Norms, Recipe};
use super::{Arch, Builder, Config, ExpertNames, Model, Name, Reference, decoder, keys};
use crate::backend::{Activation, Gate, Router};
use crate::blocks::rope::RopeScaling;
use crate::error::Result;
use crate::format::{Format, Key};

/// The family's entry in the registry.
pub const ARCH: Arch = Arch {
    gguf: "step35",
    name: "Step-3.5",
    models: "Step-3.5-Flash and 3.7-Flash (196B-A11B)",
    mlx: true,
    reference: Reference::Transformers,
    hugging_face: &["Step3p5ForCausalLM", "Step3p7ForConditionalGeneration", "step3p5", "step3p7"],
    describe,
};

const HEAD_GATE: Name = Name::new("attn_gate.weight", "self_attn.g_proj.weight");

/// The names of a mixture's tensors.
struct Names {
    router: Name,
    correction: Name,
    experts: ExpertNames,
    shared: [Name; 3],
}

/// As Hugging Face's folders have them.
const PUBLISHED: Names = Names {
    router: Name::new("ffn_gate_inp.weight", "moe.gate.weight"),
    correction: Name::new("exp_probs_b.bias", "moe.router_bias"),
    experts: ExpertNames { module: "moe", stacked: &[""], ..ExpertNames::USUAL },
    shared: [
        Name::new("ffn_gate_shexp.weight", "share_expert.gate_proj.weight"),
        Name::new("ffn_up_shexp.weight", "share_expert.up_proj.weight"),
        Name::new("ffn_down_shexp.weight", "share_expert.down_proj.weight"),
    ],
};

/// As MLX's folders have them.
const MLX: Names = Names {
    router: Name::new("", "mlp.gate.gate.weight"),
    correction: Name::new("", "mlp.gate.router_bias"),
    experts: ExpertNames::USUAL,
    shared: [
        Name::new("", "mlp.share_expert.gate_proj.weight"),
        Name::new("", "mlp.share_expert.up_proj.weight"),
        Name::new("", "mlp.share_expert.down_proj.weight"),
    ],
};

/// The heads and key heads of layers with a window, in folders.
const WINDOWED_HEADS: Key = Key {
    gguf: "",
    hugging_face: &["num_sliding_attention_heads", "attention_other_setting.num_attention_heads"],
};
const WINDOWED_KV_HEADS: Key =
    Key { gguf: "", hugging_face: &["attention_other_setting.num_attention_groups"] };
/// The kinds of layers whose rotation is scaled.
const SCALED: Key = Key { gguf: "", hugging_face: &["yarn_only_types"] };
/// What scores are divided by the root of.
const QUERY_SCALE: Key = Key { gguf: "", hugging_face: &["query_pre_attn_scalar"] };
/// The bounds of inner values, of experts, and of shared experts and dense blocks.
const LIMITS: Key = Key { gguf: "swiglu_clamp_exp", hugging_face: &["swiglu_limits"] };
const SHARED_LIMITS: Key = Key { gguf: "swiglu_clamp_shexp", hugging_face: &["swiglu_limits_shared"] };
/// The distance between layers with experts, after the dense ones.
const INTERVAL: Key = Key { gguf: "moe_every_n_layers", hugging_face: &["moe_every_n_layer"] };

fn describe(config: &Config<'_>, b: &mut Builder<'_>) -> Result<Box<dyn Model>> {
    refuse_others(config)?;
    let names = if config.format() == Format::Mlx { &MLX } else { &PUBLISHED };
    let router = Router { scale: config.router_scale()?, ..feed_forward::sigmoid_router(config)? };
    let (inner, shared_inner) = (config.count(keys::EXPERT_INNER)?, config.count(keys::SHARED_INNER)?);
    let dense = Dense::new(config.count(keys::INNER)?);
    // GGUF files always say which layers have a window.
    let windows = attention::windows(config, config.layers()?, |_| false)?;
    let mut layers = Vec::new();
    for (l, window) in windows.into_iter().enumerate() {
        let kind = if window.is_some() { LayerKind::Windowed } else { LayerKind::Full };
        let config = config.of_layer(l, kind);
        let activation = |key: Key| -> Result<Activation> {
            let limit = config.nonzero_float(key)?;
            Ok(limit.map_or(Activation::SwiGlu, |limit| Activation::ClippedAfter(limit as f32)))
        };
        let beside = activation(SHARED_LIMITS)?;
        let feed_forward: FeedForward = if b.has(names.router.of_layer(l)) {
            let shared = Shared::named(shared_inner, names.shared);
            let shared = Shared { dense: Dense { activation: beside, ..shared.dense }, ..shared };
            let mixture = Mixture {
                gate: names.router,
                correction: Some(names.correction),
                names: names.experts,
                activation: activation(LIMITS)?,
                shared: Some(shared),
                ..Mixture::new(router, inner)
            };
            mixture.into()
        } else {
            Dense { activation: beside, ..dense }.into()
        };
        layers.push(LayerRecipe::new(Grouped { window, ..attention(&config, kind)? }, feed_forward));
    }
    let recipe = Recipe::new(config, layers)?;
    let norms = Norms { zero_centred: config.format() == Format::HuggingFace, ..recipe.norms };
    decoder::describe(config, b, &Recipe { norms, ..recipe })
}

/// Refuses settings that no published model has.
fn refuse_others(config: &Config<'_>) -> Result<()> {
    config.refuse_false(keys::ROUTER_NORMALISES)?;
    if let Some(interval) = config.optional_count(INTERVAL)?.filter(|&interval| interval != 1) {
        return Err(config.unsupported(INTERVAL, &interval.to_string()));
    }
    if let Some(types) = config.optional_texts(SCALED)?
        && !types.iter().eq([LayerKind::Full.name()])
    {
        return Err(config.unsupported(SCALED, &types.iter().collect::<Vec<_>>().join(", ")));
    }
    Ok(())
}

/// The attention of a layer of this kind, with its settings.
fn attention(config: &Config<'_>, kind: LayerKind) -> Result<Grouped> {
    let (mut heads, mut kv_heads) = (config.count(keys::HEADS)?, config.count(keys::KV_HEADS)?);
    if kind == LayerKind::Windowed {
        heads = config.optional_count(WINDOWED_HEADS)?.unwrap_or(heads);
        kv_heads = config.optional_count(WINDOWED_KV_HEADS)?.unwrap_or(kv_heads);
    }
    let dim = config.count(keys::KEY_DIM)?;
    if let Some(other) = config.optional_count(QUERY_SCALE)?.filter(|&other| other != dim) {
        return Err(config.unsupported(QUERY_SCALE, &other.to_string()));
    }
    Ok(Grouped {
        value_dim: config.optional_count(keys::VALUE_DIM)?.unwrap_or(dim),
        rotation: Some(rotation(config, kind, dim)?),
        qk_norm: QkNorm::Head,
        gate: Some(OutputGate::Own { name: HEAD_GATE, per_head: true, function: Gate::Sigmoid }),
        ..Grouped::of(config, [heads, kv_heads], dim)?
    })
}

fn rotation(config: &Config<'_>, kind: LayerKind, dim: usize) -> Result<Rotating> {
    const TYPE_OF_KIND: Key = Key { gguf: "", hugging_face: &["rope_parameters.rope_type"] };
    let rotating = Rotating::read(config, dim)?;
    Ok(match (config.format(), kind) {
        // GGUF files do not say that only half of the channels rotate.
        (Format::Gguf, LayerKind::Full) if !rotating.channels.is_multiple_of(4) => {
            return Err(config.error(keys::KEY_DIM, "is not a multiple of four"));
        }
        (Format::Gguf, LayerKind::Full) => Rotating { channels: rotating.channels / 2, ..rotating },
        (Format::Gguf, LayerKind::Windowed) => Rotating { divided: false, ..rotating },
        // The scaling is that of the other layers, unless the folder has one for each kind.
        (_, LayerKind::Windowed) if config.optional_text(TYPE_OF_KIND)?.is_none() => {
            Rotating::new(rotating.channels, rotating.base, RopeScaling::Plain)
        }
        _ => rotating,
    })
}
