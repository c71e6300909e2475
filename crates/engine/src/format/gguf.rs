//! GGUF
use std::path::Path;
use super::ModelFile;
use crate::error::{Error, Result};
/// Open.
pub fn open(path: &Path) -> Result<ModelFile> { Err(Error::format(path, "not a GGUF file")) }
