//! The tier above RAM: which experts are in the slots of device memory.
//!
//! This module only keeps the record. A device works in the order of its requests, so a slot can go to the next
//! expert as soon as the work with the last one has been requested: no slot needs to be pinned.

use std::ops::Range;

use smallvec::SmallVec;

use super::policy::Policy;
use super::slots::reads_at_once;

/// A slot in device memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceSlot {
    /// The class of experts.
    pub class: usize,
    /// The index among the slots of the class.
    pub slot: usize,
}

/// Slots. Those of one token fit without an allocation.
pub type DeviceSlots = SmallVec<[usize; 16]>;

/// No expert, or no slot.
const NONE: u32 = u32::MAX;

/// No expert, because the slot's memory is lent to conversations.
const LENT: u32 = u32::MAX - 1;

/// The number of slots of a class that are lent together, of a class that has at most this many such parts. The memory
/// of each part is one allocation.
pub fn part_of(slots: usize, parts: usize) -> usize {
    slots.div_ceil(parts).max(1)
}

/// Slots in device memory that are lent together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DevicePart {
    /// The class of experts.
    pub class: usize,
    /// The index among the parts of the class.
    pub part: usize,
}

/// Experts uploaded at a time while slots are free.
const FILLING: usize = 16;

/// An expert in device memory counts as settled if at least one in this many of its class would be evicted before it.
/// Only the RAM copy of a settled expert is dropped early. On recorded traces, dropping without this rule costs up to
/// a quarter of the hits of either memory; excluding half of the experts costs next to nothing (docs/performance-cache.md).
const UNSETTLED: usize = 4;

/// Which experts are in the slots of device memory.
pub struct Tier {
    /// By class and slot: the expert.
    slots: Vec<Vec<u32>>,
    /// By class: slots without an expert.
    free: Vec<Vec<u32>>,
    /// By expert: its slot.
    place: Vec<u32>,
    /// By class: the bytes of a slot, and how many slots are never lent.
    sizes: Vec<(u64, usize)>,
    /// The most parts of a class.
    parts: usize,
    /// Parts that are lent, in the order of lending.
    lent: Vec<DevicePart>,
}

impl Tier {
    /// A tier of empty slots of each class for a model with `experts` experts. `sizes` has for each class the bytes
    /// of a slot and how many slots are never lent. The others are lent in at most `parts` parts.
    pub fn new(experts: usize, slots: &[usize], sizes: Vec<(u64, usize)>, parts: usize) -> Tier {
        Tier {
            sizes,
            parts,
            lent: Vec::new(),
            slots: slots.iter().map(|&n| vec![NONE; n]).collect(),
            free: slots.iter().map(|&n| (0..n as u32).rev().collect()).collect(),
            place: vec![NONE; experts],
        }
    }

    /// The slot of an expert, if it has one.
    pub fn find(&self, expert: usize) -> Option<usize> {
        Some(self.place[expert]).filter(|&slot| slot != NONE).map(|slot| slot as usize)
    }

    /// Slots of each class.
    pub fn slot_counts(&self) -> Vec<usize> {
        self.slots.iter().map(Vec::len).collect()
    }

    /// The number of all slots.
    pub fn slot_count(&self) -> usize {
        self.slots.iter().map(Vec::len).sum()
    }

    /// The number of free slots of each class.
    pub fn free_counts(&self) -> Vec<usize> {
        self.free.iter().map(Vec::len).collect()
    }

    /// How many experts of a class are uploaded at a time. The others keep their slots meanwhile.
    pub fn at_once(&self, class: usize) -> usize {
        reads_at_once(self.slots[class].len()).max(self.free[class].len().min(FILLING))
    }

    /// Gives slots to experts of a class that have none, at most [`at_once`](Self::at_once): free slots first, then
    /// the slots of the experts that the policy evicts.
    pub fn place(&mut self, class: usize, experts: &[usize], policy: &dyn Policy) -> DeviceSlots {
        let missing = experts.len().saturating_sub(self.free[class].len());
        let mut evicted = if missing > 0 { self.coldest(class, missing, policy) } else { DeviceSlots::new() };
        let mut slots = DeviceSlots::new();
        for &expert in experts {
            assert_eq!(self.place[expert], NONE, "the expert has a slot already");
            let slot = match self.free[class].pop() {
                Some(slot) => slot as usize,
                None => evicted.pop().expect("at most `at_once` experts"),
            };
            let last = std::mem::replace(&mut self.slots[class][slot], expert as u32);
            if last != NONE {
                self.place[last as usize] = NONE;
            }
            self.place[expert] = slot as u32;
            slots.push(slot);
        }
        slots
    }

    /// The slots of the `count` experts with the lowest scores, the lowest last.
    fn coldest(&self, class: usize, count: usize, policy: &dyn Policy) -> DeviceSlots {
        let mut found: SmallVec<[(f64, usize); 16]> = SmallVec::new();
        for (slot, &expert) in self.slots[class].iter().enumerate() {
            if expert == NONE || expert == LENT {
                continue;
            }
            let score = policy.score(expert as usize);
            if found.len() == count && score >= found[0].0 {
                continue;
            }
            if found.len() == count {
                found.remove(0);
            }
            let at = found.partition_point(|&(other, _)| other > score);
            found.insert(at, (score, slot));
        }
        found.into_iter().map(|(_, slot)| slot).collect()
    }

    /// Which of these experts is evicted from RAM. If possible, it is one that is in device memory too and settled
    /// there; of those, the one with the highest score. Otherwise it is the one with the lowest score. There is at
    /// least one candidate.
    pub fn victim(
        &self,
        class: usize,
        candidates: &mut dyn Iterator<Item = usize>,
        policy: &dyn Policy,
    ) -> usize {
        let mut coldest = (f64::INFINITY, None);
        let mut duplicate = (f64::NEG_INFINITY, None);
        for expert in candidates {
            let score = policy.score(expert);
            if coldest.1.is_none() || score < coldest.0 {
                coldest = (score, Some(expert));
            }
            if self.place[expert] != NONE && (duplicate.1.is_none() || score > duplicate.0) {
                duplicate = (score, Some(expert));
            }
        }
        let settled = duplicate.1.filter(|_| self.is_settled(class, duplicate.0, policy));
        settled.or(coldest.1).expect("there is a candidate")
    }

    /// Whether enough others would be evicted from device memory before an expert of this score.
    fn is_settled(&self, class: usize, score: f64, policy: &dyn Policy) -> bool {
        let others = self.slots[class].iter().filter(|&&other| other != NONE && other != LENT);
        let before = others.filter(|&&other| policy.score(other as usize) < score).count();
        before * UNSETTLED >= self.slots[class].len()
    }

    /// Whether all experts are in this tier. Then none is ever evicted.
    pub fn holds_all(&self) -> bool {
        self.lent.is_empty() && self.slot_count() >= self.place.len() && self.free.iter().all(Vec::is_empty)
    }

    /// The number of slots of a class that are lent together.
    fn part_of(&self, class: usize) -> usize {
        part_of(self.slots[class].len(), self.parts)
    }

    /// The slots of a part.
    fn slots_of(&self, DevicePart { class, part }: DevicePart) -> Range<usize> {
        let (all, each) = (self.slots[class].len(), self.part_of(class));
        part * each..all.min((part + 1) * each)
    }

    /// Bytes of a part.
    fn part_bytes(&self, part: DevicePart) -> u64 {
        self.slots_of(part).len() as u64 * self.sizes[part.class].0
    }

    /// The part of a class that would be lent next.
    fn next_part(&self, class: usize) -> Option<DevicePart> {
        let lent = self.lent.iter().filter(|part| part.class == class).count();
        let part = self.slots[class].len().div_ceil(self.part_of(class)).checked_sub(lent + 1)?;
        let part = DevicePart { class, part };
        // All parts after it are lent.
        (self.slots_of(part).start >= self.sizes[class].1).then_some(part)
    }

    /// Bytes that are lent.
    pub fn lent_bytes(&self) -> u64 {
        self.lent.iter().map(|&part| self.part_bytes(part)).sum()
    }

    /// The most bytes that can be lent.
    pub fn lendable_bytes(&self) -> u64 {
        let of_class = |class: usize| {
            let (all, (bytes, least)) = (self.slots[class].len(), self.sizes[class]);
            let kept = least.next_multiple_of(self.part_of(class)).min(all);
            (all - kept) as u64 * bytes
        };
        (0..self.slots.len()).map(of_class).sum()
    }

    /// Lends a part and forgets its experts. The class with the most slots lends first.
    pub fn lend(&mut self) -> Option<DevicePart> {
        let parts = (0..self.slots.len()).filter_map(|class| self.next_part(class));
        let part = parts.max_by_key(|&part| self.slots_of(part).start as u64 * self.sizes[part.class].0)?;
        for slot in self.slots_of(part) {
            let expert = std::mem::replace(&mut self.slots[part.class][slot], LENT);
            if expert != NONE {
                self.place[expert as usize] = NONE;
            }
        }
        let slots = &self.slots[part.class];
        self.free[part.class].retain(|&slot| slots[slot as usize] != LENT);
        self.lent.push(part);
        Some(part)
    }

    /// The part to take back next, if at least `bytes` bytes remain lent without it.
    pub fn next_to_take_back(&self, bytes: u64) -> Option<DevicePart> {
        let &part = self.lent.last()?;
        (self.lent_bytes() - self.part_bytes(part) >= bytes).then_some(part)
    }

    /// Records that the part lent last is back, with empty slots.
    pub fn take_back(&mut self) {
        let part = self.lent.pop().expect("one is lent");
        for slot in self.slots_of(part) {
            self.slots[part.class][slot] = NONE;
            self.free[part.class].push(slot as u32);
        }
    }

    /// Forgets all experts, after a failure on the device.
    pub fn clear(&mut self) {
        for (slots, free) in self.slots.iter_mut().zip(&mut self.free) {
            slots.iter_mut().filter(|slot| **slot != LENT).for_each(|slot| *slot = NONE);
            free.clear();
            free.extend((0..slots.len() as u32).rev().filter(|&slot| slots[slot as usize] != LENT));
        }
        self.place.fill(NONE);
    }
}

#[cfg(test)]
mod tests {
    use super::super::policy::{self, PolicyKind};
    use super::*;

    fn ranked(order: &[usize], experts: usize) -> Box<dyn Policy> {
        let mut policy = policy::make(PolicyKind::Lru, experts);
        order.iter().for_each(|&expert| policy.used(expert));
        policy
    }

    #[test]
    fn free_slots_are_used_first_then_those_of_the_coldest_experts() {
        let policy = ranked(&[4, 2, 0, 1, 3, 5, 6, 7], 8);
        let mut tier = Tier::new(8, &[3], vec![(1, 0)], 64);
        assert_eq!(tier.at_once(0), 3);
        let slots = tier.place(0, &[0, 2, 4], &*policy);
        assert_eq!(slots.len(), 3);
        assert_eq!(tier.at_once(0), 1);
        // Of experts 0, 2 and 4, 4 was used longest ago, then 2.
        assert_eq!(tier.place(0, &[6], &*policy)[0], slots[2]);
        assert_eq!([tier.find(4), tier.find(6), tier.find(2)], [None, Some(slots[2]), Some(slots[1])]);
        assert_eq!(tier.place(0, &[3, 7], &*policy)[..], [slots[1], slots[0]]);
        assert_eq!([0, 2, 4].map(|expert| tier.find(expert)), [None; 3]);
        tier.clear();
        assert!((0..8).all(|expert| tier.find(expert).is_none()));
        assert_eq!(tier.at_once(0), 3);
    }

    #[test]
    fn only_experts_settled_on_the_device_are_evicted_from_ram_first() {
        let policy = ranked(&[0, 1, 2, 3, 4, 5, 6, 7], 8);
        let mut tier = Tier::new(8, &[4], vec![(1, 0)], 64);
        tier.place(0, &[0, 2, 4, 6], &*policy);
        let victim = |among: &[usize]| tier.victim(0, &mut among.iter().copied(), &*policy);
        assert_eq!(victim(&[1, 2, 4, 5, 7]), 4);
        // Expert 0 is on the device too, but would be evicted there next.
        assert_eq!(victim(&[7, 5, 0, 1]), 0);
        assert_eq!(victim(&[7, 1, 3]), 1);
    }

    #[test]
    fn classes_do_not_mix() {
        let policy = ranked(&[0, 1, 2, 3], 4);
        let mut tier = Tier::new(4, &[1, 1], vec![(1, 0), (1, 0)], 64);
        assert_eq!(tier.place(0, &[1], &*policy)[..], [0]);
        assert_eq!(tier.place(1, &[0], &*policy)[..], [0]);
        tier.place(0, &[3], &*policy);
        assert_eq!([0, 1, 3].map(|expert| tier.find(expert)), [Some(0), None, Some(0)]);
    }

    #[test]
    fn lent_slots_hold_no_expert_and_come_back_empty() {
        let policy = ranked(&[0, 1, 2, 3, 4, 5, 6, 7], 8);
        let mut tier = Tier::new(8, &[8], vec![(10, 3)], 64);
        tier.place(0, &[0, 1, 2, 3, 4, 5, 6, 7], &*policy);
        assert!(tier.holds_all() && tier.lendable_bytes() == 50);
        let lent: Vec<DevicePart> = std::iter::from_fn(|| tier.lend()).collect();
        assert_eq!(lent.iter().map(|part| part.part).collect::<Vec<_>>(), [7, 6, 5, 4, 3]);
        assert!(tier.lent_bytes() == 50 && !tier.holds_all());
        let there: Vec<usize> = (0..8).filter(|&expert| tier.find(expert).is_some()).collect();
        assert_eq!(there.len(), 3);
        // No expert gets a lent slot, not even after all experts are forgotten.
        assert!(tier.place(0, &[(0..8).find(|e| !there.contains(e)).unwrap()], &*policy)[0] < 3);
        tier.clear();
        assert_eq!(tier.free_counts(), [3]);
        assert_eq!(tier.next_to_take_back(50), None);
        assert_eq!(tier.next_to_take_back(40), Some(DevicePart { class: 0, part: 3 }));
        tier.take_back();
        assert_eq!((tier.free_counts(), tier.lent_bytes()), (vec![4], 40));
    }
}
