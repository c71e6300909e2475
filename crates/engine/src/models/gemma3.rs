//! Gemma 3: dense, with norms before and after each block. Most layers have a window and another rotation than the
//! others.

use super::attention::{self, Grouped, QkNorm};
use super::config::Omitted;
use super::feed_forward::Dense;
use super::gemma4::{FFN_NORMS, MIXER_NORMS};
use super::positions::Rotating;
use super::recipe::{LayerRecipe, Norms, Recipe};
use super::{Arch, Builder, Config, LayerKind, Model, Reference, decoder, keys};
use crate::backend::{Activation, Window};
use crate::blocks::rope::RopeScaling;
use crate::error::Result;
use crate::format::{Format, Key, Value};

/// The family's entry in the registry.
pub const ARCH: Arch = Arch {
    gguf: "gemma3",
    name: "Gemma 3, dense",
    models: "Gemma-3, 1B to 27B",
    mlx: true,
    reference: Reference::Transformers,
    hugging_face: &["Gemma3ForConditionalGeneration", "Gemma3ForCausalLM", "gemma3", "gemma3_text"],
    describe,
};

/// The published folders omit settings that equal these.
const OMITTED: Omitted = &[
    ("max_position_embeddings", Value::Unsigned(131_072)),
    ("num_attention_heads", Value::Unsigned(8)),
    ("num_key_value_heads", Value::Unsigned(4)),
    ("head_dim", Value::Unsigned(256)),
    ("query_pre_attn_scalar", Value::Unsigned(256)),
    ("rms_norm_eps", Value::Float(1e-6)),
    ("sliding_window", Value::Unsigned(4096)),
];

/// The base of the frequencies in layers with a window.
const WINDOW_BASE: Key = Key {
    gguf: "rope.freq_base_swa",
    hugging_face: &["rope_parameters.sliding_attention.rope_theta", "rope_local_base_freq"],
};
/// The scaling of the rotation there.
const WINDOW_SCALING: Key = Key { gguf: "", hugging_face: &["rope_parameters.sliding_attention.rope_type"] };
/// Scores are divided by its root.
const QUERY_SCALE: Key = Key { gguf: "", hugging_face: &["query_pre_attn_scalar"] };

fn describe(config: &Config<'_>, b: &mut Builder<'_>) -> Result<Box<dyn Model>> {
    config.assume(OMITTED);
    refuse(config)?;
    let hidden = config.count(keys::HIDDEN)?;
    let dense = Dense { activation: Activation::GeGlu, ..Dense::new(config.count(keys::INNER)?) };
    let heads = [config.count(keys::HEADS)?, config.count(keys::KV_HEADS)?];
    let attention = Grouped {
        scale: scale(config)?,
        qk_norm: QkNorm::Head,
        ..Grouped::of(config, heads, config.count(keys::KEY_DIM)?)?
    };
    let mut layers = Vec::new();
    for (l, window) in windows(config)?.into_iter().enumerate() {
        let rotation = Some(rotation(config, l, window, attention.key_dim)?);
        layers.push(LayerRecipe {
            mixer_norms: MIXER_NORMS,
            ffn_norms: FFN_NORMS,
            ..LayerRecipe::new(Grouped { window, rotation, ..attention.clone() }, dense)
        });
    }
    // No layer reads the base of the layers without a window if there are fewer layers than a period has.
    config.optional_float(keys::ROPE_BASE)?;
    let zero_centred = config.format() != Format::Gguf;
    let recipe = Recipe {
        embedding_scale: Some((hidden as f32).sqrt()),
        softcap: config.nonzero_float(keys::LOGIT_SOFTCAP)?.map(|bound| bound as f32),
        ..Recipe::with_norms(layers, Norms { zero_centred, ..Norms::rms(config.float(keys::NORM_EPS)?) })
    };
    decoder::describe(config, b, &recipe)
}

/// Refuses settings that no published model has.
fn refuse(config: &Config<'_>) -> Result<()> {
    config.refuse_true(keys::QKV_BIAS)?;
    config.refuse_true(keys::BIDIRECTIONAL)?;
    for (key, known) in [(keys::HIDDEN_ACTIVATION, "gelu_pytorch_tanh"), (WINDOW_SCALING, "default")] {
        if let Some(other) = config.optional_text(key)?.filter(|&name| name != known) {
            return Err(config.unsupported(key, other));
        }
    }
    Ok(())
}

/// The factor of scores. GGUF files do not have it, but it differs only in the model with 62 layers.
fn scale(config: &Config<'_>) -> Result<f32> {
    let channels = match config.format() {
        Format::Gguf if config.layers()? == 62 => config.count(keys::HIDDEN)? / config.count(keys::HEADS)?,
        Format::Gguf => config.count(keys::KEY_DIM)?,
        Format::HuggingFace | Format::Mlx => config.count(QUERY_SCALE)?,
    };
    Ok(1.0 / (channels as f32).sqrt())
}

/// The window of each layer. The last layer of each period has none.
fn windows(config: &Config<'_>) -> Result<Vec<Option<Window>>> {
    let (layers, period) = (config.layers()?, attention::window_period(config, 6)?);
    if config.number(keys::WINDOW)? == 0 {
        return Ok(vec![None; layers]);
    }
    attention::windows(config, layers, |l| !(l + 1).is_multiple_of(period))
}

/// The rotation of layer `l`. The scaling for longer contexts is only that of layers without a window.
fn rotation(config: &Config<'_>, l: usize, window: Option<Window>, dim: usize) -> Result<Rotating> {
    if window.is_some() {
        let base = config.optional_float(WINDOW_BASE)?.unwrap_or(10_000.0);
        return Ok(Rotating::new(dim, base, RopeScaling::Plain));
    }
    let own = config.of_layer(l, LayerKind::Full);
    let base = own.optional_float(keys::ROPE_BASE)?.unwrap_or(1_000_000.0);
    Ok(Rotating::new(dim, base, own.rope_scaling()?))
}
