//! Nemotron 3: every layer is a single block, either attention without positions or a mixture of experts without gates,
//! which may compute in fewer channels than the stream has. Models with Mamba2 layers, which all published ones have, and
//! those with dense layers are not supported.

use super::attention::{AttentionNames, Grouped};
use super::deepseek2;
use super::feed_forward::{self, Dense, Mixture, Projections, Shared};
use super::recipe::{LayerRecipe, Norms, Recipe};
use super::{Arch, Builder, Config, ExpertNames, Model, Name, Reference, decoder, keys};
use crate::backend::{Activation, GroupScore, Router, Scores};
use crate::error::Result;
use crate::format::{Format, Key};

/// The family's entry in the registry.
pub const ARCH: Arch = Arch {
    gguf: "nemotron_h_moe",
    name: "Nemotron 3, without Mamba2",
    models: "none yet: published models have Mamba2 layers",
    mlx: false,
    reference: Reference::Transformers,
    hugging_face: &["NemotronHForCausalLM", "nemotron_h"],
    describe,
};

const NORM_EPS: Key = Key { gguf: "attention.layer_norm_rms_epsilon", hugging_face: &["layer_norm_epsilon"] };
/// The same in some GGUF files.
const OTHER_EPS: Key = Key { gguf: "attention.layer_norm_epsilon", hugging_face: &[] };
const ACTIVATION: Key = Key { gguf: "", hugging_face: &["mlp_hidden_act"] };
const LATENT: Key = Key { gguf: "moe_latent_size", hugging_face: &["moe_latent_size"] };
const SHARED_INNER: Key =
    Key { gguf: "expert_shared_feed_forward_length", hugging_face: &["moe_shared_expert_intermediate_size"] };

const NORM: Name = Name::new("attn_norm.weight", "norm.weight");
const EMBED: Name = Name::new("token_embd.weight", "model.embeddings.weight");
const OUTPUT_NORM: Name = Name::new("output_norm.weight", "model.norm_f.weight");
const ATTENTION: AttentionNames = AttentionNames {
    q: Name::new("attn_q.weight", "mixer.q_proj.weight"),
    k: Name::new("attn_k.weight", "mixer.k_proj.weight"),
    v: Name::new("attn_v.weight", "mixer.v_proj.weight"),
    out: Name::new("attn_output.weight", "mixer.o_proj.weight"),
    ..AttentionNames::USUAL
};
const ROUTER: Name = Name::new("ffn_gate_inp.weight", "mixer.gate.weight");
const CORRECTION: Name = Name::new("exp_probs_b.bias", "mixer.gate.e_score_correction_bias");
const EXPERTS: ExpertNames = ExpertNames { module: "mixer", ..ExpertNames::USUAL };
const SHARED: [Name; 3] = [
    Name::new("", ""),
    Name::new("ffn_up_shexp.weight", "mixer.shared_experts.up_proj.weight"),
    Name::new("ffn_down_shexp.weight", "mixer.shared_experts.down_proj.weight"),
];
const PROJECTIONS: [Name; 2] = [
    Name::new("ffn_latent_down.weight", "mixer.fc1_latent_proj.weight"),
    Name::new("ffn_latent_up.weight", "mixer.fc2_latent_proj.weight"),
];

/// What is said of the blocks that are not supported.
const MAMBA: &str = "layers of Mamba2";

/// The block of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Block {
    Attention { kv_heads: usize },
    Mixture,
}

fn describe(config: &Config<'_>, b: &mut Builder<'_>) -> Result<Box<dyn Model>> {
    config.refuse_true(keys::QKV_BIAS)?;
    config.refuse_true(keys::MLP_BIAS)?;
    if let Some(other) = config.optional_text(ACTIVATION)?.filter(|&name| name != "relu2") {
        return Err(config.unsupported(ACTIVATION, other));
    }
    if let Some(other) = config.optional_count(keys::SHARED_EXPERTS)?.filter(|&count| count != 1) {
        return Err(config.unsupported(keys::SHARED_EXPERTS, &other.to_string()));
    }
    let blocks = blocks(config)?;
    let mixture = mixture(config)?;
    let layer = |block: Block| -> Result<LayerRecipe> {
        Ok(match block {
            Block::Attention { kv_heads } => LayerRecipe::of_mixer(attention(config, kv_heads)?, NORM),
            Block::Mixture => LayerRecipe::of_feed_forward(mixture.clone(), NORM),
        })
    };
    let layers = blocks.into_iter().map(layer).collect::<Result<_>>()?;
    let eps = match config.optional_float(OTHER_EPS)? {
        Some(eps) => config.optional_float(NORM_EPS)?.unwrap_or(eps),
        None => config.float(NORM_EPS)?,
    };
    let recipe = Recipe::with_norms(layers, Norms::rms(eps));
    decoder::describe(config, b, &Recipe { embed: EMBED, output_norm: OUTPUT_NORM, ..recipe })
}

fn attention(config: &Config<'_>, kv_heads: usize) -> Result<Grouped> {
    let (heads, dim) = (config.count(keys::HEADS)?, config.count(keys::KEY_DIM)?);
    let value_dim = config.optional_count(keys::VALUE_DIM)?.unwrap_or(dim);
    Ok(Grouped { value_dim, names: ATTENTION, ..Grouped::of(config, [heads, kv_heads], dim)? })
}

fn mixture(config: &Config<'_>) -> Result<Mixture> {
    let activation = Activation::ReluSquared;
    let shared = Shared::named(config.count(SHARED_INNER)?, SHARED);
    let latent = config.optional_count(LATENT)?;
    Ok(Mixture {
        gate: ROUTER,
        correction: Some(CORRECTION),
        names: EXPERTS,
        activation,
        latent: latent.map(|width| Projections { width, names: PROJECTIONS }),
        shared: Some(Shared { dense: Dense { activation, ..shared.dense }, ..shared }),
        ..Mixture::new(router(config)?, config.count(keys::EXPERT_INNER)?)
    })
}

fn router(config: &Config<'_>) -> Result<Router> {
    let normalise = config.optional_bool(keys::ROUTER_NORMALISES)?.unwrap_or(true);
    let router = Router {
        scores: Scores::Sigmoid,
        scale: config.router_scale()?,
        ..feed_forward::softmax_router(config, normalise)?
    };
    let groups = deepseek2::groups(config, &router, GroupScore::BestTwo)?;
    Ok(Router { groups, ..router })
}

/// The block of each layer.
fn blocks(config: &Config<'_>) -> Result<Vec<Block>> {
    let layers = config.layers()?;
    if config.format() == Format::Gguf {
        let numbers = |key| config.optional_counts(key, layers)?.ok_or_else(|| config.missing(key));
        let block = |(kv_heads, inner)| match (kv_heads, inner) {
            (0, 0) => Err(config.unsupported(keys::KV_HEADS, MAMBA)),
            (kv_heads, 0) => Ok(Block::Attention { kv_heads }),
            _ => Ok(Block::Mixture),
        };
        return numbers(keys::KV_HEADS)?.into_iter().zip(numbers(keys::INNER)?).map(block).collect();
    }
    let names = config.blocks()?.ok_or_else(|| config.missing(keys::BLOCKS))?;
    if names.len() != layers {
        return Err(config.error(keys::BLOCKS, "does not have one block for each layer"));
    }
    let kv_heads = config.count(keys::KV_HEADS)?;
    let block = |name: &String| match &**name {
        "*" | "attention" | "full_attention" => Ok(Block::Attention { kv_heads }),
        "E" | "moe" => Ok(Block::Mixture),
        "M" | "mamba" | "linear_attention" => Err(config.unsupported(keys::BLOCKS, MAMBA)),
        other => Err(config.unsupported(keys::BLOCKS, other)),
    };
    names.iter().map(block).collect()
}
