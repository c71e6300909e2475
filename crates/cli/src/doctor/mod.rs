//! `forebay doctor`: what the machine has, what a model makes of it, and what to change.

mod card;
mod drive;
mod system;

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Result;
use clap::Args;
use forebay_engine::internals::experts::IoMethod;
use forebay_engine::internals::forecast::predict::{DriveSpeed, Outlook, Prediction};
use forebay_engine::internals::memory::{GroupLimit, Machine};
use forebay_engine::plan::Plan;
use forebay_engine::{Bytes, Cancel, Error, Options, Prospect, instruction_sets};
use serde_json::{Value, json};

use self::card::Card;
use self::drive::{Drive, Effort};
use self::system::{Gpu, Memory, Processor};
use crate::args::ComputeArgs;
use crate::errors::in_flags;
use crate::hub;
use crate::interrupt;
use crate::measured::{hits_text, prediction_json, rate, speed_text, threads};
use crate::memory_speed::memory_speed;
use crate::output::print;
use crate::plan::{OnGpu, share};
use crate::progress::Progress;

/// Find out what this machine has, what limits a model on it, and what to change
///
/// Looks at the processor, the memory and its limits, and the graphics processors that drivers show; measures the
/// memory, and the drive under the model with direct reads of the size of its experts, a few and many at a time and
/// then for a while, because drives slow down when they are warm. Without a model a file is written to the current folder,
/// read and removed. With one, the bottleneck is named.
#[derive(Args)]
#[command(after_help = "\
Examples:
  forebay doctor                          this machine, and the drive of the current folder
  forebay doctor model.gguf               what limits this model here
  forebay doctor model.gguf --memory 8G   what would limit it in 8 GiB
  forebay doctor model.gguf --quick --json | jq .bottleneck")]
pub struct DoctorArgs {
    /// A GGUF file, any part of a split one, or a folder with safetensors files
    model: Option<PathBuf>,
    /// Measure for moments only: a drive that slows down when it is warm is not noticed
    #[arg(long)]
    quick: bool,
    /// How long the drive has to keep it up
    #[arg(long, value_name = "N", default_value = "15", conflicts_with = "quick", value_parser = clap::value_parser!(u64).range(1..=3600))]
    seconds: u64,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    compute: ComputeArgs,
}

/// Runs the command.
pub fn run(args: &DoctorArgs) -> Result<ExitCode> {
    let cancel = Cancel::default();
    interrupt::install(&cancel)?;
    let options = args.compute.options(None);
    // What the model needs is to be told also where there is not so much.
    let unlimited = options.clone().memory(u64::MAX);
    let path = args.model.as_deref().map(hub::locate).transpose()?;
    let prospect = path.map(|path| Prospect::new(&path, &unlimited)).transpose()?;
    let report = Report::new(args, &options, prospect.as_ref(), &cancel)?;
    print(&if args.json { format!("{:#}\n", report.json()) } else { report.text() })?;
    Ok(ExitCode::SUCCESS)
}

/// All that was found.
struct Report {
    processor: Processor,
    memory: Memory,
    /// Bytes a second.
    memory_speed: f64,
    threads: usize,
    /// `None` for a model without experts; the reason where it could not be measured.
    drive: Option<Result<Drive, String>>,
    gpu: Gpu,
    cards: Vec<Card>,
    model: Option<Diagnosis>,
    advice: Vec<String>,
}

/// What a model makes of the machine.
struct Diagnosis {
    name: String,
    /// Bytes of all its files.
    bytes: u64,
    least_memory: u64,
    /// Why it cannot run, or how it will.
    outcome: Result<Outcome, String>,
    bottleneck: Bottleneck,
    /// Where it would be on the GPU, if there is one to compute.
    on_gpu: Option<OnGpu>,
}

struct Outcome {
    plan: Plan,
    predicted: Prediction,
    pace: Pace,
}

/// The part of the machine that more of would help most.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Bottleneck {
    /// There is too little memory to run at all.
    MemorySize,
    /// Tokens wait for experts.
    Drive,
    /// Weights are computed as fast as memory delivers them.
    MemoryBandwidth,
    /// Memory could deliver more than is computed.
    Processor,
}

/// What decides which part of the machine a model waits for.
#[derive(Clone, Copy)]
struct Pace {
    /// The share of a token's time that is spent waiting for the drive.
    waiting: f64,
    /// Bytes of weights that are computed in a second when none of them has to be waited for.
    computing: f64,
    /// Bytes of memory that are read in a second.
    memory: f64,
}

impl Pace {
    fn bottleneck(self) -> Bottleneck {
        if self.waiting >= MUCH_WAITING {
            Bottleneck::Drive
        } else if self.computing >= NEAR_BANDWIDTH * self.memory {
            Bottleneck::MemoryBandwidth
        } else {
            Bottleneck::Processor
        }
    }
}

impl Bottleneck {
    fn name(self) -> &'static str {
        match self {
            Bottleneck::MemorySize => "memory size",
            Bottleneck::Drive => "drive",
            Bottleneck::MemoryBandwidth => "memory bandwidth",
            Bottleneck::Processor => "processor",
        }
    }

    fn explanation(self) -> &'static str {
        match self {
            Bottleneck::MemorySize => "the model cannot run in the memory there is",
            Bottleneck::Drive => "most of a token's time goes to waiting for experts",
            Bottleneck::MemoryBandwidth => "weights are computed about as fast as memory is read",
            Bottleneck::Processor => "memory could be read faster than weights of these types are computed",
        }
    }
}

/// From this share of a token's time on, waiting for the drive is what matters.
const MUCH_WAITING: f64 = 0.4;

/// Products that take at least this share of the memory's speed are bound by it.
const NEAR_BANDWIDTH: f64 = 0.6;

impl Report {
    fn new(
        args: &DoctorArgs,
        options: &Options,
        prospect: Option<&Prospect>,
        cancel: &Cancel,
    ) -> Result<Report> {
        let root = Path::new("/");
        let processor = Processor::look(root, instruction_sets());
        let memory = Memory::look(root, Machine::now().available, GroupLimit::all());
        let drive = look_at_drive(args, options.io, prospect, cancel)?;
        cancel.check()?;
        let bar = Progress::measuring();
        bar.say("the memory".into());
        let threads = threads(options);
        let memory_speed = memory_speed(threads)?;
        cancel.check()?;
        bar.say("products with weights like the model's".into());
        let mut model = match prospect {
            Some(prospect) => Some(Diagnosis::new(prospect, options, drive.as_ref(), memory_speed)?),
            None => None,
        };
        bar.say("the GPU".into());
        let in_use = args.compute.device()?;
        let cards = Card::all(root, in_use.as_ref())?;
        if let (Some(model), Some(prospect), Some(gpu)) = (&mut model, prospect, in_use) {
            model.on_gpu = Some(OnGpu::new(gpu, prospect, options, None)?);
        }
        drop(bar);
        let gpu = Gpu::look(root);
        let mut report =
            Report { processor, memory, memory_speed, threads, drive, gpu, cards, model, advice: Vec::new() };
        report.advice = report.advise();
        Ok(report)
    }

    fn drive(&self) -> Option<&Drive> {
        self.drive.as_ref()?.as_ref().ok()
    }

    /// What to change, the most important first.
    fn advise(&self) -> Vec<String> {
        let mut advice = Vec::new();
        // What would help the processor helps nobody where the GPU computes.
        if let Some(model) =
            self.model.as_ref().filter(|model| !model.on_gpu.as_ref().is_some_and(OnGpu::computes))
        {
            advice.extend(model.advice());
        }
        let tightest = self.memory.groups.iter().map(|g| g.limit).min();
        if let (Some(limit), Some(total)) = (tightest, self.memory.total)
            && limit < total
        {
            advice.push(format!(
                "a control group limits memory to {} of the machine's {}: raise it (docker run --memory, MemoryMax= and MemoryHigh= of the service)",
                Bytes(limit),
                Bytes(total)
            ));
        }
        if self.memory.huge_pages.as_deref() == Some("never") {
            advice.push(
                "huge pages are off, which costs up to half of the memory's speed: echo madvise > \
                 /sys/kernel/mm/transparent_hugepage/enabled"
                    .into(),
            );
        }
        if self.processor.instruction_sets == ["scalar"] {
            advice.push(
                "the processor has no instruction set that the kernels use (AVX2, AVX-512, NEON with dotprod): computing is slow"
                    .into(),
            );
        }
        if let Some(drive) = self.drive() {
            if drive.volume.is_remote() {
                advice.push("the file comes over a network: copy it to a drive of this machine".into());
            }
            if drive.volume.rotates == Some(true) {
                advice.push(
                    "the system calls this drive a turning disk: if it is one, copy the model to an SSD"
                        .into(),
                );
            }
            if drive.how.contains("refused") && drive.how.contains("io_uring") {
                advice.push(
                    "io_uring is refused, so threads read instead, which is a little slower: sysctl kernel.io_uring_disabled=0, or \
                     allow it in the container's seccomp profile"
                        .into(),
                );
            }
            if drive.how.contains("buffered (") {
                advice.push(
                    "the file system has no direct reads, so all of them go through the page cache: move the model to another \
                     (ext4, XFS, Btrfs)"
                        .into(),
                );
            }
            if drive.endurance.as_ref().is_some_and(drive::Endurance::throttles) {
                advice.push(
                    "the drive slows down under load: give it a heat sink or an air stream, or see whether others use it"
                        .into(),
                );
            }
        }
        advice
    }

    fn text(&self) -> String {
        let mut text = String::new();
        let mut row = |name: &str, value: String| text += &format!("{name:<18}{value}\n");
        let p = &self.processor;
        row("processor", p.model.clone().unwrap_or_else(|| std::env::consts::ARCH.into()));
        row(
            "instruction set",
            format!("{} (there is: {})", p.instruction_sets[0], p.instruction_sets.join(", ")),
        );
        let online = p
            .online
            .filter(|&n| n != p.usable)
            .map_or(String::new(), |n| format!(" of {n} for this process"));
        row("cores", format!("{}{online}", p.usable));
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
        row("memory reads", format!("{} with {} threads", rate(self.memory_speed), self.threads));
        row("huge pages", m.huge_pages.clone().unwrap_or_else(|| "unknown".into()));
        match &self.drive {
            None => row("drive", "not needed: the model has no experts to stream".into()),
            Some(Err(reason)) => row("drive", format!("not measured: {reason}")),
            Some(Ok(drive)) => {
                let v = &drive.volume;
                let known = [&v.device, &v.file_system].into_iter().flatten().cloned();
                let turning = v.rotates.map(|r| if r { "said to turn" } else { "does not turn" }.to_owned());
                let on = known.chain(turning).collect::<Vec<_>>().join(", ");
                row(
                    "drive",
                    format!(
                        "{}{}",
                        drive.path.display(),
                        if on.is_empty() { on } else { format!(" on {on}") }
                    ),
                );
                row("read by", drive.how.clone());
                let depths = drive.depths.iter().map(|&(depth, speed)| format!("{depth}: {}", rate(speed)));
                let depths = depths.collect::<Vec<_>>().join(", ");
                row("drive reads", format!("{} each, together {depths}", Bytes(drive.expert_bytes)));
                row(
                    "drive endurance",
                    match &drive.endurance {
                        None => "not measured (--quick)".into(),
                        Some(e) => {
                            let verdict = if e.throttles() { "it slows down" } else { "it keeps it up" };
                            format!(
                                "{} at first, {} after {:.0} s: {verdict}",
                                rate(e.first),
                                rate(e.last),
                                e.seconds
                            )
                        }
                    },
                );
            }
        }
        row("GPU", self.gpu_text());
        self.cards.iter().flat_map(Card::rows).for_each(|(name, value)| row(name, value));
        if let Some(model) = &self.model {
            text += &model.text();
        }
        text += "\nWhat to change\n";
        if self.advice.is_empty() {
            text += "  nothing that is seen from here\n";
        }
        for advice in &self.advice {
            text += &format!("  - {advice}\n");
        }
        text
    }

    fn gpu_text(&self) -> String {
        // A program that is linked with nothing loads nothing.
        const STATIC: Option<&str> = if cfg!(target_env = "musl") {
            Some("this program is linked statically and cannot load a driver: CPU only")
        } else {
            None
        };
        let gpu = &self.gpu;
        if !gpu.found() && self.cards.is_empty() {
            return STATIC.map_or("none found".into(), |why| format!("none found; {why}"));
        }
        let devices = gpu.devices.iter().map(|d| d.display().to_string()).collect::<Vec<_>>().join(", ");
        let what = if gpu.names.is_empty() { devices } else { gpu.names.join(", ") };
        let found = gpu.library.as_ref().map(|path| path.display().to_string());
        let library = STATIC.map_or(found.unwrap_or("no CUDA library found".into()), str::to_owned);
        match forebay_cuda::find() {
            Ok(_) => {
                let gpus: Vec<_> = self.cards.iter().map(Card::name).collect();
                let compiler = if forebay_cuda::compiler_is_there() { "" } else { "; NVRTC is missing" };
                format!("{} ({library}); used for models that fit{compiler}", gpus.join(", "))
            }
            Err(why) => format!("{what} ({library}); not used: {why}"),
        }
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
        json!({
            "processor": self.processor.json(),
            "memory": memory,
            "drive": drive,
            "gpu": gpu,
            "model": self.model.as_ref().map(Diagnosis::json),
            "bottleneck": self.model.as_ref().map(|m| m.bottleneck.name()),
            "advice": self.advice,
        })
    }
}

impl Diagnosis {
    fn new(
        prospect: &Prospect,
        options: &Options,
        drive: Option<&Result<Drive, String>>,
        memory_speed: f64,
    ) -> Result<Diagnosis> {
        let file = prospect.file();
        let name = file.metadata.str("general.name").map(str::to_owned);
        let name = name.unwrap_or_else(|| file.path().display().to_string());
        let least_memory = prospect.least_memory(options)?;
        let mut diagnosis = Diagnosis {
            name,
            bytes: file.bytes(),
            least_memory,
            outcome: Err(String::new()),
            bottleneck: Bottleneck::MemorySize,
            on_gpu: None,
        };
        let plan = match prospect.plan_with(options) {
            Ok(plan) => plan,
            Err(error @ Error::Budget { .. }) => {
                diagnosis.outcome = Err(in_flags(&error.to_string()));
                return Ok(diagnosis);
            }
            Err(error) => return Err(error.into()),
        };
        let compute = prospect.compute_time(options)?;
        let speed = |drive: &Drive| {
            let ((_, one), (together, many)) = (*drive.depths.first()?, *drive.depths.last()?);
            Some(DriveSpeed { one, many, together })
        };
        let drive_speed = drive.and_then(|d| d.as_ref().ok()).and_then(speed);
        let outlook: Outlook = prospect.outlook(options, compute, drive_speed)?;
        let predicted = outlook.predict(share(&plan));
        let traffic = prospect.traffic();
        let bytes = (traffic.dense + traffic.experts) as f64;
        let computing = bytes / (compute.dense + compute.experts);
        let pace = Pace { waiting: predicted.waiting, computing, memory: memory_speed };
        diagnosis.bottleneck = pace.bottleneck();
        diagnosis.outcome = Ok(Outcome { plan, predicted, pace });
        Ok(diagnosis)
    }

    fn advice(&self) -> Option<String> {
        match (self.bottleneck, &self.outcome) {
            (Bottleneck::MemorySize, _) => Some(format!(
                "give the model at least {} of memory, shorten its context, or use a smaller one",
                Bytes(self.least_memory)
            )),
            (Bottleneck::Drive, Ok(outcome)) => {
                let slots = 100.0 * share(&outcome.plan);
                Some(format!(
                    "memory holds {slots:.0} % of the experts: more of it, or a faster drive, helps most; \
                     `forebay plan` says how much"
                ))
            }
            (Bottleneck::MemoryBandwidth, _) => Some(
                "a model with fewer active parameters or fewer bits would be faster; more cores would not, unless they bring \
                 memory channels"
                    .into(),
            ),
            (Bottleneck::Processor, _) => Some(
                "more or faster cores would help, as would types that are unpacked faster (Q4_K, Q8_0 rather than IQ types)"
                    .into(),
            ),
            (Bottleneck::Drive, Err(_)) => None,
        }
    }

    fn text(&self) -> String {
        let mut text = format!("\n{}, {}\n", self.name, Bytes(self.bytes));
        let mut row = |name: &str, value: String| text += &format!("{name:<18}{value}\n");
        row("least memory", Bytes(self.least_memory).to_string());
        match &self.outcome {
            Err(reason) => row("cannot run", reason.clone()),
            Ok(Outcome { plan, predicted, .. }) => {
                if plan.expert_count > 0 {
                    let slots: usize = plan.slots.iter().sum();
                    row(
                        "in memory",
                        format!("{slots} of {} experts ({:.0} %)", plan.expert_count, 100.0 * share(plan)),
                    );
                }
                if !plan.holds_all_experts() {
                    row("expected hits", hits_text(predicted.hit_rate));
                    row(
                        "waiting",
                        format!("{:.0} % of a token's time for the drive", 100.0 * predicted.waiting),
                    );
                }
                row("writing", speed_text(predicted.speed));
            }
        }
        row("bottleneck", format!("{}: {}", self.bottleneck.name(), self.bottleneck.explanation()));
        if let Some(gpu) = &self.on_gpu {
            row("the GPU", gpu.short());
        }
        text
    }

    fn json(&self) -> Value {
        let mut object = json!({
            "name": self.name,
            "bytes": self.bytes,
            "least_memory": self.least_memory,
            "error": self.outcome.as_ref().err(),
            "bottleneck": self.bottleneck.name(),
            "gpu": self.on_gpu.as_ref().map(OnGpu::json),
        });
        if let Ok(Outcome { plan, predicted, pace }) = &self.outcome {
            object["budget"] = json!(plan.budget);
            object["planned"] = json!(plan.total());
            object["share_of_experts"] = json!(share(plan));
            object["prediction"] = prediction_json(predicted);
            object["compute_bytes_per_second"] = json!(pace.computing);
        }
        object
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
    // A drive that cannot be measured is something to tell; the rest of the machine is there all the same.
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
    use super::*;

    #[test]
    fn the_bottleneck_is_what_a_token_waits_for() {
        let memory = 20e9;
        for (waiting, computing, expected) in [
            (0.9, 18e9, Bottleneck::Drive),
            (MUCH_WAITING, 1e9, Bottleneck::Drive),
            (0.39, 18e9, Bottleneck::MemoryBandwidth),
            (0.0, NEAR_BANDWIDTH * memory, Bottleneck::MemoryBandwidth),
            (0.39, 11e9, Bottleneck::Processor),
            (0.0, 1e9, Bottleneck::Processor),
        ] {
            assert_eq!(Pace { waiting, computing, memory }.bottleneck(), expected, "{waiting}, {computing}");
        }
    }
}
