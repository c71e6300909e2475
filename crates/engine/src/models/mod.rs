//! The model families. Each has a file with its configuration, its tensors' names and a straight-line
//! forward pass; the registry below lists them.

mod blueprint;
mod config;
mod qwen3moe;

pub use blueprint::{Blueprint, Builder};
pub use config::Config;
use config::quoted;

use crate::backend::KvShape;
use crate::blocks::Context;
use crate::blocks::head::Head;
use crate::error::{Error, Result};
use crate::format::ModelFile;
use crate::session::Batch;

/// All families that can be run.
pub const ARCHS: &[Arch] = &[qwen3moe::ARCH];

/// A family's entry in the registry.
#[derive(Clone, Copy)]
pub struct Arch {
    /// `general.architecture` in GGUF files.
    pub gguf: &'static str,
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
    fn state(&self) -> Vec<KvShape>;
}

/// Describes the model in a file: which family it is, what it needs, how it computes.
///
/// # Errors
/// If the family is unknown, or the file does not hold what the family needs.
pub fn describe(file: &ModelFile) -> Result<Blueprint> {
    let name = file
        .metadata
        .str("general.architecture")
        .ok_or_else(|| Error::format(file.path(), "general.architecture is missing: not a model"))?;
    let arch = ARCHS.iter().find(|arch| arch.gguf == name).ok_or_else(|| {
        let known: Vec<_> = ARCHS.iter().map(|arch| arch.gguf).collect();
        Error::Unsupported(format!(
            "{}: architecture {} is not supported; supported: {}",
            file.path().display(),
            quoted(name),
            known.join(", ")
        ))
    })?;
    let config = Config::new(file, name);
    let mut builder = Builder::new(file);
    let model = (arch.describe)(&config, &mut builder)?;
    let context = config.count("context_length")?;
    builder.finish(model, context)
}
