//! The memory of conversations: what they need beyond what the plan set aside for them, expert slots give.

use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::engine::Engine;
use crate::error::{Bytes, Error, Result};
use crate::plan::Plan;
use crate::store::ExpertStore;

/// Counts what all conversations with a model hold.
pub(crate) struct ContextMemory {
    /// What they may hold before slots are asked.
    room: u64,
    /// Whether conversations are in a device's memory, where slots are lent to them.
    on_device: bool,
    held: Mutex<Held>,
}

#[derive(Default)]
struct Held {
    /// By all conversations.
    used: u64,
    /// From expert slots.
    borrowed: u64,
}

impl ContextMemory {
    /// What the plan sets aside, and what it leaves unused.
    pub fn new(plan: &Plan) -> ContextMemory {
        let room = match &plan.device {
            Some(device) => device.room(),
            None => plan.budget.saturating_sub(plan.total() - plan.kv),
        };
        ContextMemory { room, on_device: plan.device.is_some(), held: Mutex::default() }
    }

    /// One conversation goes from holding `from` bytes to holding `to`. Slots give what is missing, and get back what is
    /// no longer needed.
    ///
    /// # Errors
    /// [`Error::Budget`] if slots cannot give enough. Then nothing has changed.
    pub fn resize(&self, store: &ExpertStore, from: u64, to: u64) -> Result<()> {
        if from == to {
            return Ok(());
        }
        let mut held = self.lock();
        let used = held.used - from + to;
        let beyond = used.saturating_sub(self.room);
        if beyond > held.borrowed {
            let missing = beyond - held.borrowed;
            let given = match self.on_device {
                true => store.device_lendable().saturating_sub(held.borrowed).min(missing),
                false => store.give_back(missing),
            };
            if given < missing {
                if !self.on_device {
                    store.take_again(given);
                }
                return Err(Error::Budget {
                    need: used,
                    have: self.room + held.borrowed + given,
                    what: format!("all conversations and their grammars, this one's {}", Bytes(to)),
                    remedy: match self.on_device {
                        true => "shorten the conversation, or give it more memory with --vram",
                        false => "shorten the conversation, or give it more memory with --memory",
                    }
                    .into(),
                });
            }
            held.borrowed += given;
        } else {
            let no_longer = held.borrowed - beyond;
            held.borrowed -= if self.on_device { no_longer } else { store.take_again(no_longer) };
        }
        if self.on_device {
            store.ask_device_for(held.borrowed);
        }
        held.used = used;
        Ok(())
    }

    fn lock(&self) -> MutexGuard<'_, Held> {
        // Numbers change together, after everything that can fail.
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Bytes that an engine counts for a conversation, until it is dropped.
pub(crate) struct Hold {
    engine: Engine,
    bytes: u64,
}

impl Hold {
    /// Nothing yet.
    pub fn none(engine: &Engine) -> Hold {
        Hold { engine: engine.clone(), bytes: 0 }
    }

    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Goes on to so many bytes.
    ///
    /// # Errors
    /// [`Error::Budget`] if there is no room for them. Then nothing has changed.
    pub fn resize(&mut self, bytes: u64) -> Result<()> {
        self.engine.hold_context(self.bytes, bytes)?;
        self.bytes = bytes;
        Ok(())
    }

    /// Takes so many bytes of it, or all if it has fewer.
    pub fn split(&mut self, bytes: u64) -> Hold {
        let bytes = bytes.min(self.bytes);
        self.bytes -= bytes;
        Hold { engine: self.engine.clone(), bytes }
    }

    /// Takes over what another one holds.
    pub fn join(&mut self, mut other: Hold) {
        self.bytes += std::mem::take(&mut other.bytes);
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        // Giving memory back does not fail.
        let _ = self.resize(0);
    }
}
