//! The memory plan: what a model needs and where it goes, known before any weight is read.

use std::str::FromStr;
use std::sync::Arc;

use crate::backend::{KvShape, MARKS, Precision, StateShape};
use crate::error::{Bytes, Error, Result};
use crate::experts::SlotClasses;
use crate::memory::{Ledger, Lender, Machine, Purpose, TierPlan};
use crate::models::Blueprint;
#[cfg(feature = "grammar")]
use crate::tokenizer::lexicon::likely_bytes;

/// Tokens per chunk of a prompt, if memory suffices for all experts.
const CHUNK: usize = 512;

/// Tokens per chunk if experts are streamed and memory allows: each chunk reads the experts once, so larger chunks read less.
const STREAMED_CHUNK: usize = 2048;

/// The smallest chunk: smaller ones would read experts for a few tokens each.
const LEAST_CHUNK: usize = 32;

/// Bytes of slots through which experts are uploaded to a device that holds all of them: enough to keep the drive busy.
const HANDING_OVER: u64 = 512 << 20;

/// Device memory for the driver, the kernels and the lists of a batch.
const DEVICE_RESERVE: u64 = 256 << 20;

/// The most scratch memory of a chunk on a device. Larger models have shorter chunks.
const DEVICE_SCRATCH: u64 = 1 << 30;

/// Positions per page of the KV cache.
const PAGE: u64 = forebay_kernels::KEY_BLOCK as u64;

#[cfg(not(feature = "grammar"))]
fn likely_bytes(_: u64) -> u64 {
    0
}

/// The input of a plan.
///
/// Callers set it with [`Options`](crate::Options), which has an example.
#[derive(Clone, Copy, Debug, Default)]
pub struct Wishes {
    /// The context length in tokens.
    pub context: usize,
    /// Tokens for which memory is reserved.
    pub reserved: usize,
    /// The precision of products, which determines the size of keys and values.
    pub precision: Precision,
    /// Tokens per chunk of a prompt; by default as many as memory allows.
    pub chunk: Option<usize>,
    /// The memory budget of the process; by default the available memory, less a margin.
    pub memory: Option<u64>,
    /// The part of the budget that the caller uses itself.
    pub caller: u64,
    /// The limit for expert slots; by default the rest of the budget.
    pub expert_memory: Option<ExpertMemory>,
    /// The device that computes instead of the CPU, if there is one.
    pub device: Option<DeviceWishes>,
}

impl Wishes {
    /// Tokens per chunk of a prompt, where that is not the budget's choice: on a device, the number of tokens that are computed
    /// together may change bits.
    fn fixed_chunk(&self, blueprint: &Blueprint) -> Option<usize> {
        let of_device = |device: DeviceWishes| {
            let mut chunk = device.chunk;
            while chunk > LEAST_CHUNK && blueprint.scratch_bytes(chunk) > DEVICE_SCRATCH {
                chunk /= 2;
            }
            chunk
        };
        self.chunk.or(self.device.map(of_device))
    }
}

/// The memory of a device, and the chunks that suit it.
///
/// They come from [`Options::device`](crate::Options::device).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceWishes {
    /// The device's memory budget in bytes; `None` if it computes in the computer's memory.
    pub memory: Option<u64>,
    /// The preferred number of tokens per chunk of a prompt.
    pub chunk: usize,
}

/// The plan for a device's memory: bytes by purpose.
///
/// It is part of a [`Plan`], which has an example.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DevicePlan {
    /// The budget.
    pub budget: u64,
    /// Dense weights.
    pub dense: u64,
    /// Expert slots.
    pub slot_bytes: u64,
    /// The number of slots of each size.
    pub slots: Vec<usize>,
    /// Buffers of the forward pass, and staging buffers for experts.
    pub scratch: u64,
    /// The KV cache of one conversation.
    pub kv: u64,
}

impl DevicePlan {
    /// All planned memory.
    pub fn total(&self) -> u64 {
        self.fixed().saturating_add(self.slot_bytes)
    }

    /// All planned memory except expert slots.
    pub fn fixed(&self) -> u64 {
        [self.scratch, self.kv].into_iter().fold(self.dense, u64::saturating_add)
    }

    /// The memory of everything except slots, for chunks of this length.
    fn new(
        blueprint: &Blueprint,
        classes: &SlotClasses,
        wishes: &Wishes,
        memory: u64,
        chunk: usize,
    ) -> DevicePlan {
        let positions = (wishes.reserved as u64).next_multiple_of(PAGE);
        let (places, bytes) = classes.staging();
        let scratch = blueprint.scratch_bytes(chunk).saturating_add((places * bytes) as u64);
        DevicePlan {
            budget: memory,
            dense: blueprint.dense_bytes(),
            slot_bytes: 0,
            slots: Vec::new(),
            // Halves of what products read are copies, and routing has tables.
            scratch: scratch.saturating_add(DEVICE_RESERVE),
            kv: conversation_bytes(blueprint, wishes.precision, positions),
        }
    }

    /// Divides the rest of the budget into slots.
    fn give_slots(&mut self, classes: &SlotClasses, reserved: usize) -> Result<()> {
        let room = self.budget.checked_sub(self.fixed());
        let Some(slots) = room.and_then(|room| classes.divide_device(room)) else {
            let least = classes.device_bytes(&classes.least());
            return Err(Error::Budget {
                need: self.fixed().saturating_add(least),
                have: self.budget,
                what: format!(
                    "on the GPU: dense weights {}, context of {reserved} tokens {}, scratch {}, the experts that a token \
                     uses in one layer {}",
                    Bytes(self.dense),
                    Bytes(self.kv),
                    Bytes(self.scratch),
                    Bytes(least)
                ),
                remedy: "raise the device's memory limit, ask for a shorter context with Options::context, or use \
                         Options::device = None"
                    .into(),
            });
        };
        self.slot_bytes = classes.device_bytes(&slots);
        self.slots = slots;
        Ok(())
    }

    /// The most memory that all conversations together may use.
    pub fn room(&self) -> u64 {
        self.budget.saturating_sub(self.total() - self.kv)
    }

    /// The number of expert slots.
    pub fn slot_count(&self) -> usize {
        self.slots.iter().sum()
    }
}

/// A limit for expert slots.
///
/// # Examples
/// ```
/// use forebay_engine::{ExpertMemory, Options, Prospect};
///
/// # let model = std::path::Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/tales-qwen3moe-Q4_K_M.gguf"));
/// let half = Options::new().expert_memory(ExpertMemory::Percent(50.0));
/// let plan = Prospect::new(model, &half)?.plan().clone();
/// assert!(plan.slot_bytes <= plan.experts / 2);
/// assert!(plan.streams());
/// # Ok::<(), forebay_engine::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum ExpertMemory {
    /// In bytes.
    Bytes(u64),
    /// In percent of all experts.
    Percent(f64),
}

/// Reads `4G` or `30%`.
impl FromStr for ExpertMemory {
    type Err = Error;

    fn from_str(s: &str) -> Result<ExpertMemory> {
        let Some(number) = s.trim().strip_suffix('%') else {
            return Bytes::of_memory(s).map(|bytes| ExpertMemory::Bytes(bytes.0));
        };
        match number.trim().parse::<f64>() {
            Ok(percent) if percent > 0.0 && percent <= 100.0 => Ok(ExpertMemory::Percent(percent)),
            _ => Err(Error::Invalid("expected a percentage above 0 and up to 100".into())),
        }
    }
}

/// Bytes by purpose, and what they are divided into.
///
/// # Examples
/// ```
/// use forebay_engine::{Bytes, Options, Prospect};
///
/// # let model = std::path::Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/tales-qwen3moe-Q4_K_M.gguf"));
/// let prospect = Prospect::new(model, &Options::new().memory(1 << 30))?;
/// let plan = prospect.plan();
/// println!("{} dense weights, {} of experts", Bytes(plan.dense), Bytes(plan.slot_bytes));
/// assert!(plan.holds_all_experts());
/// assert!(plan.total() <= plan.budget);
/// # Ok::<(), forebay_engine::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// The budget of the process; `u64::MAX` if unknown.
    pub budget: u64,
    /// Dense weights: attention, norms, routers, embeddings.
    pub dense: u64,
    /// The KV cache of one conversation of [`reserved`](Self::reserved) tokens.
    pub kv: u64,
    /// Buffers of the forward pass.
    pub scratch: u64,
    /// With a device: memory for grammars, their vocabulary and requests. The device copies from expert slots, so these
    /// cannot lend memory. Without a device they can, and nothing is reserved.
    pub requests: u64,
    /// The rest of the process: program, tokenizer, tables of the file, stacks, and headroom.
    pub process: u64,
    /// Expert slots.
    pub slot_bytes: u64,
    /// The number of slots of each size.
    pub slots: Vec<usize>,
    /// Bytes of slots for all experts.
    pub experts: u64,
    /// The number of all experts.
    pub expert_count: usize,
    /// Tokens per chunk of a prompt.
    pub chunk: usize,
    /// The context length in tokens.
    pub context: usize,
    /// Tokens for which memory is reserved. A longer conversation takes memory from expert slots.
    pub reserved: usize,
    /// The plan for the device's memory, if a device computes.
    pub device: Option<DevicePlan>,
}

impl Plan {
    /// Divides the memory.
    ///
    /// # Errors
    /// [`Error::Budget`] if memory does not suffice for the fixed part and the experts that a token uses in one layer.
    pub fn new(
        blueprint: &Blueprint,
        classes: &SlotClasses,
        wishes: &Wishes,
        machine: &Machine,
    ) -> Result<Plan> {
        let budget = match (wishes.memory, machine.available) {
            (Some(memory), _) => memory,
            (None, Some(available)) => machine.resident + available.saturating_sub(margin(available)),
            (None, None) => u64::MAX,
        };
        if let Some(memory) = wishes.device.and_then(|device| device.memory) {
            return Plan::for_device(blueprint, classes, wishes, machine, budget, memory);
        }
        let chunk = wishes.fixed_chunk(blueprint);
        let positions = (wishes.reserved as u64).next_multiple_of(PAGE);
        let mut plan = Plan {
            budget,
            dense: blueprint.dense_bytes(),
            kv: conversation_bytes(blueprint, wishes.precision, positions),
            scratch: 0,
            requests: 0,
            process: process_bytes(machine, budget, wishes.caller),
            slot_bytes: 0,
            slots: Vec::new(),
            experts: classes.all_bytes(),
            expert_count: classes.classes.iter().map(|c| c.experts).sum(),
            chunk: 0,
            context: wishes.context,
            reserved: wishes.reserved,
            device: None,
        };
        let limit = plan.expert_limit(wishes);
        let everything = plan.experts <= limit && {
            plan.choose_chunk(blueprint, chunk.unwrap_or(CHUNK));
            plan.fixed().saturating_add(plan.experts) <= budget
        };
        let least = classes.bytes(&classes.least());
        if !everything {
            // Up to an eighth of the memory goes to scratch, of what the rest leaves.
            plan.scratch = 0;
            let most = budget.saturating_sub(plan.fixed()).saturating_sub(least).min(budget / 8);
            let chunk = match chunk {
                Some(chunk) => chunk,
                None => (0..)
                    .map(|halvings| STREAMED_CHUNK >> halvings)
                    .find(|&c| c <= LEAST_CHUNK || blueprint.scratch_bytes(c) <= most)
                    .expect("the numbers end below the least"),
            };
            plan.choose_chunk(blueprint, chunk.min(wishes.context));
        }
        let room = budget.saturating_sub(plan.fixed()).min(limit);
        match classes.divide(room) {
            Some(slots) if plan.fixed() <= budget => {
                plan.slot_bytes = classes.bytes(&slots);
                plan.slots = slots;
                Ok(plan)
            }
            _ => Err(plan.refusal(least, limit)),
        }
    }

    /// Divides the device's memory, then RAM. RAM also has the dense weights, and experts: as many as fit if the device does
    /// not hold all of them, otherwise a few slots through which they are uploaded.
    fn for_device(
        blueprint: &Blueprint,
        classes: &SlotClasses,
        wishes: &Wishes,
        machine: &Machine,
        budget: u64,
        memory: u64,
    ) -> Result<Plan> {
        let mut plan = Plan {
            budget,
            dense: blueprint.dense_bytes(),
            kv: 0,
            scratch: 0,
            requests: 0,
            process: process_bytes(machine, budget, wishes.caller),
            slot_bytes: 0,
            slots: Vec::new(),
            experts: classes.all_bytes(),
            expert_count: classes.classes.iter().map(|c| c.experts).sum(),
            chunk: 0,
            context: wishes.context,
            reserved: wishes.reserved,
            device: None,
        };
        let chunk = wishes.fixed_chunk(blueprint).unwrap_or(CHUNK).min(wishes.context).max(1);
        let mut on_device = DevicePlan::new(blueprint, classes, wishes, memory, chunk);
        plan.chunk = chunk;
        on_device.give_slots(classes, wishes.reserved)?;
        let least = classes.bytes(&classes.least());
        let limit = plan.expert_limit(wishes);
        let limit = match on_device.slot_count() == plan.expert_count {
            true => limit.min(HANDING_OVER.max(least)),
            false => limit,
        };
        plan.device = Some(on_device);
        // For these slots cannot give memory back; but a model that runs without them is not refused for them.
        let most = budget.saturating_sub(plan.fixed()).saturating_sub(least).min(budget / 8);
        let requests = (budget / 64).min(256 << 20);
        plan.requests = (likely_bytes(blueprint.model.vocab() as u64) + requests).min(most);
        let room = budget.saturating_sub(plan.fixed()).min(limit);
        match classes.divide(room) {
            Some(slots) if plan.fixed() <= budget => {
                plan.slot_bytes = classes.bytes(&slots);
                plan.slots = slots;
                Ok(plan)
            }
            _ => Err(plan.refusal(least, limit)),
        }
    }

    /// The most bytes that slots may use.
    fn expert_limit(&self, wishes: &Wishes) -> u64 {
        match wishes.expert_memory {
            None => u64::MAX,
            Some(ExpertMemory::Bytes(bytes)) => bytes,
            Some(ExpertMemory::Percent(percent)) => (self.experts as f64 * percent / 100.0) as u64,
        }
    }

    /// The ledger that starts with this plan. Accounts may use what is reserved for them and what is unused.
    pub(crate) fn ledger(&self, slots: Arc<dyn Lender>) -> Ledger {
        let unused = self.budget.saturating_sub(self.total());
        let computer = TierPlan {
            fixed: vec![
                (Purpose::Dense, self.dense),
                (Purpose::Scratch, self.scratch),
                (Purpose::Process, self.process),
            ],
            room: unused.saturating_add(self.kv).saturating_add(self.requests),
        };
        let device = self.device.as_ref().map(|there| TierPlan {
            fixed: vec![
                (Purpose::Dense, there.dense),
                (Purpose::Experts, there.slot_bytes),
                (Purpose::Scratch, there.scratch),
            ],
            room: there.room(),
        });
        Ledger::new(computer, device, slots)
    }

    /// All planned memory, or `u64::MAX` if the sum is larger.
    pub fn total(&self) -> u64 {
        self.fixed().saturating_add(self.slot_bytes)
    }

    /// All planned memory except expert slots.
    pub fn fixed(&self) -> u64 {
        [self.kv, self.scratch, self.requests, self.process].into_iter().fold(self.dense, u64::saturating_add)
    }

    /// Whether RAM has a slot for every expert.
    pub fn holds_all_experts(&self) -> bool {
        self.slots.iter().sum::<usize>() == self.expert_count
    }

    /// Whether the device has a slot for every expert.
    pub fn device_holds_all_experts(&self) -> bool {
        self.device.as_ref().is_some_and(|device| device.slot_count() == self.expert_count)
    }

    /// Whether experts are read from the drive or uploaded to a device while tokens are computed.
    pub fn moves_experts(&self) -> bool {
        self.streams() || self.device.is_some() && !self.device_holds_all_experts()
    }

    /// Whether experts are read from the drive while tokens are computed.
    pub fn streams(&self) -> bool {
        !self.holds_all_experts() && !self.device_holds_all_experts()
    }

    fn choose_chunk(&mut self, blueprint: &Blueprint, chunk: usize) {
        self.chunk = chunk;
        self.scratch = blueprint.scratch_bytes(chunk);
    }

    fn refusal(&self, least: u64, limit: u64) -> Error {
        let what = format!(
            "dense weights {}, context of {} tokens {}, scratch {}, the program itself {}, the experts that a \
             token uses in one layer {}",
            Bytes(self.dense),
            self.reserved,
            Bytes(self.kv),
            Bytes(self.scratch),
            Bytes(self.process),
            Bytes(least)
        );
        if least > limit && self.fixed().saturating_add(least) <= self.budget {
            let remedy = format!("raise Options::expert_memory to at least {}", Bytes(least));
            return Error::Budget { need: least, have: limit, what, remedy };
        }
        let need = self.fixed().saturating_add(least);
        let remedy = if need - self.kv <= self.budget {
            "ask for a shorter context with Options::context, or for more memory with Options::memory"
        } else {
            "give it more memory with Options::memory, or use a smaller model"
        };
        Error::Budget { need, have: self.budget, what, remedy: remedy.into() }
    }
}

/// The margin for other programs if the caller sets no budget.
fn margin(available: u64) -> u64 {
    (available / 16).clamp(64 << 20, 2 << 30)
}

/// The memory of the process besides the model.
fn process_bytes(machine: &Machine, budget: u64, caller: u64) -> u64 {
    machine.resident + headroom(budget) + caller.min(budget / 16)
}

/// Headroom for memory that cannot be counted before loading: stacks, gaps of the allocator, texts, page tables.
fn headroom(budget: u64) -> u64 {
    (budget / 64).clamp(16 << 20, 256 << 20)
}

/// The memory that one token reads when it is computed alone, as in generation. The memory bandwidth divided by this is an
/// upper bound of the speed. Activations are not counted, because they stay in the CPU's caches.
///
/// # Examples
/// ```
/// # let model = std::path::Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/tales-qwen3moe-Q4_K_M.gguf"));
/// # let engine = forebay_engine::Engine::open(model, &forebay_engine::Options::new().threads(1))?;
/// let traffic = engine.traffic();
/// // A long conversation has more keys and values to read.
/// assert!(traffic.bytes(1000) > traffic.bytes(10));
/// let gigabytes_per_second = 50.0;
/// println!("at most {:.0} tokens a second", gigabytes_per_second * 1e9 / traffic.bytes(1000) as f64);
/// # Ok::<(), forebay_engine::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Traffic {
    /// Dense weights, with only one row of the embedding table. The output matrix is
    /// read once, also if it is the embedding table.
    pub dense: u64,
    /// The experts that the router chooses, in all layers.
    pub experts: u64,
    /// Keys and values of one position, in the layers without a window.
    pub position: u64,
    /// Keys and values of full windows, in the layers with a window.
    pub windows: u64,
    /// Recurrent states, which are read and written.
    pub recurrent: u64,
}

impl Traffic {
    /// The traffic of a model.
    pub fn new(blueprint: &Blueprint, precision: Precision) -> Traffic {
        let mut traffic = Traffic {
            dense: blueprint.dense_bytes_per_token(),
            experts: blueprint.expert_bytes_per_token(),
            position: 0,
            windows: 0,
            recurrent: 0,
        };
        for shape in blueprint.model.state().into_iter().flatten() {
            match shape {
                StateShape::Attention(kv) => {
                    let position = position_bytes(&kv, precision);
                    match kv.window {
                        None => traffic.position = traffic.position.saturating_add(position),
                        Some(window) => {
                            let window = position.saturating_mul(window.most() as u64);
                            traffic.windows = traffic.windows.saturating_add(window);
                        }
                    }
                }
                StateShape::Recurrent(floats) => {
                    traffic.recurrent = traffic.recurrent.saturating_add(floats as u64 * 8);
                }
            }
        }
        traffic
    }

    /// Bytes that a token reads if it attends to `positions` positions, including its own. Assumes that windows are full.
    pub fn bytes(&self, positions: u64) -> u64 {
        self.dense + self.experts + self.windows + self.recurrent + self.position * positions
    }
}

/// Bytes of the keys and values of one position in one layer.
fn position_bytes(kv: &KvShape, precision: Precision) -> u64 {
    let cell = match precision {
        Precision::Fast => 2,
        Precision::Exact => 4,
    };
    (kv.position() as u64).saturating_mul(cell)
}

/// Bytes of the states of a conversation with this many positions, with all marks.
fn conversation_bytes(blueprint: &Blueprint, precision: Precision, positions: u64) -> u64 {
    let layer = |shape: StateShape| match shape {
        StateShape::Attention(kv) => {
            let seen = kv.window.map_or(positions, |window| {
                let window = window.most() as u64 + 2 * PAGE;
                positions.min(STREAMED_CHUNK as u64 + (MARKS as u64 + 1).saturating_mul(window))
            });
            position_bytes(&kv, precision).saturating_mul(seen)
        }
        // The last state and the one before.
        StateShape::Recurrent(floats) => (floats as u64).saturating_mul(4 * (MARKS as u64 + 2)),
    };
    blueprint.model.state().into_iter().flatten().map(layer).fold(0, u64::saturating_add)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::format::ModelFile;

    fn plan() -> Plan {
        Plan {
            budget: 6 << 30,
            dense: 4 << 30,
            kv: 2 << 30,
            scratch: 1 << 20,
            requests: 0,
            process: 0,
            slot_bytes: 0,
            slots: Vec::new(),
            experts: 9 << 30,
            expert_count: 9,
            chunk: 1,
            context: 100,
            reserved: 100,
            device: None,
        }
    }

    #[test]
    fn more_memory_is_not_refused_where_less_suffices() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/tales-qwen3moe-Q4_K_M.gguf");
        let blueprint = crate::models::describe(&ModelFile::open(&path).unwrap()).unwrap();
        let classes = SlotClasses::new(&blueprint.experts);
        let plan = |memory: u64| {
            let wishes = Wishes {
                context: 1024,
                reserved: 1024,
                precision: Precision::Fast,
                chunk: None,
                memory: Some(memory),
                caller: 0,
                expert_memory: None,
                device: None,
            };
            Plan::new(&blueprint, &classes, &wishes, &Machine { resident: 16 << 20, ..Machine::default() })
        };
        let budgets = (1 << 20..80 << 20).step_by(64 << 10);
        let mut plans = budgets.map(plan).skip_while(Result::is_err).map(Result::unwrap).peekable();
        assert_eq!(plans.peek().map(|plan| plan.chunk), Some(LEAST_CHUNK), "the least memory is the least");
        assert!(plans.all(|plan| plan.total() <= plan.budget));
    }

    #[test]
    fn a_refusal_says_what_to_change() {
        let message = plan().refusal(1 << 30, u64::MAX).to_string();
        assert!(
            message.starts_with("7.0 GiB of memory is needed (dense weights 4.0 GiB, context"),
            "{message}"
        );
        assert!(
            message.contains("but 6.0 GiB is available; ask for a shorter context with Options::context"),
            "{message}"
        );
        let message = Plan { budget: 4 << 30, ..plan() }.refusal(1 << 30, u64::MAX).to_string();
        assert!(message.ends_with("with Options::memory, or use a smaller model"), "{message}");
        let message = Plan { kv: 0, ..plan() }.refusal(1 << 30, 5).to_string();
        assert!(message.ends_with("raise Options::expert_memory to at least 1.0 GiB"), "{message}");
    }

    #[test]
    fn limits_for_experts_are_bytes_or_percent() {
        let read = |s: &str| s.parse::<ExpertMemory>();
        assert_eq!(read("30%").unwrap(), ExpertMemory::Percent(30.0));
        assert_eq!(read("4M").unwrap(), ExpertMemory::Bytes(4 << 20));
        assert!(read("101%").is_err());
        assert_eq!(read("6").unwrap_err().to_string(), Bytes::of_memory("6").unwrap_err().to_string());
    }
}
