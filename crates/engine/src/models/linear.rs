//! Layers with linear attention: their settings and the names of their tensors.

use forebay_kernels::math::exp;

use super::{Builder, Config, Name, keys};
use crate::backend::{Buf, DeltaShape, HeadOrder};
use crate::blocks::delta_net::{DeltaNet, DeltaWeights, Pair};
use crate::error::Result;
use crate::format::{Format, Key};

const KEY_HEADS: Key = Key { gguf: "ssm.group_count", hugging_face: &["linear_num_key_heads"] };
const VALUE_HEADS: Key = Key { gguf: "ssm.time_step_rank", hugging_face: &["linear_num_value_heads"] };
const KEY_DIM: Key = Key { gguf: "ssm.state_size", hugging_face: &["linear_key_head_dim"] };
const VALUE_DIM: Key = Key { gguf: "", hugging_face: &["linear_value_head_dim"] };
/// Channels of all values together.
const VALUES: Key = Key { gguf: "ssm.inner_size", hugging_face: &[] };
const KERNEL: Key = Key { gguf: "ssm.conv_kernel", hugging_face: &["linear_conv_kernel_dim"] };

const QKV: Name = Name::new("attn_qkv.weight", "linear_attn.in_proj_qkv.weight");
const Z: Name = Name::new("attn_gate.weight", "linear_attn.in_proj_z.weight");
const QKVZ: Name = Name::new("ssm_in.weight", "linear_attn.in_proj_qkvz.weight");
const B: Name = Name::new("ssm_beta.weight", "linear_attn.in_proj_b.weight");
const A: Name = Name::new("ssm_alpha.weight", "linear_attn.in_proj_a.weight");
const BA: Name = Name::new("ssm_ba.weight", "linear_attn.in_proj_ba.weight");
const FILTERS: Name = Name::new("ssm_conv1d.weight", "linear_attn.conv1d.weight");
const RATES: Name = Name::new("ssm_a", "linear_attn.A_log");
const BIASES: Name = Name::new("ssm_dt.bias", "linear_attn.dt_bias");
const NORM: Name = Name::new("ssm_norm.weight", "linear_attn.norm.weight");
const OUT: Name = Name::new("ssm_out.weight", "linear_attn.out_proj.weight");

/// The heads of a model, with this order of value heads.
///
/// # Errors
/// If a size is missing or inconsistent.
pub fn shape(config: &Config<'_>, order: HeadOrder) -> Result<DeltaShape> {
    let (key_heads, value_heads) = (config.count(KEY_HEADS)?, config.count(VALUE_HEADS)?);
    if !value_heads.is_multiple_of(key_heads) {
        return Err(config.error(VALUE_HEADS, "is not a multiple of the number of key heads"));
    }
    let value_dim = match config.format() {
        Format::HuggingFace | Format::Mlx => config.count(VALUE_DIM)?,
        Format::Gguf => {
            let values = config.count(VALUES)?;
            if !values.is_multiple_of(value_heads) {
                return Err(config.error(VALUES, "is not a multiple of the number of value heads"));
            }
            values / value_heads
        }
    };
    let kernel = config.count(KERNEL)?;
    if kernel < 2 {
        return Err(config.unsupported(KERNEL, &kernel.to_string()));
    }
    let key_dim = config.count(KEY_DIM)?;
    let shape = DeltaShape { key_heads, value_heads, key_dim, value_dim, kernel, order };
    match shape.state_floats() {
        Some(_) => Ok(shape),
        None => Err(config.error(KEY_DIM, "makes the recurrent states too large")),
    }
}

/// The layers with linear attention, which share buffers.
pub struct Linear {
    /// The block.
    pub net: DeltaNet,
    hidden: usize,
    /// The buffers for products of matrices with grouped rows.
    qkvz: Option<Buf>,
    ba: Option<Buf>,
}

impl Linear {
    /// Whether a layer has linear attention, by its tensors.
    pub fn is_layer(b: &Builder<'_>, l: usize) -> bool {
        b.has(FILTERS.of_layer(l))
    }

    /// The layers of a model, the first of which is layer `first`.
    ///
    /// # Errors
    /// If the sizes are inconsistent.
    pub fn new(b: &mut Builder<'_>, config: &Config<'_>, shape: DeltaShape, first: usize) -> Result<Linear> {
        let values = shape.value_heads * shape.value_dim;
        let net = DeltaNet {
            shape,
            state: shape.state_floats().expect("its size was checked"),
            eps: config.float(keys::NORM_EPS)?,
            qkv: b.buffer(shape.channels()),
            convolved: b.buffer(shape.channels()),
            z: b.buffer(values),
            b: b.buffer(shape.value_heads),
            a: b.buffer(shape.value_heads),
            out: b.buffer(values),
        };
        let mut buffer = |name: Name, width| b.has(name.of_layer(first)).then(|| b.buffer(width));
        let qkvz = buffer(QKVZ, shape.channels() + values);
        let ba = buffer(BA, 2 * shape.value_heads);
        Ok(Linear { net, hidden: config.count(keys::HIDDEN)?, qkvz, ba })
    }

    /// The weights of layer `l`.
    ///
    /// # Errors
    /// If a tensor is missing or has another shape.
    pub fn layer(&self, b: &mut Builder<'_>, l: usize) -> Result<DeltaWeights> {
        let DeltaShape { value_heads, value_dim, kernel, .. } = self.net.shape;
        let (channels, values, hidden) = (self.net.shape.channels(), value_heads * value_dim, self.hidden);
        let qkv_z = match self.qkvz {
            Some(buf) => Pair::Interleaved(b.matrix(QKVZ.of_layer(l), channels + values, hidden)?, buf),
            None => Pair::Separate(
                b.matrix(QKV.of_layer(l), channels, hidden)?,
                b.matrix(Z.of_layer(l), values, hidden)?,
            ),
        };
        let b_a = match self.ba {
            Some(buf) => Pair::Interleaved(b.matrix(BA.of_layer(l), 2 * value_heads, hidden)?, buf),
            None => Pair::Separate(
                b.matrix(B.of_layer(l), value_heads, hidden)?,
                b.matrix(A.of_layer(l), value_heads, hidden)?,
            ),
        };
        // GGUF files have the rates themselves, other files their logarithms.
        let rates = match b.format() {
            Format::Gguf => b.vector(RATES.of_layer(l), value_heads)?,
            Format::HuggingFace | Format::Mlx => {
                b.vector_of(RATES.of_layer(l), value_heads, |log| -exp(log))?
            }
        };
        Ok(DeltaWeights {
            qkv_z,
            b_a,
            filters: b.filters(FILTERS.of_layer(l), channels, kernel)?,
            rates,
            biases: b.vector(BIASES.of_layer(l), value_heads)?,
            norm: b.vector(NORM.of_layer(l), value_dim)?,
            out: b.matrix(OUT.of_layer(l), hidden, values)?,
        })
    }
}
