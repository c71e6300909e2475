//! What a plan comes to: one sentence for people, fields for programs.

use forebay_engine::Error;
pub use forebay_engine::internals::forecast::place::{Place, short};
use forebay_engine::internals::forecast::predict::Prediction;
use forebay_engine::plan::Plan;
use serde_json::{Value, json};

use crate::errors::in_flags;

/// The verdict on a model with a memory budget on a machine.
#[derive(Clone, Debug, PartialEq)]
pub enum Verdict {
    /// The budget is too small.
    Refused {
        /// Bytes that would suffice.
        need: u64,
        have: u64,
        /// What takes how much of it.
        parts: String,
        remedy: String,
    },
    Runs {
        place: Place,
        /// `None` where nothing was measured.
        speed: Option<Speed>,
        alternative: Option<Alternative>,
        /// Bytes of this machine's memory, if the budget is larger.
        machine: Option<u64>,
        budget: u64,
    },
}

/// The speed of generation.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Speed {
    pub tokens_per_second: f64,
    /// Whether it is an upper bound, and no estimate.
    pub at_most: bool,
    pub limit: Limit,
}

/// The part of a machine that limits the speed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Limit {
    /// There is too little memory to run at all.
    MemorySize,
    /// Tokens wait for experts from the drive.
    Drive,
    /// Weights are computed as fast as memory delivers them.
    MemoryBandwidth,
    /// Memory could deliver more than is computed.
    Processor,
    /// Tokens wait for experts on their way to the GPU.
    Pcie,
}

/// A larger budget, and what would come of it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Alternative {
    /// Bytes.
    pub memory: u64,
    /// `None` where nothing was measured.
    pub tokens_per_second: Option<f64>,
    /// Whether all experts fit.
    pub holds_all: bool,
    /// Bytes of this machine's memory, if that is less.
    pub machine: Option<u64>,
}

/// From this share of a token's time on, waiting for the drive is the limit.
const MUCH_WAITING: f64 = 0.4;

/// Products that take at least this share of the memory's bandwidth are limited by it.
const NEAR_BANDWIDTH: f64 = 0.6;

impl Limit {
    /// For a token that spends this share of its time waiting for the drive, on a machine that computes so many bytes of weights a
    /// second and reads so many from memory.
    pub fn of(waiting: f64, computing: f64, memory: f64) -> Limit {
        if waiting >= MUCH_WAITING {
            Limit::Drive
        } else if computing >= NEAR_BANDWIDTH * memory {
            Limit::MemoryBandwidth
        } else {
            Limit::Processor
        }
    }

    /// The name in JSON.
    pub fn name(self) -> &'static str {
        match self {
            Limit::MemorySize => "memory size",
            Limit::Drive => "drive",
            Limit::MemoryBandwidth => "memory bandwidth",
            Limit::Processor => "processor",
            Limit::Pcie => "PCIe",
        }
    }

    /// What it means, as a part of a sentence.
    pub fn clause(self) -> &'static str {
        match self {
            Limit::MemorySize => "memory is too small",
            Limit::Drive => "the drive is the limit",
            Limit::MemoryBandwidth => "memory bandwidth is the limit",
            Limit::Processor => "CPU-bound: unpacking these weights is slower than reading them",
            Limit::Pcie => "PCIe is the limit",
        }
    }
}

impl Verdict {
    /// For a budget that an error refuses, and the smallest that it does not; `None` for other errors.
    pub fn refused(error: &Error, least: Option<u64>) -> Option<Verdict> {
        let Error::Budget { need, have, what, remedy } = error else { return None };
        Some(Verdict::Refused {
            need: least.unwrap_or(*need),
            have: *have,
            parts: in_flags(what),
            remedy: in_flags(remedy),
        })
    }

    pub fn limit(&self) -> Option<Limit> {
        match self {
            Verdict::Refused { .. } => Some(Limit::MemorySize),
            Verdict::Runs { speed, .. } => speed.map(|speed| speed.limit),
        }
    }

    /// For people.
    pub fn sentence(&self) -> String {
        match self {
            Verdict::Refused { need, have, parts, remedy } => format!(
                "Does not run in {}: needs at least {} ({parts}). What to do: {remedy}.",
                short(*have),
                short(*need)
            ),
            Verdict::Runs { place, speed, alternative, machine, budget } => {
                let mut parts = vec![place.lead().to_owned()];
                match speed {
                    Some(speed) => {
                        let about = if speed.at_most { "at most about" } else { "about" };
                        parts.push(format!("{about} {} tokens a second", count(speed.tokens_per_second)));
                        parts.push(speed.limit.clause().into());
                    }
                    None => parts.extend(place.experts()),
                }
                let mut sentence = parts.join("; ") + ".";
                if let Some(machine) = machine {
                    sentence = format!(
                        "With {} of memory, more than the {} of this machine: {}",
                        short(*budget),
                        short(*machine),
                        uncapitalised(&sentence)
                    );
                }
                if let Some(alternative) = alternative {
                    sentence += " ";
                    sentence += &alternative.sentence(*budget);
                }
                sentence
            }
        }
    }

    /// Adds the fields of the verdict to an object.
    pub fn tell(&self, object: &mut Value) {
        object["verdict"] = json!(self.sentence());
        object["runs"] = json!(!matches!(self, Verdict::Refused { .. }));
        object["limit"] = json!(self.limit().map(Limit::name));
        let (alternative, machine) = match self {
            Verdict::Runs { alternative, machine, .. } => (*alternative, *machine),
            Verdict::Refused { .. } => (None, None),
        };
        object["alternative"] = json!(alternative.map(Alternative::json));
        object["exceeds_machine"] = json!(machine.is_some());
    }
}

impl Alternative {
    fn sentence(self, budget: u64) -> String {
        let (memory, budget) = (short(self.memory), short(budget));
        let unit = |text: &str| text.rsplit_once(' ').map(|(_, unit)| unit.to_owned());
        // `16 GiB instead of 8`
        let budget = match budget.rsplit_once(' ') {
            Some((number, _)) if unit(&memory) == unit(&budget) => number.to_owned(),
            _ => budget,
        };
        let mut effects = Vec::new();
        if self.holds_all {
            effects.push("hold all experts".to_owned());
        }
        if let Some(speed) = self.tokens_per_second {
            effects.push(format!("give about {}", count(speed)));
        }
        let machine = self
            .machine
            .map_or(String::new(), |machine| format!(", but this machine has {}", short(machine)));
        format!("{memory} instead of {budget} would {}{machine}.", effects.join(" and "))
    }

    fn json(self) -> Value {
        json!({
            "memory": self.memory,
            "tokens_per_second": self.tokens_per_second,
            "holds_all_experts": self.holds_all,
            "exceeds_machine": self.machine.is_some(),
        })
    }
}

/// What is gained by less than this factor is not worth a sentence.
const WORTH_TELLING: f64 = 1.15;

/// What more memory would bring, on a machine with so much of it: all experts in memory if the machine has room for them, else as much
/// as it has; what it has not got is told as such.
///
/// `all` is the budget that holds all experts, and `predict` says what would come of a budget, if anything is known of the speed.
pub fn alternative<E>(
    plan: &Plan,
    all: u64,
    machine: Option<u64>,
    mut predict: impl FnMut(u64) -> Result<Option<Prediction>, E>,
) -> Result<Option<Alternative>, E> {
    if plan.holds_all_experts() || plan.budget == u64::MAX {
        return Ok(None);
    }
    let speed = |prediction: Option<Prediction>| prediction.map(|p| p.speed.middle);
    let now = speed(predict(plan.budget)?);
    let all = round_up(all);
    // Something is left to the system, as where nobody chooses a budget.
    let room = machine.map(|total| total - total / 16);
    let is_here = |memory: u64| room.is_none_or(|room| memory <= room);
    let half_more = plan.budget / 2 * 3;
    let mut candidates = vec![all];
    // What less than all of them would bring is told in speed alone.
    if now.is_some() {
        candidates
            .extend([plan.budget.saturating_mul(2), half_more].map(round_up).iter().filter(|&&m| m < all));
    }
    let fits = candidates.iter().copied().find(|&memory| is_here(memory) && memory > plan.budget);
    let memory = fits.unwrap_or(all);
    let then = speed(predict(memory)?);
    let helps = match (now, then) {
        (Some(now), Some(then)) => then >= WORTH_TELLING * now,
        _ => true,
    };
    Ok(helps.then_some(Alternative {
        memory,
        tokens_per_second: then,
        holds_all: memory >= all,
        machine: machine.filter(|_| !is_here(memory)),
    }))
}

/// To whole GiB, or to sixteen MiB where there are few of them.
fn round_up(bytes: u64) -> u64 {
    let unit = if bytes > 2 << 30 { 1 << 30 } else { 16 << 20 };
    bytes.checked_next_multiple_of(unit).unwrap_or(bytes)
}

/// A number of which nobody knows more than the first digits.
pub fn count(x: f64) -> String {
    match x {
        x if x >= 100.0 => {
            let unit = 10f64.powf(x.log10().floor() - 1.0);
            format!("{:.0}", (x / unit).round() * unit)
        }
        x if x >= 3.0 => format!("{x:.0}"),
        x if x >= 0.1 => format!("{x:.1}"),
        x => format!("{x:.2}"),
    }
}

/// A sentence, to follow a colon.
pub fn uncapitalised(sentence: &str) -> String {
    let mut chars = sentence.chars();
    chars.next().map_or(String::new(), |first| first.to_lowercase().chain(chars).collect())
}

#[cfg(test)]
mod tests {
    use forebay_engine::internals::forecast::predict::Range;

    use super::super::tests::plan;
    use super::*;

    const GIB: u64 = 1 << 30;

    fn range(middle: f64) -> Range {
        Range { low: middle, middle, high: middle }
    }

    fn prediction(speed: f64) -> Prediction {
        Prediction { hit_rate: range(0.5), speed: range(speed), waiting: 0.5 }
    }

    fn speed(tokens_per_second: f64, limit: Limit) -> Option<Speed> {
        Some(Speed { tokens_per_second, at_most: false, limit })
    }

    fn runs(place: Place, speed: Option<Speed>, alternative: Option<Alternative>) -> String {
        Verdict::Runs { place, speed, alternative, machine: None, budget: 8 * GIB }.sentence()
    }

    const STREAMS: Place = Place::Drive { slots: 1300, experts: 6144 };

    #[test]
    fn the_limit_is_what_a_token_waits_for() {
        let memory = 20e9;
        for (waiting, computing, expected) in [
            (0.9, 18e9, Limit::Drive),
            (MUCH_WAITING, 1e9, Limit::Drive),
            (0.39, 18e9, Limit::MemoryBandwidth),
            (0.0, NEAR_BANDWIDTH * memory, Limit::MemoryBandwidth),
            (0.39, 11e9, Limit::Processor),
            (0.0, 1e9, Limit::Processor),
        ] {
            assert_eq!(Limit::of(waiting, computing, memory), expected, "{waiting}, {computing}");
        }
    }

    #[test]
    fn each_case_has_its_sentence() {
        let more = |memory, machine| Alternative {
            memory: memory * GIB,
            tokens_per_second: Some(14.2),
            holds_all: false,
            machine,
        };
        assert_eq!(
            runs(STREAMS, speed(9.3, Limit::Drive), Some(more(16, None))),
            "Runs; about 9 tokens a second; the drive is the limit. 16 GiB instead of 8 would give about 14."
        );
        assert_eq!(
            runs(
                STREAMS,
                speed(0.62, Limit::Drive),
                Some(Alternative { holds_all: true, ..more(20, Some(12 * GIB)) })
            ),
            "Runs; about 0.6 tokens a second; the drive is the limit. 20 GiB instead of 8 would hold all experts and give \
             about 14, but this machine has 12 GiB."
        );
        assert_eq!(
            runs(Place::Memory, speed(31.0, Limit::MemoryBandwidth), None),
            "Runs wholly from memory; about 31 tokens a second; memory bandwidth is the limit."
        );
        assert_eq!(
            runs(STREAMS, speed(2.04, Limit::Processor), None),
            "Runs; about 2.0 tokens a second; CPU-bound: unpacking these weights is slower than reading them."
        );
        assert_eq!(
            runs(
                STREAMS,
                None,
                Some(Alternative { tokens_per_second: None, holds_all: true, ..more(20, None) })
            ),
            "Runs; 21 % of the experts are in memory, the others are read from the drive when they are used. 20 GiB \
             instead of 8 would hold all experts."
        );
        assert_eq!(runs(Place::Memory, None, None), "Runs wholly from memory.");
        assert_eq!(runs(Place::Gpu, None, None), "Runs wholly on the GPU.");
        let pcie = Speed { tokens_per_second: 97.4, at_most: true, limit: Limit::Pcie };
        assert_eq!(
            runs(Place::BesideGpu { slots: 100, experts: 400 }, Some(pcie), None),
            "Runs on the GPU; at most about 97 tokens a second; PCIe is the limit."
        );
    }

    #[test]
    fn numbers_have_the_digits_that_are_known() {
        let counts = [1346.0, 476.2, 99.7, 9.3, 2.04, 0.62, 0.034].map(count);
        assert_eq!(counts, ["1300", "480", "100", "9", "2.0", "0.6", "0.03"]);
    }

    #[test]
    fn a_budget_beyond_the_machine_is_named() {
        let verdict = Verdict::Runs {
            place: Place::Memory,
            speed: speed(31.0, Limit::MemoryBandwidth),
            alternative: None,
            machine: Some(47 * GIB / 2),
            budget: 200 * GIB,
        };
        assert_eq!(
            verdict.sentence(),
            "With 200 GiB of memory, more than the 23.5 GiB of this machine: runs wholly from memory; about 31 tokens a \
             second; memory bandwidth is the limit."
        );
        let mut object = json!({});
        verdict.tell(&mut object);
        assert_eq!((&object["exceeds_machine"], &object["runs"]), (&json!(true), &json!(true)));
        assert_eq!((&object["limit"], &object["alternative"]), (&json!("memory bandwidth"), &Value::Null));
    }

    #[test]
    fn a_refusal_says_what_is_needed_and_what_to_change() {
        let error = Error::Budget {
            need: 7 * GIB,
            have: 6 * GIB,
            what: "dense weights 4.0 GiB, scratch 3.0 GiB".into(),
            remedy: "give it more memory with Options::memory, or use a smaller model".into(),
        };
        let verdict = Verdict::refused(&error, Some(15 * GIB / 2)).unwrap();
        assert_eq!(
            verdict.sentence(),
            "Does not run in 6 GiB: needs at least 7.5 GiB (dense weights 4.0 GiB, scratch 3.0 GiB). What to do: give it \
             more memory with --memory, or use a smaller model."
        );
        assert_eq!(verdict.limit(), Some(Limit::MemorySize));
        assert_eq!(Verdict::refused(&Error::Cancelled, None), None);
    }

    #[test]
    fn an_alternative_is_predicted_and_fits_the_machine() {
        // 18 GiB of experts, 8 GiB of budget.
        let plan = Plan { budget: 8 * GIB, ..plan() };
        let all = 20 * GIB - 5;
        let speed_of = |memory: u64| if memory >= 20 * GIB { 14.0 } else { memory as f64 / GIB as f64 };
        let found = |machine: Option<u64>| {
            let predict = |memory| Ok::<_, ()>(Some(prediction(speed_of(memory))));
            alternative(&plan, all, machine, predict).unwrap()
        };
        let expect = |memory, speed, holds_all, machine| {
            Some(Alternative { memory: memory * GIB, tokens_per_second: Some(speed), holds_all, machine })
        };
        assert_eq!(found(Some(24 * GIB)), expect(20, 14.0, true, None));
        assert_eq!(found(None), expect(20, 14.0, true, None), "where nobody knows, nothing is ruled out");
        assert_eq!(found(Some(18 * GIB)), expect(16, 16.0, false, None));
        assert_eq!(found(Some(14 * GIB)), expect(12, 12.0, false, None));
        // The machine has no more: what it would take is said with what there is.
        assert_eq!(found(Some(10 * GIB)), expect(20, 14.0, true, Some(10 * GIB)));

        let predict = |_| Ok::<_, ()>(Some(prediction(9.0)));
        assert_eq!(
            alternative(&plan, all, None, predict).unwrap(),
            None,
            "what changes nothing is not offered"
        );
        let unknown = alternative(&plan, all, None, |_| Ok::<_, ()>(None)).unwrap().unwrap();
        assert_eq!((unknown.tokens_per_second, unknown.holds_all), (None, true));
        let resident = Plan { slots: vec![6144], ..plan.clone() };
        assert_eq!(alternative(&resident, all, None, |_| Ok::<_, ()>(None)).unwrap(), None);
    }
}
