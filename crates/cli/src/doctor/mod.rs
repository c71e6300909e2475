//! `forebay doctor`: what limits a model on this machine, and what to change.

mod card;
mod diagnosis;
mod drive;
mod findings;
mod portable;
mod report;
mod system;

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Result;
use clap::Args;
use forebay_engine::internals::experts::IoMethod;
use forebay_engine::internals::memory::{GroupLimit, Machine};
use forebay_engine::{Bytes, Cancel, Error, Options, Prospect, instruction_sets};
use forebay_hub as hub;
use serde_json::{Value, json};

use self::card::Card;
use self::diagnosis::Diagnosis;
use self::drive::{Drive, Effort};
use self::findings::{Evidence, Finding, findings};
use self::portable::Listed;
use self::report::{Suite, markdown};
use self::system::{Gpu, Memory, Processor};
use crate::args::{ComputeArgs, ModelArgs};
use crate::errors::in_flags;
use crate::interrupt;
use crate::measured::{Load, rate, threads};
use crate::memory_speed::memory_speed;
use crate::output::print;
use crate::plan::{OnGpu, loaded, on_shared_memory, wrapped};
use crate::progress::Progress;

/// The width of the text.
const WIDTH: usize = 100;

/// Measure this machine, and say what limits a model on it and what to change
///
/// Prints a verdict in one sentence, then the findings, then the measurements. Each finding says what was measured, what it
/// means, what to change, and the command for that.
///
/// Measures the memory bandwidth, and the drive that holds the model: with direct reads of the size of its experts, one to
/// eight at a time, and then for 15 seconds, because some drives slow down when they get hot. Without a model, a file of
/// 512 MiB is written to the current folder, read and removed.
#[derive(Args)]
#[command(mut_arg("model", |model| model.help("GGUF file (for a split model, any part), safetensors folder, or download, as OWNER/NAME:QUANT")), after_help = "\
Examples:
  forebay doctor                          this machine, and the drive of the current folder
  forebay doctor model.gguf               what limits this model here
  forebay doctor model.gguf --memory 8G   what would limit it in 8 GiB
  forebay doctor model.gguf --quick --json | jq .verdict
  forebay doctor --report                 a table to send to the developers")]
pub struct DoctorArgs {
    #[command(flatten)]
    model: ModelArgs,
    /// Measure for about a second; a drive that slows down when it gets hot is not noticed
    #[arg(long)]
    quick: bool,
    /// How many seconds the drive is read for, to see whether it slows down
    #[arg(long, value_name = "N", default_value = "15", conflicts_with = "quick", value_parser = clap::value_parser!(u64).range(1..=3600))]
    seconds: u64,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
    /// Print the measurements as a Markdown table, to send to the developers
    #[arg(long, conflicts_with = "json")]
    report: bool,
    /// Add the results of the suite for GPUs to the report, from a file with its output
    #[arg(long, value_name = "FILE", requires = "report")]
    suite: Option<PathBuf>,
    #[command(flatten)]
    compute: ComputeArgs,
}

/// Runs the command.
pub fn run(args: &DoctorArgs) -> Result<ExitCode> {
    let cancel = Cancel::default();
    interrupt::install(&cancel)?;
    let options = args.compute.options(None);
    // The needs of a model are shown even if the machine has less memory.
    let unlimited = options.clone().memory(u64::MAX);
    let path = args.model.get()?.map(hub::locate).transpose()?;
    let prospect = path.map(|path| Prospect::new(&path, &unlimited)).transpose()?;
    let suite = args.suite.as_deref().map(Suite::read).transpose()?;
    let report = Report::new(args, options, prospect.as_ref(), &cancel)?;
    print(&if args.json {
        format!("{:#}\n", report.json())
    } else if args.report {
        report.markdown(suite.as_ref())
    } else {
        report.text()
    })?;
    Ok(ExitCode::SUCCESS)
}

/// The whole report.
struct Report {
    processor: Processor,
    memory: Memory,
    /// The memory bandwidth in bytes per second.
    memory_speed: f64,
    threads: usize,
    /// The load of other programs before the measurements.
    load: Option<Load>,
    /// `None` for a model without experts; an error if the drive could not be measured.
    drive: Option<Result<Drive, String>>,
    gpu: Gpu,
    cards: Vec<Card>,
    /// NVIDIA's GPUs as text.
    gpu_text: String,
    /// The GPUs that Metal or Vulkan finds, or why there is none.
    portable: Result<Vec<Listed>, String>,
    model: Option<Diagnosis>,
    findings: Vec<Finding>,
}

impl Report {
    fn new(
        args: &DoctorArgs,
        options: Options,
        prospect: Option<&Prospect>,
        cancel: &Cancel,
    ) -> Result<Report> {
        let root = Path::new("/");
        let in_use = args.compute.device()?;
        let options = &match prospect {
            Some(prospect) => on_shared_memory(prospect, options, in_use.as_ref()),
            None => options,
        };
        let load = Load::look(root);
        let processor = Processor::look(root, instruction_sets());
        let memory = Memory::look(root, &Machine::now(), GroupLimit::all());
        let drive = look_at_drive(args, options.io, prospect, cancel)?;
        cancel.check()?;
        let bar = Progress::measuring();
        bar.say("the memory bandwidth".into());
        let threads = threads(options);
        let memory_speed = memory_speed(threads)?;
        cancel.check()?;
        bar.say("the speed of matrix products with weights of the model's types".into());
        let measured_drive = drive.as_ref().and_then(|drive| drive.as_ref().ok());
        let mut model = match prospect {
            Some(prospect) => Some(Diagnosis::new(prospect, options, measured_drive, memory_speed, load)?),
            None => None,
        };
        bar.say("the GPU".into());
        let cards = Card::all(root, in_use.as_ref())?;
        let portable = Listed::all(in_use.as_ref())?;
        if let (Some(model), Some(prospect), Some(gpu)) = (&mut model, prospect, &in_use) {
            model.on_gpu = Some(OnGpu::new(gpu, prospect, options, None)?);
        }
        drop(bar);
        let gpu = Gpu::look(root);
        // Changes for the CPU do not help a model that the GPU computes.
        let on_gpu = |model: &Diagnosis| model.on_gpu.as_ref().and_then(OnGpu::computes).is_some();
        let on_cpu = model.as_ref().filter(|model| !on_gpu(model));
        let findings = findings(&Evidence {
            processor: &processor,
            memory: &memory,
            drive: measured_drive,
            load,
            options,
            model: on_cpu,
            name: &args.model.get()?.map_or(String::new(), |path| path.display().to_string()),
        });
        let gpu_text = gpu_text(&gpu, &cards);
        Ok(Report {
            processor,
            memory,
            memory_speed,
            threads,
            load,
            drive,
            gpu,
            cards,
            gpu_text,
            portable,
            model,
            findings,
        })
    }

    fn verdict(&self) -> String {
        let mut verdict = match &self.model {
            Some(model) => {
                let on_gpu = model.on_gpu.as_ref().and_then(OnGpu::verdict);
                on_gpu.as_ref().unwrap_or(&model.verdict).sentence()
            }
            None => {
                let fastest = |drive: &Drive| drive.depths.iter().map(|d| d.1).fold(0.0, f64::max);
                let drive = match &self.drive {
                    Some(Ok(drive)) => format!(", the drive at {}", rate(fastest(drive))),
                    _ => String::new(),
                };
                format!("Memory can be read at {}{drive}.", rate(self.memory_speed))
            }
        };
        verdict += &match self.findings.len() {
            0 => " Nothing was found that should be changed.".to_owned(),
            1 => " There is 1 finding.".to_owned(),
            count => format!(" There are {count} findings."),
        };
        let is_refused = self.model.as_ref().is_some_and(|model| model.outcome.is_none());
        match self.load.filter(|load| load.is_high() && !is_refused) {
            Some(load) => verdict + " " + &loaded(&load),
            None => verdict,
        }
    }

    fn text(&self) -> String {
        let mut text = wrapped(&self.verdict(), WIDTH) + "\n\n";
        for (i, finding) in self.findings.iter().enumerate() {
            text += &finding.text(i + 1, WIDTH);
            text.push('\n');
        }
        for (name, value) in self.rows() {
            text += &format!("{name:<18}{value}\n");
        }
        if let Some(model) = &self.model {
            text += &model.text();
        }
        text
    }

    fn markdown(&self, suite: Option<&Suite>) -> String {
        use std::env::consts::{ARCH, OS};
        let mut rows = vec![("system".to_owned(), format!("{OS}, {ARCH}"))];
        rows.extend(self.rows());
        let mut text = markdown(concat!("Forebay ", env!("CARGO_PKG_VERSION")), &rows, suite);
        if let Some(model) = &self.model {
            text += &format!("\n```text{}```\n", model.text());
        }
        text
    }

    /// The measurements, each with its name.
    fn rows(&self) -> Vec<(String, String)> {
        let mut rows = Vec::new();
        let mut row = |name: &str, value: String| rows.push((name.to_owned(), value));
        let p = &self.processor;
        row("CPU", p.model.clone().unwrap_or_else(|| std::env::consts::ARCH.into()));
        row(
            "instruction set",
            format!("{} (available: {})", p.instruction_sets[0], p.instruction_sets.join(", ")),
        );
        let online = p
            .online
            .filter(|&n| n != p.usable)
            .map_or(String::new(), |n| format!(" of {n} for this process"));
        row("CPUs", format!("{}{online}", p.usable));
        row("load", self.load.map_or("unknown".into(), |load| load.text()));
        let size = |bytes: Option<u64>| bytes.map_or("unknown".into(), |b| Bytes(b).to_string());
        let m = &self.memory;
        row("memory", format!("{}, {} available, swap {}", size(m.total), size(m.available), size(m.swap)));
        row(
            "memory limits",
            match &m.groups[..] {
                [] => "none by control groups".into(),
                groups => groups.iter().map(group_text).collect::<Vec<_>>().join("; "),
            },
        );
        row("memory bandwidth", format!("{} with {} threads", rate(self.memory_speed), self.threads));
        row("huge pages", m.huge_pages.clone().unwrap_or_else(|| "unknown".into()));
        match &self.drive {
            None => row("drive", "not needed: the model has no experts to stream".into()),
            Some(Err(reason)) => row("drive", format!("not measured: {reason}")),
            Some(Ok(drive)) => drive.rows().into_iter().for_each(|(name, value)| row(name, value)),
        }
        row("NVIDIA GPU", self.gpu_text.clone());
        self.cards.iter().flat_map(Card::rows).for_each(|(name, value)| row(name, value));
        match &self.portable {
            Err(why) => row("Metal and Vulkan", in_flags(why)),
            Ok(listed) => rows.extend(listed.iter().flat_map(Listed::rows)),
        }
        rows
    }

    fn json(&self) -> Value {
        let drive = match &self.drive {
            None => Value::Null,
            Some(Ok(drive)) => drive.json(),
            Some(Err(reason)) => json!({ "error": reason }),
        };
        let mut memory = self.memory.json();
        memory["read_bytes_per_second"] = json!(self.memory_speed);
        let mut gpu = self.gpu.json();
        gpu["cards"] = self.cards.iter().map(Card::json).collect();
        gpu["portable"] = match &self.portable {
            Ok(listed) => listed.iter().map(Listed::json).collect(),
            Err(why) => json!({ "error": in_flags(why) }),
        };
        json!({
            "verdict": self.verdict(),
            "findings": self.findings.iter().map(Finding::json).collect::<Vec<_>>(),
            "processor": self.processor.json(),
            "load": self.load.map(|load| load.json()),
            "memory": memory,
            "drive": drive,
            "gpu": gpu,
            "model": self.model.as_ref().map(Diagnosis::json),
            "bottleneck": self.model.as_ref().map(|m| m.limit().name()),
        })
    }
}

fn gpu_text(gpu: &Gpu, cards: &[Card]) -> String {
    // A statically linked program cannot load the driver.
    const STATIC: Option<&str> = if cfg!(target_env = "musl") {
        Some("this program is linked statically and cannot load a driver: CPU only")
    } else {
        None
    };
    if !gpu.found() && cards.is_empty() {
        return STATIC.map_or("none found".into(), |why| format!("none found; {why}"));
    }
    let devices = gpu.devices.iter().map(|d| d.display().to_string()).collect::<Vec<_>>().join(", ");
    let what = if gpu.names.is_empty() { devices } else { gpu.names.join(", ") };
    let found = gpu.library.as_ref().map(|path| path.display().to_string());
    let library = STATIC.map_or(found.unwrap_or("no CUDA library found".into()), str::to_owned);
    match forebay_devices::cuda::find() {
        Ok(_) => {
            let gpus: Vec<_> = cards.iter().map(Card::name).collect();
            let compiler = if forebay_devices::cuda::compiler_is_there() { "" } else { "; NVRTC is missing" };
            format!("{} ({library}); used for models that fit{compiler}", gpus.join(", "))
        }
        Err(why) => format!("{what} ({library}); not used: {why}"),
    }
}

fn look_at_drive(
    args: &DoctorArgs,
    io: IoMethod,
    prospect: Option<&Prospect>,
    cancel: &Cancel,
) -> Result<Option<Result<Drive, String>>> {
    let effort = if args.quick {
        Effort { moment: Duration::from_millis(100), endurance: Duration::ZERO, file: 64 << 20 }
    } else {
        let endurance = Duration::from_secs(args.seconds);
        Effort { moment: Duration::from_millis(500), endurance, file: 512 << 20 }
    };
    let measured = match prospect {
        Some(prospect) => Drive::of_model(prospect, io, effort, cancel).transpose(),
        None => Some(Drive::of_folder(Path::new("."), io, effort, cancel)),
    };
    // A drive that cannot be measured is reported, and the rest of the machine with it.
    match measured {
        None => Ok(None),
        Some(Ok(drive)) => Ok(Some(Ok(drive))),
        Some(Err(error)) if matches!(error.downcast_ref(), Some(Error::Cancelled)) => {
            Err(Error::Cancelled.into())
        }
        Some(Err(error)) => Ok(Some(Err(format!("{error:#}")))),
    }
}

fn group_text(group: &GroupLimit) -> String {
    format!("{} by {} (version {})", Bytes(group.limit), group.folder.display(), group.version)
}

#[cfg(test)]
mod tests {
    use expect_test::expect_file;

    use super::*;

    fn report() -> Report {
        Report {
            processor: system::tests::processor(),
            memory: system::tests::memory(),
            memory_speed: 20e9,
            threads: 4,
            load: Some(Load { busy: 0.1, cpus: 4, average: Some(0.2) }),
            drive: Some(Ok(drive::tests::drive())),
            gpu: Gpu { names: Vec::new(), devices: Vec::new(), library: None },
            cards: Vec::new(),
            gpu_text: "none found".into(),
            portable: Ok(vec![portable::tests::listed()]),
            model: None,
            findings: Vec::new(),
        }
    }

    /// The report with its findings.
    fn diagnosed(mut report: Report) -> Report {
        let drive = report.drive.as_ref().and_then(|drive| drive.as_ref().ok());
        report.findings = findings(&Evidence {
            processor: &report.processor,
            memory: &report.memory,
            drive,
            load: report.load,
            options: &Options::new(),
            model: report.model.as_ref(),
            name: "model.gguf",
        });
        report
    }

    #[test]
    fn a_model_and_its_findings_are_shown() {
        let mut report = report();
        report.model = Some(diagnosis::tests::diagnosis());
        report.load = Some(Load { busy: 2.6, cpus: 4, average: Some(3.1) });
        report.memory.huge_pages = Some("never".into());
        let text = diagnosed(report).text();
        assert!(text.lines().all(|line| line.chars().count() <= WIDTH), "{text}");
        expect_file!["../../tests/snapshots/doctor_model.txt"].assert_eq(&text);
    }

    #[test]
    fn a_machine_without_faults_is_shown() {
        expect_file!["../../tests/snapshots/doctor_machine.txt"].assert_eq(&diagnosed(report()).text());
    }
}
