//! The model families. Each has a file with its configuration and tensor names. Most share one decoder for the
//! forward pass. [`ARCHS`] lists all families.

mod afmoe;
mod attention;
mod bailing_moe;
mod blueprint;
mod builder;
mod cohere2moe;
mod config;
mod declared;
mod decoder;
mod deepseek2;
mod dense;
mod dots1;
mod ernie4_5_moe;
mod exaone_moe;
mod experts;
mod feed_forward;
mod gemma3;
mod gemma4;
mod glm4moe;
mod gpt_oss;
mod granite;
mod grovemoe;
mod hunyuan_moe;
mod hy_v3;
pub mod keys;
mod laguna;
mod latent;
mod lfm2moe;
mod linear;
mod llama;
mod llama4;
mod mimo2;
mod minimax_m2;
mod mistral3;
mod mistral4;
mod names;
mod needs;
mod nemotron_h;
mod olmoe;
mod parts;
mod phimoe;
mod positions;
mod product;
mod qwen2;
mod qwen2moe;
mod qwen3;
mod qwen35moe;
mod qwen3moe;
mod recipe;
mod scaling;
mod short_conv;
mod smallthinker;
mod span;
mod split;
mod step35;
pub mod unread;

pub use blueprint::Blueprint;
pub use builder::Builder;
pub use config::{Config, LayerKind};
pub use names::{BiasNames, ExpertNames, Fused, Name};
pub use needs::{Need, NeedKind, needs};
pub use product::Product;
pub use span::Span;

use std::ops::Range;

use crate::backend::{Batch, Buf, StateShape};
use crate::blocks::Context;
use crate::blocks::head::Head;
use crate::error::{Error, Result};
use crate::format::{Format, ModelFile, Quoted, Value};

/// All supported families.
pub const ARCHS: &[Arch] = &[
    qwen3moe::ARCH,
    qwen2::ARCH,
    qwen3::ARCH,
    llama::ARCH,
    olmoe::ARCH,
    qwen2moe::ARCH,
    minimax_m2::ARCH,
    glm4moe::ARCH,
    qwen35moe::ARCH,
    qwen35moe::QWEN3_NEXT,
    gpt_oss::ARCH,
    deepseek2::ARCH,
    dots1::ARCH,
    hy_v3::ARCH,
    exaone_moe::ARCH,
    afmoe::ARCH,
    ernie4_5_moe::ARCH,
    hunyuan_moe::ARCH,
    mistral3::ARCH,
    mistral4::ARCH,
    qwen35moe::DENSE,
    qwen3moe::VL,
    gemma4::ARCH,
    lfm2moe::ARCH,
    granite::ARCH,
    granite::DENSE,
    bailing_moe::ARCH,
    bailing_moe::V2,
    smallthinker::ARCH,
    step35::ARCH,
    mimo2::ARCH,
    laguna::ARCH,
    llama4::ARCH,
    gemma3::ARCH,
    cohere2moe::ARCH,
    phimoe::ARCH,
    grovemoe::ARCH,
    nemotron_h::ARCH,
];

/// A family's entry in the registry.
#[derive(Clone, Copy)]
pub struct Arch {
    /// `general.architecture` in GGUF files.
    pub gguf: &'static str,
    /// The family's name, for people.
    pub name: &'static str,
    /// Published models and their sizes.
    pub models: &'static str,
    /// Whether mlx-lm converts models of the family, and Forebay reads its folders.
    pub mlx: bool,
    /// What the logits of tiny models of the family are compared with.
    pub reference: Reference,
    /// `architectures` and `model_type` in `config.json`.
    pub hugging_face: &'static [&'static str],
    /// Reads the configuration and declares what the model needs. Reads no weights.
    pub describe: fn(&Config<'_>, &mut Builder<'_>) -> Result<Box<dyn Model>>,
}

impl Arch {
    /// The model and the length of its context. Every setting that changes its arithmetic has been read.
    fn model(&self, config: &Config<'_>, b: &mut Builder<'_>) -> Result<(Box<dyn Model>, usize)> {
        let described = ((self.describe)(config, b)?, config.context()?);
        unread::refuse(self.gguf, config)?;
        Ok(described)
    }
}

/// Where the logits come from that a family's are compared with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reference {
    /// Hugging Face transformers.
    Transformers,
    /// The published formulas, written down in `tools/tiny_by_hand.py`, because transformers does not have the family.
    /// llama.cpp computes the same.
    Formulas,
    /// The published formulas, which llama.cpp does not compute.
    FormulasOnly,
}

/// A model's forward pass, with weights that a backend holds.
pub trait Model: Send + Sync {
    /// Computes the hidden states of a batch, and appends the batch to its sequences' states. The first stage of a model
    /// starts from the batch's tokens, the others from the hidden states that the batch brings.
    ///
    /// # Errors
    /// If the backend or the store fails; [`Error::Cancelled`] if a stop is requested.
    fn forward(&self, cx: &mut Context<'_>, batch: &mut Batch<'_>) -> Result<()>;

    /// Computes logits from hidden states; `None` in a stage that does not have the last layer.
    fn head(&self) -> Option<&Head>;

    /// The hidden states of a batch: `[rows, hidden]`
    fn stream(&self) -> Buf;

    /// The number of logits.
    fn vocab(&self) -> usize;

    /// The shape of each layer's state; `None` for layers that keep nothing.
    fn state(&self) -> Vec<Option<StateShape>>;
}

/// Finds the family of the model in a file and describes the model.
///
/// # Errors
/// If the family is unknown, or the file does not have what the family needs.
pub fn describe(file: &ModelFile) -> Result<Blueprint> {
    describe_layers(file, None)
}

/// Like [`describe`], but only the tensors of these layers are loaded: the first stage has the embeddings, too, and the
/// last one the head. The tensors of other layers are only checked.
///
/// # Errors
/// As [`describe`]; [`Error::Invalid`] if the model has no such layers.
pub fn describe_layers(file: &ModelFile, layers: Option<Range<usize>>) -> Result<Blueprint> {
    refuse_parts(file)?;
    let arch = recognise(file)?;
    let config = Config::new(file);
    let mut builder = Builder::for_layers(file, layers);
    let (model, context) = arch.model(&config, &mut builder)?;
    builder.finish(model, context)
}

/// Architectures of draft models for speculative decoding.
const DRAFTS: [&str; 3] = ["eagle3", "dflash", "gemma4-assistant"];

/// Refuses GGUF files that have only a part of a model: the encoder and projector of images or audio, or a draft for
/// speculative decoding with another model. Some drafts have that model's architecture, but only its layers for
/// multi-token prediction (MTP).
fn refuse_parts(file: &ModelFile) -> Result<()> {
    if file.format != Format::Gguf {
        return Ok(());
    }
    if file.architecture() == Some("clip") || file.metadata.str("general.type") == Some("mmproj") {
        return Err(Error::Unsupported(format!(
            "{}: this file holds only a vision or audio projector (mmproj), not a model; use the GGUF file of the \
             model itself, which Forebay runs on text",
            file.path().display()
        )));
    }
    let has_draft_architecture = file.architecture().is_some_and(|name| DRAFTS.contains(&name));
    let starts = |prefix: &str| file.tensors.iter().any(|tensor| tensor.name.starts_with(prefix));
    let predicts = file.tensors.iter().any(|tensor| tensor.name.contains(".nextn."));
    if !has_draft_architecture && (!predicts || starts("blk.0.")) {
        return Ok(());
    }
    Err(Error::Unsupported(format!(
        "{}: this file holds only the draft layers (MTP) for speculative decoding, not a model; \
         use the GGUF file of the model itself",
        file.path().display()
    )))
}

/// The family of a model.
fn recognise(file: &ModelFile) -> Result<&'static Arch> {
    let path = file.settings_path();
    let (key, said): (_, Vec<&str>) = match file.format {
        Format::Gguf => ("general.architecture", file.architecture().into_iter().collect()),
        Format::HuggingFace | Format::Mlx => {
            let classes = file.metadata.get("architectures").and_then(Value::as_strings);
            let classes = classes.into_iter().flat_map(|classes| classes.iter());
            ("architectures", classes.chain(file.metadata.str("model_type")).collect())
        }
    };
    let known = |arch: &Arch| match file.format {
        Format::Gguf => vec![arch.gguf],
        Format::HuggingFace | Format::Mlx => arch.hugging_face.to_vec(),
    };
    let first = said.first().ok_or_else(|| {
        Error::format(&path, format!("the setting {key} is missing, so this is not a model"))
    })?;
    ARCHS.iter().find(|arch| known(arch).iter().any(|name| said.contains(name))).ok_or_else(|| {
        let supported: Vec<_> = ARCHS.iter().map(|arch| known(arch)[0]).collect();
        Error::Unsupported(format!(
            "{}: architecture {} is not supported; use a model of one of these: {}",
            path.display(),
            Quoted(first),
            supported.join(", ")
        ))
    })
}
