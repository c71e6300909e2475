//! What the user of a program chooses.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use forebay_engine::internals::experts::Device;
use forebay_engine::{Error, Result};

use crate::{Gpu, Portable, cuda, portable};

/// Where to compute.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DeviceChoice {
    /// On the first NVIDIA GPU that can take the model through CUDA, otherwise on the CPU. GPUs through Metal and Vulkan
    /// are only used if they are named, because they are not fast yet.
    #[default]
    Auto,
    /// On the CPU.
    Cpu,
    /// On the NVIDIA GPU of this number.
    Cuda(usize),
    /// On Apple's GPU.
    Metal,
    /// On the GPU of this number among those that Vulkan finds: cards first, software last.
    Vulkan(usize),
}

impl FromStr for DeviceChoice {
    type Err = Error;

    fn from_str(s: &str) -> Result<DeviceChoice> {
        let (kind, number) = match s.split_once(':') {
            None => (s, None),
            Some((kind, number)) => (kind, Some(number.parse::<usize>().map_err(|_| unknown())?)),
        };
        match (kind, number) {
            ("auto", None) => Ok(DeviceChoice::Auto),
            ("cpu", None) => Ok(DeviceChoice::Cpu),
            ("metal", None) => Ok(DeviceChoice::Metal),
            ("cuda", number) => Ok(DeviceChoice::Cuda(number.unwrap_or(0))),
            ("vulkan", number) => Ok(DeviceChoice::Vulkan(number.unwrap_or(0))),
            _ => Err(unknown()),
        }
    }
}

fn unknown() -> Error {
    Error::Invalid("expected auto, cpu, cuda:0, metal or vulkan:0".into())
}

impl fmt::Display for DeviceChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            DeviceChoice::Auto => f.write_str("auto"),
            DeviceChoice::Cpu => f.write_str("cpu"),
            DeviceChoice::Cuda(number) => write!(f, "cuda:{number}"),
            DeviceChoice::Metal => f.write_str("metal"),
            DeviceChoice::Vulkan(number) => write!(f, "vulkan:{number}"),
        }
    }
}

impl DeviceChoice {
    /// Opens the chosen GPU, with this much of its memory; `None` for the CPU. `note` is told why a GPU that there is
    /// cannot be used.
    ///
    /// # Errors
    /// If a certain GPU was demanded and cannot be used.
    pub fn open(self, memory: Option<u64>, note: impl FnMut(String)) -> Result<Option<Gpu>> {
        Ok(self.load(memory, note, |_| Ok(()))?.1)
    }

    /// Loads a model with `load` on the first of the chosen GPUs that can take it, or on the CPU if there is none and none
    /// was demanded. `note` is told why a GPU does not take it. Returns the GPU, too, if one has the model.
    ///
    /// # Errors
    /// If the demanded GPU cannot be used, and the errors of `load`.
    pub fn load<T>(
        self,
        memory: Option<u64>,
        mut note: impl FnMut(String),
        load: impl Fn(Option<Arc<dyn Device>>) -> Result<T>,
    ) -> Result<(T, Option<Gpu>)> {
        let candidates = self.candidates()?;
        let last = candidates.len().saturating_sub(1);
        for (number, candidate) in candidates.into_iter().enumerate() {
            let name = candidate.name();
            let loaded = candidate.open(memory, self).and_then(|(gpu, ignored)| {
                ignored.into_iter().for_each(&mut note);
                Ok((load(Some(Arc::clone(&gpu.device)))?, gpu))
            });
            match loaded {
                Ok((loaded, gpu)) => return Ok((loaded, Some(gpu))),
                Err(error) if !self.may_fall_back(&error) => return Err(error),
                Err(error) if number == last => {
                    note(format!("Running on the CPU instead of {name}: {error}"))
                }
                Err(error) => note(format!("Not running on {name}: {error}")),
            }
        }
        Ok((load(None)?, None))
    }

    /// Whether the CPU may compute instead, after a GPU has failed with this error.
    pub fn may_fall_back(self, error: &Error) -> bool {
        let of_the_gpu = matches!(
            error,
            Error::Budget { .. } | Error::Unsupported(_) | Error::Backend(_) | Error::DeviceLost(_)
        );
        self == DeviceChoice::Auto && of_the_gpu
    }

    /// The GPUs to try, in order.
    fn candidates(self) -> Result<Vec<Candidate>> {
        match self {
            DeviceChoice::Cpu => Ok(Vec::new()),
            DeviceChoice::Cuda(number) => Ok(vec![Candidate::Cuda(number)]),
            DeviceChoice::Metal | DeviceChoice::Vulkan(_) => {
                Ok(vec![Candidate::Portable(portable::named(self)?)])
            }
            DeviceChoice::Auto => {
                // A missing GPU is not worth a note.
                let none = |why| tracing::info!("no GPU to compute on: {why}");
                let found = cuda::find().map_err(none).map_or(0, |found| found.len());
                Ok((0..found).map(Candidate::Cuda).collect())
            }
        }
    }
}

/// A GPU to try.
enum Candidate {
    Cuda(usize),
    Portable(Portable),
}

impl Candidate {
    fn name(&self) -> String {
        match self {
            Candidate::Cuda(number) => format!("cuda:{number}"),
            Candidate::Portable(gpu) => gpu.name.clone(),
        }
    }

    /// Opens it, with a note if the memory that was asked for has no meaning.
    fn open(self, memory: Option<u64>, choice: DeviceChoice) -> Result<(Gpu, Option<String>)> {
        match self {
            Candidate::Cuda(number) => {
                let gpu = cuda::Cuda::open(number, memory)?;
                let name = gpu.name().to_owned();
                Ok((Gpu { place: DeviceChoice::Cuda(number), name, device: Arc::new(gpu) }, None))
            }
            Candidate::Portable(found) => {
                let gpu = found.open(memory)?;
                if memory.is_none() || !gpu.device.shares_memory() {
                    return Ok((gpu, None));
                }
                let about = format!(
                    "the device's memory limit has no meaning for {}, which computes in the computer's memory",
                    gpu.name
                );
                match choice {
                    DeviceChoice::Auto => Ok((gpu, Some(format!("Note: {about}")))),
                    _ => Err(Error::Invalid(format!("{about}; limit both with Options::memory"))),
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_have_numbers() {
        for (text, choice) in [
            ("auto", DeviceChoice::Auto),
            ("cpu", DeviceChoice::Cpu),
            ("cuda:3", DeviceChoice::Cuda(3)),
            ("metal", DeviceChoice::Metal),
            ("vulkan:1", DeviceChoice::Vulkan(1)),
        ] {
            assert_eq!(text.parse::<DeviceChoice>().unwrap(), choice);
            assert_eq!(choice.to_string(), text);
        }
        assert_eq!("cuda".parse::<DeviceChoice>().unwrap(), DeviceChoice::Cuda(0));
        assert_eq!("vulkan".parse::<DeviceChoice>().unwrap(), DeviceChoice::Vulkan(0));
        for wrong in ["", "gpu", "cuda:", "cuda:x", "cpu:1", "metal:0", "auto:0", "vulkan:-1"] {
            assert!(wrong.parse::<DeviceChoice>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn only_auto_falls_back_and_only_from_errors_of_the_gpu() {
        let lost = Error::DeviceLost("gone".into());
        assert!(DeviceChoice::Auto.may_fall_back(&lost));
        assert!(!DeviceChoice::Vulkan(0).may_fall_back(&lost) && !DeviceChoice::Cuda(0).may_fall_back(&lost));
        assert!(!DeviceChoice::Auto.may_fall_back(&Error::Invalid("no".into())));
    }

    #[test]
    fn the_cpu_needs_no_gpu() {
        let (on_device, gpu) =
            DeviceChoice::Cpu.load(None, |note| panic!("{note}"), |device| Ok(device.is_some())).unwrap();
        assert!(!on_device && gpu.is_none());
    }
}
