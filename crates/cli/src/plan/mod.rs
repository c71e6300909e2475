//! `forebay plan`: where everything would be, and how fast it would run.

mod gpu;
mod picture;
mod stages;
pub mod verdict;

pub use gpu::OnGpu;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Result;
use clap::Args;
use forebay_devices::Gpu;
use forebay_engine::internals::forecast::predict::{Outlook, Prediction, Skew};
use forebay_engine::internals::memory::Machine;
use forebay_engine::plan::{Plan, Traffic};
use forebay_engine::{Bytes, Error, Options, Prospect};
use forebay_hub::{self as hub, Sight};
use serde_json::{Value, json};

use self::verdict::{Limit, Place, Speed, Verdict};
use crate::args::{LoadArgs, ModelArgs};
use crate::measured::{Load, Measured, hits_text, prediction_json, range_json, rate, speed_text};
use crate::output::print;
use crate::pull;
use crate::values::at_least_one;

/// Show where a model's parts would be in memory, and how fast it would run
///
/// Prints a picture of the memory, a verdict in one sentence, and a table. No weight is loaded. Dense weights are always in
/// memory; experts fill what is left of the budget, and the others are read from the drive when the router asks for them.
///
/// The drive, the memory bandwidth and matrix products like the model's are measured for a few seconds, unless --no-probe is
/// given. Of a model on the hub that is not downloaded only the header is read, a few megabytes; the drive is then measured with a
/// temporary file of 256 MiB where downloads are kept.
///
/// The predicted speed is a range, because it depends on which experts a conversation uses. Before a model has run on this
/// machine, the prediction assumes typical expert usage (measured on trained models); afterwards it uses the model's own.
///
/// With --stages, the model is split by layers over machines like this one, each with the memory of --memory. The output says what
/// each would hold, how fast a token would pass through all of them, and whether one machine would be faster. Only the library can
/// run such stages.
#[derive(Args)]
#[command(after_help = "\
Examples:
  forebay plan model.gguf                     with the memory that is free now
  forebay plan model.gguf --memory 8G         with 8 GiB for the whole process
  forebay plan model.gguf --memory 8G --ctx 32768 --json
  forebay plan model.gguf --memory 60G --stages 4
  forebay plan OWNER/NAME:Q4_K_M              before it is downloaded")]
pub struct PlanArgs {
    #[command(flatten)]
    model: ModelArgs,
    /// Split the model by layers over N machines with --memory each
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    stages: Option<usize>,
    /// Do not measure the machine; no speed is predicted
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
    let request = Request {
        model: args.model.get()?,
        load: &args.load,
        probe: !args.no_probe,
        json: args.json,
        answers: None,
    };
    match args.stages {
        Some(count) => stages::show(&request, count),
        None => show(&request),
    }
}

/// What is to be planned, and how it is shown.
pub struct Request<'a> {
    pub model: Option<&'a Path>,
    pub load: &'a LoadArgs,
    /// Whether the machine is measured.
    pub probe: bool,
    pub json: bool,
    /// For a server, how many answers it generates at once.
    pub answers: Option<usize>,
}

/// The model of a request.
struct Found {
    path: PathBuf,
    sight: Option<Sight>,
    options: Options,
    /// With all the memory that it needs: that is worth knowing also where the budget is too small.
    prospect: Prospect,
}

impl Found {
    fn of(request: &Request<'_>) -> Result<Found> {
        let options = request.load.options();
        let sight = request.model.map(pull::sight).transpose()?;
        let path =
            sight.as_ref().map_or_else(|| pull::locate_or_demo(None), |sight| Ok(sight.path.clone()))?;
        let prospect = Prospect::new(&path, &options.clone().memory(u64::MAX).expert_memory(None))?;
        Ok(Found { path, sight, options, prospect })
    }

    /// What is to be said before the plan.
    fn note(&self) -> String {
        self.sight.as_ref().map_or(String::new(), Sight::note)
    }

    /// Prints why the model does not run.
    fn refuse(&self, request: &Request<'_>, error: Error, least: Option<u64>) -> Result<ExitCode> {
        let Some(verdict) = Verdict::refused(&error, least) else { return Err(error.into()) };
        print(&if request.json {
            let mut object = json!({ "least_memory": least });
            verdict.tell(&mut object);
            format!("{object:#}\n")
        } else {
            format!("{}{}\n", self.note(), wrapped(&verdict.sentence(), picture::width()))
        })?;
        Ok(ExitCode::FAILURE)
    }

    /// Measures the machine, if the request asks for it.
    fn measure(&self, request: &Request<'_>) -> Result<Option<(Measured, Outlook)>> {
        let Found { prospect, options, .. } = self;
        let is_remote = self.sight.as_ref().is_some_and(Sight::is_remote);
        let downloads = if is_remote { Some(hub::downloads()?) } else { None };
        let folder = downloads.as_ref().map(hub::Downloads::folder);
        let measured = match request.probe.then(|| Measured::new(prospect, options, folder)).transpose() {
            // The sizes are worth knowing also where nothing can be written.
            Err(error) if is_remote => {
                eprintln!("No speed is predicted: {error:#}");
                None
            }
            measured => measured?,
        };
        let Some(measured) = measured else { return Ok(None) };
        let mut outlook = measured.outlook(prospect, options)?;
        if is_remote {
            // The routers are not here, so nothing is known of their preferences.
            outlook.skew = Skew::of_routers(&[]);
        }
        Ok(Some((measured, outlook)))
    }
}

/// Prints a plan. A budget that is too small is a verdict, and a failure.
pub fn show(request: &Request<'_>) -> Result<ExitCode> {
    let gpu = request.load.device()?;
    let mut found = Found::of(request)?;
    found.options = on_shared_memory(&found.prospect, found.options, gpu.as_ref());
    let Found { options, prospect, .. } = &found;
    let plan = match prospect.plan_with(options) {
        Ok(plan) => plan,
        Err(error) => {
            let least = prospect.least_memory(options).ok();
            return found.refuse(request, error, least);
        }
    };
    let (measured, outlook) = found.measure(request)?.unzip();
    let gpu = gpu.map(|gpu| OnGpu::new(&gpu, prospect, options, outlook.as_ref())).transpose()?;
    let machine = Machine::now().total;
    let survey = Survey { prospect, options, plan: &plan, machine };
    let forecast = Forecast {
        verdict: survey.verdict(measured.as_ref(), outlook.as_ref(), gpu.as_ref())?,
        plan: &plan,
        traffic: prospect.traffic(),
        measured: measured.as_ref(),
        speed: match &outlook {
            Some(outlook) => Some(survey.expected(outlook)?),
            None => None,
        },
        gpu: gpu.as_ref(),
        answers: request.answers,
    };
    print(&if request.json {
        format!("{:#}\n", forecast.json())
    } else {
        found.note() + &forecast.text(picture::width())
    })?;
    Ok(ExitCode::SUCCESS)
}

/// The options for measurements and predictions: with the GPU, if it computes the model in the computer's memory. Then its
/// plan is the CPU's, but not its speed.
pub fn on_shared_memory(prospect: &Prospect, options: Options, gpu: Option<&Gpu>) -> Options {
    let with = gpu
        .filter(|gpu| gpu.device.shares_memory())
        .map(|gpu| options.clone().device(Some(gpu.device.clone())));
    with.filter(|options| prospect.plan_with(options).is_ok()).unwrap_or(options)
}

/// A model with a budget on a machine.
pub struct Survey<'a> {
    pub prospect: &'a Prospect,
    pub options: &'a Options,
    /// On the CPU.
    pub plan: &'a Plan,
    /// Bytes of the machine's memory, where the system tells.
    pub machine: Option<u64>,
}

impl Survey<'_> {
    /// The verdict on the GPU, if there is one that would compute, else on the CPU.
    pub fn verdict(
        &self,
        measured: Option<&Measured>,
        outlook: Option<&Outlook>,
        gpu: Option<&OnGpu>,
    ) -> Result<Verdict> {
        if let Some(verdict) = gpu.and_then(OnGpu::verdict) {
            return Ok(verdict);
        }
        let speed = measured.zip(outlook).map(|(measured, outlook)| {
            speed(self.prospect.traffic(), measured, &outlook.predict(share(self.plan)))
        });
        let budget = self.plan.budget;
        Ok(Verdict::Runs {
            place: Place::of(self.plan),
            speed,
            alternative: self.alternative(outlook)?,
            machine: self.machine.filter(|&machine| budget > machine && budget < u64::MAX),
            budget,
        })
    }

    fn alternative(&self, outlook: Option<&Outlook>) -> Result<Option<verdict::Alternative>> {
        // Where experts have a limit of their own, more memory would meet that limit.
        if self.options.expert_memory.is_some() || self.plan.holds_all_experts() {
            return Ok(None);
        }
        let all = self.prospect.memory_for_all(self.options)?;
        verdict::alternative(self.plan, all, self.machine, |memory| match outlook {
            Some(outlook) => Ok(Some(outlook.predict(self.share_in(memory)?))),
            None => Ok(None),
        })
    }

    fn expected(&self, outlook: &Outlook) -> Result<Expected> {
        Ok(Expected {
            skew: outlook.skew.clone(),
            predicted: outlook.predict(share(self.plan)),
            changes: self.changes(outlook)?,
        })
    }

    /// What more memory and faster drives would bring to a model that streams.
    fn changes(&self, outlook: &Outlook) -> Result<Vec<Change>> {
        let plan = self.plan;
        if plan.holds_all_experts() || self.options.expert_memory.is_some() {
            return Ok(Vec::new());
        }
        let all = self.prospect.memory_for_all(self.options)?;
        let mut changes = Vec::new();
        let mut with_memory = |memory, what: String, predicted| {
            let beyond = self.machine.is_some_and(|machine| memory > machine);
            changes.push(Change { what, memory, beyond, drive: 1.0, predicted });
        };
        for memory in [plan.budget / 2 * 3, plan.budget.saturating_mul(2)] {
            if memory < all {
                let predicted = outlook.predict(self.share_in(memory)?);
                with_memory(memory, format!("{} of memory", Bytes(memory)), predicted);
            }
        }
        with_memory(all, format!("{} of memory: all experts fit", Bytes(all)), outlook.predict(1.0));
        for (what, factor) in [("a drive twice as fast", 2.0), ("a drive four times as fast", 4.0)] {
            let faster = Outlook { drive: outlook.drive.map(|d| d.times(factor)), ..outlook.clone() };
            let predicted = faster.predict(share(plan));
            changes.push(Change {
                what: what.into(),
                memory: plan.budget,
                beyond: false,
                drive: factor,
                predicted,
            });
        }
        Ok(changes)
    }

    /// The share of the experts that such a budget holds.
    fn share_in(&self, memory: u64) -> Result<f64, Error> {
        Ok(share(&self.prospect.plan_for(self.options, memory)?))
    }
}

/// The speed of the verdict.
fn speed(traffic: Traffic, measured: &Measured, predicted: &Prediction) -> Speed {
    let seconds = measured.compute.dense + measured.compute.experts;
    let computing = (traffic.dense + traffic.experts) as f64 / seconds;
    Speed {
        tokens_per_second: predicted.speed.middle,
        at_most: false,
        limit: Limit::of(predicted.waiting, computing, measured.memory),
    }
}

/// What is known before anything is loaded.
struct Forecast<'a> {
    verdict: Verdict,
    /// On the CPU.
    plan: &'a Plan,
    traffic: Traffic,
    measured: Option<&'a Measured>,
    /// Where the machine was measured.
    speed: Option<Expected>,
    gpu: Option<&'a OnGpu>,
    answers: Option<usize>,
}

/// What the CPU is expected to do.
struct Expected {
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
    /// Whether that is more than this machine has.
    beyond: bool,
    /// How many times as fast the drive is.
    drive: f64,
    predicted: Prediction,
}

impl Forecast<'_> {
    fn text(&self, width: usize) -> String {
        let on_gpu = self.gpu.and_then(OnGpu::computes);
        let mut text = picture::picture(on_gpu.unwrap_or(self.plan), width);
        text += &format!("\n{}\n", wrapped(&self.verdict.sentence(), width));
        if let Some(load) = self.measured.and_then(|m| m.load).filter(Load::is_high) {
            text += &wrapped(&loaded(&load), width);
            text.push('\n');
        }
        text.push('\n');
        if let (Some(gpu), Some(_)) = (self.gpu, on_gpu) {
            return text + &gpu.text();
        }
        for (name, value, note) in self.rows() {
            text += format!("{name:<22}{value:>12}  {note}").trim_end();
            text.push('\n');
        }
        if let Some(speed) = &self.speed {
            text += &speed.text(self.plan, width);
        }
        // A GPU that is there and does not compute is something to explain.
        text + &self.gpu.map_or(String::new(), |gpu| format!("\n{}", gpu.text()))
    }

    fn rows(&self) -> Vec<(String, String, String)> {
        let plan = self.plan;
        let budget = if plan.budget == u64::MAX { "unknown".into() } else { Bytes(plan.budget).to_string() };
        let mut rows = vec![
            ("budget".to_owned(), budget, String::new()),
            ("dense weights".into(), Bytes(plan.dense).to_string(), String::new()),
            (format!("context of {}", plan.reserved), Bytes(plan.kv).to_string(), context_note(plan)),
            (
                "scratch".into(),
                Bytes(plan.scratch).to_string(),
                format!("prompts in chunks of {} tokens", plan.chunk),
            ),
            (
                "program, tokenizer".into(),
                Bytes(plan.process).to_string(),
                "measured, with some headroom".into(),
            ),
        ];
        if plan.expert_count > 0 {
            let slots: usize = plan.slots.iter().sum();
            rows.push((
                "expert slots".into(),
                Bytes(plan.slot_bytes).to_string(),
                format!(
                    "{slots} of {} experts ({:.0} %); all of them take {}",
                    plan.expert_count,
                    100.0 * share(plan),
                    Bytes(plan.experts)
                ),
            ));
            let note = if plan.slot_bytes < self.traffic.experts && !plan.holds_all_experts() {
                "more than the slots hold: more memory helps much"
            } else {
                ""
            };
            rows.push(("experts per token".into(), Bytes(self.traffic.experts).to_string(), note.into()));
        }
        rows.push(("planned".into(), Bytes(plan.total()).to_string(), String::new()));
        if let Some(answers) = self.answers {
            rows.push(("answers at once".into(), answers.to_string(), "they share the context".into()));
        }
        if let Some(measured) = self.measured {
            rows.push(("memory bandwidth".into(), rate(measured.memory), String::new()));
            if let Some(drive) = measured.drive {
                let note = format!("one expert at a time; {} at once: {}", drive.together, rate(drive.many));
                rows.push(("drive".into(), rate(drive.one), note));
            }
        }
        rows
    }

    fn json(&self) -> Value {
        let plan = self.plan;
        let speed = self.speed.as_ref();
        let mut object = json!({
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
            "expert_slots": { "bytes": plan.slot_bytes, "count": plan.slots.iter().sum::<usize>() },
            "experts": { "bytes": plan.experts, "count": plan.expert_count },
            "working_set": self.traffic.experts,
            "uniform_hit_rate": share(plan),
            "memory_bytes_per_second": self.measured.map(|m| m.memory),
            "drive_bytes_per_second": self.measured.and_then(|m| m.drive).map(|drive| drive.many),
            "drive_bytes_per_second_alone": self.measured.and_then(|m| m.drive).map(|drive| drive.one),
            "compute_seconds": self.measured.map(|m| json!({ "dense": m.compute.dense, "experts": m.compute.experts })),
            "load": self.measured.and_then(|m| m.load).map(|load| load.json()),
            "hit_rate": speed.map(|s| range_json(s.predicted.hit_rate)),
            "tokens_per_second": speed.map(|s| range_json(s.predicted.speed)),
            "use_of_experts": speed.map(|s| if matches!(s.skew, Skew::Known(_)) { "remembered" } else { "typical" }),
            "changes": speed.map(|s| s.changes.iter().map(Change::json).collect::<Vec<_>>()),
            "streams": !plan.holds_all_experts(),
            "gpu": self.gpu.map(OnGpu::json),
        });
        self.verdict.tell(&mut object);
        object
    }
}

impl Expected {
    fn text(&self, plan: &Plan, width: usize) -> String {
        let Prediction { hit_rate, speed, waiting } = self.predicted;
        let mut text = format!("\ngeneration      {}\n", speed_text(speed));
        if !plan.holds_all_experts() {
            let waiting = 100.0 * waiting;
            text += &format!("cache hit rate  {}\n", hits_text(hit_rate));
            text += &format!("waiting         {waiting:.0} % of the time, for the drive\n");
        }
        if !self.changes.is_empty() {
            text += &format!("\n{:<46}{:<20}{}\n", "what would help", "cache hit rate", "generation");
            for Change { what, beyond, predicted, .. } in &self.changes {
                let (hits, speed) = (hits_text(predicted.hit_rate), speed_text(predicted.speed));
                let mark = if *beyond { "*" } else { " " };
                text += &format!("{mark} {what:<44}{hits:<20}{speed}\n");
            }
            if self.changes.iter().any(|change| change.beyond) {
                text += "* more memory than this machine has\n";
            }
        }
        format!("{text}\n{}\n", wrapped(&self.assumptions(plan), width))
    }

    /// What the range covers.
    fn assumptions(&self, plan: &Plan) -> String {
        const PRODUCTS: &str = "1.0 to 1.45 times the measured time of the matrix products";
        if plan.holds_all_experts() {
            return format!("The range assumes a short context, and {PRODUCTS}.");
        }
        let drive = format!("a short context, {PRODUCTS}, and 65 to 100 % of the drive's measured speed.");
        match self.skew {
            Skew::Known(_) => format!(
                "The range assumes expert usage as in earlier runs on this machine (with 0.6 to 1.5 times the misses), {drive}"
            ),
            Skew::Expected(_) => format!(
                "The range assumes typical expert usage (measured on trained models), {drive} After the first run of the \
                 model on this machine, the prediction uses the model's own expert usage."
            ),
        }
    }
}

impl Change {
    fn json(&self) -> Value {
        let mut object = json!({
            "what": self.what,
            "memory": self.memory,
            "exceeds_machine": self.beyond,
            "drive_factor": self.drive,
        });
        if let (Some(to), Value::Object(from)) = (object.as_object_mut(), prediction_json(&self.predicted)) {
            to.extend(from);
        }
        object
    }
}

/// The share of the experts that there are slots for.
pub fn share(plan: &Plan) -> f64 {
    let slots: usize = plan.slots.iter().sum();
    if plan.expert_count == 0 { 1.0 } else { slots as f64 / plan.expert_count as f64 }
}

/// What becomes of conversations that are longer than memory is reserved for.
fn context_note(plan: &Plan) -> String {
    match plan.context {
        limit if limit == plan.reserved => String::new(),
        limit if plan.expert_count == 0 => format!("up to {limit} if memory suffices"),
        limit => format!("up to {limit}, with memory taken from expert slots"),
    }
}

/// What is to be said of figures that were measured on a busy machine.
pub fn loaded(load: &Load) -> String {
    format!("Measured while other programs kept {}: on an idle machine the speed may be higher.", load.text())
}

/// A text in lines of at most so many columns.
pub fn wrapped(text: &str, width: usize) -> String {
    let mut lines = vec![String::new()];
    for word in text.split(' ') {
        let line = lines.last_mut().expect("there is always a line");
        if !line.is_empty() && line.chars().count() + 1 + word.chars().count() > width {
            lines.push(word.to_owned());
        } else {
            if !line.is_empty() {
                line.push(' ');
            }
            line.push_str(word);
        }
    }
    lines.join("\n")
}

#[cfg(test)]
pub mod tests {
    use expect_test::{ExpectFile, expect_file};
    use forebay_engine::internals::forecast::ComputeTime;
    use forebay_engine::internals::forecast::predict::{DriveSpeed, Range};

    use super::*;

    const GIB: u64 = 1 << 30;

    /// A model of 18 GiB in 6 GiB.
    pub fn plan() -> Plan {
        Plan {
            budget: 6 * GIB,
            dense: GIB,
            kv: 800 << 20,
            scratch: 100 << 20,
            requests: 0,
            process: 60 << 20,
            slot_bytes: 4 * GIB,
            slots: vec![1300],
            experts: 18 * GIB,
            expert_count: 6144,
            chunk: 512,
            context: 32768,
            reserved: 8192,
            device: None,
        }
    }

    fn measured(load: f64) -> Measured {
        Measured {
            memory: 20e9,
            drive: Some(DriveSpeed { one: 1.1e9, many: 2.3e9, together: 8 }),
            compute: ComputeTime { dense: 0.03, experts: 0.04 },
            load: Some(Load { busy: load, cpus: 4, average: Some(3.1) }),
        }
    }

    fn predicted(middle: f64, waiting: f64) -> Prediction {
        let around = |middle| Range { low: 0.75 * middle, middle, high: 1.25 * middle };
        Prediction { hit_rate: around(0.6), speed: around(middle), waiting }
    }

    #[track_caller]
    fn shows(forecast: &Forecast<'_>, expected: ExpectFile) {
        let text = forecast.text(100);
        assert!(text.lines().all(|line| line.chars().count() <= 100), "{text}");
        expected.assert_eq(&text);
    }

    fn traffic() -> Traffic {
        Traffic { dense: GIB, experts: GIB, position: 98304, windows: 0, recurrent: 0 }
    }

    #[test]
    fn a_model_that_streams_is_shown() {
        let (plan, measured) = (plan(), measured(0.1));
        let change = |what: &str, memory: u64, speed| Change {
            what: what.into(),
            memory: memory * GIB,
            beyond: memory > 16,
            drive: 1.0,
            predicted: predicted(speed, 0.3),
        };
        let now = predicted(9.3, 0.55);
        let verdict = Verdict::Runs {
            place: Place::of(&plan),
            speed: Some(speed(traffic(), &measured, &now)),
            alternative: Some(verdict::Alternative {
                memory: 20 * GIB,
                tokens_per_second: Some(14.0),
                holds_all: true,
                machine: Some(16 * GIB),
            }),
            machine: None,
            budget: plan.budget,
        };
        let expected = Expected {
            skew: Skew::Expected(Vec::new()),
            predicted: now,
            changes: vec![
                change("9.0 GiB of memory", 9, 11.0),
                change("20.0 GiB of memory: all experts fit", 20, 14.0),
            ],
        };
        let forecast = Forecast {
            verdict,
            plan: &plan,
            traffic: traffic(),
            measured: Some(&measured),
            speed: Some(expected),
            gpu: None,
            answers: Some(32),
        };
        shows(&forecast, expect_file!["../../tests/snapshots/plan_streams.txt"]);
        let object = forecast.json();
        assert_eq!(object["limit"], "drive");
        assert_eq!(object["alternative"]["memory"], 20 * GIB);
    }

    #[test]
    fn a_model_in_memory_on_a_busy_machine_is_shown() {
        let plan = Plan { budget: 24 * GIB, slot_bytes: 18 * GIB, slots: vec![6144], ..plan() };
        let measured = measured(2.8);
        let now = predicted(11.4, 0.0);
        let verdict = Verdict::Runs {
            place: Place::of(&plan),
            speed: Some(speed(Traffic { dense: GIB / 4, experts: GIB / 4, ..traffic() }, &measured, &now)),
            alternative: None,
            machine: Some(16 * GIB),
            budget: plan.budget,
        };
        let forecast = Forecast {
            verdict,
            plan: &plan,
            traffic: traffic(),
            measured: Some(&measured),
            speed: Some(Expected { skew: Skew::Known(vec![1.0]), predicted: now, changes: Vec::new() }),
            gpu: None,
            answers: None,
        };
        shows(&forecast, expect_file!["../../tests/snapshots/plan_in_memory.txt"]);
    }

    #[test]
    fn a_model_that_was_not_measured_is_shown() {
        let plan = plan();
        let forecast = Forecast {
            verdict: Verdict::Runs {
                place: Place::of(&plan),
                speed: None,
                alternative: None,
                machine: None,
                budget: plan.budget,
            },
            plan: &plan,
            traffic: Traffic { experts: 5 * GIB, ..traffic() },
            measured: None,
            speed: None,
            gpu: None,
            answers: None,
        };
        shows(&forecast, expect_file!["../../tests/snapshots/plan_unmeasured.txt"]);
        assert_eq!(forecast.json()["tokens_per_second"], Value::Null);
    }

    #[test]
    fn lines_break_between_words() {
        assert_eq!(wrapped("one two three", 7), "one two\nthree");
        assert_eq!(wrapped("extraordinary", 7), "extraordinary");
        assert_eq!(wrapped("", 7), "");
    }
}
