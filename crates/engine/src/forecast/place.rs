//! Where a model's experts are, in words.

use crate::error::Bytes;
use crate::plan::Plan;

/// Where a model's experts are.
#[derive(Clone, Debug, PartialEq)]
pub enum Place {
    /// All in memory, or the model has none.
    Memory,
    /// So many of all in memory, the others on the drive.
    Drive {
        /// Experts that there is memory for.
        slots: usize,
        /// All experts.
        experts: usize,
    },
    /// All in the GPU's memory.
    Gpu,
    /// So many of all in the GPU's memory; the others in memory and, if there is no room, on the drive.
    BesideGpu {
        /// Experts that there is GPU memory for.
        slots: usize,
        /// All experts.
        experts: usize,
    },
}

impl Place {
    /// The place in a plan.
    pub fn of(plan: &Plan) -> Place {
        let experts = plan.expert_count;
        match &plan.device {
            Some(_) if plan.device_holds_all_experts() => Place::Gpu,
            Some(gpu) => Place::BesideGpu { slots: gpu.slot_count(), experts },
            None if plan.holds_all_experts() => Place::Memory,
            None => Place::Drive { slots: plan.slots.iter().sum(), experts },
        }
    }

    /// The beginning of a sentence.
    pub fn lead(&self) -> &'static str {
        match self {
            Place::Memory => "Runs wholly from memory",
            Place::Drive { .. } => "Runs",
            Place::Gpu => "Runs wholly on the GPU",
            Place::BesideGpu { .. } => "Runs on the GPU",
        }
    }

    /// Where experts are, for a sentence that tells no speed.
    pub fn experts(&self) -> Option<String> {
        let (slots, experts, first, rest) = match *self {
            Place::Memory | Place::Gpu => return None,
            Place::Drive { slots, experts } => (slots, experts, "in memory", "are read from the drive"),
            Place::BesideGpu { slots, experts } => (slots, experts, "in GPU memory", "are uploaded"),
        };
        let percent = 100.0 * slots as f64 / experts as f64;
        Some(format!("{percent:.0} % of the experts are {first}, the others {rest} when they are used"))
    }
}

/// The sentence about a model that is loaded, of which nothing was measured.
pub fn of_loaded(plan: &Plan) -> String {
    let place = Place::of(plan);
    let mut sentence = match place.experts() {
        Some(experts) => format!("{}; {experts}.", place.lead()),
        None => format!("{}.", place.lead()),
    };
    // How much the least budget for all of them is, only the model's description knows.
    if let Place::Drive { slots, experts } = place
        && slots < experts
    {
        let missing = plan.experts.saturating_sub(plan.slot_bytes);
        sentence += &format!(" About {} more memory would hold all of them.", short(missing));
    }
    sentence
}

/// `8 GiB`, `7.5 GiB`
pub fn short(bytes: u64) -> String {
    Bytes(bytes).to_string().replace(".0 ", " ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::DevicePlan;

    const GIB: u64 = 1 << 30;

    fn plan() -> Plan {
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

    #[test]
    fn a_loaded_model_is_judged_without_measuring() {
        assert_eq!(
            of_loaded(&plan()),
            "Runs; 21 % of the experts are in memory, the others are read from the drive when they are used. About 14 GiB \
             more memory would hold all of them."
        );
        assert_eq!(of_loaded(&Plan { slots: vec![6144], ..plan() }), "Runs wholly from memory.");
        let device = DevicePlan { budget: 9, dense: 1, slot_bytes: 1, slots: vec![3072], scratch: 1, kv: 1 };
        let beside = Plan { device: Some(device.clone()), ..plan() };
        assert_eq!(
            of_loaded(&beside),
            "Runs on the GPU; 50 % of the experts are in GPU memory, the others are uploaded when they are used."
        );
        let all = Plan { device: Some(DevicePlan { slots: vec![6144], ..device }), ..plan() };
        assert_eq!(of_loaded(&all), "Runs wholly on the GPU.");
    }
}
