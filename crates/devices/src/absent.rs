//! In place of GPUs through Metal and Vulkan, in a program that is built without them.

use std::convert::Infallible;
use std::sync::Arc;

use forebay_engine::internals::experts::Device;
use forebay_engine::{Error, Result};

use crate::{DeviceChoice, Portable};

/// What opens a GPU: there is none.
pub type Handle = Infallible;

/// No GPU.
///
/// # Errors
/// Always: this program is built without them.
pub fn find() -> Result<Vec<Portable>> {
    Err(Error::Unsupported(format!("this program is built without Metal and Vulkan: {REMEDY}")))
}

/// No GPU.
///
/// # Errors
/// Always: this program is built without them.
pub fn named(choice: DeviceChoice) -> Result<Portable> {
    Err(Error::Unsupported(format!(
        "{choice} cannot be used, because this program is built without Metal and Vulkan: {REMEDY}"
    )))
}

/// A static program cannot load a GPU's driver.
const REMEDY: &str = if cfg!(target_env = "musl") {
    "use the build that is not static"
} else {
    "build it with `--features gpu`"
};

/// Cannot be called.
///
/// # Errors
/// None.
pub fn open(handle: &Handle, _: Option<u64>) -> Result<Arc<dyn Device>> {
    match *handle {}
}
