//! Gives the memory of slots back to the operating system, so that conversations can use it, and takes it again.

use super::tier::Tier;
use super::{ExpertStore, Residence, Slot, StoreState};
use crate::memory::Lender;

impl Lender for ExpertStore {
    fn slot_bytes(&self) -> u64 {
        ExpertStore::slot_bytes(self)
    }

    fn lendable(&self) -> u64 {
        let state = self.shared.lock();
        let mut bytes = 0;
        for (class, arena) in self.shared.arenas.iter().enumerate() {
            let mut left: Vec<usize> = (0..state.slots[class].len()).collect();
            left.retain(|&slot| !state.slots[class][slot].given_back);
            let spared = left.len().saturating_sub(self.least(class));
            bytes += left.iter().rev().take(spared).map(|&slot| arena.returnable(slot)).sum::<u64>();
        }
        bytes
    }

    fn give_back(&self, bytes: u64) -> u64 {
        ExpertStore::give_back(self, bytes)
    }

    fn take_again(&self, bytes: u64) -> u64 {
        ExpertStore::take_again(self, bytes)
    }

    fn device_lendable(&self) -> u64 {
        self.shared.lock().tier.as_ref().map_or(0, Tier::lendable_bytes)
    }

    fn lend_device_bytes(&self, bytes: u64) {
        self.shared.lock().device_bytes_requested = bytes;
    }
}

/// The result of giving slots back.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Given {
    /// Bytes by which the slots' share of the budget shrinks.
    pub slots: u64,
    /// Bytes that were resident and are free now. A slot that never held an expert has none.
    pub freed: u64,
}

impl ExpertStore {
    /// Gives slots back to the operating system until `bytes` bytes of the budget are free or no slot can be spared,
    /// the last slots first. Slots in use stay, and at least those that one layer needs for a token. Returns how many
    /// bytes of the budget are free now.
    pub fn give_back(&self, bytes: u64) -> u64 {
        self.give_until(|given| given.slots >= bytes).slots
    }

    /// Like [`give_back`](Self::give_back), but until `bytes` bytes of the machine's memory are free.
    pub fn relieve(&self, bytes: u64) -> Given {
        self.give_until(|given| given.freed >= bytes)
    }

    /// Slots of a class that one layer needs for a token.
    fn least(&self, class: usize) -> usize {
        let layers = self.shared.class_of_layer.iter().zip(&self.shared.layers);
        let of_class = layers.filter(|(c, _)| **c == Some(class)).flat_map(|(_, layer)| layer);
        of_class.map(|layer| layer.used).max().unwrap_or(0)
    }

    fn give_until(&self, is_enough: impl Fn(&Given) -> bool) -> Given {
        self.populating.stop();
        let mut state = self.shared.lock();
        let mut given = Given::default();
        for (class, arena) in self.shared.arenas.iter().enumerate() {
            let least = self.least(class);
            let mut left = state.slots[class].iter().filter(|slot| !slot.given_back).count();
            for slot in (0..state.slots[class].len()).rev() {
                if is_enough(&given) || left <= least {
                    break;
                }
                let Slot { expert, pins, given_back } = state.slots[class][slot];
                let reading = expert.is_some_and(|e| matches!(state.experts[e], Residence::Reading { .. }));
                let held = expert.is_some_and(|e| state.held[self.shared.numbering.place(e).0] > 0);
                if given_back || pins > 0 || reading || held || arena.returnable(slot) == 0 {
                    continue;
                }
                if let Some(expert) = expert {
                    state.experts[expert] = Residence::Drive;
                }
                state.free[class].retain(|&free| free != slot);
                // SAFETY: the slot holds no expert, is not pinned, not being read to and not free to take.
                let freed = unsafe { arena.give_back(slot) };
                state.slots[class][slot] = Slot { expert: None, pins: 0, given_back: freed.is_some() };
                let Some(freed) = freed else {
                    // The operating system refuses, and would refuse the other slots of the class too.
                    state.free[class].push(slot);
                    break;
                };
                given.slots += arena.returnable(slot);
                given.freed += freed;
                left -= 1;
            }
        }
        given
    }

    /// Uses given-back slots again, as many as fit into `bytes`. Returns their bytes.
    pub fn take_again(&self, bytes: u64) -> u64 {
        let mut state = self.shared.lock();
        let mut taken = 0;
        for (class, arena) in self.shared.arenas.iter().enumerate() {
            let StoreState { slots, free, .. } = &mut *state;
            for (number, slot) in slots[class].iter_mut().enumerate().filter(|(_, slot)| slot.given_back) {
                if taken + arena.returnable(number) > bytes {
                    break;
                }
                slot.given_back = false;
                free[class].push(number);
                taken += arena.returnable(number);
            }
        }
        taken
    }

    /// Bytes of all slots that have not been given back.
    pub fn slot_bytes(&self) -> u64 {
        let state = self.shared.lock();
        let mut bytes = 0;
        for (arena, slots) in self.shared.arenas.iter().zip(&state.slots) {
            for (number, slot) in slots.iter().enumerate() {
                let given = if slot.given_back { arena.returnable(number) } else { 0 };
                bytes += arena.slot_bytes() as u64 - given;
            }
        }
        bytes
    }
}
