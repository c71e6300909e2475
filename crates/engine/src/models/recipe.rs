//! What a family says about its decoder: its attention, feed-forward blocks and norms, layer by layer.

use super::attention::Grouped;
use super::feed_forward::FeedForward;
use super::latent::Latent;
use super::short_conv::Short;
use super::{Builder, Config, Name, keys};
use crate::backend::{DeltaShape, Vector};
use crate::blocks::norm::{Norm, NormKind};
use crate::error::Result;

/// A decoder.
pub struct Recipe {
    /// The layers, from the first to the last.
    pub layers: Vec<LayerRecipe>,
    /// The norms of all layers, and the last one.
    pub norms: Norms,
    /// The name of the embeddings.
    pub embed: Name,
    /// The name of the last norm.
    pub output_norm: Name,
    /// The name of the bias of logits, if they have one.
    pub output_bias: Option<Name>,
    /// Whether every column of the output matrix is divided by its length.
    pub normalises_output: bool,
    /// A factor of the embeddings.
    pub embedding_scale: Option<f32>,
    /// A factor of the logits.
    pub logit_scale: Option<f32>,
    /// The bound of the logits: they become `cap · tanh(logit / cap)`.
    pub softcap: Option<f32>,
    /// Whether the family has read the setting of the activation function, instead of always using SiLU.
    pub reads_activation: bool,
}

impl Recipe {
    /// A decoder with these layers and nothing unusual around them.
    ///
    /// # Errors
    /// If the configuration has no epsilon for norms.
    pub fn new(config: &Config<'_>, layers: Vec<LayerRecipe>) -> Result<Recipe> {
        Ok(Recipe::with_norms(layers, Norms::rms(config.float(keys::NORM_EPS)?)))
    }

    /// The same with other norms.
    pub fn with_norms(layers: Vec<LayerRecipe>, norms: Norms) -> Recipe {
        Recipe {
            layers,
            norms,
            embed: Name::new("token_embd.weight", "model.embed_tokens.weight"),
            output_norm: Name::new("output_norm.weight", "model.norm.weight"),
            output_bias: None,
            normalises_output: false,
            embedding_scale: None,
            logit_scale: None,
            softcap: None,
            reads_activation: false,
        }
    }

    /// A decoder whose first layers have dense feed-forward blocks, the others mixtures, and which has the same
    /// attention in all layers.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn dense_first(
        config: &Config<'_>,
        dense_layers: usize,
        dense: &LayerRecipe,
        mixture: &LayerRecipe,
    ) -> Result<Recipe> {
        let layer = |l: usize| if l < dense_layers { dense.clone() } else { mixture.clone() };
        Recipe::new(config, (0..config.layers()?).map(layer).collect())
    }

    /// A decoder whose layers are all alike.
    ///
    /// # Errors
    /// If the configuration has no number of layers or no epsilon for norms.
    pub fn uniform(config: &Config<'_>, layer: &LayerRecipe) -> Result<Recipe> {
        Recipe::new(config, vec![layer.clone(); config.layers()?])
    }
}

/// One layer.
#[derive(Clone)]
pub struct LayerRecipe {
    /// The block that mixes tokens, if it has one.
    pub mixer: Option<Mixer>,
    /// The feed-forward block, if it has one.
    pub feed_forward: Option<FeedForward>,
    /// The norms of the block that mixes tokens.
    pub mixer_norms: BlockNorms,
    /// The norms of the feed-forward block.
    pub ffn_norms: BlockNorms,
    /// Whether the feed-forward block reads what the other block reads, instead of the stream after it.
    pub parallel: bool,
    /// A factor of what both blocks add to the stream.
    pub residual_scale: Option<f32>,
    /// The name of a factor of the stream after the layer: one number.
    pub scale: Option<Name>,
}

/// The names of the norms of a block; `None` where there is no norm.
#[derive(Clone, Copy)]
pub struct BlockNorms {
    /// The norm of the block's input.
    pub before: Option<Name>,
    /// The norm of the block's output.
    pub after: Option<Name>,
}

impl LayerRecipe {
    /// The usual name of the norm before the block that mixes tokens.
    pub const MIXER_NORM: Name = Name::new("attn_norm.weight", "input_layernorm.weight");
    /// The usual name of the norm before the feed-forward block.
    pub const FFN_NORM: Name = Name::new("ffn_norm.weight", "post_attention_layernorm.weight");
    /// Its name in the GGUF files of some families.
    pub const POST_NORM: Name = Name::new("post_attention_norm.weight", "post_attention_layernorm.weight");

    /// A layer with norms before its blocks.
    pub fn new(mixer: impl Into<Mixer>, feed_forward: impl Into<FeedForward>) -> LayerRecipe {
        LayerRecipe {
            mixer: Some(mixer.into()),
            feed_forward: Some(feed_forward.into()),
            mixer_norms: BlockNorms { before: Some(LayerRecipe::MIXER_NORM), after: None },
            ffn_norms: BlockNorms { before: Some(LayerRecipe::FFN_NORM), after: None },
            parallel: false,
            residual_scale: None,
            scale: None,
        }
    }

    /// A layer with a single block, which mixes tokens, after a norm with this name.
    pub fn of_mixer(mixer: impl Into<Mixer>, norm: Name) -> LayerRecipe {
        LayerRecipe { mixer: Some(mixer.into()), ..LayerRecipe::empty(norm) }
    }

    /// A layer with a single block, a feed-forward block, after a norm with this name.
    pub fn of_feed_forward(feed_forward: impl Into<FeedForward>, norm: Name) -> LayerRecipe {
        LayerRecipe { feed_forward: Some(feed_forward.into()), ..LayerRecipe::empty(norm) }
    }

    fn empty(norm: Name) -> LayerRecipe {
        let norms = BlockNorms { before: Some(norm), after: None };
        LayerRecipe {
            mixer: None,
            feed_forward: None,
            mixer_norms: norms,
            ffn_norms: norms,
            parallel: false,
            residual_scale: None,
            scale: None,
        }
    }

    /// The same with another name of the norm before the feed-forward block.
    pub fn with_ffn_norm(self, name: Name) -> LayerRecipe {
        LayerRecipe { ffn_norms: BlockNorms { before: Some(name), ..self.ffn_norms }, ..self }
    }
}

/// The block of a layer that mixes tokens.
#[derive(Clone)]
pub enum Mixer {
    /// Grouped-query attention.
    Grouped(Box<Grouped>),
    /// Latent attention.
    Latent(Latent),
    /// Linear attention by the delta rule.
    Linear(DeltaShape),
    /// A gated short convolution.
    Short(Short),
}

impl From<Grouped> for Mixer {
    fn from(grouped: Grouped) -> Mixer {
        Mixer::Grouped(Box::new(grouped))
    }
}

impl From<Latent> for Mixer {
    fn from(latent: Latent) -> Mixer {
        Mixer::Latent(latent)
    }
}

impl From<DeltaShape> for Mixer {
    fn from(shape: DeltaShape) -> Mixer {
        Mixer::Linear(shape)
    }
}

impl From<Short> for Mixer {
    fn from(short: Short) -> Mixer {
        Mixer::Short(short)
    }
}

/// The norms of a model.
#[derive(Clone, Copy)]
pub struct Norms {
    /// What they normalise.
    pub kind: NormKind,
    /// Whether the file stores their weights minus one.
    pub zero_centred: bool,
    /// Whether they have biases.
    pub bias: bool,
    /// Their epsilon.
    pub eps: f32,
}

impl Norms {
    /// Plain RMS norms.
    pub fn rms(eps: f32) -> Norms {
        Norms { kind: NormKind::Rms, zero_centred: false, bias: false, eps }
    }

    /// Declares a norm of rows of `len` numbers.
    ///
    /// # Errors
    /// If a tensor is missing or does not fit.
    pub fn norm(&self, b: &mut Builder<'_>, name: Name, len: usize) -> Result<Norm> {
        let bias = self.bias.then(|| b.vector(name.bias(), len)).transpose()?;
        Ok(Norm { kind: self.kind, weight: self.weights(b, name, len)?, bias, eps: self.eps })
    }

    /// Declares the weights of an RMS norm.
    ///
    /// # Errors
    /// If the tensor is missing or does not fit.
    pub fn weights(&self, b: &mut Builder<'_>, name: Name, len: usize) -> Result<Vector> {
        if self.zero_centred { b.vector_of(name, len, |w| w + 1.0) } else { b.vector(name, len) }
    }
}
