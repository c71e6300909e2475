//! The memory of conversations, grammars and requests: what they need beyond what the plan set aside for them, expert slots give, but where
//! a device computes: its slots give to conversations alone.

use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::engine::Engine;
use crate::error::{Bytes, Error, Result};
use crate::plan::Plan;
use crate::store::ExpertStore;

/// Counts what all conversations with a model hold, their grammars, and requests.
pub(crate) struct ContextMemory {
    conversations: Account,
    /// Where conversations are in a device's memory. Otherwise both are in the same.
    grammars: Option<Account>,
}

/// What memory is held for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum HeldFor {
    /// What layers remember of a conversation.
    Conversation,
    /// The vocabulary as grammars see it.
    Vocabulary,
    /// Compiling a grammar.
    Compiling,
    /// A compiled grammar, which a request holds from when it is prepared until it has been answered.
    Grammar,
    /// The states of the grammar of an answer that is being written.
    Matcher,
    /// What callers hold of requests: texts, and what is made of them.
    Request,
}

impl HeldFor {
    const COUNT: usize = HeldFor::Request as usize + 1;

    /// What requests hold for as long as they wait to be answered.
    const WHILE_WAITING: [HeldFor; 2] = [HeldFor::Grammar, HeldFor::Request];
}

/// Memory that is held, and where more comes from.
struct Account {
    /// What may be held before slots are asked.
    room: u64,
    lender: Lender,
    held: Mutex<Held>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Lender {
    /// Expert slots in the computer's memory.
    Slots,
    /// Those in the device's.
    DeviceSlots,
    /// Memory that a device copies from stays where it is.
    Nobody,
}

#[derive(Clone, Copy, Default)]
struct Held {
    /// By all, for each purpose.
    used: [u64; HeldFor::COUNT],
    /// From expert slots.
    borrowed: u64,
}

impl Held {
    fn while_waiting(&self) -> u64 {
        HeldFor::WHILE_WAITING.iter().map(|&held_for| self.used[held_for as usize]).sum()
    }
}

impl ContextMemory {
    /// What the plan sets aside, and what it leaves unused.
    pub fn new(plan: &Plan) -> ContextMemory {
        let account = |room, lender| Account { room, lender, held: Mutex::default() };
        let unused = plan.budget.saturating_sub(plan.total());
        match &plan.device {
            Some(device) => ContextMemory {
                conversations: account(device.room(), Lender::DeviceSlots),
                grammars: Some(account(unused.saturating_add(plan.scratch), Lender::Nobody)),
            },
            None => ContextMemory {
                conversations: account(unused.saturating_add(plan.kv), Lender::Slots),
                grammars: None,
            },
        }
    }

    /// What is held goes from `from` bytes to `to`. Slots give what is missing, and get back what is no
    /// longer needed.
    ///
    /// # Errors
    /// [`Error::Budget`] if slots cannot give enough. Then nothing has changed.
    pub fn resize(&self, store: &ExpertStore, held_for: HeldFor, from: u64, to: u64) -> Result<()> {
        let account = match (held_for, &self.grammars) {
            (HeldFor::Conversation, _) | (_, None) => &self.conversations,
            (_, Some(grammars)) => grammars,
        };
        account.resize(store, held_for, from, to)
    }

    /// Bytes that requests hold which are prepared, or wait to be answered.
    pub fn held_by_requests(&self) -> u64 {
        let held = *self.grammars.as_ref().unwrap_or(&self.conversations).lock();
        held.while_waiting() + held.used[HeldFor::Compiling as usize]
    }
}

impl Account {
    fn resize(&self, store: &ExpertStore, held_for: HeldFor, from: u64, to: u64) -> Result<()> {
        if from == to {
            return Ok(());
        }
        let mut held = self.lock();
        let mut after = *held;
        after.used[held_for as usize] += to;
        after.used[held_for as usize] -= from;
        let used = after.used.iter().sum::<u64>();
        // A request on its own may have all memory. Several leave half to the answers: requests that wait would otherwise hold
        // the memory without which nobody is answered.
        let waiting = after.while_waiting();
        if to > from && HeldFor::WHILE_WAITING.contains(&held_for) && waiting > to {
            let half = (self.room + held.borrowed + self.lendable(store)) / 2;
            if waiting > half {
                return Err(self.refusal(waiting, half, to));
            }
        }
        let beyond = used.saturating_sub(self.room);
        if beyond > held.borrowed {
            let missing = beyond - held.borrowed;
            let given = match self.lender {
                Lender::DeviceSlots => store.device_lendable().saturating_sub(held.borrowed).min(missing),
                Lender::Slots => store.give_back(missing),
                Lender::Nobody => 0,
            };
            if given < missing {
                if self.lender == Lender::Slots {
                    store.take_again(given);
                }
                return Err(self.refusal(used, self.room + held.borrowed + given, to));
            }
            held.borrowed += given;
        } else {
            let no_longer = held.borrowed - beyond;
            let taken = if self.lender == Lender::Slots { store.take_again(no_longer) } else { no_longer };
            held.borrowed -= taken;
        }
        if self.lender == Lender::DeviceSlots {
            store.ask_device_for(held.borrowed);
        }
        held.used = after.used;
        Ok(())
    }

    /// What slots could give, besides what they gave.
    fn lendable(&self, store: &ExpertStore) -> u64 {
        match self.lender {
            Lender::Slots => store.lendable(),
            Lender::DeviceSlots => store.device_lendable(),
            Lender::Nobody => 0,
        }
    }

    fn refusal(&self, need: u64, have: u64, this: u64) -> Error {
        let (who, remedy) = match self.lender {
            Lender::Slots => (
                "all conversations, grammars and requests",
                "shorten the conversation, or give it more memory with --memory",
            ),
            Lender::DeviceSlots => {
                ("all conversations", "shorten the conversation, or give it more memory with --vram")
            }
            Lender::Nobody => {
                ("all grammars, their vocabulary and requests", "give it more memory with --memory")
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
pub struct Hold {
    engine: Engine,
    held_for: HeldFor,
    bytes: u64,
}

impl Hold {
    /// Nothing yet.
    pub(crate) fn none(engine: &Engine, held_for: HeldFor) -> Hold {
        Hold { engine: engine.clone(), held_for, bytes: 0 }
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
        self.engine.hold(self.held_for, self.bytes, bytes)?;
        self.bytes = bytes;
        Ok(())
    }

    /// Takes so many bytes of it, or all if it has fewer.
    pub(crate) fn split(&mut self, bytes: u64) -> Hold {
        let bytes = bytes.min(self.bytes);
        self.bytes -= bytes;
        Hold { engine: self.engine.clone(), held_for: self.held_for, bytes }
    }

    /// Takes over what another one holds.
    pub(crate) fn join(&mut self, mut other: Hold) {
        self.bytes += std::mem::take(&mut other.bytes);
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        // Giving memory back does not fail.
        let _ = self.resize(0);
    }
}
