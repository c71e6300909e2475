//! Where a model would be that is split by layers over several machines, and how fast it would run there.

use std::ops::Range;
use std::path::Path;
use std::process::ExitCode;

use anyhow::Result;
use forebay_engine::internals::forecast::ComputeTime;
use forebay_engine::internals::forecast::predict::{self, Outlook};
use forebay_engine::plan::{Plan, Traffic};
use forebay_engine::{Bytes, Error, Options, Prospect};
use serde_json::{Value, json};

use super::verdict::{count, short};
use super::{Found, Request, picture, share, wrapped};
use crate::measured::{Measured, range_json, speed_text};
use crate::output::print;

/// Seconds for the hidden states of a token to a stage and back, assumed: a remote call on a local network.
const HOP: f64 = 0.002;

/// Several machines like this one, each with a stage of the model.
struct Stages {
    /// Bytes of memory of each machine that the model may use.
    memory: u64,
    stages: Vec<Stage>,
    /// The whole model on one of the machines, or why it does not run there.
    one: std::result::Result<Plan, Error>,
    /// What one machine computes, if it was measured: the expected speed of the whole model with such a share of its
    /// experts in memory.
    speeds: Option<Speeds>,
}

/// Some layers of the model on one machine.
struct Stage {
    layers: Range<usize>,
    plan: Plan,
}

/// Expected speeds, in tokens a second.
#[derive(Clone, Copy)]
struct Speeds {
    /// Of a token that passes all stages one after the other.
    staged: predict::Range,
    /// On one machine, if the model runs there.
    one: Option<predict::Range>,
}

/// How the stages compare with one machine.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Advice {
    /// One machine holds the model.
    Replicas,
    /// One machine runs the model, but has to read experts.
    Either,
    /// The model runs only in stages.
    Stages,
}

/// Prints the plan of a model in `count` stages.
pub fn show(request: &Request<'_>, count: usize) -> Result<ExitCode> {
    let found = Found::of(request)?;
    let measured = found.measure(request)?;
    let Found { path, options, prospect, .. } = &found;
    let stages = match Stages::new(path, prospect, options, count, measured.as_ref()) {
        Ok(stages) => stages,
        Err(error) => return found.refuse(request, error, None),
    };
    print(&if request.json {
        format!("{:#}\n", stages.json())
    } else {
        found.note() + &stages.text(picture::width())
    })?;
    Ok(ExitCode::SUCCESS)
}

impl Stages {
    /// Plans the model in `count` stages, each on a machine like this one.
    ///
    /// # Errors
    /// [`Error::Budget`] if a stage does not fit its machine; if the model cannot be read or has fewer layers.
    fn new(
        path: &Path,
        prospect: &Prospect,
        options: &Options,
        count: usize,
        measured: Option<&(Measured, Outlook)>,
    ) -> std::result::Result<Stages, Error> {
        let mut stages = Vec::new();
        let mut outlooks = Vec::new();
        for layers in prospect.split(count)? {
            let free = options.clone().memory(u64::MAX).expert_memory(None).layers(layers.clone());
            let part = Prospect::new(path, &free)?;
            let plan = part.plan_with(options).map_err(|error| of_stage(error, &layers))?;
            if let Some((measured, outlook)) = measured {
                let compute = computing(measured.compute, part.traffic(), prospect.traffic());
                let routed = part.routed_layers().iter().filter(|layer| layer.experts > 0).count();
                outlooks.push((Outlook { compute, layers: routed, ..outlook.clone() }, share(&plan)));
            }
            stages.push(Stage { layers, plan });
        }
        let one = prospect.plan_with(options);
        let speeds = measured.map(|(_, outlook)| Speeds {
            staged: in_turn(outlooks.iter().map(|(outlook, share)| outlook.predict(*share).speed)),
            one: one.as_ref().ok().map(|plan| outlook.predict(share(plan)).speed),
        });
        Ok(Stages { memory: stages[0].plan.budget, stages, one, speeds })
    }

    fn advice(&self) -> Advice {
        match &self.one {
            Ok(plan) if plan.holds_all_experts() => Advice::Replicas,
            Ok(_) => Advice::Either,
            Err(_) => Advice::Stages,
        }
    }

    /// What to do, with the speeds if they are known.
    fn verdict(&self) -> String {
        let (machines, memory) = (self.stages.len(), short(self.memory));
        let holds_all = self.stages.iter().all(|stage| stage.plan.holds_all_experts());
        let staged = self.speeds.map(|speeds| count(speeds.staged.middle));
        let one = self.speeds.and_then(|speeds| speeds.one);
        let place = if holds_all { "all experts in memory" } else { "experts read from all drives" };
        match (self.advice(), staged, one) {
            (Advice::Replicas, Some(staged), Some(one)) => format!(
                "One machine with {memory} holds the model, so {machines} stages would be slower: about {staged} tokens a \
                 second instead of {}. Run the whole model on each machine instead: {machines} conversations at \
                 once would get about {} in total.",
                count(one.middle),
                count(machines as f64 * one.middle)
            ),
            (Advice::Replicas, ..) => format!(
                "One machine with {memory} holds the model, so {machines} stages would be slower. Run the whole model on each \
                 machine instead."
            ),
            (Advice::Either, Some(staged), Some(one)) => {
                let factor = self.speeds.map_or(1.0, |speeds| speeds.staged.middle / one.middle);
                let gain = if factor > 1.0 {
                    format!("{factor:.1} times as fast")
                } else {
                    format!("slower; run the whole model on each of the {machines} machines instead")
                };
                format!(
                    "{machines} stages with {memory} each: about {staged} tokens a second, with {place}. One machine reads \
                     more experts from its drive and gives about {}: the stages are {gain}.",
                    count(one.middle)
                )
            }
            (Advice::Stages, Some(staged), _) => format!(
                "One machine with {memory} cannot run the model; {machines} stages can: about {staged} tokens a second, with \
                 {place}."
            ),
            (Advice::Stages, ..) => format!(
                "One machine with {memory} cannot run the model; {machines} stages can, with {place}."
            ),
            (Advice::Either, ..) => format!(
                "{machines} stages with {memory} each run with {place}. One machine would read more experts from its \
                 drive."
            ),
        }
    }

    fn text(&self, width: usize) -> String {
        let mut text = wrapped(&self.verdict(), width);
        text += &format!(
            "\n\n{:<7}{:<12}{:>11}{:>15}{:>13}{:>13}  {}\n",
            "stage", "layers", "planned", "dense weights", "context", "experts", "in memory"
        );
        for (number, Stage { layers, plan }) in self.stages.iter().enumerate() {
            let layers = format!("{}..{}", layers.start, layers.end);
            let held = match plan.expert_count {
                0 => "no experts".to_owned(),
                all => {
                    format!("{} of {all} ({:.0} %)", plan.slots.iter().sum::<usize>(), 100.0 * share(plan))
                }
            };
            text += &format!(
                "{:<7}{layers:<12}{:>11}{:>15}{:>13}{:>13}  {held}\n",
                number + 1,
                Bytes(plan.total()).to_string(),
                Bytes(plan.dense).to_string(),
                Bytes(plan.kv).to_string(),
                Bytes(plan.slot_bytes).to_string(),
            );
        }
        if let Some(Speeds { staged, one }) = self.speeds {
            let one = one.map_or_else(|| "does not run".into(), speed_text);
            text += &format!(
                "\n{:<16}{}\n{:<16}{one}\n",
                format!("{} stages", self.stages.len()),
                speed_text(staged),
                "one machine",
            );
        }
        format!("{text}\n{}\n", wrapped(&self.assumptions(), width))
    }

    /// What the speeds assume.
    fn assumptions(&self) -> String {
        let mut text = String::from(
            "A token passes the stages one after the other, so the stages share the work of a token and do not speed up \
             its computation. Each stage reads only its own experts, into its own memory.",
        );
        if self.speeds.is_some() {
            text += &format!(
                " The speeds assume that each machine has the processor and the drive of this one, and {} ms for the hidden \
                 states of a token to each of the other stages and back.",
                HOP * 1e3
            );
        }
        text + " At present only the library runs stages: see docs/several-machines.md."
    }

    fn json(&self) -> Value {
        let stage = |Stage { layers, plan }: &Stage| {
            json!({
                "layers": [layers.start, layers.end],
                "planned": plan.total(),
                "dense": plan.dense,
                "kv": plan.kv,
                "expert_slots": { "bytes": plan.slot_bytes, "count": plan.slots.iter().sum::<usize>() },
                "experts": { "bytes": plan.experts, "count": plan.expert_count },
                "streams": plan.streams(),
            })
        };
        let one = self.one.as_ref().ok();
        json!({
            "verdict": self.verdict(),
            "better": if self.is_slower() { "replicas" } else { "stages" },
            "budget": self.memory,
            "stages": self.stages.iter().map(stage).collect::<Vec<_>>(),
            "hop_seconds": HOP,
            "tokens_per_second": self.speeds.map(|speeds| range_json(speeds.staged)),
            "one_machine": {
                "runs": one.is_some(),
                "streams": one.map(Plan::streams),
                "tokens_per_second": self.speeds.and_then(|speeds| speeds.one).map(range_json),
            },
        })
    }

    /// Whether one machine is as fast as all stages.
    fn is_slower(&self) -> bool {
        let slower = |speeds: Speeds| speeds.one.is_some_and(|one| one.middle >= speeds.staged.middle);
        self.advice() == Advice::Replicas || self.speeds.is_some_and(slower)
    }
}

/// The time of a stage's products: its share of the bytes that a token reads.
fn computing(all: ComputeTime, part: Traffic, whole: Traffic) -> ComputeTime {
    let share = |part: u64, whole: u64| part as f64 / whole.max(1) as f64;
    ComputeTime {
        dense: all.dense * share(part.dense, whole.dense),
        experts: all.experts * share(part.experts, whole.experts),
    }
}

/// The speed of tokens that pass stages of these speeds one after the other.
fn in_turn(stages: impl ExactSizeIterator<Item = predict::Range> + Clone) -> predict::Range {
    let hops = (stages.len() - 1) as f64 * HOP;
    let speed = |of: fn(&predict::Range) -> f64| {
        1.0 / (hops + stages.clone().map(|stage| 1.0 / of(&stage)).sum::<f64>())
    };
    predict::Range { low: speed(|s| s.low), middle: speed(|s| s.middle), high: speed(|s| s.high) }
}

/// An error about a stage's memory, with its layers.
fn of_stage(error: Error, layers: &Range<usize>) -> Error {
    match error {
        Error::Budget { need, have, what, remedy } => {
            let what = format!("in the stage with layers {}..{}: {what}", layers.start, layers.end);
            Error::Budget { need, have, what, remedy: format!("use more stages, or {remedy}") }
        }
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use expect_test::{ExpectFile, expect_file};

    use super::*;

    const GIB: u64 = 1 << 30;

    fn plan(dense: u64, slots: usize, experts: usize) -> Plan {
        Plan {
            budget: 60 * GIB,
            dense: dense * GIB,
            kv: 400 << 20,
            slot_bytes: slots as u64 * GIB,
            slots: vec![slots],
            experts: experts as u64 * GIB,
            expert_count: experts,
            ..crate::plan::tests::plan()
        }
    }

    /// A model of 380 GiB in four stages.
    fn stages(slots: usize) -> Vec<Stage> {
        let part = |i: usize| Stage { layers: 15 * i..15 * (i + 1), plan: plan(3, slots, 92) };
        (0..4).map(part).collect()
    }

    fn around(middle: f64) -> predict::Range {
        predict::Range { low: 0.75 * middle, middle, high: 1.25 * middle }
    }

    fn refused() -> Error {
        let (what, remedy) = (String::new(), String::new());
        Error::Budget { need: 61 * GIB, have: 60 * GIB, what, remedy }
    }

    #[track_caller]
    fn shows(stages: &Stages, expected: ExpectFile) {
        let text = stages.text(100);
        assert!(text.lines().all(|line| line.chars().count() <= 100), "{text}");
        expected.assert_eq(&text);
    }

    #[test]
    fn a_model_that_is_larger_than_the_machines_is_shown() {
        let speeds = Some(Speeds { staged: around(4.2), one: Some(around(1.1)) });
        let one = Ok(plan(12, 44, 368));
        let stages = Stages { memory: 60 * GIB, stages: stages(55), one, speeds };
        shows(&stages, expect_file!["../../tests/snapshots/plan_stages.txt"]);
        let object = stages.json();
        assert_eq!((&object["better"], &object["stages"][1]["layers"]), (&json!("stages"), &json!([15, 30])));
    }

    #[test]
    fn replicas_are_better_for_a_model_that_fits_one_machine() {
        let speeds = Some(Speeds { staged: around(9.0), one: Some(around(9.6)) });
        let one = Ok(Plan { budget: 400 * GIB, ..plan(12, 368, 368) });
        let stages = Stages { memory: 400 * GIB, stages: stages(92), one, speeds };
        shows(&stages, expect_file!["../../tests/snapshots/plan_stages_slower.txt"]);
        assert_eq!(stages.json()["better"], "replicas");
    }

    #[test]
    fn what_was_not_measured_or_does_not_run_is_said() {
        let alone = |one, speeds| Stages { memory: 60 * GIB, stages: stages(92), one, speeds }.verdict();
        assert_eq!(
            alone(Err(refused()), None),
            "One machine with 60 GiB cannot run the model; 4 stages can, with all experts in memory."
        );
        let speeds = Some(Speeds { staged: around(5.0), one: None });
        assert!(alone(Err(refused()), speeds).contains("4 stages can: about 5"));
        let slow = Some(Speeds { staged: around(5.0), one: Some(around(6.0)) });
        assert!(alone(Ok(plan(12, 44, 368)), slow).ends_with("on each of the 4 machines instead."));
    }

    #[test]
    fn a_token_takes_the_time_of_all_stages_and_of_the_way() {
        let speed = in_turn([around(10.0), around(5.0)].into_iter());
        assert!((1.0 / speed.middle - (0.1 + 0.2 + HOP)).abs() < 1e-9);
        assert!(speed.low < speed.middle && speed.middle < speed.high);
        let one = in_turn([around(10.0)].into_iter());
        assert!((one.middle - 10.0).abs() < 1e-9);
    }
}
