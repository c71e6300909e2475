//! Grouped-query attention of a family: its settings, its weights and the names of its tensors.

use super::positions::{Places, Rotating};
use super::recipe::Norms;
use super::{Builder, Config, Name, keys};
use crate::backend::{Buf, Gate, KvShape, RopePairs, Window};
use crate::blocks::gqa::{AttentionGate, Gqa, GqaWeights, QkNorms};
use crate::blocks::positions::Temperature;
use crate::error::Result;

/// The attention of a layer.
#[derive(Clone)]
pub struct Grouped {
    /// Channels of the residual stream.
    pub hidden: usize,
    /// Query heads.
    pub heads: usize,
    /// Key heads, which divide the query heads.
    pub kv_heads: usize,
    /// Channels of a query and of a key.
    pub key_dim: usize,
    /// Channels of a value.
    pub value_dim: usize,
    /// The rotation of queries and keys; `None` without positions.
    pub rotation: Option<Rotating>,
    /// The positions that a query sees; `None` for all.
    pub window: Option<Window>,
    /// The factor of every score.
    pub scale: f32,
    /// Whether queries, keys and values have biases.
    pub qkv_bias: bool,
    /// Whether the output has a bias.
    pub out_bias: bool,
    /// The name of the sinks: scores that are part of the softmax's sum but have no value. `None` without sinks.
    pub sinks: Option<Name>,
    /// The norms of queries and keys.
    pub qk_norm: QkNorm,
    /// Whether values have a norm without weights.
    pub value_norm: bool,
    /// A factor of the values.
    pub value_scale: Option<f32>,
    /// Whether the values are the keys, before their norm and rotation.
    pub value_is_key: bool,
    /// The gate of the output.
    pub gate: Option<OutputGate>,
    /// Factors of queries by position.
    pub temperature: Option<Temperature>,
    /// The names of the tensors.
    pub names: AttentionNames,
}

/// The norms of queries and keys.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum QkNorm {
    /// None.
    None,
    /// Of each head.
    Head,
    /// Of all heads together.
    Projection,
    /// Of each head after the rotation.
    HeadAfterRotation,
    /// Of each head after the rotation, without weights.
    RotatedHead,
}

/// Where the logits of the output's gate come from.
#[derive(Clone, Copy)]
pub enum OutputGate {
    /// From the query projection, after each head's query.
    BesideQueries,
    /// From a matrix of their own.
    Own {
        /// Its name.
        name: Name,
        /// Whether a head has one number, instead of one for each channel.
        per_head: bool,
        /// How logits become factors.
        function: Gate,
    },
}

/// The names of a layer's tensors.
#[derive(Clone, Copy)]
pub struct AttentionNames {
    /// The projection to queries.
    pub q: Name,
    /// The projection to keys.
    pub k: Name,
    /// The projection to values.
    pub v: Name,
    /// All three in one tensor, one after another, in some files.
    pub qkv: Name,
    /// The output.
    pub out: Name,
    /// The norm of queries.
    pub q_norm: Name,
    /// The norm of keys.
    pub k_norm: Name,
}

impl AttentionNames {
    /// The usual names.
    pub const USUAL: AttentionNames = AttentionNames {
        q: Name::new("attn_q.weight", "self_attn.q_proj.weight"),
        k: Name::new("attn_k.weight", "self_attn.k_proj.weight"),
        v: Name::new("attn_v.weight", "self_attn.v_proj.weight"),
        qkv: Name::new("attn_qkv.weight", ""),
        out: Name::new("attn_output.weight", "self_attn.o_proj.weight"),
        q_norm: Name::new("attn_q_norm.weight", "self_attn.q_norm.weight"),
        k_norm: Name::new("attn_k_norm.weight", "self_attn.k_norm.weight"),
    };

    /// Whether the file has biases for a layer's queries, keys and values.
    pub fn have_qkv_bias(&self, b: &Builder<'_>, l: usize) -> bool {
        [self.q, self.qkv].iter().any(|name| b.has(name.bias().of_layer(l)))
    }
}

impl Grouped {
    /// The attention in the configuration: all channels rotate, and queries see all positions before them.
    ///
    /// # Errors
    /// If a setting is missing, inconsistent, or restricts the rotation to some channels.
    pub fn read(config: &Config<'_>) -> Result<Grouped> {
        let grouped = Grouped::read_partial(config)?;
        if let Some(channels) = config.optional_count(keys::ROPE_DIM)?.filter(|&n| n != grouped.key_dim) {
            return Err(config.unsupported(keys::ROPE_DIM, &channels.to_string()));
        }
        if let Some(share) = config.optional_float(keys::ROPE_SHARE)?.filter(|&share| share != 1.0) {
            return Err(config.unsupported(keys::ROPE_SHARE, &share.to_string()));
        }
        Ok(grouped)
    }

    /// Like [`read`](Self::read); the configuration may restrict the rotation to the first channels of a head.
    ///
    /// # Errors
    /// If a setting is missing or inconsistent.
    pub fn read_partial(config: &Config<'_>) -> Result<Grouped> {
        let grouped = Grouped::of_config(config)?;
        Ok(Grouped { rotation: Some(Rotating::read(config, grouped.key_dim)?), ..grouped })
    }

    /// Like [`read`](Self::read), without a rotation.
    ///
    /// # Errors
    /// If a setting is missing or inconsistent.
    pub fn of_config(config: &Config<'_>) -> Result<Grouped> {
        let (hidden, heads) = (config.count(keys::HIDDEN)?, config.count(keys::HEADS)?);
        let key_dim = config.optional_count(keys::KEY_DIM)?.unwrap_or(hidden / heads);
        let kv_heads = config.optional_count(keys::KV_HEADS)?.unwrap_or(heads);
        Ok(Grouped {
            value_dim: config.optional_count(keys::VALUE_DIM)?.unwrap_or(key_dim),
            ..Grouped::of(config, [heads, kv_heads], key_dim)?
        })
    }

    /// Plain attention without positions, with these numbers of query and key heads of `dim` channels.
    ///
    /// # Errors
    /// If the numbers are inconsistent.
    pub fn of(config: &Config<'_>, [heads, kv_heads]: [usize; 2], dim: usize) -> Result<Grouped> {
        if !heads.is_multiple_of(kv_heads) {
            return Err(config.error(keys::KV_HEADS, "does not divide the number of heads"));
        }
        if dim == 0 || !dim.is_multiple_of(2) {
            return Err(config.error(keys::KEY_DIM, "is not an even number of channels"));
        }
        Ok(Grouped {
            hidden: config.count(keys::HIDDEN)?,
            heads,
            kv_heads,
            key_dim: dim,
            value_dim: dim,
            rotation: None,
            window: None,
            scale: 1.0 / (dim as f32).sqrt(),
            qkv_bias: false,
            out_bias: false,
            sinks: None,
            qk_norm: QkNorm::None,
            value_norm: false,
            value_scale: None,
            value_is_key: false,
            gate: None,
            temperature: None,
            names: AttentionNames::USUAL,
        })
    }

    /// The same with other pairs of rotated channels.
    pub fn with_pairs(mut self, pairs: RopePairs) -> Grouped {
        if let Some(rotation) = &mut self.rotation {
            rotation.pairs = pairs;
        }
        self
    }

    /// Checks what depends on several settings.
    ///
    /// # Errors
    /// If they do not fit together.
    pub fn check(&self, config: &Config<'_>) -> Result<()> {
        let as_long = self.value_dim == self.key_dim;
        if matches!(self.gate, Some(OutputGate::BesideQueries)) && !as_long {
            let problem = "must equal the key length, because the attention has a gate";
            return Err(config.error(keys::VALUE_DIM, problem));
        }
        if self.value_is_key && !as_long {
            return Err(config.error(keys::VALUE_DIM, "must equal the key length, because values are keys"));
        }
        Ok(())
    }

    fn gate_width(&self) -> usize {
        match self.gate {
            None => 0,
            Some(OutputGate::Own { per_head: true, .. }) => self.heads,
            Some(OutputGate::Own { .. } | OutputGate::BesideQueries) => self.heads * self.value_dim,
        }
    }

    /// The numbers of queries, keys and values of a row.
    fn widths(&self) -> [usize; 3] {
        [self.heads * self.key_dim, self.kv_heads * self.key_dim, self.kv_heads * self.value_dim]
    }

    fn norms(&self, b: &mut Builder<'_>, norms: &Norms, l: usize) -> Result<Option<QkNorms>> {
        let [q, k, _] = self.widths();
        let lens = match self.qk_norm {
            QkNorm::None => return Ok(None),
            QkNorm::RotatedHead => {
                let [q, k] = [b.constant(1.0, self.key_dim), b.constant(1.0, self.key_dim)];
                return Ok(Some(QkNorms { q, k, after_rotation: true }));
            }
            QkNorm::Head | QkNorm::HeadAfterRotation => [self.key_dim; 2],
            QkNorm::Projection => [q, k],
        };
        Ok(Some(QkNorms {
            q: norms.weights(b, self.names.q_norm.of_layer(l), lens[0])?,
            k: norms.weights(b, self.names.k_norm.of_layer(l), lens[1])?,
            after_rotation: self.qk_norm == QkNorm::HeadAfterRotation,
        }))
    }

    /// The weights of layer `l`.
    ///
    /// # Errors
    /// If a tensor is missing or does not fit.
    pub fn weights(&self, b: &mut Builder<'_>, norms: &Norms, l: usize) -> Result<GqaWeights> {
        let [q, k, v] = self.widths();
        let (hidden, names) = (self.hidden, &self.names);
        let together = names.qkv.of_layer(l);
        let biases = match self.qkv_bias {
            false => None,
            true if b.has(together.bias()) => Some(b.vector_in_parts(together.bias(), [q, k, v])?),
            true => Some([
                b.vector(names.q.bias().of_layer(l), q)?,
                b.vector(names.k.bias().of_layer(l), k)?,
                b.vector(names.v.bias().of_layer(l), v)?,
            ]),
        };
        let out_bias = self.out_bias.then(|| b.vector(names.out.bias().of_layer(l), hidden)).transpose()?;
        let sinks = self.sinks.map(|name| b.vector(name.of_layer(l), self.heads)).transpose()?;
        let qk_norms = self.norms(b, norms, l)?;
        let value_norm = self.value_norm.then(|| b.constant(1.0, self.value_dim));
        let value_scale = self.value_scale.map(|scale| b.constant(scale, 1));
        let q = if matches!(self.gate, Some(OutputGate::BesideQueries)) { 2 * q } else { q };
        let [q, k, v] = if b.has(together) {
            b.matrix_in_parts(together, [q, k, v], hidden)?
        } else {
            let q = b.matrix(names.q.of_layer(l), q, hidden)?;
            let k = b.matrix(names.k.of_layer(l), k, hidden)?;
            [q, k, if self.value_is_key { k } else { b.matrix(names.v.of_layer(l), v, hidden)? }]
        };
        let gate = match self.gate {
            Some(OutputGate::Own { name, .. }) => {
                Some(b.matrix(name.of_layer(l), self.gate_width(), hidden)?)
            }
            _ => None,
        };
        let out = b.matrix(names.out.of_layer(l), hidden, self.heads * self.value_dim)?;
        Ok(GqaWeights {
            q,
            k,
            v,
            out,
            gate,
            biases,
            out_bias,
            sinks,
            norms: qk_norms,
            value_norm,
            value_scale,
        })
    }
}

/// The buffers that all layers with grouped-query attention share: each as wide as the widest layer needs it.
pub struct AttentionBuffers {
    q: Buf,
    k: Buf,
    v: Buf,
    attended: Buf,
    gate: Option<Buf>,
    queries_and_gate: Option<Buf>,
}

impl AttentionBuffers {
    /// Declares the buffers for these layers; `None` if there are none.
    pub fn declare(b: &mut Builder<'_>, layers: &[&Grouped]) -> Option<AttentionBuffers> {
        if layers.is_empty() {
            return None;
        }
        let widest =
            |width: &dyn Fn(&Grouped) -> usize| layers.iter().map(|layer| width(layer)).max().unwrap_or(0);
        let (gate, beside) = (
            widest(&Grouped::gate_width),
            widest(&|layer| match layer.gate {
                Some(OutputGate::BesideQueries) => 2 * layer.widths()[0],
                _ => 0,
            }),
        );
        Some(AttentionBuffers {
            q: b.buffer(widest(&|layer| layer.widths()[0])),
            k: b.buffer(widest(&|layer| layer.widths()[1])),
            v: b.buffer(widest(&|layer| layer.widths()[2])),
            attended: b.buffer(widest(&|layer| layer.heads * layer.value_dim)),
            gate: (gate > 0).then(|| b.buffer(gate)),
            queries_and_gate: (beside > 0).then(|| b.buffer(beside)),
        })
    }

    /// The attention block of a layer.
    pub fn block(&self, layer: &Grouped, places: &mut Places, b: &mut Builder<'_>, eps: f32) -> Gqa {
        let &Grouped { heads, kv_heads, key_dim, value_dim, window, scale, .. } = layer;
        let [q, k, v] = layer.widths();
        let gate = self.gate.map(|gate| gate.narrow(layer.gate_width()));
        Gqa {
            kv: KvShape { heads: kv_heads, key_dim, value_dim, window, latent: false },
            scale,
            rotation: layer.rotation.as_ref().map(|rotation| places.rotation(b, rotation)),
            eps,
            q: self.q.narrow(q),
            k: self.k.narrow(k),
            v: self.v.narrow(v),
            attended: self.attended.narrow(heads * value_dim),
            gate: match (layer.gate, gate, self.queries_and_gate) {
                (Some(OutputGate::Own { function, .. }), Some(gate), _) => {
                    Some(AttentionGate::Own { gate, function })
                }
                (Some(OutputGate::BesideQueries), Some(gate), Some(both)) => {
                    Some(AttentionGate::BesideQueries { queries_and_gate: both.narrow(2 * q), gate })
                }
                _ => None,
            },
            temperature: layer.temperature.map(|temperature| places.temperature(b, temperature)),
        }
    }
}

/// The window of each layer: `None` for layers that see all positions.
///
/// # Errors
/// If the window's length or a layer's kind is missing or invalid.
pub fn windows(
    config: &Config<'_>,
    layers: usize,
    by_default: impl Fn(usize) -> bool,
) -> Result<Vec<Option<Window>>> {
    let kinds = layer_kinds(config, layers, by_default)?;
    if !kinds.contains(&true) {
        return Ok(vec![None; layers]);
    }
    let window = Window::Last(config.count(keys::WINDOW)?);
    Ok(kinds.into_iter().map(|windowed| windowed.then_some(window)).collect())
}

/// Whether each layer has a window: by the types of layers in folders, by the pattern in GGUF files, or else by the
/// rule that the family's files imply.
///
/// # Errors
/// If a layer's kind is missing or unknown.
pub fn layer_kinds(
    config: &Config<'_>,
    layers: usize,
    by_default: impl Fn(usize) -> bool,
) -> Result<Vec<bool>> {
    if let Some(types) = config.optional_texts(keys::LAYER_TYPES)? {
        if types.len() < layers {
            return Err(config.error(keys::LAYER_TYPES, "does not have one type for each layer"));
        }
        let has_window = |name: &str| match name {
            "sliding_attention" => Ok(true),
            "full_attention" => Ok(false),
            other => Err(config.unsupported(keys::LAYER_TYPES, other)),
        };
        return types.iter().take(layers).map(has_window).collect();
    }
    let pattern = match config.is_list(keys::WINDOW_PATTERN) {
        true => config.optional_bools(keys::WINDOW_PATTERN, layers)?,
        false => None,
    };
    Ok(pattern.unwrap_or_else(|| (0..layers).map(by_default).collect()))
}

/// The distance between layers without a window, if the file has a number instead of a type for each layer. `LLLG` is
/// another spelling of 4.
///
/// # Errors
/// If it is neither a positive integer nor such a text.
pub fn window_period(config: &Config<'_>, by_default: usize) -> Result<usize> {
    if config.is_text(keys::WINDOW_PERIOD)
        && let Some(pattern) = config.optional_text(keys::WINDOW_PERIOD)?
    {
        return match pattern.strip_suffix('G') {
            Some(windows) if windows.chars().all(|layer| layer == 'L') => Ok(pattern.len()),
            _ => Err(config.unsupported(keys::WINDOW_PERIOD, pattern)),
        };
    }
    let period = match config.is_list(keys::WINDOW_PERIOD) {
        true => None,
        false => config.optional_count(keys::WINDOW_PERIOD)?,
    };
    Ok(period.unwrap_or(by_default))
}
