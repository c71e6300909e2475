//! The device that the user of a program chooses.

use std::str::FromStr;
use std::sync::Arc;

use forebay_engine::internals::experts::Device;
use forebay_engine::{Error, Result};

use crate::{Cuda, find};

/// Where to compute.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DeviceChoice {
    /// On the first GPU if it can be used, otherwise on the CPU.
    #[default]
    Auto,
    /// On the CPU.
    Cpu,
    /// On the NVIDIA GPU of this number.
    Cuda(usize),
}

impl FromStr for DeviceChoice {
    type Err = Error;

    fn from_str(s: &str) -> Result<DeviceChoice> {
        let wrong = |message: &str| Error::Invalid(message.into());
        match s.split_once(':') {
            None if s == "auto" => Ok(DeviceChoice::Auto),
            None if s == "cpu" => Ok(DeviceChoice::Cpu),
            None if s == "cuda" => Ok(DeviceChoice::Cuda(0)),
            Some(("cuda", number)) => {
                Ok(DeviceChoice::Cuda(number.parse().map_err(|_| wrong("expected cuda:0"))?))
            }
            _ => Err(wrong("expected auto, cpu or cuda:0")),
        }
    }
}

impl DeviceChoice {
    /// Opens the chosen GPU, with this much of its memory; `None` for the CPU. `note` is told why a GPU that there is
    /// cannot be used.
    ///
    /// # Errors
    /// If a GPU of this number was demanded and cannot be used.
    pub fn open(self, memory: Option<u64>, note: impl FnOnce(String)) -> Result<Option<Cuda>> {
        match self {
            DeviceChoice::Cpu => Ok(None),
            DeviceChoice::Cuda(number) => Ok(Some(Cuda::open(number, memory)?)),
            // A missing GPU is not worth a note.
            DeviceChoice::Auto => match find() {
                Err(why) => {
                    tracing::info!("running on the CPU: {why}");
                    Ok(None)
                }
                Ok(_) => match Cuda::open(0, memory) {
                    Ok(gpu) => Ok(Some(gpu)),
                    Err(error) => {
                        note(format!("Running on the CPU: {error}"));
                        Ok(None)
                    }
                },
            },
        }
    }

    /// Loads a model on the chosen GPU with `load`, or on the CPU if that GPU cannot take it and need not. `note` is told
    /// so. Returns the GPU, too, if it has the model.
    ///
    /// # Errors
    /// If the GPU cannot be used, and the errors of `load`.
    pub fn load<T>(
        self,
        memory: Option<u64>,
        mut note: impl FnMut(String),
        load: impl Fn(Option<Arc<dyn Device>>) -> Result<T>,
    ) -> Result<(T, Option<Arc<Cuda>>)> {
        let Some(gpu) = self.open(memory, &mut note)?.map(Arc::new) else { return Ok((load(None)?, None)) };
        match load(Some(Arc::clone(&gpu) as _)) {
            Err(error) if self.may_fall_back(&error) => {
                note(format!("Running on the CPU instead of {}: {error}", gpu.name()));
                Ok((load(None)?, None))
            }
            loaded => Ok((loaded?, Some(gpu))),
        }
    }

    /// Whether the CPU may compute instead, after a GPU has failed with this error.
    pub fn may_fall_back(self, error: &Error) -> bool {
        let of_the_gpu = matches!(
            error,
            Error::Budget { .. } | Error::Unsupported(_) | Error::Backend(_) | Error::DeviceLost(_)
        );
        self == DeviceChoice::Auto && of_the_gpu
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_have_numbers() {
        assert_eq!("auto".parse::<DeviceChoice>().unwrap(), DeviceChoice::Auto);
        assert_eq!("cpu".parse::<DeviceChoice>().unwrap(), DeviceChoice::Cpu);
        assert_eq!("cuda:3".parse::<DeviceChoice>().unwrap(), DeviceChoice::Cuda(3));
        for wrong in ["", "gpu", "cuda:", "cuda:x", "cpu:1"] {
            assert!(wrong.parse::<DeviceChoice>().is_err(), "{wrong}");
        }
    }
}
