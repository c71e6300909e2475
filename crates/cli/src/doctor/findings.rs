//! The findings of `doctor`: what was measured, what it means, what to change, and the command for that.

use forebay_engine::{Bytes, Options};
use serde_json::{Value, json};

use super::diagnosis::{Diagnosis, Outcome};
use super::drive::{Drive, Endurance};
use super::system::{Memory, Processor};
use crate::measured::{Load, hits_text, rate};
use crate::plan::verdict::{Alternative, Limit, Verdict, short, uncapitalised};
use crate::plan::{share, wrapped};

/// A finding.
#[derive(Clone, Debug, PartialEq)]
pub struct Finding {
    pub measured: String,
    pub means: String,
    pub change: String,
    pub command: Option<String>,
}

/// The input of findings.
pub struct Evidence<'a> {
    pub processor: &'a Processor,
    pub memory: &'a Memory,
    pub drive: Option<&'a Drive>,
    pub load: Option<Load>,
    pub options: &'a Options,
    /// `None` also if a GPU computes, because changes for the CPU would not help the model.
    pub model: Option<&'a Diagnosis>,
    /// The model as it was named on the command line.
    pub name: &'a str,
}

/// Hard disks are slower than this, in bytes per second. A faster drive is an SSD, even if it is reported as rotational.
const FASTEST_DISK: f64 = 0.4e9;

/// For models with more bits per weight than this, a smaller quantisation is hardly worse.
const MANY_BITS: f64 = 5.5;

impl Finding {
    fn new(measured: impl Into<String>, means: &str, change: impl Into<String>) -> Finding {
        Finding { measured: measured.into(), means: means.into(), change: change.into(), command: None }
    }

    fn command(self, command: impl Into<String>) -> Finding {
        Finding { command: Some(command.into()), ..self }
    }

    /// The finding as an entry of a numbered list.
    pub fn text(&self, number: usize, width: usize) -> String {
        let mut text = String::new();
        let parts = [
            ("measured", Some(&self.measured)),
            ("means", Some(&self.means)),
            ("change", Some(&self.change)),
            ("command", self.command.as_ref()),
        ];
        for (i, (name, part)) in parts.into_iter().enumerate() {
            let Some(part) = part else { continue };
            let lead = if i == 0 { format!("{number:>3}. ") } else { " ".repeat(5) };
            // A command stays on one line, so that it can be copied.
            let part = if name == "command" { part.clone() } else { wrapped(part, width - 15) };
            text += &format!("{lead}{name:<10}{}\n", part.replace('\n', &format!("\n{:15}", "")));
        }
        text
    }

    pub fn json(&self) -> Value {
        json!({ "measured": self.measured, "means": self.means, "change": self.change, "command": self.command })
    }
}

/// All findings, the most important first.
pub fn findings(evidence: &Evidence<'_>) -> Vec<Finding> {
    let mut all = Vec::new();
    all.extend(evidence.model.and_then(|model| of_model(model, evidence)));
    // A model that cannot run cannot run on an idle machine either.
    let is_refused = evidence.model.is_some_and(|model| model.outcome.is_none());
    let load = evidence.load.filter(|load| load.is_high() && !is_refused);
    all.extend(load.map(|load| of_load(&load, evidence.name)));
    all.extend(of_memory(evidence.memory));
    if evidence.processor.instruction_sets == ["scalar"] {
        all.push(Finding::new(
            "The CPU has none of the instruction sets that the kernels use: AVX2, AVX-512, NEON with dot products.",
            "Computing is many times slower than on a CPU that has one of them.",
            "Use another machine. In a virtual machine, pass the host's CPU through.",
        ));
    }
    all.extend(evidence.drive.into_iter().flat_map(of_drive));
    all
}

fn of_model(model: &Diagnosis, evidence: &Evidence<'_>) -> Option<Finding> {
    let name = evidence.name;
    let outcome = match (&model.outcome, &model.verdict) {
        (Some(outcome), _) => outcome,
        (None, Verdict::Refused { have, remedy, .. }) => {
            let measured =
                format!("The model needs at least {}; there is {}.", Bytes(model.least_memory), Bytes(*have));
            let finding = Finding::new(measured, "The model cannot run.", capitalised(remedy) + ".");
            return Some(
                finding.command(format!("forebay run {name} --memory {}", flag(model.least_memory))),
            );
        }
        (None, Verdict::Runs { .. }) => return None,
    };
    match outcome.limit {
        Limit::Drive => Some(of_waiting(model, outcome, name, evidence.options.expert_memory.is_some())),
        Limit::MemoryBandwidth => {
            let has_smaller = model.main_type != "Q4_K" && model.bits.is_some_and(|bits| bits > MANY_BITS);
            let change = if has_smaller {
                "Use the same model with fewer bits per weight, such as Q4_K_M. More CPUs help only if they bring memory channels."
            } else {
                "Use a model with fewer active parameters. More CPUs help only if they bring memory channels."
            };
            Some(Finding::new(outcome.computing_text(), "Memory bandwidth is the limit.", change))
        }
        Limit::Processor => Some(of_computing(model, outcome, evidence)),
        Limit::MemorySize | Limit::Pcie => None,
    }
}

/// Tokens wait for the drive. `has_limit` says whether experts have a limit of their own.
fn of_waiting(model: &Diagnosis, outcome: &Outcome, name: &str, has_limit: bool) -> Finding {
    let measured = format!(
        "Memory holds {:.0} % of the experts. Expected cache hit rate: {}. A token spends {:.0} % of its time waiting for the \
         drive{}.",
        100.0 * share(&outcome.plan),
        hits_text(outcome.predicted.hit_rate),
        100.0 * outcome.predicted.waiting,
        outcome.drive.map_or(String::new(), |drive| format!(", which reads {}", rate(drive.many)))
    );
    let means = "The drive is the limit.";
    let alternative = match &model.verdict {
        Verdict::Runs { alternative, .. } => *alternative,
        Verdict::Refused { .. } => None,
    };
    match alternative {
        _ if has_limit => Finding::new(measured, means, "Raise --expert-memory, or leave it out.")
            .command(format!("forebay run {name}")),
        Some(Alternative { memory, tokens_per_second: Some(speed), machine: None, .. }) => {
            let change = format!(
                "Give it more memory: {} instead of {} would give about {speed:.1} tokens a second.",
                short(memory),
                short(outcome.plan.budget)
            );
            Finding::new(measured, means, change)
                .command(format!("forebay run {name} --memory {}", flag(memory)))
        }
        _ => {
            let change =
                "Use a machine with more memory or a faster drive; `plan` predicts what each would bring.";
            Finding::new(measured, means, change).command(format!("forebay plan {name}"))
        }
    }
}

/// The CPU computes more slowly than memory delivers.
fn of_computing(model: &Diagnosis, outcome: &Outcome, evidence: &Evidence<'_>) -> Finding {
    let means = "CPU-bound: unpacking these weights is slower than reading them.";
    let measured = outcome.computing_text();
    let usable = evidence.processor.usable;
    let name = evidence.name;
    if let Some(threads) = evidence.options.threads.filter(|&threads| threads < usable) {
        let change = format!("Compute with all {usable} CPUs instead of {threads}.");
        return Finding::new(measured, means, change)
            .command(format!("forebay run {name} --threads {usable}"));
    }
    // Types whose blocks are looked up in tables.
    let slow = model.main_type.starts_with("IQ") || model.main_type.starts_with("TQ");
    let change = if slow {
        format!("Use the same model as Q4_K_M: {} takes longer to unpack than Q4_K.", model.main_type)
    } else {
        "Use more or faster CPUs, or a model with fewer active parameters.".to_owned()
    };
    let change = match evidence.load.filter(Load::is_high) {
        Some(_) => {
            format!("First measure on an idle machine. If the limit is the same: {}", uncapitalised(&change))
        }
        None => change,
    };
    Finding::new(measured, means, change)
}

fn of_load(load: &Load, name: &str) -> Finding {
    let command = if name.is_empty() { "forebay doctor".into() } else { format!("forebay doctor {name}") };
    Finding::new(
        format!("Other programs kept {} while this was measured.", load.text()),
        "The figures below are lower than on an idle machine, and the verdict rests on them.",
        "Measure again when the machine is idle.",
    )
    .command(command)
}

fn of_memory(memory: &Memory) -> Vec<Finding> {
    let mut all = Vec::new();
    let tightest = memory.groups.iter().map(|g| g.limit).min();
    if let (Some(limit), Some(total)) = (tightest, memory.total)
        && limit < total
    {
        let finding = Finding::new(
            format!("A control group limits memory to {} of the machine's {}.", Bytes(limit), Bytes(total)),
            "Fewer experts fit in memory than the machine could hold.",
            "Raise the limit: `docker run --memory`, or MemoryMax= and MemoryHigh= of the systemd unit.",
        );
        all.push(finding.command("systemctl set-property UNIT MemoryMax=infinity MemoryHigh=infinity"));
    }
    if memory.huge_pages.as_deref() == Some("never") {
        let finding = Finding::new(
            "Transparent huge pages are off.",
            "Memory is read at as little as half its speed.",
            "Allow them where programs ask for them.",
        );
        all.push(finding.command("echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled"));
    }
    all
}

fn of_drive(drive: &Drive) -> Vec<Finding> {
    let mut all = Vec::new();
    let fastest = drive.depths.iter().map(|&(_, speed)| speed).fold(0.0, f64::max);
    let path = drive.path.display();
    if drive.volume.is_remote() {
        let finding = Finding::new(
            format!("The file comes over a network, at {}.", rate(fastest)),
            "The network is read instead of a drive.",
            "Copy the model to a drive of this machine.",
        );
        all.push(finding.command(format!("cp -r {path} FOLDER")));
    }
    if drive.volume.rotates == Some(true) && fastest < FASTEST_DISK {
        let finding = Finding::new(
            format!("The drive is reported as rotational and reads {}.", rate(fastest)),
            "It is probably a hard disk, too slow to stream experts from.",
            "Copy the model to an SSD.",
        );
        all.push(finding.command(format!("cp -r {path} FOLDER")));
    }
    if drive.how.contains("(io_uring is not available") {
        let finding = Finding::new(
            format!("Read method: {}.", drive.how),
            "Threads read a little more slowly than io_uring.",
            "Allow io_uring, in a container also in its seccomp profile.",
        );
        all.push(finding.command("sudo sysctl kernel.io_uring_disabled=0"));
    }
    if drive.how.contains("buffered (") {
        all.push(Finding::new(
            format!("Read method: {}.", drive.how),
            "All reads go through the page cache, which costs time and memory.",
            "Move the model to a file system with direct reads, such as ext4, XFS or Btrfs.",
        ));
    }
    if let Some(Endurance { seconds, first, last }) = drive.endurance.filter(Endurance::throttles) {
        let finding = Finding::new(
            format!("The drive read {} at first and {} after {seconds:.0} s.", rate(first), rate(last)),
            "It slows down under load: because it is hot, or because other programs use it.",
            "Look at its temperature; cool it with a heat sink or a fan.",
        );
        let device = drive.volume.device.as_deref().unwrap_or("DEVICE");
        all.push(finding.command(format!("sudo smartctl -a {device}")));
    }
    all
}

/// A number of bytes as a flag takes it, rounded up.
fn flag(bytes: u64) -> String {
    match bytes {
        bytes if bytes >= 4 << 30 => format!("{}G", bytes.div_ceil(1 << 30)),
        bytes => format!("{}M", bytes.div_ceil(1 << 20)),
    }
}

fn capitalised(sentence: &str) -> String {
    let mut chars = sentence.chars();
    chars.next().map_or(String::new(), |first| first.to_uppercase().chain(chars).collect())
}

#[cfg(test)]
mod tests {
    use super::super::diagnosis::tests::{diagnosis, outcome};
    use super::super::drive::tests::drive;
    use super::super::system::Volume;
    use super::super::system::tests::{memory, processor};
    use super::*;

    /// An idle machine without problems.
    fn check(change: impl FnOnce(&mut Case)) -> Vec<Finding> {
        let mut case = Case {
            processor: processor(),
            memory: memory(),
            drive: drive(),
            load: Load { busy: 0.1, cpus: 4, average: Some(0.2) },
            options: Options::new(),
            model: None,
        };
        change(&mut case);
        findings(&Evidence {
            processor: &case.processor,
            memory: &case.memory,
            drive: Some(&case.drive),
            load: Some(case.load),
            options: &case.options,
            model: case.model.as_ref(),
            name: "model.gguf",
        })
    }

    struct Case {
        processor: Processor,
        memory: Memory,
        drive: Drive,
        load: Load,
        options: Options,
        model: Option<Diagnosis>,
    }

    #[test]
    fn a_machine_without_faults_has_no_findings() {
        assert_eq!(check(|_| ()), []);
    }

    #[test]
    fn a_fast_drive_is_no_hard_disk_whatever_is_reported() {
        let volume = || Volume { rotates: Some(true), ..Volume::default() };
        let fast = check(|case| case.drive.volume = volume());
        assert_eq!(fast, [], "2 GB/s are no hard disk's");
        let slow = check(|case| {
            case.drive.volume = volume();
            case.drive.depths = vec![(1, 0.09e9), (8, 0.15e9)];
        });
        assert!(slow[0].measured.contains("reported as rotational and reads 0.1 GB/s"), "{slow:?}");
        assert!(slow[0].change.contains("SSD"));
    }

    /// These texts come from the readers (`experts/io/mod.rs` and `direct.rs` in the engine).
    #[test]
    fn slow_ways_of_reading_are_found() {
        let how = |how: &str| check(|case| case.drive.how = how.into());
        let pool = how("8 threads, direct (io_uring is not available: it is blocked)");
        assert_eq!(pool[0].command.as_deref(), Some("sudo sysctl kernel.io_uring_disabled=0"));
        let buffered = how("8 threads, buffered (direct I/O is not available)");
        assert!(buffered[0].change.contains("ext4"), "{buffered:?}");
        assert_eq!(how("8 threads, direct"), [], "threads were asked for");
    }

    #[test]
    fn the_load_is_named() {
        let found = check(|case| case.load.busy = 2.6);
        assert!(found[0].measured.starts_with("Other programs kept 2.6 of 4 CPUs busy, load average 0.2"));
        assert_eq!(found[0].command.as_deref(), Some("forebay doctor model.gguf"));
        let found = check(|case| {
            case.load.busy = 2.6;
            let outcome = Outcome { limit: Limit::Processor, ..outcome() };
            case.model = Some(Diagnosis { outcome: Some(outcome), ..diagnosis() });
        });
        assert!(found[0].change.starts_with("First measure on an idle machine."), "{found:?}");
    }

    #[test]
    fn nothing_is_advised_that_the_model_already_is() {
        let limited = |limit, main_type: &str, bits| {
            let found = check(|case| {
                case.model = Some(Diagnosis {
                    outcome: Some(Outcome { limit, ..outcome() }),
                    main_type: main_type.into(),
                    bits: Some(bits),
                    ..diagnosis()
                });
            });
            assert_eq!(found.len(), 1, "{found:?}");
            found[0].change.clone()
        };
        assert!(!limited(Limit::Processor, "Q4_K", 4.8).contains("Q4_K"));
        assert!(!limited(Limit::MemoryBandwidth, "Q4_K", 4.8).contains("bits"));
        assert!(!limited(Limit::MemoryBandwidth, "Q4_K", 6.1).contains("bits"), "its embeddings are large");
        assert!(limited(Limit::MemoryBandwidth, "BF16", 16.0).contains("Q4_K_M"));
        assert!(limited(Limit::Processor, "IQ2_XS", 2.4).contains("IQ2_XS takes longer to unpack than Q4_K"));
    }

    #[test]
    fn idle_cpus_are_used_before_others_are_bought() {
        let found = check(|case| {
            let outcome = Outcome { limit: Limit::Processor, ..outcome() };
            case.model = Some(Diagnosis { outcome: Some(outcome), ..diagnosis() });
            case.options = Options::new().threads(1);
        });
        assert_eq!(found[0].change, "Compute with all 4 CPUs instead of 1.");
        assert_eq!(found[0].command.as_deref(), Some("forebay run model.gguf --threads 4"));
    }

    #[test]
    fn more_memory_is_advised_where_the_machine_has_it() {
        let more = |machine| {
            let mut model = diagnosis();
            if let Verdict::Runs { alternative: Some(alternative), .. } = &mut model.verdict {
                alternative.machine = machine;
            }
            check(|case| case.model = Some(model)).remove(0)
        };
        let here = more(None);
        assert!(here.measured.starts_with("Memory holds 21 % of the experts."), "{here:?}");
        assert_eq!(
            here.change,
            "Give it more memory: 20 GiB instead of 6 GiB would give about 14.0 tokens a second."
        );
        assert_eq!(here.command.as_deref(), Some("forebay run model.gguf --memory 20G"));
        let limited = check(|case| {
            case.model = Some(diagnosis());
            case.options = Options::new().expert_memory(forebay_engine::plan::ExpertMemory::Percent(20.0));
        });
        assert_eq!(limited[0].change, "Raise --expert-memory, or leave it out.");
        let elsewhere = more(Some(12 << 30));
        assert!(elsewhere.change.starts_with("Use a machine with more memory or a faster drive"));
        assert_eq!(elsewhere.command.as_deref(), Some("forebay plan model.gguf"));
    }

    #[test]
    fn a_model_that_cannot_run_is_told_what_to_do() {
        let verdict = Verdict::Refused {
            need: 5 << 30,
            have: 2 << 30,
            parts: "dense weights 4.0 GiB".into(),
            remedy: "give it more memory with --memory, or use a smaller model".into(),
        };
        let model = Diagnosis { outcome: None, verdict, least_memory: 5 << 30, ..diagnosis() };
        let found = check(|case| case.model = Some(model)).remove(0);
        assert_eq!(found.measured, "The model needs at least 5.0 GiB; there is 2.0 GiB.");
        assert_eq!(found.change, "Give it more memory with --memory, or use a smaller model.");
        assert_eq!(found.command.as_deref(), Some("forebay run model.gguf --memory 5G"));
    }
}
