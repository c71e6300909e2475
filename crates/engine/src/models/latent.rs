//! The weights of latent attention: their names, and the layouts of each head's two matrices in files.

use super::positions::{Places, Rotating};
use super::{Builder, Config, Name, keys};
use crate::backend::{HeadMatrices, KvShape, RopePairs};
use crate::blocks::mla::{Mla, MlaWeights, QueryWeights};
use crate::blocks::positions::Temperature;
use crate::blocks::rope::{RopeScaling, Yarn};
use crate::error::Result;
use crate::format::Format;

const Q: Name = Name::new("attn_q.weight", "self_attn.q_proj.weight");
const Q_DOWN: Name = Name::new("attn_q_a.weight", "self_attn.q_a_proj.weight");
const Q_NORM: Name = Name::new("attn_q_a_norm.weight", "self_attn.q_a_layernorm.weight");
const Q_UP: Name = Name::new("attn_q_b.weight", "self_attn.q_b_proj.weight");
/// Computes the latent and, in its last rows, the rotated channels of the key.
const KV_DOWN: Name = Name::new("attn_kv_a_mqa.weight", "self_attn.kv_a_proj_with_mqa.weight");
const KV_NORM: Name = Name::new("attn_kv_a_norm.weight", "self_attn.kv_a_layernorm.weight");
/// Each head's `W_K` and `W_V`, one after the other.
const KV_UP: Name = Name::new("attn_kv_b.weight", "self_attn.kv_b_proj.weight");
/// Each head's `W_Kᵀ`, if it is a separate tensor.
const K_UP: Name = Name::new("attn_k_b.weight", "self_attn.embed_q.weight");
/// Each head's `W_V`, if it is a separate tensor.
const V_UP: Name = Name::new("attn_v_b.weight", "self_attn.unembed_out.weight");
const OUT: Name = Name::new("attn_output.weight", "self_attn.o_proj.weight");

/// The epsilon of the norms of latents. It is not in the configuration.
const LATENT_EPS: f32 = 1e-6;

/// Latent attention of a family.
#[derive(Clone)]
pub struct Latent {
    hidden: usize,
    heads: usize,
    /// Channels of a query's latent, if queries have latents.
    q_rank: Option<usize>,
    /// Channels of a latent.
    rank: usize,
    /// Channels of a head's query and key that do not rotate.
    plain: usize,
    /// Channels of a head's value.
    value: usize,
    /// The factor of every score.
    scale: f32,
    /// The rotation of the other channels of queries and keys.
    rotation: Rotating,
    /// Factors of queries by position.
    temperature: Option<Temperature>,
}

impl Latent {
    /// The attention in the configuration.
    ///
    /// # Errors
    /// If settings are missing or inconsistent, or ask for an unsupported rotation.
    pub fn read(config: &Config<'_>, pairs: RopePairs) -> Result<Latent> {
        let rotated = config.count(keys::ROTATED_DIM)?;
        if !rotated.is_multiple_of(2) {
            return Err(config.error(keys::ROTATED_DIM, "is not an even number of channels"));
        }
        let (plain, value) = match config.format() {
            Format::Gguf => {
                // If these are present, the other two describe the latent and its key.
                let key = match config.optional_count(keys::HEAD_KEY_DIM)? {
                    Some(_) => keys::HEAD_KEY_DIM,
                    None => keys::KEY_DIM,
                };
                let value = match config.optional_count(keys::HEAD_VALUE_DIM)? {
                    Some(value) => value,
                    None => config.count(keys::VALUE_DIM)?,
                };
                match config.count(key)?.checked_sub(rotated) {
                    Some(plain @ 1..) => (plain, value),
                    _ => return Err(config.error(key, "leaves no channels that do not rotate")),
                }
            }
            Format::HuggingFace | Format::Mlx => {
                (config.count(keys::PLAIN_DIM)?, config.count(keys::VALUE_DIM)?)
            }
        };
        let scaling = config.rope_scaling()?;
        let magnitude = match scaling {
            RopeScaling::Yarn(yarn) => yarn.mscale_all_dim.map_or(1.0, |m| Yarn::magnitude(yarn.factor, m)),
            _ => 1.0,
        };
        let base = config.optional_float(keys::ROPE_BASE)?.unwrap_or(10_000.0);
        let rotation = Rotating { pairs, ..Rotating::new(rotated, base, scaling) };
        let gguf = config.format() == Format::Gguf;
        if gguf {
            config.refuse_factor(keys::ROPE_ATTENTION)?;
        }
        Ok(Latent {
            hidden: config.count(keys::HIDDEN)?,
            heads: config.count(keys::HEADS)?,
            q_rank: config.optional_count(keys::Q_RANK)?,
            rank: config.count(keys::KV_RANK)?,
            plain,
            value,
            scale: (magnitude * magnitude / ((plain + rotated) as f64).sqrt()) as f32,
            // GGUF files do not scale cosine and sine.
            rotation: if gguf { Rotating { scale: 1.0, ..rotation } } else { rotation },
            temperature: None,
        })
    }

    /// The same with queries that are sharpened at late positions.
    pub fn with_temperature(self, temperature: Option<Temperature>) -> Latent {
        Latent { temperature, ..self }
    }

    /// The block, with buffers for all layers.
    pub fn block(&self, b: &mut Builder<'_>, places: &mut Places) -> Mla {
        let &Latent { heads, rank, plain, value, .. } = self;
        let rotated = self.rotation.channels;
        let key_dim = rotated + rank;
        let rotation = places.rotation(b, &self.rotation);
        Mla {
            kv: KvShape { heads: 1, key_dim, value_dim: rank, window: None, latent: true },
            scale: self.scale,
            pairs: rotation.pairs,
            eps: LATENT_EPS,
            q_latent: self.q_rank.map(|rank| b.buffer(rank)),
            q: b.buffer(heads * (plain + rotated)),
            absorbed: b.buffer(heads * key_dim),
            k: b.buffer(rotated),
            latent: b.buffer(rank),
            attended: b.buffer(heads * rank),
            values: b.buffer(heads * value),
            angles: rotation.angles,
            temperature: self.temperature.map(|temperature| places.temperature(b, temperature)),
        }
    }

    /// The weights of one layer.
    ///
    /// # Errors
    /// If a tensor is missing or does not fit.
    pub fn weights(&self, b: &mut Builder<'_>, l: usize) -> Result<MlaWeights> {
        let &Latent { hidden, heads, q_rank, rank, plain, value, .. } = self;
        let rotated = self.rotation.channels;
        let queries = heads * (plain + rotated);
        let q = match q_rank {
            None => QueryWeights::Direct(b.matrix(Q.of_layer(l), queries, hidden)?),
            Some(q_rank) => QueryWeights::Latent {
                down: b.matrix(Q_DOWN.of_layer(l), q_rank, hidden)?,
                norm: b.vector(Q_NORM.of_layer(l), q_rank)?,
                up: b.matrix(Q_UP.of_layer(l), queries, q_rank)?,
            },
        };
        let [latent, k] = b.matrix_in_parts(KV_DOWN.of_layer(l), [rank, rotated], hidden)?;
        let (absorb, v) = if b.has(K_UP.of_layer(l)) {
            let mut own = |name: Name, rows: usize, cols: usize| -> Result<_> {
                let stored = b.matrices(name.of_layer(l), heads, rows, cols)?;
                Ok(HeadMatrices { stored, heads, first: 0, rows, transposed: false })
            };
            (own(K_UP, rank, plain)?, own(V_UP, value, rank)?)
        } else {
            let stored = b.matrix(KV_UP.of_layer(l), heads * (plain + value), rank)?;
            (
                HeadMatrices { stored, heads, first: 0, rows: plain, transposed: true },
                HeadMatrices { stored, heads, first: plain, rows: value, transposed: false },
            )
        };
        Ok(MlaWeights {
            q,
            k,
            latent,
            latent_norm: b.vector(KV_NORM.of_layer(l), rank)?,
            absorb,
            v,
            out: b.matrix(OUT.of_layer(l), hidden, heads * value)?,
        })
    }
}
