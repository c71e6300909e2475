//! How much memory the machine, the control group and the process have and use.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::error::{Bytes, Error, Result};

/// Memory at the moment, in bytes.
///
/// # Examples
/// ```
/// use forebay_engine::{Machine, Options, Prospect};
///
/// # let model = std::path::Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/tales-qwen3moe-Q4_K_M.gguf"));
/// // How would the memory of another machine be divided?
/// let machine = Machine { total: Some(32 << 30), available: Some(30 << 30), ..Machine::default() };
/// let plan = Prospect::new(model, &Options::new().machine(machine))?.plan().clone();
/// assert!((28 << 30..30 << 30).contains(&plan.budget), "some is left to other programs");
/// # Ok::<(), forebay_engine::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Machine {
    /// What the process could use if it were alone: the machine's memory, or less if a control group limits it.
    /// `None` if the system does not tell.
    pub total: Option<u64>,
    /// What is free without swapping, within the limits of control groups. `None` if the system does not tell.
    pub available: Option<u64>,
    /// Resident memory of the process, with all pages of its program, even those not used yet.
    pub resident: u64,
}

impl Machine {
    /// Measures.
    pub fn now() -> Machine {
        let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
        let machine = Machine { resident: resident_in_the_end(&status), ..Machine::at(Path::new("/")) };
        // A Mac has no such files.
        #[cfg(target_os = "macos")]
        let machine = super::mac::machine().unwrap_or(machine);
        machine
    }

    /// Measures with the system's files below `root`. The tightest limit counts: the machine's, or that of a control
    /// group above the process.
    fn at(root: &Path) -> Machine {
        let info = read(root, "proc/meminfo").unwrap_or_default();
        let groups = read(root, "proc/self/cgroup").map_or_else(Vec::new, |groups| limits(root, &groups));
        let total =
            meminfo(&info, "MemTotal:").into_iter().chain(groups.iter().map(|group| group.limit)).min();
        let available =
            meminfo(&info, "MemAvailable:").into_iter().chain(groups.iter().map(|group| group.left)).min();
        Machine { total, available, resident: 0 }
    }

    /// Checks a memory budget that the user chose.
    ///
    /// # Errors
    /// [`Error::Budget`] if the budget exceeds the total memory. If it only exceeds what is free at the moment, logs
    /// a warning: other programs may end, and a model need not use its whole budget.
    pub fn check_budget(&self, budget: u64) -> Result<()> {
        if let Some(total) = self.total.filter(|&total| budget > total) {
            return Err(Error::Budget {
                need: budget,
                have: total,
                what: "the budget, Options::memory".into(),
                remedy:
                    "set Options::memory lower, or leave it out to use the memory that is free, less a margin"
                        .into(),
            });
        }
        let free = self.available.map(|available| available.saturating_add(self.resident));
        if let Some(free) = free.filter(|&free| budget > free) {
            tracing::warn!(
                "the budget is {}, but only {} is free: if the model needs more, the system may swap or kill the process",
                Bytes(budget),
                Bytes(free)
            );
        }
        Ok(())
    }
}

/// The memory limit of a control group above the process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GroupLimit {
    /// The version of the control group: 1 or 2.
    pub version: u8,
    /// The group's folder.
    pub folder: PathBuf,
    /// Bytes that all its processes together may use before the kernel kills one of them or, in version 2, slows them
    /// down.
    pub limit: u64,
    /// Bytes of the limit that are not in use, or only for cached files.
    pub left: u64,
}

impl GroupLimit {
    /// The limits of all groups from the process's own to the root.
    pub fn all() -> Vec<GroupLimit> {
        let root = Path::new("/");
        let groups = read(root, "proc/self/cgroup").map_or_else(Vec::new, |groups| limits(root, &groups));
        // Without a limit, version 1 has a number near the largest.
        groups.into_iter().filter(|group| group.limit < 1 << 62).collect()
    }
}

/// Watches for a shortage of memory: of the machine, because other programs need more, or of the budget, because the
/// process has more resident than was planned.
#[derive(Debug)]
pub struct Pressure {
    /// Whether the slots are large enough to make a difference to the machine.
    watches_machine: bool,
    /// The most that the process may have resident, if that is watched.
    budget: Option<u64>,
    looked_at_all: Option<Instant>,
    looked_at_process: Option<Instant>,
    /// Bytes that were given back and not taken again.
    given: u64,
}

/// What expert slots should do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Relief {
    /// Memory is short: give back this many bytes.
    Give(u64),
    /// Memory is plentiful again: take this many of the given bytes again.
    Take(u64),
}

impl Pressure {
    /// How often to measure the machine. It takes a tenth of a millisecond, too much for every token.
    const EVERY: Duration = Duration::from_secs(1);

    /// How often to measure the process. That is quicker, and requests can take much memory within a second.
    const EVERY_PROCESS: Duration = Duration::from_millis(20);

    /// Watches for slots of `slot_bytes` bytes and, with a `budget`, for a process that may have so many bytes
    /// resident.
    pub fn on(slot_bytes: u64, budget: Option<u64>) -> Pressure {
        Pressure {
            watches_machine: slot_bytes >= 128 << 20,
            budget: budget.filter(|_| slot_bytes > 0),
            looked_at_all: None,
            looked_at_process: None,
            given: 0,
        }
    }

    /// What to do now, if anything. The caller reports the result to [`done`](Self::done).
    pub fn relief(&mut self) -> Option<Relief> {
        let is_due = |looked: Option<Instant>, every| looked.is_none_or(|looked| looked.elapsed() >= every);
        let all = is_due(self.looked_at_all, Pressure::EVERY);
        if self.budget.is_none() && !self.watches_machine
            || !all && !is_due(self.looked_at_process, Pressure::EVERY_PROCESS)
        {
            return None;
        }
        self.looked_at_process = Some(Instant::now());
        let process = self.budget.map(|budget| Left::of_process(resident(), budget));
        let mut machine = None;
        if all {
            self.looked_at_all = self.looked_at_process;
            machine = Machine::now().available.filter(|_| self.watches_machine).map(Left::of_machine);
        }
        // To take slots again needs a measurement of both.
        self.judge(&[process, machine]).filter(|relief| all || matches!(relief, Relief::Give(_)))
    }

    /// Records the bytes that were really given or taken.
    pub fn done(&mut self, relief: Relief) {
        match relief {
            Relief::Give(bytes) => self.given += bytes,
            Relief::Take(bytes) => self.given -= bytes,
        }
    }

    fn judge(&self, looked_at: &[Option<Left>]) -> Option<Relief> {
        let looked_at = || looked_at.iter().flatten();
        // Gives back enough to leave twice the minimum.
        let short =
            looked_at().filter(|left| left.bytes < left.least).map(|left| 2 * left.least - left.bytes);
        if let Some(short) = short.max() {
            return Some(Relief::Give(short as u64));
        }
        let plenty = looked_at().map(|left| (left.bytes - left.plenty).max(0) as u64).min()?;
        let plenty = plenty.min(self.given);
        (plenty > 0).then_some(Relief::Take(plenty))
    }
}

/// Free memory of the machine, or what is left of the process's budget.
struct Left {
    /// Its size; negative if the budget is exceeded.
    bytes: i64,
    /// Below this, slots are given back.
    least: i64,
    /// Above this, slots are taken again. Far above `least`, so that memory does not go back and forth.
    plenty: i64,
}

impl Left {
    fn of_machine(available: u64) -> Left {
        Left { bytes: signed(available), least: 128 << 20, plenty: 1 << 30 }
    }

    fn of_process(resident: u64, budget: u64) -> Left {
        let least = signed(budget / 24).clamp(1 << 20, 64 << 20);
        Left { bytes: signed(budget) - signed(resident), least, plenty: 3 * least }
    }
}

fn signed(bytes: u64) -> i64 {
    i64::try_from(bytes).unwrap_or(i64::MAX)
}

fn meminfo(info: &str, name: &str) -> Option<u64> {
    let line = info.lines().find_map(|l| l.strip_prefix(name))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib * 1024)
}

/// The limits of the memory controllers in `/proc/self/cgroup`, from the process's group to the root. In a container
/// the path may be the host's, of which only the root is visible.
fn limits(root: &Path, groups: &str) -> Vec<GroupLimit> {
    let mut found = Vec::new();
    for line in groups.lines() {
        let mut fields = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (fields.next(), fields.next()) else { continue };
        // Above memory.high the kernel slows processes almost to a standstill, so it counts as a limit. The soft
        // limit of version 1 does not: it only decides whose memory is reclaimed first.
        let (version, mount, bounds, usage, cache) = if controllers.is_empty() {
            (2, "sys/fs/cgroup", &["memory.max", "memory.high"][..], "memory.current", "inactive_file ")
        } else if controllers.split(',').any(|c| c == "memory") {
            (
                1,
                "sys/fs/cgroup/memory",
                &["memory.limit_in_bytes"][..],
                "memory.usage_in_bytes",
                "total_inactive_file ",
            )
        } else {
            continue;
        };
        let mount = root.join(mount);
        let mut folder = mount.join(path.trim_start_matches('/'));
        loop {
            let number = |name: &str| read(&folder, name)?.trim().parse::<u64>().ok();
            // Without a limit, version 2 has a word instead of a number.
            let limit = bounds.iter().filter_map(|name| number(name)).min();
            if let (Some(limit), Some(usage)) = (limit, number(usage)) {
                // The kernel drops cached files when the memory is needed, so they do not count.
                let cached = read(&folder, "memory.stat")
                    .and_then(|stat| stat.lines().find_map(|l| l.strip_prefix(cache)?.parse().ok()))
                    .unwrap_or(0);
                let left = limit.saturating_sub(usage.saturating_sub(cached));
                found.push(GroupLimit { version, folder: folder.clone(), limit, left });
            }
            if folder == mount || !folder.pop() {
                break;
            }
        }
    }
    found
}

fn read(folder: &Path, name: &str) -> Option<String> {
    fs::read_to_string(folder.join(name)).ok()
}

/// A size in the system's report on this process, such as `VmHWM:`, if the system tells it.
pub fn of_process(name: &str) -> Option<u64> {
    meminfo(&fs::read_to_string("/proc/self/status").ok()?, name)
}

/// The process's resident memory at the moment, without file pages that the kernel can drop; zero if the system does
/// not tell.
pub fn resident() -> u64 {
    let resident = resident_now(&fs::read_to_string("/proc/self/status").unwrap_or_default());
    #[cfg(target_os = "macos")]
    let resident = super::mac::resident().unwrap_or(resident);
    resident
}

fn resident_now(status: &str) -> u64 {
    let bytes = |name| meminfo(status, name).unwrap_or(0);
    // Of mapped files only the program itself counts: the kernel drops pages of a mapped model when memory is needed.
    let program = bytes("VmExe:") + bytes("VmLib:");
    bytes("VmRSS:").saturating_sub(bytes("RssFile:").saturating_sub(program))
}

/// The process's resident memory once all of its program has been used. The budget must hold then, too.
fn resident_in_the_end(status: &str) -> u64 {
    let bytes = |name| meminfo(status, name).unwrap_or(0);
    let unused = (bytes("VmExe:") + bytes("VmLib:")).saturating_sub(bytes("RssFile:"));
    bytes("VmRSS:") + unused
}

#[cfg(test)]
mod tests {
    use super::*;

    fn machine(files: &[(&str, &str)]) -> Option<u64> {
        look(files).available
    }

    fn look(files: &[(&str, &str)]) -> Machine {
        let root = tempfile::tempdir().unwrap();
        for (name, text) in files {
            let path = root.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        Machine::at(root.path())
    }

    const MEMINFO: (&str, &str) = ("proc/meminfo", "MemTotal: 9000 kB\nMemAvailable:    4000 kB\n");

    #[test]
    fn memory_is_given_back_only_when_it_is_short() {
        let mut pressure = Pressure::on(1 << 30, None);
        let judge =
            |pressure: &Pressure, available| pressure.judge(&[None, Some(Left::of_machine(available))]);
        pressure.relief();
        assert!(pressure.looked_at_all.is_some());
        assert_eq!(pressure.relief(), None, "it looks once a second");
        assert_eq!(judge(&pressure, 128 << 20), None);
        assert_eq!(judge(&pressure, 100 << 20), Some(Relief::Give(156 << 20)));
        pressure.done(Relief::Give(160 << 20));
        assert_eq!(judge(&pressure, 1 << 30), None, "not plenty yet");
        assert_eq!(judge(&pressure, 1100 << 20), Some(Relief::Take(76 << 20)));
        pressure.done(Relief::Take(75 << 20));
        assert_eq!(judge(&pressure, 8 << 30), Some(Relief::Take(85 << 20)), "no more than was given");
        let mut small = Pressure::on(1 << 20, None);
        assert!(small.relief().is_none() && small.looked_at_all.is_none());
    }

    #[test]
    fn slots_are_given_back_before_the_budget_is_exceeded() {
        const MIB: u64 = 1 << 20;
        let mut pressure = Pressure::on(40 * MIB, Some(120 * MIB));
        let judge = |pressure: &Pressure, resident, machine: Option<u64>| {
            pressure
                .judge(&[Some(Left::of_process(resident * MIB, 120 * MIB)), machine.map(Left::of_machine)])
        };
        assert_eq!(judge(&pressure, 115, None), None);
        assert_eq!(judge(&pressure, 116, None), Some(Relief::Give(6 * MIB)));
        assert_eq!(judge(&pressure, 125, None), Some(Relief::Give(15 * MIB)), "it is exceeded");
        pressure.done(Relief::Give(12 * MIB));
        assert_eq!(judge(&pressure, 105, None), None, "memory does not go back and forth");
        assert_eq!(judge(&pressure, 100, None), Some(Relief::Take(5 * MIB)));
        assert_eq!(judge(&pressure, 100, Some(1 << 30)), None, "the machine has no plenty");
        assert_eq!(judge(&pressure, 100, Some(MIB)), Some(Relief::Give(255 * MIB)));
        if cfg!(target_os = "linux") {
            let exceeded = Pressure::on(40 * MIB, Some(MIB)).relief();
            assert!(matches!(exceeded, Some(Relief::Give(_))), "{exceeded:?}");
        }
    }

    #[test]
    fn the_whole_program_counts_as_resident() {
        let status = "VmRSS:\t 9000 kB\nRssFile:\t 3000 kB\nVmExe:\t 7000 kB\nVmLib:\t 1000 kB\n";
        assert_eq!(resident_in_the_end(status), 14_000 << 10);
        assert_eq!(
            resident_in_the_end(&status.replace("3000", "8500")),
            9000 << 10,
            "other files are mapped, too"
        );
        assert_eq!(resident_in_the_end(""), 0);
        assert_eq!(resident_now(status), 9000 << 10);
        assert_eq!(resident_now(&status.replace("3000", "8500")), 8500 << 10, "500 KiB are of other files");
        if cfg!(target_os = "linux") {
            assert!(resident() > 1 << 20 && Machine::now().resident >= resident() / 2);
        }
    }

    #[test]
    fn without_groups_the_machine_limits_memory() {
        assert_eq!(machine(&[MEMINFO]), Some(4000 << 10));
        assert_eq!(machine(&[]), None);
    }

    #[test]
    fn the_tightest_group_of_version_1_counts_without_its_cache() {
        let files = [
            MEMINFO,
            ("proc/self/cgroup", "5:cpu:/x\n4:cpuset,memory:/a/b\n"),
            ("sys/fs/cgroup/memory/a/b/memory.limit_in_bytes", "9223372036854771712\n"),
            ("sys/fs/cgroup/memory/a/b/memory.usage_in_bytes", "5\n"),
            ("sys/fs/cgroup/memory/a/memory.limit_in_bytes", "1000000\n"),
            ("sys/fs/cgroup/memory/a/memory.usage_in_bytes", "600000\n"),
            ("sys/fs/cgroup/memory/a/memory.stat", "cache 9\ntotal_inactive_file 500000\n"),
        ];
        assert_eq!(machine(&files), Some(900_000));
    }

    #[test]
    fn version_2_has_no_number_without_a_limit() {
        let mut files = vec![
            MEMINFO,
            ("proc/self/cgroup", "0::/a/b\n"),
            ("sys/fs/cgroup/a/b/memory.max", "max\n"),
            ("sys/fs/cgroup/a/b/memory.current", "5\n"),
        ];
        assert_eq!(machine(&files), Some(4000 << 10));
        files.push(("sys/fs/cgroup/a/memory.max", "70000\n"));
        files.push(("sys/fs/cgroup/a/memory.current", "20000\n"));
        assert_eq!(machine(&files), Some(50_000));
    }

    #[test]
    fn memory_high_counts_as_a_limit() {
        let mut files = vec![
            MEMINFO,
            ("proc/self/cgroup", "0::/a\n"),
            ("sys/fs/cgroup/a/memory.max", "70000\n"),
            ("sys/fs/cgroup/a/memory.high", "max\n"),
            ("sys/fs/cgroup/a/memory.current", "20000\n"),
        ];
        assert_eq!((look(&files).total, look(&files).available), (Some(70_000), Some(50_000)));
        files[3].1 = "60000\n";
        assert_eq!((look(&files).total, look(&files).available), (Some(60_000), Some(40_000)));
        files[2].1 = "max\n";
        assert_eq!((look(&files).total, look(&files).available), (Some(60_000), Some(40_000)));
    }

    #[test]
    fn a_budget_above_the_total_memory_is_refused() {
        let machine = Machine { total: Some(24 << 30), available: Some(20 << 30), resident: 1 << 30 };
        for fits in [1, 21 << 30, 24 << 30] {
            machine.check_budget(fits).unwrap();
        }
        let refusal = machine.check_budget(999 << 30).unwrap_err().to_string();
        assert!(
            refusal
                .starts_with("999.0 GiB of memory is needed (the budget, Options::memory), but 24.0 GiB is"),
            "{refusal}"
        );
        // If the total is unknown, no budget is refused.
        Machine::default().check_budget(u64::MAX).unwrap();
    }

    #[test]
    fn a_machine_without_groups_has_its_total() {
        assert_eq!(look(&[MEMINFO]).total, Some(9000 << 10));
        let group = [
            MEMINFO,
            ("proc/self/cgroup", "4:memory:/\n"),
            ("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n"),
            ("sys/fs/cgroup/memory/memory.usage_in_bytes", "5\n"),
        ];
        assert_eq!(look(&group).total, Some(9000 << 10));
    }

    /// In a container the path may be the host's.
    #[test]
    fn a_missing_path_falls_back_to_the_root_group() {
        let files = [
            MEMINFO,
            ("proc/self/cgroup", "0::/host/path\n"),
            ("sys/fs/cgroup/memory.max", "30000\n"),
            ("sys/fs/cgroup/memory.current", "10000\n"),
        ];
        assert_eq!(machine(&files), Some(20_000));
    }
}
