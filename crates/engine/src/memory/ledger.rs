//! The ledger records who uses how much memory, in RAM and in device memory.
//!
//! Its first state is the [plan](crate::plan::Plan), which divides all memory among dense weights, experts, scratch
//! buffers, the process, and holders. Holders come and go afterwards: conversations, grammars, requests. Each has a
//! [`Hold`], which returns its memory when it is dropped. Holders that need more than the plan reserved for them
//! borrow from expert slots. The sum of all accounts never exceeds the budget.
//! slots: memory goes from one account to the other, and no sum ever exceeds the budget.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::error::{Bytes, Error, Result};

/// Which memory it is.
///
/// [`MemoryEntry`] has an example.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemoryTier {
    /// RAM.
    Computer,
    /// The memory of the device that computes, if it is not the CPU.
    Device,
}

impl MemoryTier {
    /// The name in messages and labels.
    pub fn name(self) -> &'static str {
        match self {
            MemoryTier::Computer => "computer",
            MemoryTier::Device => "device",
        }
    }
}

/// What memory is used for.
///
/// [`MemoryEntry`] has an example.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// Weights that every token uses.
    Dense,
    /// Expert slots.
    Experts,
    /// Buffers of the forward pass.
    Scratch,
    /// The program, its tokenizer, stacks, and a reserve for what cannot be counted.
    Process,
    /// KV caches and recurrent states of conversations in progress.
    Conversations,
    /// KV caches and recurrent states kept for later prompts.
    Prefixes,
    /// The vocabulary in the form that grammars use.
    Vocabulary,
    /// The compilation of a grammar.
    Compiling,
    /// Compiled grammars. Each belongs to its request from its preparation until its answer is complete.
    Grammars,
    /// The states of grammars of answers in progress.
    Matchers,
    /// Texts of requests and data derived from them, held by callers.
    Requests,
}

impl Purpose {
    /// All purposes, in the order of their discriminants.
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

    /// What a request holds while it waits for its answer.
    const WHILE_WAITING: [Purpose; 2] = [Purpose::Grammars, Purpose::Requests];

    /// The name in messages and labels.
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

    /// Whether it is memory of conversations, which is on the device that computes. All other holders use RAM.
    fn is_of_conversations(self) -> bool {
        matches!(self, Purpose::Conversations | Purpose::Prefixes)
    }
}

/// The bytes held for one purpose.
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
    /// The tier of the memory.
    pub tier: MemoryTier,
    /// Its purpose.
    pub purpose: Purpose,
    /// Its size.
    pub bytes: u64,
}

/// Expert slots that lend their memory to holders.
pub(crate) trait Lender: Send + Sync {
    /// Bytes of the slots in RAM that have not been given back.
    fn slot_bytes(&self) -> u64;

    /// The most bytes that the slots in RAM could give back.
    fn lendable(&self) -> u64;

    /// Gives slots back until `bytes` bytes are free or no slot can be spared. Returns how many bytes are free.
    fn give_back(&self, bytes: u64) -> u64;

    /// Uses given-back slots again, as many as fit into `bytes`. Returns their bytes.
    fn take_again(&self, bytes: u64) -> u64;

    /// The most bytes of the device's slots that can be lent.
    fn device_lendable(&self) -> u64;

    /// Sets how many bytes of the device's slots are lent from the next pass on.
    fn lend_device_bytes(&self, bytes: u64);
}

/// The memory of a loaded model.
pub(crate) struct Ledger {
    computer: Account,
    /// Present if a device computes. Conversations are in its memory then.
    device: Option<Account>,
    slots: Arc<dyn Lender>,
}

/// The plan for one tier.
pub(crate) struct TierPlan {
    /// Bytes planned for each purpose, whatever holders need.
    pub fixed: Vec<(Purpose, u64)>,
    /// Bytes that holders may use before they borrow from slots.
    pub room: u64,
}

/// The account of one tier.
struct Account {
    /// Bytes planned for each purpose; `held` has those in use.
    planned: [u64; Purpose::ALL.len()],
    /// Bytes that holders may use before they borrow from slots.
    room: u64,
    source: LendingSlots,
    held: Mutex<Held>,
}

/// The expert slots that lend to an account.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum LendingSlots {
    Computer,
    Device,
    None,
}

#[derive(Clone, Copy, Default)]
struct Held {
    by_purpose: [u64; Purpose::ALL.len()],
    /// Bytes borrowed from expert slots.
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
    /// The ledger of a model with this plan, and the expert slots that lend to holders. Slots that a device copies
    /// from lend nothing, because they must not move.
    pub fn new(computer: TierPlan, device: Option<TierPlan>, slots: Arc<dyn Lender>) -> Ledger {
        let source = if device.is_some() { LendingSlots::None } else { LendingSlots::Computer };
        Ledger {
            computer: Account::new(computer, source),
            device: device.map(|there| Account::new(there, LendingSlots::Device)),
            slots,
        }
    }

    /// Changes the bytes held for a purpose from `from` to `to`. Borrows missing bytes from slots, and returns those
    /// no longer needed.
    ///
    /// # Errors
    /// [`Error::Budget`] if the slots cannot lend enough. Then nothing has changed.
    pub fn resize(&self, purpose: Purpose, from: u64, to: u64) -> Result<()> {
        self.account(purpose).resize(&*self.slots, purpose, from, to)
    }

    /// Moves bytes from one purpose to another in the same tier.
    fn transfer(&self, from: Purpose, to: Purpose, bytes: u64) {
        debug_assert!(from.is_of_conversations() == to.is_of_conversations());
        let mut held = self.account(from).lock();
        held.by_purpose[from as usize] -= bytes;
        held.by_purpose[to as usize] += bytes;
    }

    /// Bytes held by requests that are being prepared or wait for their answer.
    pub fn held_by_requests(&self) -> u64 {
        let held = *self.computer.lock();
        held.while_waiting() + held.by_purpose[Purpose::Compiling as usize]
    }

    /// The bytes in use by tier and purpose. Expert slots count without what they have lent.
    pub fn entries(&self) -> Vec<MemoryEntry> {
        let tiers =
            [(MemoryTier::Computer, Some(&self.computer)), (MemoryTier::Device, self.device.as_ref())];
        let mut entries = Vec::new();
        for (tier, account) in tiers.into_iter().filter_map(|(tier, account)| Some((tier, account?))) {
            let held = *account.lock();
            entries.extend(Purpose::ALL.map(|purpose| {
                let number = purpose as usize;
                let bytes = match (purpose, tier) {
                    // Some of the slots may have been given back to the machine too.
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
        // One request alone may use all memory. Several may use half of it: otherwise waiting requests could hold the
        // memory that is needed to answer any of them.
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
            slots.lend_device_bytes(after.borrowed);
        }
        *held = after;
        Ok(())
    }

    /// Bytes that the slots could still lend.
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
                "conversations, grammars and requests together",
                "shorten the conversation, or raise the budget with Options::memory",
            ),
            LendingSlots::Device => {
                ("all conversations together", "shorten the conversation, or raise the device's memory limit")
            }
            LendingSlots::None => {
                ("grammars, their vocabulary and requests together", "raise the budget with Options::memory")
            }
        };
        let what = format!("{who}, {} of it for this one", Bytes(this));
        Error::Budget { need, have, what, remedy: remedy.into() }
    }

    fn lock(&self) -> MutexGuard<'_, Held> {
        // All numbers change together, after everything that can fail.
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Bytes counted against an engine's memory budget until this is dropped.
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
    /// Holds zero bytes.
    pub(crate) fn none(ledger: &Arc<Ledger>, purpose: Purpose) -> Hold {
        Hold { ledger: Arc::clone(ledger), purpose, bytes: 0 }
    }

    /// The number of bytes held.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Changes the number of bytes held.
    ///
    /// # Errors
    /// [`Error::Budget`] if the memory does not suffice. Then nothing has changed.
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

    /// Splits off `bytes` bytes, or all if it holds fewer.
    pub(crate) fn split(&mut self, bytes: u64) -> Hold {
        let bytes = bytes.min(self.bytes);
        self.bytes -= bytes;
        Hold { ledger: Arc::clone(&self.ledger), purpose: self.purpose, bytes }
    }

    /// Takes over the bytes of another hold.
    pub(crate) fn join(&mut self, mut other: Hold) {
        other.turn_to(self.purpose);
        self.bytes += std::mem::take(&mut other.bytes);
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        // Returning memory does not fail.
        let _ = self.resize(0);
    }
}
