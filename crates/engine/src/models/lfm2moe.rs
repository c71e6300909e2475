//! LFM2 with experts: most layers have a gated short convolution instead of attention; the first layers are dense, the
//! others mixtures, whose router uses sigmoids and a correction.

use super::attention::{AttentionNames, Grouped, QkNorm};
use super::feed_forward::{self, Dense, FeedForward, Mixture};
use super::positions::Rotating;
use super::recipe::{BlockNorms, LayerRecipe, Mixer, Recipe};
use super::short_conv::Short;
use super::{Arch, Builder, Config, ExpertNames, Model, Name, Reference, decoder, keys};
use crate::backend::Router;
use crate::error::Result;
use crate::format::{Format, Key};

/// The family's entry in the registry.
pub const ARCH: Arch = Arch {
    gguf: "lfm2moe",
    name: "LFM2-MoE",
    models: "LFM2-8B-A1B, 24B-A2B",
    mlx: true,
    reference: Reference::Transformers,
    hugging_face: &["Lfm2MoeForCausalLM", "lfm2_moe"],
    describe,
};

const DENSE_LAYERS: Key = Key { hugging_face: &["num_dense_layers"], ..keys::DENSE_LAYERS };
const CORRECTS: Key = Key { gguf: "", hugging_face: &["use_expert_bias"] };

const OUTPUT_NORM: Name = Name::new("token_embd_norm.weight", "model.embedding_norm.weight");
const MIXER_NORM: Name = Name::new("attn_norm.weight", "operator_norm.weight");
const FFN_NORM: Name = Name::new("ffn_norm.weight", "ffn_norm.weight");
const ATTENTION: AttentionNames = AttentionNames {
    out: Name::new("attn_output.weight", "self_attn.out_proj.weight"),
    q_norm: Name::new("attn_q_norm.weight", "self_attn.q_layernorm.weight"),
    k_norm: Name::new("attn_k_norm.weight", "self_attn.k_layernorm.weight"),
    ..AttentionNames::USUAL
};
const DENSE: [Name; 3] = [
    Name::new("ffn_gate.weight", "feed_forward.w1.weight"),
    Name::new("ffn_up.weight", "feed_forward.w3.weight"),
    Name::new("ffn_down.weight", "feed_forward.w2.weight"),
];
/// In folders that mlx-lm converted.
const DENSE_OF_MLX: [Name; 3] = [
    Name::new("ffn_gate.weight", "feed_forward.gate_proj.weight"),
    Name::new("ffn_up.weight", "feed_forward.up_proj.weight"),
    Name::new("ffn_down.weight", "feed_forward.down_proj.weight"),
];
const ROUTER: Name = Name::new("ffn_gate_inp.weight", "feed_forward.gate.weight");
const CORRECTION: Name = Name::new("exp_probs_b.bias", "feed_forward.expert_bias");
const EXPERTS: ExpertNames =
    ExpertNames { module: "feed_forward", parts: ["w1", "w3", "w2"], ..ExpertNames::USUAL };

fn describe(config: &Config<'_>, b: &mut Builder<'_>) -> Result<Box<dyn Model>> {
    let layers = config.layers()?;
    let router = Router {
        scale: config.router_scale()?,
        normalise: config.optional_bool(keys::ROUTER_NORMALISES)?.unwrap_or(true),
        // llama.cpp does not add this.
        epsilon: 1e-6,
        ..feed_forward::sigmoid_router(config)?
    };
    let corrects = config.optional_bool(CORRECTS)?.unwrap_or(true);
    let mixture = Mixture {
        gate: ROUTER,
        correction: corrects.then_some(CORRECTION),
        names: EXPERTS,
        ..Mixture::new(router, config.count(keys::EXPERT_INNER)?)
    };
    let names = if b.format() == Format::Mlx { DENSE_OF_MLX } else { DENSE };
    let dense = Dense { names, ..Dense::new(config.count(keys::INNER)?) };
    let dense_layers = config.number(DENSE_LAYERS)?;
    let short = Short::read(config)?;
    let layer = |(l, kv_heads): (usize, Option<usize>)| -> Result<LayerRecipe> {
        let mixer: Mixer = match kv_heads {
            None => short.into(),
            Some(kv_heads) => attention(config, kv_heads)?.into(),
        };
        let feed_forward: FeedForward = if l < dense_layers { dense.into() } else { mixture.clone().into() };
        let mixer_norms = BlockNorms { before: Some(MIXER_NORM), after: None };
        Ok(LayerRecipe { mixer_norms, ..LayerRecipe::new(mixer, feed_forward).with_ffn_norm(FFN_NORM) })
    };
    let layers = kv_heads(config, layers)?.into_iter().enumerate().map(layer).collect::<Result<_>>()?;
    let recipe = Recipe { output_norm: OUTPUT_NORM, ..Recipe::new(config, layers)? };
    decoder::describe(config, b, &recipe)
}

fn attention(config: &Config<'_>, kv_heads: usize) -> Result<Grouped> {
    let heads = config.count(keys::HEADS)?;
    let key_dim = config.count(keys::HIDDEN)? / heads;
    Ok(Grouped {
        rotation: Some(Rotating::read(config, key_dim)?),
        qk_norm: QkNorm::Head,
        names: ATTENTION,
        ..Grouped::of(config, [heads, kv_heads], key_dim)?
    })
}

/// The key heads of each layer; `None` for layers without attention.
fn kv_heads(config: &Config<'_>, layers: usize) -> Result<Vec<Option<usize>>> {
    if config.format() == Format::Gguf {
        let heads = config.optional_counts(keys::KV_HEADS, layers)?;
        let heads = heads.ok_or_else(|| config.error(keys::KV_HEADS, "is missing"))?;
        return Ok(heads.into_iter().map(|heads| (heads > 0).then_some(heads)).collect());
    }
    let types = config.optional_texts(keys::LAYER_TYPES)?;
    let types = types.ok_or_else(|| config.error(keys::LAYER_TYPES, "is missing"))?;
    if types.len() != layers {
        return Err(config.error(keys::LAYER_TYPES, "does not have one type for each layer"));
    }
    let heads = config.count(keys::KV_HEADS)?;
    let of_type = |name: &str| match name {
        "full_attention" => Ok(Some(heads)),
        "conv" => Ok(None),
        other => Err(config.unsupported(keys::LAYER_TYPES, other)),
    };
    types.iter().map(of_type).collect()
}
