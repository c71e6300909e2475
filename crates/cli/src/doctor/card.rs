//! Describes an NVIDIA GPU: its name, its connection and its measured speeds.

use std::fs;
use std::path::Path;

use anyhow::Result;
use forebay_devices::cuda::{self, Found};
use forebay_devices::{DeviceChoice, Gpu};
use forebay_engine::Bytes;
use serde_json::{Value, json};

use crate::measured::rate;

/// A GPU that NVIDIA's driver shows.
pub struct Card {
    found: Found,
    link: Option<Link>,
    measured: Option<Measured>,
}

/// How a GPU is connected.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Link {
    /// The generation of PCI Express.
    generation: u32,
    /// The number of lanes.
    width: u32,
}

/// The measurements of a GPU.
struct Measured {
    /// Bytes that models may use.
    usable: u64,
    /// Bytes per second that a copy inside its memory reads and writes.
    memory: f64,
    /// Bytes per second that are uploaded to it from RAM.
    link: f64,
}

impl Card {
    /// All NVIDIA GPUs. The one in use is measured.
    ///
    /// # Errors
    /// If measuring fails.
    pub fn all(root: &Path, in_use: Option<&Gpu>) -> Result<Vec<Card>> {
        let card = |found: Found| {
            let link = Link::look(root, &found.bus);
            let measured = match in_use.filter(|gpu| gpu.place == DeviceChoice::Cuda(found.ordinal)) {
                None => None,
                Some(gpu) => Some(Measured {
                    usable: gpu.device.memory(),
                    memory: gpu.device.memory_speed()?,
                    link: gpu.device.link_speed()?,
                }),
            };
            Ok(Card { found, link, measured })
        };
        cuda::find().unwrap_or_default().into_iter().map(card).collect()
    }

    /// Its name and memory.
    pub fn name(&self) -> String {
        let (major, minor) = self.found.capability;
        let link =
            self.link.map_or(String::new(), |link| format!(", PCIe {}.0 x{}", link.generation, link.width));
        format!("{} with {}, CUDA {major}.{minor}{link}", self.found.name, Bytes(self.found.memory))
    }

    /// The measurements as text.
    pub fn rows(&self) -> Vec<(&'static str, String)> {
        let Some(Measured { usable, memory, link }) = self.measured else { return Vec::new() };
        vec![
            (
                "GPU memory",
                format!("{} for models; read and written at {} by a copy", Bytes(usable), rate(memory)),
            ),
            ("PCIe", format!("{} from RAM to the GPU", rate(link))),
        ]
    }

    pub fn json(&self) -> Value {
        let (major, minor) = self.found.capability;
        json!({
            "device": format!("cuda:{}", self.found.ordinal),
            "name": self.found.name,
            "memory": self.found.memory,
            "capability": format!("{major}.{minor}"),
            "bus": self.found.bus,
            "pcie_generation": self.link.map(|link| link.generation),
            "pcie_width": self.link.map(|link| link.width),
            "usable_memory": self.measured.as_ref().map(|m| m.usable),
            "memory_bytes_per_second": self.measured.as_ref().map(|m| m.memory),
            "link_bytes_per_second": self.measured.as_ref().map(|m| m.link),
        })
    }
}

impl Link {
    /// As the system reports it for an address on the bus: with the highest speed, because an idle GPU lowers the current one.
    fn look(root: &Path, bus: &str) -> Option<Link> {
        let folder = root.join("sys/bus/pci/devices").join(bus);
        let text = |name: &str| fs::read_to_string(folder.join(name)).ok();
        let speed = text("max_link_speed")?;
        let generation = match speed.split_whitespace().next()?.parse::<f32>().ok()? {
            2.5 => 1,
            5.0 => 2,
            8.0 => 3,
            16.0 => 4,
            32.0 => 5,
            64.0 => 6,
            _ => return None,
        };
        Some(Link { generation, width: text("current_link_width")?.trim().parse().ok()? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_link_is_what_the_system_says() {
        let root = tempfile::tempdir().unwrap();
        let folder = root.path().join("sys/bus/pci/devices/0000:3b:00.0");
        fs::create_dir_all(&folder).unwrap();
        fs::write(folder.join("max_link_speed"), "32.0 GT/s PCIe\n").unwrap();
        fs::write(folder.join("current_link_width"), "16\n").unwrap();
        let look = |bus: &str| Link::look(root.path(), bus);
        assert_eq!(look("0000:3b:00.0"), Some(Link { generation: 5, width: 16 }));
        assert_eq!(look("0000:3c:00.0"), None);
        fs::write(folder.join("max_link_speed"), "Unknown\n").unwrap();
        assert_eq!(look("0000:3b:00.0"), None);
    }
}
