//! How a model runs on the machine, and what limits it.

use anyhow::Result;
use forebay_engine::internals::forecast::ComputeTime;
use forebay_engine::internals::forecast::predict::{DriveSpeed, Outlook, Prediction};
use forebay_engine::internals::memory::Machine;
use forebay_engine::plan::Plan;
use forebay_engine::{Bytes, Options, Prospect};
use serde_json::{Value, json};

use super::drive::Drive;
use crate::measured::{Load, Measured, hits_text, prediction_json, rate, speed_text};
use crate::plan::verdict::{Limit, Verdict};
use crate::plan::{OnGpu, Survey, share};

/// A model on this machine.
pub struct Diagnosis {
    pub name: String,
    /// Bytes of all its files.
    pub bytes: u64,
    pub least_memory: u64,
    /// The verdict for the CPU.
    pub verdict: Verdict,
    /// How it runs; `None` if it cannot.
    pub outcome: Option<Outcome>,
    /// The type that most of its bytes have.
    pub main_type: String,
    /// Bits per weight, on average; `None` if a number in a tensor holds several weights.
    pub bits: Option<f64>,
    /// How it runs on the GPU, if one computes.
    pub on_gpu: Option<OnGpu>,
}

/// How a model runs on the CPU.
#[derive(Clone)]
pub struct Outcome {
    pub plan: Plan,
    pub predicted: Prediction,
    pub limit: Limit,
    /// Bytes of weights computed per second, without waiting for experts.
    pub computing: f64,
    /// Bytes of memory read per second.
    pub memory: f64,
    pub drive: Option<DriveSpeed>,
}

impl Outcome {
    pub fn computing_text(&self) -> String {
        format!(
            "Weights are computed at {}; memory can be read at {}.",
            rate(self.computing),
            rate(self.memory)
        )
    }
}

impl Diagnosis {
    /// Diagnoses a model on a machine whose drive, memory and load have been measured.
    pub fn new(
        prospect: &Prospect,
        options: &Options,
        drive: Option<&Drive>,
        memory: f64,
        load: Option<Load>,
    ) -> Result<Diagnosis> {
        let file = prospect.file();
        let name = file.metadata.str("general.name").map(str::to_owned);
        let least_memory = prospect.least_memory(options)?;
        let (main_type, bits) = types(prospect);
        let (verdict, outcome) = match prospect.plan_with(options) {
            Ok(plan) => {
                let compute: ComputeTime = prospect.compute_time(options)?;
                let drive = drive.and_then(Drive::speed);
                let measured = Measured { memory, drive, compute, load };
                let outlook: Outlook = measured.outlook(prospect, options)?;
                let machine = Machine::now().total;
                let survey = Survey { prospect, options, plan: &plan, machine };
                let verdict = survey.verdict(Some(&measured), Some(&outlook), None)?;
                let traffic = prospect.traffic();
                let computing = (traffic.dense + traffic.experts) as f64 / (compute.dense + compute.experts);
                let predicted = outlook.predict(share(&plan));
                let limit = Limit::of(predicted.waiting, computing, memory);
                (verdict, Some(Outcome { plan, predicted, limit, computing, memory, drive }))
            }
            Err(error) => match Verdict::refused(&error, Some(least_memory)) {
                Some(verdict) => (verdict, None),
                None => return Err(error.into()),
            },
        };
        Ok(Diagnosis {
            name: name.unwrap_or_else(|| file.path().display().to_string()),
            bytes: file.bytes(),
            least_memory,
            verdict,
            outcome,
            main_type,
            bits,
            on_gpu: None,
        })
    }

    /// The limit on the CPU.
    pub fn limit(&self) -> Limit {
        self.outcome.as_ref().map_or(Limit::MemorySize, |outcome| outcome.limit)
    }

    pub fn text(&self) -> String {
        let mut text = format!("\n{}, {}\n", self.name, Bytes(self.bytes));
        let mut row = |name: &str, value: String| text += &format!("{name:<18}{value}\n");
        let bits = self.bits.map_or(String::new(), |bits| format!(", {bits:.1} bits each on average"));
        row("weights", format!("mostly {}{bits}", self.main_type));
        row("least memory", Bytes(self.least_memory).to_string());
        if let Some(Outcome { plan, predicted, .. }) = &self.outcome {
            if plan.expert_count > 0 {
                let slots: usize = plan.slots.iter().sum();
                row(
                    "in memory",
                    format!("{slots} of {} experts ({:.0} %)", plan.expert_count, 100.0 * share(plan)),
                );
            }
            if !plan.holds_all_experts() {
                row("cache hit rate", format!("{} expected", hits_text(predicted.hit_rate)));
                row("waiting", format!("{:.0} % of the time, for the drive", 100.0 * predicted.waiting));
            }
            row("generation", speed_text(predicted.speed));
        }
        row("limit", self.limit().name().to_owned());
        if let Some(gpu) = &self.on_gpu {
            row("GPU", gpu.short());
        }
        text
    }

    pub fn json(&self) -> Value {
        let mut object = json!({
            "name": self.name,
            "bytes": self.bytes,
            "type": self.main_type,
            "bits_per_weight": self.bits,
            "least_memory": self.least_memory,
            "bottleneck": self.limit().name(),
            "gpu": self.on_gpu.as_ref().map(OnGpu::json),
        });
        self.verdict.tell(&mut object);
        if let Some(Outcome { plan, predicted, computing, .. }) = &self.outcome {
            object["budget"] = json!(plan.budget);
            object["planned"] = json!(plan.total());
            object["share_of_experts"] = json!(share(plan));
            object["prediction"] = prediction_json(predicted);
            object["compute_bytes_per_second"] = json!(computing);
        }
        object
    }
}

/// The type that most bytes have, and the bits of a weight on average.
fn types(prospect: &Prospect) -> (String, Option<f64>) {
    let mut types: Vec<(&str, u64)> = Vec::new();
    let (mut bytes, mut weights) = (0, 0);
    for tensor in &prospect.file().tensors {
        let name = tensor.dtype.name();
        bytes += tensor.len;
        weights += tensor.elements();
        match types.iter_mut().find(|(known, _)| *known == name) {
            Some((_, bytes)) => *bytes += tensor.len,
            None => types.push((name, tensor.len)),
        }
    }
    let main = types.iter().max_by_key(|(_, bytes)| *bytes).map_or("", |(name, _)| name);
    let bits = 8.0 * bytes as f64 / weights.max(1) as f64;
    // Folders have quantised weights in unsigned integers.
    (main.to_owned(), Some(bits).filter(|_| !main.starts_with('U')))
}

#[cfg(test)]
pub mod tests {
    use forebay_engine::internals::forecast::predict::Range;

    use super::*;
    use crate::plan::tests::plan;
    use crate::plan::verdict::{Alternative, Place, Speed};

    pub fn outcome() -> Outcome {
        let around = |middle| Range { low: 0.75 * middle, middle, high: 1.25 * middle };
        Outcome {
            plan: plan(),
            predicted: Prediction { hit_rate: around(0.6), speed: around(9.3), waiting: 0.55 },
            limit: Limit::Drive,
            computing: 15e9,
            memory: 20e9,
            drive: Some(DriveSpeed { one: 1.1e9, many: 2.3e9, together: 8 }),
        }
    }

    pub fn diagnosis() -> Diagnosis {
        let outcome = outcome();
        let speed = Speed { tokens_per_second: 9.3, at_most: false, limit: outcome.limit };
        let alternative =
            Alternative { memory: 20 << 30, tokens_per_second: Some(14.0), holds_all: true, machine: None };
        Diagnosis {
            name: "Large Model".into(),
            bytes: 19 << 30,
            least_memory: 2 << 30,
            verdict: Verdict::Runs {
                place: Place::of(&outcome.plan),
                speed: Some(speed),
                alternative: Some(alternative),
                machine: None,
                budget: outcome.plan.budget,
            },
            outcome: Some(outcome),
            main_type: "Q4_K".into(),
            bits: Some(4.8),
            on_gpu: None,
        }
    }
}
