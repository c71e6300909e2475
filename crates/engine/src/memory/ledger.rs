//! Who has how much memory, of the computer's and of a device's.
//!
//! The [plan](crate::plan::Plan) is the ledger's first state: it divides all memory among dense weights, experts, scratch, the
//! process, and holders. Holders are what comes and goes afterwards, such as conversations, grammars and requests. Each has a
//! [`Hold`], which pays back when it is dropped. Holders that need more than the plan set aside for them borrow from expert
//! slots: memory goes from one account to the other, and no sum ever exceeds the budget.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::error::{Bytes, Error, Result};

/// Where memory is.
///
/// [`MemoryEntry`] has an example.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemoryTier {
    /// The computer's.
    Computer,
    /// That of the device that computes, if it is not the processor.
    Device,
}

impl MemoryTier {
    /// The name for people and for labels.
    pub fn name(self) -> &'static str {
        match self {
            MemoryTier::Computer => "computer",
            MemoryTier::Device => "device",
        }
    }
}

/// What memory is for.
///
/// [`MemoryEntry`] has an example.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// Weights that every token reads.
    Dense,
    /// Expert slots.
    Experts,
    /// Buffers of the forward pass.
    Scratch,
    /// The program, its tokenizer, stacks, and what cannot be counted.
    Process,
    /// What layers remember of conversations that go on: keys and values, or recurrent states.
    Conversations,
    /// The same of conversations that are kept for later prompts.
    Prefixes,
    /// The vocabulary as grammars see it.
    Vocabulary,
    /// Compiling a grammar.
    Compiling,
    /// Compiled grammars, each held by its request from when that is prepared until it has been answered.
    Grammars,
    /// The states of grammars in answers that are being written.
    Matchers,
    /// What callers hold of requests: texts, and what is made of them.
    Requests,
}

impl Purpose {
    /// All of them, in the order of their numbers.
    pub const ALL: [Purpose; 11] = [
        Purpose::Dense,
        Purpose::Experts,
        Purpose::Scratch,
        Purpose::Process,
        Purpose::Conversations,
        Purpose::Prefixes,
        Purpose::Vocabulary,
        Purpose::Compiling,
        Purpose::Grammars,
        Purpose::Matchers,
        Purpose::Requests,
    ];

    /// What requests hold for as long as they wait to be answered.
    const WHILE_WAITING: [Purpose; 2] = [Purpose::Grammars, Purpose::Requests];

    /// The name for people and for labels.
    pub fn name(self) -> &'static str {
        match self {
            Purpose::Dense => "dense",
            Purpose::Experts => "experts",
            Purpose::Scratch => "scratch",
            Purpose::Process => "process",
            Purpose::Conversations => "conversations",
            Purpose::Prefixes => "prefixes",
            Purpose::Vocabulary => "vocabulary",
            Purpose::Compiling => "compiling",
            Purpose::Grammars => "grammars",
            Purpose::Matchers => "matchers",
            Purpose::Requests => "requests",
        }
    }

    /// Whether it is a part of conversations, which are where they are computed. All other holders are in the computer's memory.
    fn is_of_conversations(self) -> bool {
        matches!(self, Purpose::Conversations | Purpose::Prefixes)
    }
}

/// What is held for one purpose.
///
/// # Examples
/// ```
/// use forebay_engine::{Bytes, MemoryTier, Purpose};
///
/// # let model = std::path::Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/tales-qwen3moe-Q4_K_M.gguf"));
/// # let engine = forebay_engine::Engine::open(model, &forebay_engine::Options::new().threads(1))?;
/// for entry in engine.memory() {
///     println!("{} in the {}: {}", entry.purpose.name(), entry.tier.name(), Bytes(entry.bytes));
/// }
/// let dense = engine.memory().into_iter().find(|entry| entry.purpose == Purpose::Dense);
/// assert!(dense.is_some_and(|dense| dense.tier == MemoryTier::Computer && dense.bytes > 0));
/// # Ok::<(), forebay_engine::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryEntry {
    /// In whose memory.
    pub tier: MemoryTier,
    /// What for.
    pub purpose: Purpose,
    /// How much.
    pub bytes: u64,
}

/// Expert slots, which lend their memory to holders.
pub(crate) trait Lender: Send + Sync {
    /// Bytes of the slots in the computer's memory, less what they have given back.
    fn slot_bytes(&self) -> u64;

    /// Bytes that these slots could give back at most.
    fn lendable(&self) -> u64;

    /// Gives slots back until others may use so many bytes, or none can be spared. Says how many bytes others may use.
    fn give_back(&self, bytes: u64) -> u64;

    /// Takes slots that were given back into use again, as far as they fit. Says how many bytes they have.
    fn take_again(&self, bytes: u64) -> u64;

    /// Bytes of the device's slots that can be lent.
    fn device_lendable(&self) -> u64;

    /// So many bytes of the device's slots are lent from the next pass on.
    fn lend_of_device(&self, bytes: u64);
}

/// The memory of a loaded model.
pub(crate) struct Ledger {
    computer: Account,
    /// If a device computes. Conversations are in its memory then.
    device: Option<Account>,
    slots: Arc<dyn Lender>,
}

/// What a plan says of one tier.
pub(crate) struct TierPlan {
    /// What it sets aside by purpose, whatever holders come.
    pub fixed: Vec<(Purpose, u64)>,
    /// What holders may have before slots are asked.
    pub room: u64,
}

/// The memory of one tier.
struct Account {
    /// What was planned for each purpose, and what is held for it.
    planned: [u64; Purpose::ALL.len()],
    /// What holders may have before slots are asked.
    room: u64,
    source: LendingSlots,
    held: Mutex<Held>,
}

/// Which expert slots lend to an account.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum LendingSlots {
    Computer,
    Device,
    None,
}

#[derive(Clone, Copy, Default)]
struct Held {
    by_purpose: [u64; Purpose::ALL.len()],
    /// From expert slots.
    borrowed: u64,
}

impl Held {
    fn total(&self) -> u64 {
        self.by_purpose.iter().sum()
    }

    fn while_waiting(&self) -> u64 {
        Purpose::WHILE_WAITING.iter().map(|&purpose| self.by_purpose[purpose as usize]).sum()
    }
}

impl Ledger {
    /// The ledger of a model whose memory was planned so, with the expert slots that lend to holders. Slots that a device copies
    /// from lend nothing: they stay where they are.
    pub fn new(computer: TierPlan, device: Option<TierPlan>, slots: Arc<dyn Lender>) -> Ledger {
        let source = if device.is_some() { LendingSlots::None } else { LendingSlots::Computer };
        Ledger {
            computer: Account::new(computer, source),
            device: device.map(|there| Account::new(there, LendingSlots::Device)),
            slots,
        }
    }

    /// What is held for a purpose goes from `from` bytes to `to`. Slots give what is missing, and get back what is no
    /// longer needed.
    ///
    /// # Errors
    /// [`Error::Budget`] if slots cannot give enough. Then nothing has changed.
    pub fn resize(&self, purpose: Purpose, from: u64, to: u64) -> Result<()> {
        self.account(purpose).resize(&*self.slots, purpose, from, to)
    }

    /// What was held for one purpose is held for another in the same memory.
    fn transfer(&self, from: Purpose, to: Purpose, bytes: u64) {
        debug_assert!(from.is_of_conversations() == to.is_of_conversations());
        let mut held = self.account(from).lock();
        held.by_purpose[from as usize] -= bytes;
        held.by_purpose[to as usize] += bytes;
    }

    /// Bytes that requests hold which are prepared, or wait to be answered.
    pub fn held_by_requests(&self) -> u64 {
        let held = *self.computer.lock();
        held.while_waiting() + held.by_purpose[Purpose::Compiling as usize]
    }

    /// All that is held, by tier and purpose. Expert slots have what they have not lent.
    pub fn entries(&self) -> Vec<MemoryEntry> {
        let tiers =
            [(MemoryTier::Computer, Some(&self.computer)), (MemoryTier::Device, self.device.as_ref())];
        let mut entries = Vec::new();
        for (tier, account) in tiers.into_iter().filter_map(|(tier, account)| Some((tier, account?))) {
            let held = *account.lock();
            entries.extend(Purpose::ALL.map(|purpose| {
                let number = purpose as usize;
                let bytes = match (purpose, tier) {
                    // The rest of the machine may have some of them, too.
                    (Purpose::Experts, MemoryTier::Computer) => self.slots.slot_bytes(),
                    (Purpose::Experts, MemoryTier::Device) => {
                        account.planned[number].saturating_sub(held.borrowed)
                    }
                    _ => account.planned[number] + held.by_purpose[number],
                };
                MemoryEntry { tier, purpose, bytes }
            }));
        }
        entries
    }

    fn account(&self, purpose: Purpose) -> &Account {
        self.device.as_ref().filter(|_| purpose.is_of_conversations()).unwrap_or(&self.computer)
    }
}

impl Account {
    fn new(plan: TierPlan, source: LendingSlots) -> Account {
        let mut planned = [0; Purpose::ALL.len()];
        plan.fixed.iter().for_each(|&(purpose, bytes)| planned[purpose as usize] = bytes);
        Account { planned, room: plan.room, source, held: Mutex::default() }
    }

    fn resize(&self, slots: &dyn Lender, purpose: Purpose, from: u64, to: u64) -> Result<()> {
        if from == to {
            return Ok(());
        }
        let mut held = self.lock();
        let mut after = *held;
        after.by_purpose[purpose as usize] += to;
        after.by_purpose[purpose as usize] -= from;
        // A request on its own may have all memory. Several leave half to the answers: requests that wait would otherwise hold
        // the memory without which nobody is answered.
        let waiting = after.while_waiting();
        if to > from && Purpose::WHILE_WAITING.contains(&purpose) && waiting > to {
            let half = (self.room + held.borrowed + self.lendable(slots)) / 2;
            if waiting > half {
                return Err(self.refusal(waiting, half, to));
            }
        }
        let used = after.total();
        let beyond = used.saturating_sub(self.room);
        if beyond > held.borrowed {
            let missing = beyond - held.borrowed;
            let given = match self.source {
                LendingSlots::Device => slots.device_lendable().saturating_sub(held.borrowed).min(missing),
                LendingSlots::Computer => slots.give_back(missing),
                LendingSlots::None => 0,
            };
            if given < missing {
                if self.source == LendingSlots::Computer {
                    slots.take_again(given);
                }
                return Err(self.refusal(used, self.room + held.borrowed + given, to));
            }
            after.borrowed += given;
        } else {
            let no_longer = held.borrowed - beyond;
            let taken =
                if self.source == LendingSlots::Computer { slots.take_again(no_longer) } else { no_longer };
            after.borrowed -= taken;
        }
        if self.source == LendingSlots::Device {
            slots.lend_of_device(after.borrowed);
        }
        *held = after;
        Ok(())
    }

    /// What slots could give, besides what they gave.
    fn lendable(&self, slots: &dyn Lender) -> u64 {
        match self.source {
            LendingSlots::Computer => slots.lendable(),
            LendingSlots::Device => slots.device_lendable(),
            LendingSlots::None => 0,
        }
    }

    fn refusal(&self, need: u64, have: u64, this: u64) -> Error {
        let (who, remedy) = match self.source {
            LendingSlots::Computer => (
                "all conversations, grammars and requests",
                "shorten the conversation, or give it more memory with Options::memory",
            ),
            LendingSlots::Device => (
                "all conversations",
                "shorten the conversation, or give it more memory with the device's memory limit",
            ),
            LendingSlots::None => {
                ("all grammars, their vocabulary and requests", "give it more memory with Options::memory")
            }
        };
        let what = format!("{who}, this one's {}", Bytes(this));
        Error::Budget { need, have, what, remedy: remedy.into() }
    }

    fn lock(&self) -> MutexGuard<'_, Held> {
        // Numbers change together, after everything that can fail.
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Bytes that an engine counts against its memory, until this is dropped.
///
/// # Examples
/// ```
/// use forebay_engine::Purpose;
///
/// # let model = std::path::Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/tales-qwen3moe-Q4_K_M.gguf"));
/// # let engine = forebay_engine::Engine::open(model, &forebay_engine::Options::new().threads(1))?;
/// let held = || engine.memory().iter().find(|entry| entry.purpose == Purpose::Requests).map(|entry| entry.bytes);
/// let mut hold = engine.hold_for_requests();
/// hold.resize(1 << 20)?;
/// assert_eq!(held(), Some(1 << 20));
///
/// drop(hold);
/// assert_eq!(held(), Some(0));
/// # Ok::<(), forebay_engine::Error>(())
/// ```
pub struct Hold {
    ledger: Arc<Ledger>,
    purpose: Purpose,
    bytes: u64,
}

impl Hold {
    /// Nothing yet.
    pub(crate) fn none(ledger: &Arc<Ledger>, purpose: Purpose) -> Hold {
        Hold { ledger: Arc::clone(ledger), purpose, bytes: 0 }
    }

    /// How many.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Goes on to so many bytes.
    ///
    /// # Errors
    /// [`Error::Budget`] if there is no room for them. Then nothing has changed.
    pub fn resize(&mut self, bytes: u64) -> Result<()> {
        self.ledger.resize(self.purpose, self.bytes, bytes)?;
        self.bytes = bytes;
        Ok(())
    }

    /// Holds the same bytes for another purpose.
    pub(crate) fn turn_to(&mut self, purpose: Purpose) {
        self.ledger.transfer(self.purpose, purpose, self.bytes);
        self.purpose = purpose;
    }

    /// Takes so many bytes of it, or all if it has fewer.
    pub(crate) fn split(&mut self, bytes: u64) -> Hold {
        let bytes = bytes.min(self.bytes);
        self.bytes -= bytes;
        Hold { ledger: Arc::clone(&self.ledger), purpose: self.purpose, bytes }
    }

    /// Takes over what another one holds.
    pub(crate) fn join(&mut self, mut other: Hold) {
        other.turn_to(self.purpose);
        self.bytes += std::mem::take(&mut other.bytes);
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        // Giving memory back does not fail.
        let _ = self.resize(0);
    }
}
