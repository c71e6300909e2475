//! Chooses what computes a model: the CPU, or a GPU through CUDA, Metal or Vulkan. The place that knows all devices.

mod choice;
#[cfg_attr(not(any(feature = "gpu", target_vendor = "apple")), path = "absent.rs")]
mod portable;

use std::sync::Arc;

use forebay_engine::Result;
use forebay_engine::internals::experts::Device;

pub use choice::DeviceChoice;
pub use forebay_cuda as cuda;
pub use portable::find;

/// A GPU that is open.
#[derive(Clone)]
pub struct Gpu {
    /// How it is chosen.
    pub place: DeviceChoice,
    /// Its product name, and its interface if that is not CUDA.
    pub name: String,
    /// The device that models are computed on.
    pub device: Arc<dyn Device>,
}

/// A GPU that Metal or Vulkan finds.
pub struct Portable {
    /// How it is chosen.
    pub place: DeviceChoice,
    /// Its product name and interface.
    pub name: String,
    /// Its driver.
    pub driver: String,
    /// What kind of GPU it is.
    pub kind: Kind,
    /// Bytes of its own memory; `None` if it shares the computer's.
    pub memory: Option<u64>,
    /// What it has of what kernels can use, each with a value.
    pub abilities: Vec<(&'static str, String)>,
    handle: portable::Handle,
}

impl Portable {
    /// Opens it with this much of its memory; by default all of it, less a margin.
    ///
    /// # Errors
    /// If it cannot be used.
    pub fn open(&self, memory: Option<u64>) -> Result<Gpu> {
        let device = portable::open(&self.handle, memory)?;
        Ok(Gpu { place: self.place, name: self.name.clone(), device })
    }
}

/// What kind of GPU one is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A card with its own memory.
    Card,
    /// It shares the computer's memory.
    Integrated,
    /// A program that computes on the CPU in place of a GPU.
    Software,
}

impl Kind {
    /// In words.
    pub fn name(self) -> &'static str {
        match self {
            Kind::Card => "with its own memory",
            Kind::Integrated => "shares the computer's memory",
            Kind::Software => "software, which computes on the CPU",
        }
    }
}
