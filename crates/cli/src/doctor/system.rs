//! What the system reports about itself: CPU, memory, drives, GPUs. What it does not report is `None`.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use forebay_engine::internals::memory::{GroupLimit, Machine};
use serde_json::{Value, json};

/// The processor.
pub struct Processor {
    pub model: Option<String>,
    /// Instruction sets for which there are kernels, best first.
    pub instruction_sets: Vec<&'static str>,
    /// How many of the machine's CPUs the process may use.
    pub usable: usize,
    pub online: Option<usize>,
}

impl Processor {
    pub fn look(root: &Path, instruction_sets: Vec<&'static str>) -> Processor {
        let info = read(root, "proc/cpuinfo").unwrap_or_default();
        let model = info.lines().find_map(|l| l.strip_prefix("model name")?.split_once(':').map(|(_, m)| m));
        let count = info.lines().filter(|l| l.starts_with("processor")).count();
        Processor {
            model: model.map(|m| m.trim().to_owned()).or_else(model_of_mac),
            instruction_sets,
            usable: std::thread::available_parallelism().map_or(1, usize::from),
            online: (count > 0).then_some(count),
        }
    }

    pub fn json(&self) -> Value {
        json!({
            "model": self.model,
            "instruction_sets": self.instruction_sets,
            "usable": self.usable,
            "online": self.online,
        })
    }
}

/// The memory.
pub struct Memory {
    pub total: Option<u64>,
    /// Available memory, within the limits.
    pub available: Option<u64>,
    pub swap: Option<u64>,
    pub groups: Vec<GroupLimit>,
    /// `always`, `madvise` or `never`.
    pub huge_pages: Option<String>,
    /// The limit on locked memory, as the system writes it.
    pub lockable: Option<String>,
}

impl Memory {
    /// What the system reports, and what was measured of the machine.
    pub fn look(root: &Path, machine: &Machine, groups: Vec<GroupLimit>) -> Memory {
        let info = read(root, "proc/meminfo").unwrap_or_default();
        let kib = |name: &str| {
            let line = info.lines().find_map(|l| l.strip_prefix(name)?.strip_prefix(':'))?;
            Some(line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()? * 1024)
        };
        let huge = read(root, "sys/kernel/mm/transparent_hugepage/enabled");
        let limits = read(root, "proc/self/limits").unwrap_or_default();
        Memory {
            total: kib("MemTotal").or(machine.total),
            available: machine.available,
            swap: kib("SwapTotal"),
            groups,
            huge_pages: huge.and_then(|text| Some(text.split_once('[')?.1.split_once(']')?.0.to_owned())),
            lockable: limits.lines().find_map(|l| {
                l.strip_prefix("Max locked memory")?.split_whitespace().next().map(str::to_owned)
            }),
        }
    }

    pub fn json(&self) -> Value {
        let group = |g: &GroupLimit| json!({ "version": g.version, "folder": g.folder, "limit": g.limit, "left": g.left });
        json!({
            "total": self.total,
            "available": self.available,
            "swap": self.swap,
            "groups": self.groups.iter().map(group).collect::<Vec<_>>(),
            "huge_pages": self.huge_pages,
            "lockable": self.lockable,
        })
    }
}

/// The drive and the file system of a file.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Volume {
    pub mounted_at: Option<String>,
    pub file_system: Option<String>,
    pub device: Option<String>,
    /// Whether it is reported as rotational.
    pub rotates: Option<bool>,
}

impl Volume {
    /// Finds the drive by the device number of the file.
    pub fn look(root: &Path, major: u64, minor: u64) -> Volume {
        let mounts = read(root, "proc/self/mountinfo").unwrap_or_default();
        let number = format!("{major}:{minor}");
        let mut volume = Volume::default();
        for line in mounts.lines() {
            let Some((mount, source)) = line.split_once(" - ") else { continue };
            let (mount, source): (Vec<_>, Vec<_>) =
                (mount.split_whitespace().collect(), source.split_whitespace().collect());
            if mount.get(2) == Some(&number.as_str()) {
                volume.mounted_at = mount.get(4).map(|&s| s.to_owned());
                volume.file_system = source.first().map(|&s| s.to_owned());
                volume.device = source.get(1).map(|&s| s.to_owned());
                break;
            }
        }
        // A partition has its queue in the folder of its disk.
        let device = root.join("sys/dev/block").join(&number);
        let rotational = read(&device, "queue/rotational").or_else(|| read(&device, "../queue/rotational"));
        volume.rotates = rotational.map(|text| text.trim() == "1");
        volume
    }

    /// Whether the file comes over a network.
    pub fn is_remote(&self) -> bool {
        const REMOTE: [&str; 7] = ["nfs", "nfs4", "cifs", "smb3", "9p", "ceph", "fuse.sshfs"];
        self.file_system.as_ref().is_some_and(|name| REMOTE.contains(&name.as_str()))
    }

    pub fn json(&self) -> Value {
        json!({
            "mounted_at": self.mounted_at,
            "file_system": self.file_system,
            "device": self.device,
            "rotates": self.rotates,
        })
    }
}

/// GPUs, as far as the files of their drivers show them.
pub struct Gpu {
    /// Names from the driver's files.
    pub names: Vec<String>,
    /// Device files.
    pub devices: Vec<PathBuf>,
    /// The driver's library for programs.
    pub library: Option<PathBuf>,
}

impl Gpu {
    pub fn look(root: &Path) -> Gpu {
        let entries = |folder: &str, wanted: &dyn Fn(&str) -> bool| -> Vec<PathBuf> {
            let entries = fs::read_dir(root.join(folder)).into_iter().flatten().flatten();
            let mut found: Vec<_> =
                entries.filter(|e| wanted(&e.file_name().to_string_lossy())).map(|e| e.path()).collect();
            found.sort();
            found
        };
        let numbered = |name: &str, prefix: &str| {
            let number = name.strip_prefix(prefix);
            number.is_some_and(|n| !n.is_empty() && n.bytes().all(|b| b.is_ascii_digit()))
        };
        let mut devices = entries("dev", &|name| numbered(name, "nvidia") || name == "kfd");
        devices.extend(entries("dev/dri", &|name| numbered(name, "renderD")));
        let gpus = entries("proc/driver/nvidia/gpus", &|_| true);
        let names = gpus.iter().filter_map(|gpu| {
            let information = read(gpu, "information")?;
            Some(information.lines().find_map(|l| l.strip_prefix("Model:"))?.trim().to_owned())
        });
        let folders = [
            "usr/lib/x86_64-linux-gnu",
            "usr/lib/aarch64-linux-gnu",
            "usr/lib64",
            "usr/lib",
            "usr/lib/wsl/lib",
        ];
        let library = folders.iter().map(|f| root.join(f).join("libcuda.so.1")).find(|path| path.exists());
        Gpu { names: names.collect(), devices, library }
    }

    pub fn found(&self) -> bool {
        !self.names.is_empty() || !self.devices.is_empty()
    }

    pub fn json(&self) -> Value {
        json!({ "names": self.names, "devices": self.devices, "library": self.library, "used": forebay_devices::cuda::find().is_ok() })
    }
}

/// The name of a Mac's processor.
fn model_of_mac() -> Option<String> {
    if !cfg!(target_os = "macos") {
        return None;
    }
    let told = Command::new("/usr/sbin/sysctl").args(["-n", "machdep.cpu.brand_string"]).output().ok()?;
    Some(String::from_utf8(told.stdout).ok()?.trim().to_owned()).filter(|name| !name.is_empty())
}

fn read(folder: &Path, name: &str) -> Option<String> {
    fs::read_to_string(folder.join(name)).ok()
}

#[cfg(test)]
pub mod tests {
    use super::*;

    pub fn processor() -> Processor {
        Processor {
            model: Some("A Fast One".into()),
            instruction_sets: vec!["avx2", "scalar"],
            usable: 4,
            online: Some(4),
        }
    }

    pub fn memory() -> Memory {
        Memory {
            total: Some(16 << 30),
            available: Some(14 << 30),
            swap: Some(0),
            groups: Vec::new(),
            huge_pages: Some("madvise".into()),
            lockable: None,
        }
    }

    fn root(files: &[(&str, &str)]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        for (name, text) in files {
            let path = root.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        root
    }

    #[test]
    fn what_the_system_says_is_understood() {
        let root = root(&[
            ("proc/cpuinfo", "processor\t: 0\nmodel name\t: A Fast One\nprocessor\t: 1\n"),
            ("proc/meminfo", "MemTotal:  2048 kB\nSwapTotal: 0 kB\n"),
            ("sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never\n"),
            ("proc/self/limits", "Limit  Soft  Hard  Units\nMax locked memory   8388608  8388608  bytes\n"),
            ("proc/self/mountinfo", "22 1 254:0 / /data rw,noatime shared:1 - ext4 /dev/vda rw\n"),
            ("sys/dev/block/254:0/queue/rotational", "1\n"),
        ]);
        let processor = Processor::look(root.path(), vec!["scalar"]);
        assert_eq!((processor.model.as_deref(), processor.online), (Some("A Fast One"), Some(2)));
        let memory = Memory::look(root.path(), &Machine::now(), Vec::new());
        assert_eq!((memory.total, memory.swap), (Some(2 << 20), Some(0)));
        assert_eq!(memory.huge_pages.as_deref(), Some("madvise"));
        assert_eq!(memory.lockable.as_deref(), Some("8388608"));
        let volume = Volume::look(root.path(), 254, 0);
        assert_eq!(
            (volume.mounted_at.as_deref(), volume.device.as_deref()),
            (Some("/data"), Some("/dev/vda"))
        );
        assert_eq!((volume.file_system.as_deref(), volume.rotates), (Some("ext4"), Some(true)));
        assert!(!volume.is_remote());
        assert_eq!(Volume::look(root.path(), 1, 2), Volume::default());
    }

    #[test]
    fn graphics_are_found_by_their_files() {
        let root = root(&[
            ("dev/nvidia0", ""),
            ("dev/nvidiactl", ""),
            ("dev/dri/renderD128", ""),
            ("dev/dri/card0", ""),
            ("proc/driver/nvidia/gpus/0000:01:00.0/information", "Model: \t\t A Large One\nIRQ: 5\n"),
            ("usr/lib64/libcuda.so.1", ""),
        ]);
        let gpu = Gpu::look(root.path());
        assert_eq!(gpu.names, ["A Large One"]);
        let names: Vec<_> = gpu.devices.iter().map(|d| d.file_name().unwrap().to_str().unwrap()).collect();
        assert_eq!(names, ["nvidia0", "renderD128"]);
        assert!(gpu.library.is_some() && gpu.found());
        assert!(!Gpu::look(Path::new("/no/such/root")).found());
    }
}
