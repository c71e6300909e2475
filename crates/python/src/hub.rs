//! Where a model is.

use std::path::PathBuf;

use forebay_engine::Cancel;
use forebay_hub::{Error, Pull, Result};
use forebay_server::model_name;
use pyo3::prelude::*;

use crate::errors::hub_exception;
use crate::progress::Progress;
use crate::waiting::wait_looking;

/// The name and the path of a model, or of the demo model. One of the hub is downloaded if it is not here, and `progress` is
/// called with the bytes that are here, and all.
#[pyfunction]
pub fn locate(
    py: Python<'_>,
    model: Option<PathBuf>,
    progress: Bound<'_, PyAny>,
) -> PyResult<(String, PathBuf)> {
    let (cancel, bytes) = (Cancel::default(), Progress::default());
    let find = {
        let (model, cancel, bytes) = (model.clone(), cancel.clone(), bytes.clone());
        move || find(model, &cancel, &bytes)
    };
    let found = wait_looking(py, &cancel, find, |_| bytes.tell(&progress))?;
    let path = found.map_err(|error| hub_exception(error, model.as_deref()))?;
    Ok((model_name(model.as_deref(), &path), path))
}

fn find(model: Option<PathBuf>, cancel: &Cancel, bytes: &Progress) -> Result<PathBuf> {
    let Some(model) = model else { return forebay_hub::demo() };
    match forebay_hub::locate(&model) {
        Err(Error::NotDownloaded(missing)) if !forebay_hub::is_offline() => {
            let client = forebay_hub::client(forebay_hub::RETRIES, cancel)?;
            let pull = Pull::new(client, &missing.name)?;
            pull.check_space()?;
            pull.download(false, bytes)?;
            Ok(pull.path())
        }
        found => found,
    }
}
