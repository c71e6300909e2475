//! The attention of a decoder: its sizes, its weights and the names of its tensors.

use forebay_kernels::RopePairs;

use super::decoder::Recipe;
use super::latent::LatentSizes;
use super::{Builder, Config, Name, keys};
use crate::backend::{KvShape, Rope};
use crate::blocks::delta_net::{DeltaNet, DeltaWeights};
use crate::blocks::gqa::{AttentionGate, Gqa, GqaWeights};
use crate::blocks::mla::{Mla, MlaWeights};
use crate::blocks::rope::RopeScaling;
use crate::error::Result;

/// Divisors of the rotation frequencies, in GGUF files of Llama 3.1 and later.
const ROPE_DIVISORS: Name = Name::new("rope_freqs.weight", "");
// For each layer:
const Q: Name = Name::new("attn_q.weight", "self_attn.q_proj.weight");
const K: Name = Name::new("attn_k.weight", "self_attn.k_proj.weight");
const V: Name = Name::new("attn_v.weight", "self_attn.v_proj.weight");
/// All three in one tensor, one after another, in some GGUF files.
const QKV: Name = Name::new("attn_qkv.weight", "");
const QKV_BIAS: Name = Name::new("attn_qkv.bias", "");
const ATTN_OUT: Name = Name::new("attn_output.weight", "self_attn.o_proj.weight");
const Q_BIAS: Name = Name::new("attn_q.bias", "self_attn.q_proj.bias");
const K_BIAS: Name = Name::new("attn_k.bias", "self_attn.k_proj.bias");
const V_BIAS: Name = Name::new("attn_v.bias", "self_attn.v_proj.bias");
const OUT_BIAS: Name = Name::new("attn_output.bias", "self_attn.o_proj.bias");
/// The norm of queries.
pub const Q_NORM: Name = Name::new("attn_q_norm.weight", "self_attn.q_norm.weight");
const K_NORM: Name = Name::new("attn_k_norm.weight", "self_attn.k_norm.weight");

/// What attention stores per position.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum AttentionKind {
    /// Keys and values, each shared by several query heads.
    Grouped,
    /// A latent vector from which keys and values are derived.
    Latent,
}

/// The length of the norms of queries and keys.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum NormSpan {
    /// One head.
    Head,
    /// All heads together.
    Projection,
}

/// The attention block, shared by all layers.
pub enum Attention {
    Grouped(Gqa),
    Latent(Mla),
}

/// The block of a layer that mixes tokens: attention or linear attention.
pub enum Mixer {
    Grouped(GqaWeights),
    Latent(Box<MlaWeights>),
    Linear(DeltaNet, DeltaWeights),
}

/// The sizes of attention, by kind.
pub enum Sizes {
    Grouped(GroupedSizes),
    Latent(LatentSizes),
}

impl Sizes {
    /// The sizes in the configuration.
    pub fn read(config: &Config<'_>, recipe: &Recipe) -> Result<Sizes> {
        Ok(match recipe.attention {
            AttentionKind::Grouped => Sizes::Grouped(GroupedSizes::read(config)?),
            AttentionKind::Latent => Sizes::Latent(LatentSizes::read(config)?),
        })
    }

    /// The block that all layers share.
    pub fn block(&self, config: &Config<'_>, b: &mut Builder<'_>, recipe: &Recipe) -> Result<Attention> {
        Ok(match self {
            Sizes::Grouped(sizes) => Attention::Grouped(sizes.block(config, b, recipe)?),
            Sizes::Latent(sizes) => Attention::Latent(sizes.block(config, b, recipe.pairs)?),
        })
    }

    /// The weights of one layer.
    pub fn weights(&self, b: &mut Builder<'_>, recipe: &Recipe, l: usize) -> Result<Mixer> {
        Ok(match self {
            Sizes::Grouped(sizes) => Mixer::Grouped(grouped(b, recipe, l, sizes)?),
            Sizes::Latent(sizes) => Mixer::Latent(Box::new(sizes.weights(b, l)?)),
        })
    }
}

/// The sizes of grouped-query attention.
pub struct GroupedSizes {
    hidden: usize,
    heads: usize,
    kv: KvShape,
}

impl GroupedSizes {
    fn read(config: &Config<'_>) -> Result<GroupedSizes> {
        let hidden = config.count(keys::HIDDEN)?;
        let heads = config.count(keys::HEADS)?;
        let kv_heads = config.optional_count(keys::KV_HEADS)?.unwrap_or(heads);
        if !heads.is_multiple_of(kv_heads) {
            return Err(config.error(keys::KV_HEADS, "does not divide the number of heads"));
        }
        let key_dim = config.optional_count(keys::KEY_DIM)?.unwrap_or(hidden / heads);
        let value_dim = config.optional_count(keys::VALUE_DIM)?.unwrap_or(key_dim);
        if key_dim == 0 || !key_dim.is_multiple_of(2) {
            return Err(config.error(keys::KEY_DIM, "is not an even number of channels"));
        }
        let kv = KvShape { heads: kv_heads, key_dim, value_dim, window: None, latent: false };
        Ok(GroupedSizes { hidden, heads, kv })
    }

    fn block(&self, config: &Config<'_>, b: &mut Builder<'_>, recipe: &Recipe) -> Result<Gqa> {
        let &GroupedSizes { heads, kv, .. } = self;
        if recipe.gated && kv.value_dim != kv.key_dim {
            let problem = "must equal the key length, because the attention has a gate";
            return Err(config.error(keys::VALUE_DIM, problem));
        }
        let rotated = rotated_channels(config, kv.key_dim, recipe.partial_rope)?;
        let scaling = recipe.scaling.map_or_else(|| config.rope_scaling(), Ok)?;
        Ok(Gqa {
            kv,
            scale: 1.0 / (kv.key_dim as f32).sqrt(),
            rope: rope(config, b, scaling, rotated, recipe.pairs)?,
            eps: config.float(keys::NORM_EPS)?,
            gate: recipe.gated.then(|| AttentionGate {
                queries_and_gate: b.buffer(2 * heads * kv.key_dim),
                gate: b.buffer(heads * kv.key_dim),
            }),
            q: b.buffer(heads * kv.key_dim),
            k: b.buffer(kv.heads * kv.key_dim),
            v: b.buffer(kv.heads * kv.value_dim),
            attended: b.buffer(heads * kv.value_dim),
            angles: b.buffer(rotated),
        })
    }
}

/// The number of channels of a head that rotate.
fn rotated_channels(config: &Config<'_>, key_dim: usize, partial: bool) -> Result<usize> {
    let channels = config.optional_count(keys::ROPE_DIM)?;
    let share = config.optional_float(keys::ROPE_SHARE)?;
    if !partial {
        if let Some(channels) = channels.filter(|&n| n != key_dim) {
            return Err(config.unsupported(keys::ROPE_DIM, &channels.to_string()));
        }
        if let Some(share) = share.filter(|&share| share != 1.0) {
            return Err(config.unsupported(keys::ROPE_SHARE, &share.to_string()));
        }
    }
    let (key, rotated) = match (channels, share) {
        (Some(channels), _) => (keys::ROPE_DIM, channels),
        (None, Some(share)) => (keys::ROPE_SHARE, (key_dim as f32 * share) as usize),
        (None, None) => (keys::ROPE_DIM, key_dim),
    };
    if rotated == 0 || rotated > key_dim || !rotated.is_multiple_of(2) {
        let problem = format!(
            "sets {rotated} rotated channels of {key_dim}; the number must be even and at most {key_dim}"
        );
        return Err(config.error(key, &problem));
    }
    Ok(rotated)
}

/// The rotary embedding of `channels` channels.
pub fn rope(
    config: &Config<'_>,
    b: &mut Builder<'_>,
    scaling: RopeScaling,
    channels: usize,
    pairs: RopePairs,
) -> Result<Rope> {
    let base = config.optional_float(keys::ROPE_BASE)?.unwrap_or(10_000.0);
    let divisors = match b.has(ROPE_DIVISORS) {
        true => Some(b.vector(ROPE_DIVISORS, channels / 2)?),
        false => None,
    };
    Ok(Rope { frequencies: scaling.frequencies(base, channels), divisors, scale: scaling.scale(), pairs })
}

/// Whether the file has biases for a layer's queries, keys and values.
pub fn has_qkv_bias(b: &Builder<'_>, l: usize) -> bool {
    b.has(Q_BIAS.of_layer(l)) || b.has(QKV_BIAS.of_layer(l))
}

/// The weights of grouped-query attention in one layer.
fn grouped(b: &mut Builder<'_>, recipe: &Recipe, l: usize, sizes: &GroupedSizes) -> Result<GqaWeights> {
    let GroupedSizes { hidden, heads, kv } = *sizes;
    let (q, k, v) = (heads * kv.key_dim, kv.heads * kv.key_dim, kv.heads * kv.value_dim);
    let biases = match recipe.qkv_bias {
        false => None,
        true if b.has(QKV_BIAS.of_layer(l)) => Some(b.vector_in_parts(QKV_BIAS.of_layer(l), [q, k, v])?),
        true => Some([
            b.vector(Q_BIAS.of_layer(l), q)?,
            b.vector(K_BIAS.of_layer(l), k)?,
            b.vector(V_BIAS.of_layer(l), v)?,
        ]),
    };
    let out_bias = match recipe.out_bias {
        false => None,
        true => Some(b.vector(OUT_BIAS.of_layer(l), hidden)?),
    };
    let sinks = recipe.sinks.map(|name| b.vector(name.of_layer(l), heads)).transpose()?;
    let mut norms = |q: usize, k: usize| -> Result<_> {
        Ok(Some([recipe.norm(b, Q_NORM.of_layer(l), q)?, recipe.norm(b, K_NORM.of_layer(l), k)?]))
    };
    let norms = match recipe.qk_norm {
        None => None,
        Some(NormSpan::Head) => norms(kv.key_dim, kv.key_dim)?,
        Some(NormSpan::Projection) => norms(q, k)?,
    };
    let q = if recipe.gated { 2 * q } else { q };
    let [q, k, v] = if b.has(QKV.of_layer(l)) {
        b.matrix_in_parts(QKV.of_layer(l), [q, k, v], hidden)?
    } else {
        [
            b.matrix(Q.of_layer(l), q, hidden)?,
            b.matrix(K.of_layer(l), k, hidden)?,
            b.matrix(V.of_layer(l), v, hidden)?,
        ]
    };
    Ok(GqaWeights {
        q,
        k,
        v,
        out: b.matrix(ATTN_OUT.of_layer(l), hidden, heads * kv.value_dim)?,
        biases,
        out_bias,
        sinks,
        norms,
    })
}
