//! Describes GPUs that Metal or Vulkan finds.

use anyhow::Result;
use forebay_devices::{DeviceChoice, Gpu, Kind, Portable};
use forebay_engine::Bytes;
use serde_json::{Value, json};

use crate::measured::rate;

/// A GPU that Metal or Vulkan finds.
pub struct Listed {
    place: DeviceChoice,
    name: String,
    driver: String,
    kind: Kind,
    memory: Option<u64>,
    abilities: Vec<(&'static str, String)>,
    /// Bytes per second that a copy inside its memory reads and writes, if measured.
    speed: Option<f64>,
}

impl Listed {
    /// All of them, or why there is none. The one in use is measured.
    ///
    /// # Errors
    /// If measuring fails.
    pub fn all(in_use: Option<&Gpu>) -> Result<Result<Vec<Listed>, String>> {
        let found = match forebay_devices::find() {
            Ok(found) => found,
            Err(why) => return Ok(Err(why.to_string())),
        };
        let listed =
            found.into_iter().map(|Portable { place, name, driver, kind, memory, abilities, .. }| {
                let in_use = in_use.filter(|gpu| gpu.place == place);
                let speed = in_use.map(|gpu| gpu.device.memory_speed()).transpose()?;
                Ok(Listed { place, name, driver, kind, memory, abilities, speed })
            });
        listed.collect::<Result<_>>().map(Ok)
    }

    /// The description as text.
    pub fn rows(&self) -> Vec<(String, String)> {
        let memory = self.memory.map_or(String::new(), |bytes| format!(", {}", Bytes(bytes)));
        let abilities: Vec<_> =
            self.abilities.iter().map(|(name, value)| format!("{name}: {value}")).collect();
        let mut rows = vec![
            (format!("GPU {}", self.place), format!("{}, {}{memory}", self.name, self.kind.name())),
            ("  driver".into(), self.driver.clone()),
            ("  supports".into(), abilities.join(", ")),
        ];
        if let Some(speed) = self.speed {
            rows.push(("  memory".into(), format!("read and written at {} by a copy", rate(speed))));
        }
        rows
    }

    pub fn json(&self) -> Value {
        json!({
            "device": self.place.to_string(),
            "name": self.name,
            "driver": self.driver,
            "shares_memory": self.kind != Kind::Card,
            "is_software": self.kind == Kind::Software,
            "memory": self.memory,
            "abilities": self.abilities.iter().cloned().collect::<std::collections::BTreeMap<_, _>>(),
            "memory_bytes_per_second": self.speed,
        })
    }
}

#[cfg(test)]
pub mod tests {
    use super::*;

    pub fn listed() -> Listed {
        Listed {
            place: DeviceChoice::Metal,
            name: "Apple M9 (Metal)".into(),
            driver: "a driver".into(),
            kind: Kind::Integrated,
            memory: None,
            abilities: vec![("subgroups", "of 32".into()), ("f16", "yes".into())],
            speed: Some(400e9),
        }
    }
}
