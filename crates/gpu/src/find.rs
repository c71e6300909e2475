//! The GPUs of this machine.

use std::fmt;

use forebay_engine::{Bytes, Error, Result};

/// A programming interface of GPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Api {
    /// Apple's.
    Metal,
    /// Everyone else's.
    Vulkan,
}

impl Api {
    /// The interface of an adapter.
    pub fn of(info: &wgpu::AdapterInfo) -> Api {
        if info.backend == wgpu::Backend::Metal { Api::Metal } else { Api::Vulkan }
    }

    /// The interface that GPUs of this system are used through.
    pub const HERE: Api = if cfg!(target_vendor = "apple") { Api::Metal } else { Api::Vulkan };
}

impl fmt::Display for Api {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Api::Metal => "Metal",
            Api::Vulkan => "Vulkan",
        })
    }
}

/// A GPU of this machine.
pub struct Found {
    pub(crate) adapter: wgpu::Adapter,
}

/// What kind of device an adapter is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A card with its own memory.
    Discrete,
    /// A GPU that shares the processor's memory.
    Integrated,
    /// A program that computes on the processor in place of a GPU.
    Software,
}

/// The GPUs of this machine, the best first: cards, then integrated GPUs, then software.
///
/// # Errors
/// If there is none, with the reason.
pub fn find() -> Result<Vec<Found>> {
    let mut description = wgpu::InstanceDescriptor::new_without_display_handle();
    description.backends = wgpu::Backends::METAL | wgpu::Backends::VULKAN;
    description.flags = wgpu::InstanceFlags::empty();
    let instance = wgpu::Instance::new(description);
    let adapters = pollster::block_on(instance.enumerate_adapters(wgpu::Backends::all()));
    let mut found: Vec<Found> = adapters.into_iter().map(|adapter| Found { adapter }).collect();
    found.sort_by_key(|found| match found.kind() {
        Kind::Discrete => 0,
        Kind::Integrated => 1,
        Kind::Software => 2,
    });
    match found.is_empty() {
        true => Err(Error::Backend(format!("there is no GPU that {} can use", Api::HERE))),
        false => Ok(found),
    }
}

impl Found {
    /// Its product name and interface.
    pub fn name(&self) -> String {
        let info = self.adapter.get_info();
        format!("{} ({})", info.name, Api::of(&info))
    }

    /// Its driver.
    pub fn driver(&self) -> String {
        let info = self.adapter.get_info();
        format!("{} {}", info.driver, info.driver_info).trim().to_owned()
    }

    /// Its interface.
    pub fn api(&self) -> Api {
        Api::of(&self.adapter.get_info())
    }

    /// What kind of device it is.
    pub fn kind(&self) -> Kind {
        match self.adapter.get_info().device_type {
            wgpu::DeviceType::DiscreteGpu => Kind::Discrete,
            wgpu::DeviceType::Cpu => Kind::Software,
            // Virtual GPUs of unknown kind share memory, or else nothing is lost but speed.
            _ => Kind::Integrated,
        }
    }

    /// Whether its memory is the processor's.
    pub fn unified(&self) -> bool {
        self.kind() != Kind::Discrete
    }

    /// What it has of what kernels can use, each with a value.
    pub fn abilities(&self) -> Vec<(&'static str, String)> {
        let (has, limits, info) = (self.adapter.features(), self.adapter.limits(), self.adapter.get_info());
        let yes = |features| if has.contains(features) { "yes" } else { "no" }.to_owned();
        let subgroups = match has.contains(wgpu::Features::SUBGROUP) {
            true if info.subgroup_min_size == info.subgroup_max_size => {
                format!("of {}", info.subgroup_max_size)
            }
            true => format!("of {} to {}", info.subgroup_min_size, info.subgroup_max_size),
            false => "no".into(),
        };
        vec![
            ("subgroups", subgroups),
            ("f16", yes(wgpu::Features::SHADER_F16)),
            ("arrays of buffers", yes(crate::device::array_features())),
            ("cooperative matrices", yes(wgpu::Features::EXPERIMENTAL_COOPERATIVE_MATRIX)),
            ("largest buffer", Bytes(limits.max_buffer_size).to_string()),
            ("largest binding", Bytes(limits.max_storage_buffer_binding_size).to_string()),
        ]
    }

    /// Bytes of its memory.
    pub fn memory(&self) -> u64 {
        crate::adopt::memory(&self.adapter)
    }
}
