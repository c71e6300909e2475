//! Where a model would be with a GPU: in GPU memory, in RAM, on the drive.

use anyhow::Result;
use forebay_devices::Gpu;
use forebay_engine::internals::forecast::predict::{Outlook, Range};
use forebay_engine::plan::{DevicePlan, Plan};
use forebay_engine::{Bytes, Error, Options, Prospect};
use serde_json::{Value, json};

use super::share;
use super::verdict::{Limit, Place, Speed, Verdict};
use crate::errors::in_flags;
use crate::measured::{hits_text, range_json, rate};

/// A model on the machine's GPU.
pub struct OnGpu {
    name: String,
    /// Whether the GPU computes in the computer's memory. Then the plan is the CPU's.
    shares_memory: bool,
    /// Or why the GPU is not used.
    plan: std::result::Result<Plan, Error>,
    flow: Option<Flow>,
}

/// Where a token's experts come from, and how fast they can come.
struct Flow {
    /// Bytes a second, from RAM to the GPU.
    link: f64,
    /// Bytes a second, from the drive; `None` if nothing is read.
    drive: Option<f64>,
    /// Shares of a token's experts: in GPU memory, and in either memory.
    on_gpu: Range,
    in_memory: Range,
    /// Bytes of a token's experts.
    bytes: f64,
}

impl OnGpu {
    /// Plans the model for a GPU; `outlook` has the measured speed of the drive and the model's expert usage.
    pub fn new(
        gpu: &Gpu,
        prospect: &Prospect,
        options: &Options,
        outlook: Option<&Outlook>,
    ) -> Result<OnGpu> {
        let device = &gpu.device;
        let plan = prospect.plan_with(&options.clone().device(Some(device.clone())));
        let flow = match (&plan, outlook) {
            (Ok(plan), Some(outlook)) if plan.device.is_some() && plan.moves_experts() => {
                Some(Flow::new(plan, outlook, prospect.traffic().experts, device.link_speed()?))
            }
            _ => None,
        };
        Ok(OnGpu { name: gpu.name.clone(), shares_memory: device.shares_memory(), plan, flow })
    }

    /// The plan, if the GPU would compute in memory of its own.
    pub fn computes(&self) -> Option<&Plan> {
        self.plan.as_ref().ok().filter(|plan| plan.device.is_some())
    }

    /// The verdict if the GPU would compute in memory of its own, with the speed that PCIe and the drive allow where they were measured and limit it.
    pub fn verdict(&self) -> Option<Verdict> {
        let plan = self.computes()?;
        let bound = self.flow.as_ref().and_then(Flow::bound);
        let speed = bound.map(|(tokens_per_second, limit)| Speed { tokens_per_second, at_most: true, limit });
        let (place, budget) = (Place::of(plan), plan.budget);
        Some(Verdict::Runs { place, speed, alternative: None, machine: None, budget })
    }

    /// A line about the GPU, to follow its name.
    pub fn short(&self) -> String {
        let (plan, gpu) = match &self.plan {
            Ok(plan) => (plan, plan.device.as_ref()),
            Err(error) => return format!("is not used: {}", in_flags(&error.to_string())),
        };
        let Some(gpu) = gpu else { return "computes in the computer's memory".into() };
        format!(
            "computes, with {} of {} of its memory: dense weights {}, {} of {} experts {}, context of {} {}, scratch {}",
            Bytes(gpu.total()),
            Bytes(gpu.budget),
            Bytes(gpu.dense),
            gpu.slot_count(),
            plan.expert_count,
            Bytes(gpu.slot_bytes),
            plan.reserved,
            Bytes(gpu.kv),
            Bytes(gpu.scratch)
        )
    }

    pub fn text(&self) -> String {
        let (plan, gpu) = match &self.plan {
            Ok(plan @ Plan { device: Some(gpu), .. }) => (plan, gpu),
            _ => return format!("{} {}\n", self.name, self.short()),
        };
        let experts = |slots: usize, share: f64| {
            format!("{slots} of {} experts ({:.0} %)", plan.expert_count, 100.0 * share)
        };
        let mut lines = vec![
            (self.name.clone(), format!("{} of {}", Bytes(gpu.total()), Bytes(gpu.budget)), String::new()),
            ("  dense weights".into(), Bytes(gpu.dense).to_string(), String::new()),
            (format!("  context of {}", plan.reserved), Bytes(gpu.kv).to_string(), String::new()),
            (
                "  scratch".into(),
                Bytes(gpu.scratch).to_string(),
                format!("prompts in chunks of {} tokens", plan.chunk),
            ),
        ];
        if plan.expert_count > 0 {
            let note = experts(gpu.slot_count(), gpu_share(gpu, plan));
            lines.push(("  expert slots".into(), Bytes(gpu.slot_bytes).to_string(), note));
        }
        if plan.moves_experts() {
            let note = experts(plan.slots.iter().sum(), share(plan));
            lines.push(("experts in RAM".into(), Bytes(plan.slot_bytes).to_string(), note));
            let drive = if plan.streams() { "the other experts" } else { "nothing is read from it" };
            lines.push(("drive".into(), String::new(), drive.into()));
        }
        let mut text = String::new();
        for (name, value, note) in lines {
            text += format!("{name:<22}{value:>12}  {note}").trim_end();
            text.push('\n');
        }
        text + &self.flow.as_ref().map_or(String::new(), Flow::text)
    }

    pub fn json(&self) -> Value {
        match &self.plan {
            Ok(plan) => json!({
                "name": self.name,
                "shares_memory": self.shares_memory,
                "budget": plan.device.as_ref().map(|gpu| gpu.budget),
                "planned": plan.device.as_ref().map(DevicePlan::total),
                "dense": plan.device.as_ref().map(|gpu| gpu.dense),
                "kv": plan.device.as_ref().map(|gpu| gpu.kv),
                "scratch": plan.device.as_ref().map(|gpu| gpu.scratch),
                "expert_slots": plan.device.as_ref().map(|gpu| json!({
                    "bytes": gpu.slot_bytes, "count": gpu.slot_count(),
                })),
                "memory": {
                    "planned": plan.total(),
                    "expert_slots": { "bytes": plan.slot_bytes, "count": plan.slots.iter().sum::<usize>() },
                },
                "chunk": plan.chunk,
                "streams": plan.streams(),
                "flow": self.flow.as_ref().map(Flow::json),
            }),
            Err(error) => {
                json!({ "name": self.name, "shares_memory": self.shares_memory, "error": in_flags(&error.to_string()) })
            }
        }
    }
}

fn gpu_share(gpu: &DevicePlan, plan: &Plan) -> f64 {
    if plan.expert_count == 0 { 1.0 } else { gpu.slot_count() as f64 / plan.expert_count as f64 }
}

impl Flow {
    fn new(plan: &Plan, outlook: &Outlook, bytes: u64, link: f64) -> Flow {
        let above = plan.device.as_ref().map_or(0.0, |gpu| gpu_share(gpu, plan));
        let both = if plan.streams() { (above + share(plan)).min(1.0) } else { 1.0 };
        Flow {
            link,
            drive: outlook.drive.map(|drive| drive.many).filter(|_| plan.streams()),
            on_gpu: outlook.skew.hit_rate(above),
            in_memory: outlook.skew.hit_rate(both),
            bytes: bytes as f64,
        }
    }

    /// Tokens a second that PCIe and the drive allow, and which of them is slower; `None` if all experts that are used are expected to
    /// be in GPU memory.
    fn bound(&self) -> Option<(f64, Limit)> {
        let link = (1.0 - self.on_gpu.middle) * self.bytes / self.link;
        let drive = self.drive.map_or(0.0, |drive| (1.0 - self.in_memory.middle) * self.bytes / drive);
        let (seconds, by) = if drive > link { (drive, Limit::Drive) } else { (link, Limit::Pcie) };
        (seconds > 0.0).then(|| (1.0 / seconds, by))
    }

    fn text(&self) -> String {
        let mut text = format!("{:<22}{:>12}\n", "PCIe", rate(self.link));
        if let Some(drive) = self.drive {
            text += &format!("{:<22}{:>12}\n", "drive", rate(drive));
        }
        text += &format!(
            "\ncache hit rate  {} in GPU memory, {} in GPU memory or RAM\n",
            hits_text(self.on_gpu),
            hits_text(self.in_memory)
        );
        if let Some((tokens, by)) = self.bound() {
            text += &format!("generation      at most {tokens:.0} tok/s; {}\n", by.clause());
        }
        text
    }

    fn json(&self) -> Value {
        let (tokens, by) = self.bound().unzip();
        json!({
            "link_bytes_per_second": self.link,
            "drive_bytes_per_second": self.drive,
            "gpu_hit_rate": range_json(self.on_gpu),
            "hit_rate": range_json(self.in_memory),
            "tokens_per_second_at_most": tokens,
            "bound_by": by.map(Limit::name),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn flow(on_gpu: f64, in_memory: f64) -> Flow {
        let range = |middle| Range { low: middle, middle, high: middle };
        let (on_gpu, in_memory) = (range(on_gpu), range(in_memory));
        Flow { link: 50e9, drive: Some(5e9), on_gpu, in_memory, bytes: 1e9 }
    }

    #[test]
    fn the_slower_way_is_the_bound() {
        // Half of a gigabyte over PCIe is ten milliseconds; a tenth of one from the drive is twenty.
        assert_eq!(flow(0.5, 1.0).bound(), Some((100.0, Limit::Pcie)));
        let (tokens, by) = flow(0.5, 0.9).bound().unwrap();
        assert!((tokens - 50.0).abs() < 1e-6 && by == Limit::Drive, "{tokens} by {by:?}");
    }

    #[test]
    fn what_is_all_on_the_gpu_has_no_bound() {
        assert_eq!(flow(1.0, 1.0).bound(), None);
        assert!(!flow(1.0, 1.0).text().contains("at most"));
        assert!(flow(1.0, 1.0).json()["tokens_per_second_at_most"].is_null());
    }
}
