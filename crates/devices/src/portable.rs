//! GPUs through Metal and Vulkan.

use std::sync::Arc;

use forebay_engine::internals::experts::Device;
use forebay_engine::{Error, Result};
use forebay_gpu::{Api, Found, PortableGpu, Variants};

use crate::{DeviceChoice, Kind, Portable};

/// What opens a GPU.
pub type Handle = Found;

/// The GPUs that Metal or Vulkan finds: cards first, software last.
///
/// # Errors
/// If there is none, with the reason.
pub fn find() -> Result<Vec<Portable>> {
    let describe = |(number, found): (usize, Found)| Portable {
        place: match found.api() {
            Api::Metal => DeviceChoice::Metal,
            Api::Vulkan => DeviceChoice::Vulkan(number),
        },
        name: found.name(),
        driver: found.driver(),
        kind: match found.kind() {
            forebay_gpu::Kind::Discrete => Kind::Card,
            forebay_gpu::Kind::Integrated => Kind::Integrated,
            forebay_gpu::Kind::Software => Kind::Software,
        },
        memory: (!found.unified()).then(|| found.memory()),
        abilities: found.abilities(),
        handle: found,
    };
    Ok(forebay_gpu::find()?.into_iter().enumerate().map(describe).collect())
}

/// The GPU that was chosen.
///
/// # Errors
/// If there is no such GPU.
pub fn named(choice: DeviceChoice) -> Result<Portable> {
    let wanted = if choice == DeviceChoice::Metal { Api::Metal } else { Api::Vulkan };
    if wanted != Api::HERE {
        let message = format!("GPUs of this system are used through {}, not through {wanted}", Api::HERE);
        return Err(Error::Unsupported(message));
    }
    let mut found = find()?;
    match found.iter().position(|gpu| gpu.place == choice) {
        Some(position) => Ok(found.swap_remove(position)),
        None => {
            let last = found.last().expect("there is one").place;
            Err(Error::Backend(format!("there is no GPU {choice}; the last one is {last}")))
        }
    }
}

/// Opens a GPU with this much of its memory.
///
/// # Errors
/// If it cannot be used.
pub fn open(handle: &Handle, memory: Option<u64>) -> Result<Arc<dyn Device>> {
    Ok(Arc::new(PortableGpu::open(handle, memory, Variants::ALL)?))
}

#[cfg(test)]
mod tests {
    use forebay_testing::{Need, skipped};

    use super::*;

    #[test]
    fn every_gpu_that_is_found_can_be_opened() {
        let found = match find() {
            Ok(found) => found,
            Err(why) => return skipped(Need::PortableGpu, why),
        };
        for gpu in found {
            assert_eq!(gpu.place.open(None, |note| panic!("{note}")).unwrap().unwrap().name, gpu.name);
        }
    }

    #[test]
    fn memory_of_its_own_is_not_limited_where_there_is_none() {
        let found = match find() {
            Ok(found) => found,
            Err(why) => return skipped(Need::PortableGpu, why),
        };
        let Some(sharing) = found.iter().find(|gpu| gpu.kind != Kind::Card) else {
            return skipped(Need::PortableGpu, "all GPUs are cards");
        };
        let error = sharing.place.open(Some(1 << 30), |_| ()).err().unwrap();
        assert!(error.to_string().contains("has no meaning for"), "{error}");
    }
}
