//! Where a model is.

use std::path::{Path, PathBuf};

use forebay_server::model_name;
use pyo3::prelude::*;

/// The name and the path of a model.
#[pyfunction]
pub fn locate(model: Option<PathBuf>, _progress: &Bound<'_, PyAny>) -> (String, PathBuf) {
    let demo = || {
        Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/tales-qwen3moe-Q4_K_M.gguf")).to_owned()
    };
    let path = model.clone().unwrap_or_else(demo);
    (model_name(model.as_deref(), &path), path)
}
