//! A tier above the computer's memory: slots in the memory of the device that computes.
//!
//! Only who is where is kept here. Everything on the device happens in the order in which it was asked for, so a slot may go to the
//! next expert as soon as the work with the last one has been asked for: nothing has to be pinned.

use std::ops::Range;

use smallvec::SmallVec;

use super::policy::Policy;
use super::slots::reads_at_once;

/// A place for an expert in the memory of the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceSlot {
    /// Of the model's classes of experts.
    pub class: usize,
    /// Among the slots of the class.
    pub slot: usize,
}

/// Some places. One token's fit without an allocation.
pub type DeviceSlots = SmallVec<[usize; 16]>;

/// No expert, or no slot.
const NONE: u32 = u32::MAX;

/// No expert, because the slot's memory was lent to conversations.
const LENT: u32 = u32::MAX - 1;

/// Slots of a class that are lent together, a part of all: their memory is one piece.
pub fn part_of(slots: usize) -> usize {
    (slots / 64).max(1)
}

/// Slots of the device whose memory is lent together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DevicePart {
    /// Of the model's classes of experts.
    pub class: usize,
    /// Among the parts of the class.
    pub part: usize,
}

/// Experts that are brought at a time where slots are free.
const FILLING: usize = 16;

/// One in so many of the device's experts may leave soon: those are not counted on. With recorded traces, to count on all of them costs
/// up to a quarter of the hits in either memory, not to count on half of them next to nothing (docs/performance-cache.md).
const UNSETTLED: usize = 4;

/// Which experts are in the device's slots.
pub struct Tier {
    /// By class and slot: the expert.
    slots: Vec<Vec<u32>>,
    /// By class: slots without an expert.
    free: Vec<Vec<u32>>,
    /// By expert: its slot.
    place: Vec<u32>,
    /// By class: bytes of a slot, and how many are never lent.
    sizes: Vec<(u64, usize)>,
    /// Parts that are lent, the last one last.
    lent: Vec<DevicePart>,
}

impl Tier {
    /// Empty slots of each class, for a model with so many experts: all of a class are so large, and so many are never lent.
    pub fn new(experts: usize, slots: &[usize], sizes: Vec<(u64, usize)>) -> Tier {
        Tier {
            sizes,
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

    /// All slots.
    pub fn slot_count(&self) -> usize {
        self.slots.iter().map(Vec::len).sum()
    }

    /// Free slots of each class.
    pub fn room(&self) -> Vec<usize> {
        self.free.iter().map(Vec::len).collect()
    }

    /// How many experts of a class are brought at a time: those on their way take slots from those that stay.
    pub fn at_once(&self, class: usize) -> usize {
        reads_at_once(self.slots[class].len()).max(self.free[class].len().min(FILLING))
    }

    /// Gives experts of a class slots, not more than [`at_once`](Self::at_once): free ones first, then those of the experts
    /// that the policy lets go. None of them may have one.
    pub fn place(&mut self, class: usize, experts: &[usize], policy: &dyn Policy) -> DeviceSlots {
        let missing = experts.len().saturating_sub(self.free[class].len());
        let mut leaving = if missing > 0 { self.coldest(class, missing, policy) } else { DeviceSlots::new() };
        let mut slots = DeviceSlots::new();
        for &expert in experts {
            assert_eq!(self.place[expert], NONE, "an expert has one slot");
            let slot = match self.free[class].pop() {
                Some(slot) => slot as usize,
                None => leaving.pop().expect("there are as many slots as experts brought at a time"),
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

    /// The slots of so many experts that are worth least, the least of all last.
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

    /// Which of these experts leaves the computer's memory: one that is surely in the device's as well, the one that is worth most
    /// there, if enough others would leave the device before it; else the one that is worth least. Never called with none.
    pub fn leaves(
        &self,
        class: usize,
        candidates: &mut dyn Iterator<Item = usize>,
        policy: &dyn Policy,
    ) -> usize {
        let mut coldest = (f64::INFINITY, None);
        let mut doubled = (f64::NEG_INFINITY, None);
        for expert in candidates {
            let score = policy.score(expert);
            if coldest.1.is_none() || score < coldest.0 {
                coldest = (score, Some(expert));
            }
            if self.place[expert] != NONE && (doubled.1.is_none() || score > doubled.0) {
                doubled = (score, Some(expert));
            }
        }
        let settled = doubled.1.filter(|_| self.is_settled(class, doubled.0, policy));
        settled.or(coldest.1).expect("there is a candidate")
    }

    /// Whether enough others would leave before an expert of this score.
    fn is_settled(&self, class: usize, score: f64, policy: &dyn Policy) -> bool {
        let others = self.slots[class].iter().filter(|&&other| other != NONE && other != LENT);
        let before = others.filter(|&&other| policy.score(other as usize) < score).count();
        before * UNSETTLED >= self.slots[class].len()
    }

    /// Whether all experts are here, so that nobody ever leaves.
    pub fn holds_all(&self) -> bool {
        self.lent.is_empty() && self.slot_count() >= self.place.len() && self.free.iter().all(Vec::is_empty)
    }

    /// The slots of a part.
    fn slots_of(&self, DevicePart { class, part }: DevicePart) -> Range<usize> {
        let (all, each) = (self.slots[class].len(), part_of(self.slots[class].len()));
        part * each..all.min((part + 1) * each)
    }

    /// Bytes of a part.
    fn part_bytes(&self, part: DevicePart) -> u64 {
        self.slots_of(part).len() as u64 * self.sizes[part.class].0
    }

    /// The part of a class that would be lent next.
    fn next_part(&self, class: usize) -> Option<DevicePart> {
        let lent = self.lent.iter().filter(|part| part.class == class).count();
        let part =
            self.slots[class].len().div_ceil(part_of(self.slots[class].len())).checked_sub(lent + 1)?;
        let part = DevicePart { class, part };
        // All after it are lent.
        (self.slots_of(part).start >= self.sizes[class].1).then_some(part)
    }

    /// Bytes that are lent.
    pub fn lent_bytes(&self) -> u64 {
        self.lent.iter().map(|&part| self.part_bytes(part)).sum()
    }

    /// Bytes that can be lent at most.
    pub fn lendable_bytes(&self) -> u64 {
        let of_class = |class: usize| {
            let (all, (bytes, least)) = (self.slots[class].len(), self.sizes[class]);
            let kept = least.next_multiple_of(part_of(all)).min(all);
            (all - kept) as u64 * bytes
        };
        (0..self.slots.len()).map(of_class).sum()
    }

    /// Lends a part: its experts are no longer there. Those of the class with most slots go first.
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

    /// The part that would come back next, if what is lent then is still so many bytes.
    pub fn comes_back(&self, bytes: u64) -> Option<DevicePart> {
        let &part = self.lent.last()?;
        (self.lent_bytes() - self.part_bytes(part) >= bytes).then_some(part)
    }

    /// The part that was lent last is there again.
    pub fn take_back(&mut self) {
        let part = self.lent.pop().expect("one is lent");
        for slot in self.slots_of(part) {
            self.slots[part.class][slot] = NONE;
            self.free[part.class].push(slot as u32);
        }
    }

    /// Forgets what is where: after a failure nobody knows.
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
    fn free_slots_go_first_then_those_of_the_coldest() {
        let policy = ranked(&[4, 2, 0, 1, 3, 5, 6, 7], 8);
        let mut tier = Tier::new(8, &[3], vec![(1, 0)]);
        assert_eq!(tier.at_once(0), 3);
        let slots = tier.place(0, &[0, 2, 4], &*policy);
        assert_eq!(slots.len(), 3);
        assert_eq!(tier.at_once(0), 1);
        // Of 0, 2 and 4, 4 was used longest ago, then 2.
        assert_eq!(tier.place(0, &[6], &*policy)[0], slots[2]);
        assert_eq!([tier.find(4), tier.find(6), tier.find(2)], [None, Some(slots[2]), Some(slots[1])]);
        assert_eq!(tier.place(0, &[3, 7], &*policy)[..], [slots[1], slots[0]]);
        assert_eq!([0, 2, 4].map(|expert| tier.find(expert)), [None; 3]);
        tier.clear();
        assert!((0..8).all(|expert| tier.find(expert).is_none()));
        assert_eq!(tier.at_once(0), 3);
    }

    #[test]
    fn only_what_stays_in_the_upper_tier_leaves_the_lower_for_it() {
        let policy = ranked(&[0, 1, 2, 3, 4, 5, 6, 7], 8);
        let mut tier = Tier::new(8, &[4], vec![(1, 0)]);
        tier.place(0, &[0, 2, 4, 6], &*policy);
        let leaves = |among: &[usize]| tier.leaves(0, &mut among.iter().copied(), &*policy);
        assert_eq!(leaves(&[1, 2, 4, 5, 7]), 4);
        // Of 0 there is another, but it would be the next to leave.
        assert_eq!(leaves(&[7, 5, 0, 1]), 0);
        assert_eq!(leaves(&[7, 1, 3]), 1);
    }

    #[test]
    fn classes_do_not_mix() {
        let policy = ranked(&[0, 1, 2, 3], 4);
        let mut tier = Tier::new(4, &[1, 1], vec![(1, 0), (1, 0)]);
        assert_eq!(tier.place(0, &[1], &*policy)[..], [0]);
        assert_eq!(tier.place(1, &[0], &*policy)[..], [0]);
        tier.place(0, &[3], &*policy);
        assert_eq!([0, 1, 3].map(|expert| tier.find(expert)), [Some(0), None, Some(0)]);
    }

    #[test]
    fn lent_slots_hold_nobody_and_come_back_empty() {
        let policy = ranked(&[0, 1, 2, 3, 4, 5, 6, 7], 8);
        let mut tier = Tier::new(8, &[8], vec![(10, 3)]);
        tier.place(0, &[0, 1, 2, 3, 4, 5, 6, 7], &*policy);
        assert!(tier.holds_all() && tier.lendable_bytes() == 50);
        let lent: Vec<DevicePart> = std::iter::from_fn(|| tier.lend()).collect();
        assert_eq!(lent.iter().map(|part| part.part).collect::<Vec<_>>(), [7, 6, 5, 4, 3]);
        assert!(tier.lent_bytes() == 50 && !tier.holds_all());
        let there: Vec<usize> = (0..8).filter(|&expert| tier.find(expert).is_some()).collect();
        assert_eq!(there.len(), 3);
        // Nobody gets a lent slot, also after everything was forgotten.
        assert!(tier.place(0, &[(0..8).find(|e| !there.contains(e)).unwrap()], &*policy)[0] < 3);
        tier.clear();
        assert_eq!(tier.room(), [3]);
        assert_eq!(tier.comes_back(50), None);
        assert_eq!(tier.comes_back(40), Some(DevicePart { class: 0, part: 3 }));
        tier.take_back();
        assert_eq!((tier.room(), tier.lent_bytes()), (vec![4], 40));
    }
}
