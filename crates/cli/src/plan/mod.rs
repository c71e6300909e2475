//! `forebay plan`: where everything would be, and how fast it would run.

mod gpu;
mod picture;

pub use gpu::OnGpu;

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use clap::Args;
use forebay_engine::internals::forecast::predict::{Outlook, Prediction, Skew};
use forebay_engine::plan::Plan;
use forebay_engine::{Bytes, Options, Prospect};
use serde_json::{Value, json};

use crate::args::LoadArgs;
use crate::demo;
use crate::hub::{self, Sight};
use crate::measured::{Measured, hits_text, prediction_json, range_json, rate, speed_text};
use crate::output::print;

/// Show where a model's parts would be in memory, and how fast it would run
///
/// No weight is loaded. The memory, the drive and products like the model's are measured for a moment, unless --no-probe
/// is given. The dense part of a model is always in memory; experts are kept in slots as far as the budget goes, and
/// the others are read from the drive when the router asks for them. Of a model on the hub that was not pulled only
/// the header is read, a few megabytes, and the speed is not predicted.
///
/// The speed of writing is a range, because it depends on how unevenly experts are used. That is known after the model has
/// been run here (what was hot is remembered); before, the range is that of models whose use was recorded.
#[derive(Args)]
#[command(after_help = "\
Examples:
  forebay plan model.gguf                     with the memory that is free now
  forebay plan model.gguf --memory 8G         with 8 GiB for the whole process
  forebay plan model.gguf --memory 8G --ctx 32768 --json
  forebay plan OWNER/NAME:Q4_K_M              before it is downloaded")]
pub struct PlanArgs {
    /// A GGUF file, any part of a split one, a folder with safetensors files, or OWNER/NAME:QUANT on the hub
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

/// Runs the command.
pub fn run(args: &PlanArgs) -> Result<ExitCode> {
    let options = args.load.options();
    let sight = args.model.as_deref().map(hub::sight).transpose()?;
    let path = sight.as_ref().map_or_else(|| demo::or_demo(None), |sight| Ok(sight.path.clone()))?;
    let prospect = Prospect::new(&path, &options)?;
    // How fast a drive reads a file that is not on it cannot be measured.
    let is_remote = sight.as_ref().is_some_and(Sight::is_remote);
    let measured = if args.no_probe || is_remote { None } else { Some(Measured::new(&prospect, &options)?) };
    let forecast = Forecast::new(&prospect, &options, measured.as_ref())?;
    let note = sight.map_or(String::new(), |sight| sight.note());
    let outlook = measured.as_ref().map(|measured| measured.outlook(&prospect, &options)).transpose()?;
    let gpu = args.load.device()?;
    let gpu = gpu.map(|gpu| OnGpu::new(gpu, &prospect, &options, outlook.as_ref())).transpose()?;
    print(&if args.json {
        let mut object = forecast.json();
        object["gpu"] = json!(gpu.as_ref().map(OnGpu::json));
        format!("{object:#}\n")
    } else {
        let gpu = gpu.map_or(String::new(), |gpu| format!("\n{}", gpu.text()));
        note + &forecast.text(picture::width()) + &gpu
    })?;
    Ok(ExitCode::SUCCESS)
}

/// What is known before anything is loaded.
struct Forecast<'a> {
    plan: &'a Plan,
    slots: usize,
    /// Bytes of experts that a token uses.
    working_set: u64,
    measured: Option<&'a Measured>,
    /// Where the machine was measured.
    speed: Option<Speed>,
}

struct Speed {
    skew: Skew,
    predicted: Prediction,
    /// What would come of changes.
    changes: Vec<Change>,
}

/// Something that money buys.
struct Change {
    what: String,
    /// Bytes of memory with it.
    memory: u64,
    /// How many times as fast the drive is.
    drive: f64,
    predicted: Prediction,
}

impl<'a> Forecast<'a> {
    fn new(
        prospect: &'a Prospect,
        options: &Options,
        measured: Option<&'a Measured>,
    ) -> Result<Forecast<'a>> {
        let plan = prospect.plan();
        let speed = match measured {
            None => None,
            Some(measured) => {
                let outlook = measured.outlook(prospect, options)?;
                let predicted = outlook.predict(share(plan));
                let changes = changes(prospect, options, &outlook)?;
                Some(Speed { skew: outlook.skew, predicted, changes })
            }
        };
        let slots = plan.slots.iter().sum();
        Ok(Forecast { plan, slots, working_set: prospect.traffic().experts, measured, speed })
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

    fn text(&self, width: usize) -> String {
        let plan = self.plan;
        let budget = if plan.budget == u64::MAX { "unknown".into() } else { Bytes(plan.budget).to_string() };
        let mut lines = vec![
            ("budget".to_owned(), budget, String::new()),
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
                    "{} of {} experts ({:.0} %), all would be {}",
                    self.slots,
                    plan.expert_count,
                    100.0 * share(plan),
                    Bytes(plan.experts)
                ),
            ));
            lines.push(("experts of a token".into(), Bytes(self.working_set).to_string(), String::new()));
        }
        lines.push(("planned".into(), Bytes(plan.total()).to_string(), self.verdict()));
        if let Some(measured) = self.measured {
            lines.push(("memory reads".into(), rate(measured.memory), String::new()));
            if let Some(drive) = measured.drive {
                let note = format!("one expert at a time; {} together {}", drive.together, rate(drive.many));
                lines.push(("drive reads".into(), rate(drive.one), note));
            }
        }
        let mut text = picture::picture(plan, width);
        text.push('\n');
        for (name, value, note) in lines {
            let line = format!("{name:<22}{value:>12}  {note}");
            text.push_str(line.trim_end());
            text.push('\n');
        }
        if let Some(speed) = &self.speed {
            text += &speed.text(plan);
        }
        text
    }

    fn json(&self) -> Value {
        let plan = self.plan;
        let speed = self.speed.as_ref();
        json!({
            "budget": plan.budget,
            "planned": plan.total(),
            "dense": plan.dense,
            "kv": plan.kv,
            "context": plan.reserved,
            "context_limit": plan.context,
            "scratch": plan.scratch,
            "requests": plan.requests,
            "chunk": plan.chunk,
            "process": plan.process,
            "io_buffers": 0,
            "expert_slots": { "bytes": plan.slot_bytes, "count": self.slots },
            "experts": { "bytes": plan.experts, "count": plan.expert_count },
            "working_set": self.working_set,
            "uniform_hit_rate": share(plan),
            "memory_bytes_per_second": self.measured.map(|m| m.memory),
            "drive_bytes_per_second": self.measured.and_then(|m| m.drive).map(|drive| drive.many),
            "drive_bytes_per_second_alone": self.measured.and_then(|m| m.drive).map(|drive| drive.one),
            "compute_seconds": self.measured.map(|m| json!({ "dense": m.compute.dense, "experts": m.compute.experts })),
            "hit_rate": speed.map(|s| range_json(s.predicted.hit_rate)),
            "tokens_per_second": speed.map(|s| range_json(s.predicted.speed)),
            "use_of_experts": speed.map(|s| if matches!(s.skew, Skew::Known(_)) { "remembered" } else { "typical" }),
            "changes": speed.map(|s| s.changes.iter().map(Change::json).collect::<Vec<_>>()),
            "streams": !plan.holds_all_experts(),
            "verdict": self.verdict(),
        })
    }
}

impl Speed {
    fn text(&self, plan: &Plan) -> String {
        let Prediction { hit_rate, speed, waiting } = self.predicted;
        let mut text = format!("\nwriting  {}\n", speed_text(speed));
        if !plan.holds_all_experts() {
            let waiting = 100.0 * waiting;
            text += &format!(
                "         hits {}, {waiting:.0} % of the time waiting for the drive\n",
                hits_text(hit_rate)
            );
        }
        if !self.changes.is_empty() {
            text += &format!("\n{:<44}{:<20}{}\n", "what would help", "hits", "writing");
            for Change { what, predicted, .. } in &self.changes {
                let hits = hits_text(predicted.hit_rate);
                text += &format!("  {what:<42}{hits:<20}{}\n", speed_text(predicted.speed));
            }
        }
        text += "\nThe range assumes a short context and a conversation that has gone on for a while; computing that takes 1.0\n\
                 to 1.45 times the products alone, which were measured, and longer beside reads";
        if !plan.holds_all_experts() {
            text += "; a drive that gives 65 to 100 % of what it gives the\nprobe; and experts used ";
            text += match self.skew {
                Skew::Known(_) => "as in earlier runs here, with 0.6 to 1.5 times the misses",
                Skew::Expected(_) => {
                    "as its routers prefer them and conversations stay with them, judged by\ntrained models that were \
                     recorded. This model has not run here yet: after a run the plan knows its own\nuse, and the \
                     range is better"
                }
            };
        }
        text += ".\n";
        text
    }
}

impl Change {
    fn json(&self) -> Value {
        let mut object = json!({ "what": self.what, "memory": self.memory, "drive_factor": self.drive });
        if let (Some(to), Value::Object(from)) = (object.as_object_mut(), prediction_json(&self.predicted)) {
            to.extend(from);
        }
        object
    }
}

/// What more memory and faster drives would bring to a model that streams.
fn changes(prospect: &Prospect, options: &Options, outlook: &Outlook) -> Result<Vec<Change>> {
    let plan = prospect.plan();
    // Where the slots have a limit of their own, it is the limit that more memory would meet.
    if plan.holds_all_experts() || options.expert_memory.is_some() {
        return Ok(Vec::new());
    }
    let all = prospect.memory_for_all(options)?;
    let mut changes = Vec::new();
    for memory in [plan.budget / 2 * 3, plan.budget.saturating_mul(2)] {
        if memory < all {
            let predicted = outlook.predict(share(&prospect.plan_for(options, memory)?));
            changes.push(Change {
                what: format!("{} of memory", Bytes(memory)),
                memory,
                drive: 1.0,
                predicted,
            });
        }
    }
    let what = format!("{} of memory: all experts fit", Bytes(all));
    changes.push(Change { what, memory: all, drive: 1.0, predicted: outlook.predict(1.0) });
    for (what, factor) in [("a drive twice as fast", 2.0), ("a drive four times as fast", 4.0)] {
        let faster = Outlook { drive: outlook.drive.map(|d| d.times(factor)), ..outlook.clone() };
        let predicted = faster.predict(share(plan));
        changes.push(Change { what: what.into(), memory: plan.budget, drive: factor, predicted });
    }
    Ok(changes)
}

/// The share of the experts that there are slots for.
pub fn share(plan: &Plan) -> f64 {
    let slots: usize = plan.slots.iter().sum();
    if plan.expert_count == 0 { 1.0 } else { slots as f64 / plan.expert_count as f64 }
}

/// What becomes of conversations that are longer than memory is set aside for.
fn context_note(plan: &Plan) -> String {
    match plan.context {
        limit if limit == plan.reserved => String::new(),
        limit if plan.expert_count == 0 => format!("up to {limit} if memory allows"),
        limit => format!("up to {limit}, taking memory from expert slots"),
    }
}
