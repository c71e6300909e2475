//! `forebay plan`: where everything would be, and how fast it would run.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use clap::Args;
use forebay_engine::plan::Plan;
use forebay_engine::{Bytes, Prospect};
use serde_json::json;

use crate::args::LoadArgs;
use crate::demo;
use crate::hub::{self, Sight};
use crate::memory_speed::memory_speed;
use crate::output::print;
use crate::progress::Progress;

/// Show where a model's parts would be in memory, and how fast it would run
///
/// No weight is loaded. The memory's and the drive's speed are measured for a moment, unless --no-probe is given.
/// The dense part of a model is always in memory; experts are kept in slots as far as the budget goes, and
/// the others are read from the drive when the router asks for them. Of a model on the hub that was not pulled only
/// the header is read, a few megabytes, and the speed is not predicted.
#[derive(Args)]
#[command(after_help = "\
Examples:
  forebay plan model.gguf                     with the memory that is free now
  forebay plan model.gguf --memory 8G         with 8 GiB for the whole process
  forebay plan model.gguf --memory 8G --ctx 32768 --json
  forebay plan OWNER/NAME:Q4_K_M              before it is downloaded")]
pub struct PlanArgs {
    /// A GGUF file, any part of a split one, a folder with safetensors files, or OWNER/NAME[:QUANT] on the hub
    /// [default: the demo model]
    model: Option<PathBuf>,
    /// Do not measure the machine, so do not predict the speed
    #[arg(long)]
    no_probe: bool,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    load: LoadArgs,
}

/// Bytes a second, as measured.
struct Speeds {
    memory: f64,
    /// `None` where the model has no experts.
    drive: Option<f64>,
}

/// Runs the command.
pub fn run(args: &PlanArgs) -> Result<ExitCode> {
    let options = args.load.options();
    let sight = args.model.as_deref().map(hub::sight).transpose()?;
    let path = sight.as_ref().map_or_else(|| demo::or_demo(None), |sight| Ok(sight.path.clone()))?;
    let prospect = Prospect::new(&path, &options)?;
    // How fast a drive reads a file that is not on it cannot be measured.
    let is_remote = sight.as_ref().is_some_and(Sight::is_remote);
    let speeds = if args.no_probe || is_remote {
        None
    } else {
        let bar = Progress::measuring();
        bar.say("the drive".into());
        let drive = prospect.drive_speed(options.io)?;
        bar.say("the memory".into());
        let threads =
            options.threads.unwrap_or_else(|| std::thread::available_parallelism().map_or(1, usize::from));
        Some(Speeds { memory: memory_speed(threads)?, drive })
    };
    let forecast = Forecast::new(&prospect, speeds.as_ref());
    let note = sight.map_or(String::new(), |sight| sight.note());
    print(&if args.json { forecast.json() } else { note + &forecast.text() })?;
    Ok(ExitCode::SUCCESS)
}

/// What is known before anything is loaded.
struct Forecast<'a> {
    plan: &'a Plan,
    slots: usize,
    /// The hit rate if all experts were used alike.
    hit_rate: f64,
    /// Bytes of experts that a token uses.
    working_set: u64,
    speeds: Option<&'a Speeds>,
    tokens_per_second: Option<f64>,
}

impl<'a> Forecast<'a> {
    fn new(prospect: &'a Prospect, speeds: Option<&'a Speeds>) -> Forecast<'a> {
        let (plan, traffic) = (prospect.plan(), prospect.traffic());
        let slots: usize = plan.slots.iter().sum();
        let hit_rate = if plan.expert_count == 0 { 1.0 } else { slots as f64 / plan.expert_count as f64 };
        let tokens_per_second = speeds.map(|speeds| {
            let dense = traffic.dense as f64 / speeds.memory;
            let compute = traffic.experts as f64 / speeds.memory;
            let missed = traffic.experts as f64 * (1.0 - hit_rate);
            let read = speeds.drive.map_or(0.0, |drive| missed / drive);
            // Experts that are there are computed while the others are read.
            1.0 / (dense + compute.max(read))
        });
        Forecast { plan, slots, hit_rate, working_set: traffic.experts, speeds, tokens_per_second }
    }

    fn verdict(&self) -> String {
        if self.plan.expert_count == 0 {
            "everything fits: the model has no experts to stream".into()
        } else if self.plan.holds_all_experts() {
            "everything fits: nothing is streamed".into()
        } else if self.plan.slot_bytes < self.working_set {
            "streams; slots hold less than the experts of one token, so more memory helps much".into()
        } else {
            "streams: experts that are not in a slot are read when the router asks for them".into()
        }
    }

    fn text(&self) -> String {
        let plan = self.plan;
        let share = 100.0 * self.hit_rate;
        let mut lines = vec![
            ("budget".to_owned(), Bytes(plan.budget).to_string(), String::new()),
            ("dense weights".into(), Bytes(plan.dense).to_string(), String::new()),
            (format!("context of {}", plan.reserved), Bytes(plan.kv).to_string(), context_note(plan)),
            (
                "scratch".into(),
                Bytes(plan.scratch).to_string(),
                format!("prompts in chunks of {}", plan.chunk),
            ),
            (
                "program, tokenizer".into(),
                Bytes(plan.process).to_string(),
                "measured, and room to move".into(),
            ),
            ("I/O buffers".into(), "none".into(), "reads go straight into slots".into()),
        ];
        if plan.expert_count > 0 {
            lines.push((
                "expert slots".into(),
                Bytes(plan.slot_bytes).to_string(),
                format!(
                    "{} of {} experts ({share:.0} %), all would be {}",
                    self.slots,
                    plan.expert_count,
                    Bytes(plan.experts)
                ),
            ));
            lines.push(("experts of a token".into(), Bytes(self.working_set).to_string(), String::new()));
        }
        lines.push(("planned".into(), Bytes(plan.total()).to_string(), self.verdict()));
        if let Some(speeds) = self.speeds {
            lines.push(("memory reads".into(), rate(speeds.memory), String::new()));
            if let Some(drive) = speeds.drive {
                lines.push(("drive reads".into(), rate(drive), "experts, at random places".into()));
            }
        }
        if let Some(speed) = self.tokens_per_second {
            let note = if plan.holds_all_experts() {
                "bound by memory".into()
            } else {
                format!("if all experts were used alike: {share:.0} % hits")
            };
            lines.push(("at most".into(), format!("{speed:.1} tok/s"), note));
        }
        let mut text = String::new();
        for (name, value, note) in lines {
            let line = format!("{name:<22}{value:>12}  {note}");
            text.push_str(line.trim_end());
            text.push('\n');
        }
        text
    }

    fn json(&self) -> String {
        let plan = self.plan;
        let object = json!({
            "budget": plan.budget,
            "planned": plan.total(),
            "dense": plan.dense,
            "kv": plan.kv,
            "context": plan.reserved,
            "context_limit": plan.context,
            "scratch": plan.scratch,
            "chunk": plan.chunk,
            "process": plan.process,
            "io_buffers": 0,
            "expert_slots": { "bytes": plan.slot_bytes, "count": self.slots },
            "experts": { "bytes": plan.experts, "count": plan.expert_count },
            "working_set": self.working_set,
            "uniform_hit_rate": self.hit_rate,
            "memory_bytes_per_second": self.speeds.map(|s| s.memory),
            "drive_bytes_per_second": self.speeds.and_then(|s| s.drive),
            "tokens_per_second": self.tokens_per_second,
            "streams": !plan.holds_all_experts(),
            "verdict": self.verdict(),
        });
        format!("{object:#}\n")
    }
}

/// What becomes of conversations that are longer than memory is set aside for.
fn context_note(plan: &Plan) -> String {
    match plan.context {
        limit if limit == plan.reserved => String::new(),
        limit if plan.expert_count == 0 => format!("up to {limit} if memory allows"),
        limit => format!("up to {limit}, taking memory from expert slots"),
    }
}

fn rate(bytes: f64) -> String {
    format!("{:.1} GB/s", bytes / 1e9)
}
