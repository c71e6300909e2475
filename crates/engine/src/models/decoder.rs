//! The decoder that most families share: a block that mixes tokens, then a feed-forward block, each with norms and a
//! residual connection around it. A [`Recipe`] says what a family's layers are made of.

use super::attention::{AttentionBuffers, Grouped};
use super::feed_forward::{Ffn, FfnBuffers};
use super::linear::Linear;
use super::positions::Places;
use super::recipe::{self, BlockNorms, Norms, Recipe};
use super::{Builder, Config, Model, Name, Span, keys};
use crate::LayerIdx;
use crate::backend::{Backend, Batch, Buf, BufShape, KvShape, Matrix, StateShape, Vector};
use crate::blocks::Context;
use crate::blocks::delta_net::{DeltaNet, DeltaWeights};
use crate::blocks::gqa::{Gqa, GqaWeights};
use crate::blocks::head::Head;
use crate::blocks::mla::{Mla, MlaWeights};
use crate::blocks::moe::{Moe, MoeLayer, MoeWeights};
use crate::blocks::norm::Norm;
use crate::blocks::positions::Positions;
use crate::blocks::short_conv::{ShortConv, ShortConvWeights};
use crate::error::Result;
use crate::experts::NextMixture;

const OUTPUT: Name = Name::new("output.weight", "lm_head.weight");

struct Decoder {
    vocab: usize,
    /// `[vocab, hidden]` In the first stage.
    embed: Option<Matrix>,
    /// `[1]` A factor of the embeddings.
    embedding_scale: Option<Vector>,
    span: Span,
    layers: Vec<Layer>, // those of the span
    positions: Positions,
    /// In the last stage.
    head: Option<Head>,
    x: Buf,      // [rows, hidden] the residual stream
    normed: Buf, // [rows, hidden] what a block reads
    added: Buf,  // [rows, hidden] what a block adds
}

struct Layer {
    mixer: Option<(Mixer, Around)>,
    ffn: Option<(Ffn, Around)>,
    /// Whether the feed-forward block reads what the mixer reads.
    parallel: bool,
    residual_scale: Option<Vector>, // [1]
    scale: Option<Vector>,          // [1]
}

/// The norms before and after a block.
struct Around {
    before: Option<Norm>,
    after: Option<Norm>,
}

/// The block of a layer that mixes tokens.
enum Mixer {
    Grouped(Box<(Gqa, GqaWeights)>),
    Latent(Box<(Mla, MlaWeights)>),
    Linear(Box<(DeltaNet, DeltaWeights)>),
    Short(ShortConv, ShortConvWeights),
}

impl Layer {
    /// The layer's mixture, if it has one.
    fn mixture(&self) -> Option<(&Moe, &MoeWeights)> {
        self.ffn.as_ref().and_then(|(ffn, _)| ffn.mixture())
    }
}

/// Declares a decoder by its recipe.
///
/// # Errors
/// If the configuration or a tensor does not fit, or asks for something unsupported.
pub fn describe(config: &Config<'_>, b: &mut Builder<'_>, recipe: &Recipe) -> Result<Box<dyn Model>> {
    let span = b.span_of(recipe.layers.len())?;
    let hidden = config.count(keys::HIDDEN)?;
    if !recipe.reads_activation
        && let Some(other) = config.optional_text(keys::ACTIVATION)?.filter(|&name| name != "silu")
    {
        return Err(config.unsupported(keys::ACTIVATION, other));
    }
    let vocab = b.rows_of(recipe.embed)?;

    let (x, normed, added) = (b.buffer(hidden), b.buffer(hidden), b.buffer(hidden));
    let mut mixers = Mixers::declare(config, b, recipe)?;
    let blocks: Vec<_> = recipe.layers.iter().filter_map(|layer| layer.feed_forward.as_ref()).collect();
    let ffns = FfnBuffers::declare(b, &blocks, normed);
    b.keep(span.has_first());
    let embed = b.table(recipe.embed, vocab, hidden)?;
    let embedding_scale = recipe.embedding_scale.map(|scale| b.constant(scale, 1));
    let mut layers = Vec::new();
    for (l, layer) in recipe.layers.iter().enumerate() {
        b.begin_layer();
        let around = |b: &mut Builder<'_>, names: BlockNorms| -> Result<Around> {
            let mut norm = |name: Option<Name>| {
                name.map(|name| recipe.norms.norm(b, name.of_layer(l), hidden)).transpose()
            };
            Ok(Around { before: norm(names.before)?, after: norm(names.after)? })
        };
        let mixer = match &layer.mixer {
            None => None,
            Some(mixer) => {
                let norms = around(b, layer.mixer_norms)?;
                Some((mixers.block(b, mixer, &recipe.norms, l)?, norms))
            }
        };
        let ffn = match &layer.feed_forward {
            None => {
                b.no_experts();
                None
            }
            Some(block) => {
                let norms = around(b, layer.ffn_norms)?;
                Some((ffns.block(b, block, &recipe.norms, l)?, norms))
            }
        };
        layers.push(Layer {
            mixer,
            ffn,
            parallel: layer.parallel,
            residual_scale: layer.residual_scale.map(|scale| b.constant(scale, 1)),
            scale: layer.scale.map(|name| b.vector(name.of_layer(l), 1)).transpose()?,
        });
    }
    layers.truncate(span.end);
    layers.drain(..span.first);
    b.keep(span.has_last());
    let norm = recipe.norms.norm(b, recipe.output_norm, hidden)?;
    // A model without an output matrix uses the embedding table, unless the configuration says otherwise.
    let tied = !b.has(OUTPUT) && config.optional_bool(keys::TIED)? != Some(false);
    let output = match tied {
        true if span.has_first() => embed,
        true => b.matrix(recipe.embed, vocab, hidden)?,
        false => b.matrix(OUTPUT, vocab, hidden)?,
    };
    let input_scale = recipe.normalises_output.then(|| b.inverse_column_lengths(output));
    let scale = recipe.logit_scale.map(|scale| b.constant(scale, 1));
    let bias = recipe.output_bias.map(|name| b.vector(name, vocab)).transpose()?;
    b.keep(true);

    // Only now have the tensors confirmed the sizes.
    let positions = mixers.places.finish(b)?;
    let head = span.has_last().then(|| Head {
        norm,
        input_scale,
        output,
        bias,
        scale,
        softcap: recipe.softcap,
        x,
        picked: b.buffer_of(BufShape { rows: Head::ROWS, width: hidden }),
        logits: b.buffer_of(BufShape { rows: Head::ROWS, width: vocab }),
    });
    let embed = span.has_first().then_some(embed);
    Ok(Box::new(Decoder { vocab, embed, embedding_scale, span, layers, positions, head, x, normed, added }))
}

/// The buffers of the blocks that mix tokens.
struct Mixers {
    grouped: Option<AttentionBuffers>,
    latent: Option<Mla>,
    linear: Option<Linear>,
    short: Option<ShortConv>,
    places: Places,
    eps: f32,
}

impl Mixers {
    fn declare(config: &Config<'_>, b: &mut Builder<'_>, recipe: &Recipe) -> Result<Mixers> {
        let mut places = Places::default();
        let mixers = || recipe.layers.iter().filter_map(|layer| layer.mixer.as_ref());
        let grouped: Vec<&Grouped> = mixers()
            .filter_map(|mixer| match mixer {
                recipe::Mixer::Grouped(grouped) => Some(&**grouped),
                _ => None,
            })
            .collect();
        grouped.iter().try_for_each(|grouped| grouped.check(config))?;
        let latent = mixers().find_map(|mixer| match mixer {
            recipe::Mixer::Latent(latent) => Some(latent.block(b, &mut places)),
            _ => None,
        });
        let linear = recipe.layers.iter().enumerate().find_map(|(l, layer)| match &layer.mixer {
            Some(recipe::Mixer::Linear(shape)) => Some(Linear::new(b, config, *shape, l)),
            _ => None,
        });
        let short = mixers().find_map(|mixer| match mixer {
            recipe::Mixer::Short(short) => Some(short.block(b)),
            _ => None,
        });
        Ok(Mixers {
            grouped: AttentionBuffers::declare(b, &grouped),
            latent,
            linear: linear.transpose()?,
            short,
            places,
            eps: recipe.norms.eps,
        })
    }

    /// The block of layer `l` with its weights.
    fn block(
        &mut self,
        b: &mut Builder<'_>,
        mixer: &recipe::Mixer,
        norms: &Norms,
        l: usize,
    ) -> Result<Mixer> {
        const DECLARED: &str = "it was declared for such a layer";
        Ok(match mixer {
            recipe::Mixer::Grouped(grouped) => {
                let buffers = self.grouped.as_ref().expect(DECLARED);
                let block = buffers.block(grouped, &mut self.places, b, self.eps);
                Mixer::Grouped(Box::new((block, grouped.weights(b, norms, l)?)))
            }
            recipe::Mixer::Latent(latent) => {
                Mixer::Latent(Box::new((self.latent.expect(DECLARED), latent.weights(b, l)?)))
            }
            recipe::Mixer::Linear(_) => {
                let linear = self.linear.as_ref().expect(DECLARED);
                Mixer::Linear(Box::new((linear.net, linear.layer(b, l)?)))
            }
            recipe::Mixer::Short(short) => Mixer::Short(self.short.expect(DECLARED), short.weights(b, l)?),
        })
    }
}

impl Mixer {
    fn forward(
        &self,
        cx: &mut Context<'_>,
        batch: &mut Batch<'_>,
        layer: LayerIdx,
        x: Buf,
        out: Buf,
    ) -> Result<()> {
        match self {
            Mixer::Grouped(block) => block.0.forward(cx, batch, layer, &block.1, x, out),
            Mixer::Latent(block) => block.0.forward(cx, batch, layer, &block.1, x, out),
            Mixer::Linear(block) => block.0.forward(cx, batch, layer, &block.1, x, out),
            Mixer::Short(block, w) => block.forward(cx, batch, layer, w, x, out),
        }
    }

    fn state(&self) -> StateShape {
        let kv: KvShape = match self {
            Mixer::Grouped(block) => block.0.kv,
            Mixer::Latent(block) => block.0.kv,
            Mixer::Linear(block) => return StateShape::Recurrent(block.0.state),
            Mixer::Short(block, _) => return StateShape::Recurrent(block.state),
        };
        StateShape::Attention(kv)
    }
}

impl Decoder {
    /// What a block reads: the stream, through its norm if it has one.
    fn input(&self, b: &mut dyn Backend, norms: &Around) -> Result<Buf> {
        match &norms.before {
            None => Ok(self.x),
            Some(norm) => {
                norm.forward(b, self.x, self.normed)?;
                Ok(self.normed)
            }
        }
    }

    /// Adds a block's output to the stream.
    fn add(&self, b: &mut dyn Backend, layer: &Layer, norms: &Around) -> Result<()> {
        if let Some(norm) = &norms.after {
            norm.forward(b, self.added, self.added)?;
        }
        if let Some(scale) = layer.residual_scale {
            b.scale(self.added, scale)?;
        }
        b.add(self.x, self.added)
    }

    /// The mixture of the next feed-forward block after the layer with this index, if that block is one.
    fn next_mixture(&self, layer: usize) -> Option<NextMixture> {
        let mut later = self.layers.iter().enumerate().skip(layer + 1);
        let (i, next) = later.find(|(_, layer)| layer.ffn.is_some())?;
        let (_, weights) = next.mixture()?;
        Some(NextMixture { layer: LayerIdx(self.span.first + i), router: weights.router })
    }

    fn feed_forward(
        &self,
        cx: &mut Context<'_>,
        layer: LayerIdx,
        ffn: &Ffn,
        next: Option<NextMixture>,
        x: Buf,
    ) -> Result<()> {
        let moe_layer = |weights| MoeLayer { layer, weights, next, stream: self.x };
        match ffn {
            Ffn::Dense(mlp, w) => mlp.forward(cx.backend(), w, x, self.added),
            Ffn::Mixture(mixture) => mixture.0.forward(cx, moe_layer(&mixture.1), self.added),
            Ffn::Both(both) => {
                let b = cx.backend();
                both.mlp.forward(b, &both.mlp_weights, x, self.added)?;
                both.mlp_norm.forward(b, self.added, self.added)?;
                let [before, after] = &both.moe_norms;
                before.forward(b, self.x, both.moe.x)?;
                both.moe.forward(cx, moe_layer(&both.moe_weights), both.out)?;
                let b = cx.backend();
                after.forward(b, both.out, both.out)?;
                b.add(self.added, both.out)
            }
        }
    }
}

impl Model for Decoder {
    fn forward(&self, cx: &mut Context<'_>, batch: &mut Batch<'_>) -> Result<()> {
        match (self.embed, batch.stream) {
            (Some(embed), None) => {
                cx.backend().embed(embed, batch.tokens, self.x)?;
                if let Some(scale) = self.embedding_scale {
                    cx.backend().scale(self.x, scale)?;
                }
            }
            (None, Some(stream)) => cx.backend().write(self.x, stream)?,
            _ => unreachable!("the first stage starts from tokens, the others from hidden states"),
        }
        self.positions.begin(cx.backend(), batch.positions)?;
        for (i, layer) in self.layers.iter().enumerate() {
            let next = self.next_mixture(i);
            let i = LayerIdx(self.span.first + i);
            cx.begin_layer(i.0, self.span.all)?;
            if let Some((moe, weights)) = layer.mixture() {
                moe.route_early(cx.backend(), weights, self.x)?;
            }
            let mut mixed = None;
            if let Some((mixer, norms)) = &layer.mixer {
                let x = self.input(cx.backend(), norms)?;
                mixer.forward(cx, batch, i, x, self.added)?;
                self.add(cx.backend(), layer, norms)?;
                mixed = Some(x);
            }
            if let Some((ffn, norms)) = &layer.ffn {
                let x = match mixed {
                    // The norm's output is still there.
                    Some(x) if layer.parallel => x,
                    _ => self.input(cx.backend(), norms)?,
                };
                self.feed_forward(cx, i, ffn, next, x)?;
                self.add(cx.backend(), layer, norms)?;
            }
            if let Some(scale) = layer.scale {
                cx.backend().scale(self.x, scale)?;
            }
        }
        Ok(())
    }

    fn head(&self) -> Option<&Head> {
        self.head.as_ref()
    }

    fn stream(&self) -> Buf {
        self.x
    }

    fn vocab(&self) -> usize {
        self.vocab
    }

    fn state(&self) -> Vec<Option<StateShape>> {
        self.layers.iter().map(|layer| Some(layer.mixer.as_ref()?.0.state())).collect()
    }
}
