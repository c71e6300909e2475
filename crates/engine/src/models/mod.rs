//! The model families. Each has a file with its configuration and the names of its tensors; the forward pass is that of
//! the decoder that most of them share, or a straight line of its own. The registry below lists them.

mod attention;
mod blueprint;
mod config;
mod declared;
mod decoder;
mod deepseek2;
mod dots1;
mod experts;
mod glm4moe;
mod gpt_oss;
pub mod keys;
mod latent;
mod linear;
mod llama;
mod minimax_m2;
mod names;
mod needs;
mod olmoe;
mod product;
mod qwen2;
mod qwen2moe;
mod qwen3;
mod qwen35moe;
mod qwen3moe;

pub use blueprint::{Blueprint, Builder};
pub use config::Config;
pub use names::{BiasNames, ExpertNames, Fused, Name};
pub use needs::{Need, NeedKind, needs};
pub use product::Product;

use crate::backend::Batch;
use crate::backend::StateShape;
use crate::blocks::Context;
use crate::blocks::head::Head;
use crate::error::{Error, Result};
use crate::format::{Format, ModelFile, Quoted, Value};

/// All families that can be run.
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
];

/// A family's entry in the registry.
#[derive(Clone, Copy)]
pub struct Arch {
    /// `general.architecture` in GGUF files.
    pub gguf: &'static str,
    /// `architectures` and `model_type` in `config.json`.
    pub hugging_face: &'static [&'static str],
    /// Reads the configuration and declares what the model is made of. Reads no weights.
    pub describe: fn(&Config<'_>, &mut Builder<'_>) -> Result<Box<dyn Model>>,
}

/// A loaded model: the arithmetic over weights that a backend holds.
pub trait Model: Send + Sync {
    /// Computes the hidden states of a batch, and extends its sequences' states by it.
    ///
    /// # Errors
    /// The backend's and the store's; [`Error::Cancelled`] if the context asks to stop.
    fn forward(&self, cx: &mut Context<'_>, batch: &mut Batch<'_>) -> Result<()>;

    /// The way from hidden states to logits.
    fn head(&self) -> &Head;

    /// What each layer of a sequence keeps.
    fn state(&self) -> Vec<StateShape>;
}

/// Describes the model in a file: which family it is, what it needs, how it computes.
///
/// # Errors
/// If the family is unknown, or the file does not hold what the family needs.
pub fn describe(file: &ModelFile) -> Result<Blueprint> {
    refuse_drafts(file)?;
    let arch = recognise(file)?;
    let config = Config::new(file);
    let mut builder = Builder::new(file);
    let model = (arch.describe)(&config, &mut builder)?;
    let context = config.context()?;
    builder.finish(model, context)
}

/// Architectures whose files only propose tokens to a larger model.
const DRAFTS: [&str; 3] = ["eagle3", "dflash", "gemma4-assistant"];

/// Refuses GGUF files that hold no model of their own, but a draft for speculative decoding with a larger one. Some have
/// the larger model's architecture, and of its layers only those that predict further tokens (MTP).
fn refuse_drafts(file: &ModelFile) -> Result<()> {
    if file.format != Format::Gguf {
        return Ok(());
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
    let first = said.first().ok_or_else(|| Error::format(&path, format!("{key} is missing: not a model")))?;
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
