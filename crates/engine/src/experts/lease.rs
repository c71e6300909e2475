//! Experts on their way to whoever computes with them: acquisitions that wait, leases that hold.

use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use forebay_kernels::{MatRef, Planes};
use smallvec::SmallVec;

use super::io::{Priority, Read};
use super::slots::Placement;
use super::tier::DeviceSlot;
use super::{ExpertPart, ExpertStore, MAX_RANGES, PartShape, Residence, Shared, StoreState};
use crate::error::{Error, Result};
use crate::{ExpertIdx, LayerIdx};

/// Some leases. One token's fit without an allocation.
pub type Leases = SmallVec<[Lease; 16]>;

/// Experts that were asked for and not yet taken.
pub struct Acquisition<'a> {
    pub(super) store: &'a ExpertStore,
    pub(super) ready: Leases,
    /// In the device's memory.
    pub(super) on_device: SmallVec<[(ExpertIdx, DeviceSlot); 16]>,
    /// Whether those that are handed out are given slots in the device's memory.
    pub(super) uploads: bool,
    /// Pinned and on their way.
    pub(super) reading: SmallVec<[usize; 16]>,
    /// Without a slot yet, the next one last.
    pub(super) waiting: SmallVec<[usize; 16]>,
    /// The most that are on their way at a time.
    pub(super) at_once: usize,
    pub(super) start: Instant,
}

impl Acquisition<'_> {
    /// The experts that have become available since the last call, at least one; waits if there is none
    /// yet. `None` when all have been handed out.
    ///
    /// The order in which experts come is not fixed: a result must not depend on it. Leases that are kept for
    /// longer than to the next call take slots away that other experts may need.
    ///
    /// # Errors
    /// If reading one of them failed, or the drive does not answer.
    pub fn next_ready(&mut self) -> Result<Option<Leases>> {
        self.next_ready_letting_go(&mut |_| Ok(false))
    }

    /// As [`next_ready`](Self::next_ready), for a caller that keeps leases for a while. Where no slot is left it is asked to drop some that it
    /// no longer needs, and told whether it should wait until there is one; it says whether it did.
    ///
    /// # Errors
    /// As [`next_ready`](Self::next_ready), and the caller's own.
    pub fn next_ready_letting_go(
        &mut self,
        let_go: &mut dyn FnMut(bool) -> Result<bool>,
    ) -> Result<Option<Leases>> {
        if !self.ready.is_empty() {
            return Ok(Some(self.hand_out()));
        }
        let shared = &self.store.shared;
        let start = Instant::now();
        let mut for_copies = Duration::ZERO;
        let mut state;
        loop {
            // The last batch has given its slots back, and reads that have ended may leave some, too.
            self.start_reads();
            if self.reading.is_empty() && self.waiting.is_empty() {
                return Ok(None);
            }
            let short = self.reading.len() < self.at_once && !self.waiting.is_empty();
            if short && let_go(false)? {
                continue;
            }
            state = shared.lock();
            if let Some(error) = self.failure(&mut state) {
                return Err(error);
            }
            self.ready = self.arrivals(&state);
            if !self.ready.is_empty() {
                break;
            }
            if state.in_flight == 0 {
                drop(state);
                // The last read may have ended after slots were looked for.
                let waiting = self.waiting.len();
                self.start_reads();
                if self.waiting.len() < waiting {
                    continue;
                }
                let asked = Instant::now();
                if let_go(true)? {
                    for_copies += asked.elapsed();
                    continue;
                }
                return Err(Error::Backend(
                    "no slot is left for an expert: all are leased, which is a defect of the caller".into(),
                ));
            }
            let silent = state.last_news.max(start).elapsed();
            if silent > shared.patience {
                return Err(self.stalled(silent));
            }
            let limit = shared.patience - silent + Duration::from_millis(1);
            drop(shared.changed.wait_timeout(state, limit).unwrap_or_else(PoisonError::into_inner));
        }
        let waited = start.elapsed();
        state.meters.copy_wait_seconds += for_copies.as_secs_f64();
        state.meters.wait_seconds += waited.saturating_sub(for_copies).as_secs_f64();
        drop(state);
        Ok(Some(self.hand_out()))
    }

    /// The experts that are in the device's memory, and where. They are there until the next ones are handed out.
    pub fn on_device(&self) -> &[(ExpertIdx, DeviceSlot)] {
        &self.on_device
    }

    /// Leases of those that are to be brought to the device and are in memory already: to start with, while the slots that they get
    /// there are chosen.
    pub fn demanded(&self) -> Leases {
        if self.uploads { self.ready.iter().map(Lease::again).collect() } else { Leases::new() }
    }

    /// How many can be handed out without waiting.
    pub fn ready(&self) -> usize {
        self.ready.len()
    }

    /// So many of those that are ready, to be computed where they are: the ones that are worth least to have on the device.
    pub fn take_coldest(&mut self, count: usize) -> Leases {
        let mut state = self.store.shared.lock();
        self.ready.sort_by(|a, b| state.policy.score(b.number).total_cmp(&state.policy.score(a.number)));
        state.meters.computed_in_memory += count as u64;
        self.ready.drain(self.ready.len() - count..).collect()
    }

    /// Those that are ready: all of them, or as many as are brought to the device at a time.
    fn hand_out(&mut self) -> Leases {
        let mut leases = std::mem::take(&mut self.ready);
        if !self.uploads {
            return leases;
        }
        let shared = &self.store.shared;
        let mut state = shared.lock();
        let StoreState { tier, policy, meters, sent, .. } = &mut *state;
        let Some(tier) = tier else { return leases };
        let class = shared.class(leases[0].number);
        let alike = leases.iter().take_while(|lease| shared.class(lease.number) == class).count();
        self.ready = leases.drain(alike.min(tier.at_once(class))..).collect();
        let numbers: SmallVec<[usize; 16]> = leases.iter().map(|lease| lease.number).collect();
        let slots = tier.place(class, &numbers, &**policy);
        for (lease, slot) in leases.iter_mut().zip(slots) {
            lease.device_slot = Some(DeviceSlot { class, slot });
            // What was sent ahead has been counted.
            match sent.iter().position(|&sent| sent == lease.number) {
                Some(at) => drop(sent.swap_remove(at)),
                None => meters.bytes_lifted += shared.expert_bytes(lease.number),
            }
        }
        leases
    }

    /// Starts reading as many of the waiting experts as there is room for.
    pub(super) fn start_reads(&mut self) {
        if self.waiting.is_empty() {
            return;
        }
        let shared = &self.store.shared;
        let mut reads: SmallVec<[Read; 96]> = SmallVec::new();
        let mut state = shared.lock();
        while let Some(&expert) = self.waiting.last().filter(|_| self.reading.len() < self.at_once) {
            // Somebody else's read of it may have ended meanwhile.
            match state.experts[expert] {
                Residence::Drive => {
                    let Some(slot) = shared.take_slot(&mut state, expert) else { break };
                    reads.extend(self.store.reads(expert, slot));
                }
                Residence::Reading { slot, .. } | Residence::Memory { slot } => {
                    state.slots[shared.class(expert)][slot].pins += 1;
                }
            }
            self.waiting.pop();
            self.reading.push(expert);
        }
        drop(state);
        if !reads.is_empty() {
            // SAFETY: the slots are pinned until their reads have ended, and the arenas outlive the reader.
            unsafe { self.store.reader.submit(&reads, Priority::Demand) };
        }
    }

    /// Leases for those that have arrived.
    fn arrivals(&mut self, state: &StoreState) -> Leases {
        let mut ready = Leases::new();
        let shared = &self.store.shared;
        self.reading.retain(|expert| {
            let Residence::Memory { slot } = state.experts[*expert] else { return true };
            ready.push(shared.lease(*expert, slot));
            false
        });
        ready
    }

    /// Why one of those that are waited for cannot come.
    fn failure(&mut self, state: &mut StoreState) -> Option<Error> {
        let lost = self.reading.iter().position(|&e| state.experts[e] == Residence::Drive)?;
        let lost = self.reading.remove(lost);
        let Some(at) = state.failures.iter().position(|(expert, _)| *expert == lost) else {
            // Another acquisition was told of it. Here it is read once more.
            self.waiting.push(lost);
            return None;
        };
        let (_, error) = state.failures.swap_remove(at);
        state.failures.retain(|(expert, _)| *expert != lost);
        Some(error)
    }

    fn stalled(&self, silent: Duration) -> Error {
        let shared = &self.store.shared;
        let expert = self.reading.first().or(self.waiting.last()).expect("somebody is waited for");
        let range = shared.ranges(*expert)[0];
        Error::io(
            &shared.paths[range.file.0],
            format!("cannot read {} bytes at offset {}", range.len, range.offset),
            std::io::Error::new(
                std::io::ErrorKind::TimedOut,
                format!("the drive has not answered for {:.0} seconds", silent.as_secs_f64()),
            ),
        )
    }
}

impl Drop for Acquisition<'_> {
    fn drop(&mut self) {
        let shared = &self.store.shared;
        let mut state = shared.lock();
        state.meters.expert_seconds += self.start.elapsed().as_secs_f64();
        for &expert in &self.reading {
            shared.unpin(&mut state, expert);
        }
    }
}

/// An expert that stays in place while the lease lives.
pub struct Lease {
    pub(super) shared: Arc<Shared>,
    /// Among all experts.
    pub(super) number: usize,
    pub(super) slot: usize,
    pub(super) device_slot: Option<DeviceSlot>,
}

impl Lease {
    /// Another lease of the same expert.
    fn again(&self) -> Lease {
        let mut state = self.shared.lock();
        state.slots[self.shared.class(self.number)][self.slot].pins += 1;
        self.shared.lease(self.number, self.slot)
    }

    /// The layer of the expert.
    pub fn layer(&self) -> LayerIdx {
        LayerIdx(self.shared.numbering.place(self.number).0)
    }

    /// Its slot in the device's memory, if it is on its way there.
    pub fn device_slot(&self) -> Option<DeviceSlot> {
        self.device_slot
    }

    /// All that was read of the expert, as it lies in the slot, and where each of its ranges starts there.
    pub fn raw(&self) -> (&[u8], SmallVec<[usize; MAX_RANGES]>) {
        let placement = Placement::new(self.shared.ranges(self.number));
        let arena = &self.shared.arenas[self.shared.class(self.number)];
        let starts = placement.extents.iter().map(|extent| extent.place + extent.lead).collect();
        // SAFETY: the expert was read to the slot, and the lease pins it: nobody writes.
        (unsafe { arena.bytes(self.slot, placement.bytes) }, starts)
    }

    /// Which expert of the layer it is.
    pub fn expert(&self) -> ExpertIdx {
        ExpertIdx(self.shared.numbering.place(self.number).1 as u32)
    }

    /// One matrix of the expert.
    pub fn part(&self, part: ExpertPart) -> MatRef<'_> {
        let (layer, index) = self.shared.numbering.place(self.number);
        let layer = self.shared.layers[layer].as_ref().expect("it has experts");
        let PartShape { encoding, rows, cols, planes, pick } = layer.parts[part as usize];
        let extents = Placement::new(&layer.experts[index]).extents;
        let arena = &self.shared.arenas[self.shared.class(self.number)];
        let [codes, scales, biases] = planes.map(|plane| match plane {
            // SAFETY: the expert was read to the slot by this placement, and the lease pins it: nobody writes.
            Some(plane) => unsafe { arena.part(self.slot, &extents[plane]) },
            None => &[],
        });
        let stored = MatRef::from_planes(encoding, rows * pick.step, cols, Planes { codes, scales, biases });
        if pick.step == 1 { stored } else { stored.every(pick.first, pick.step) }
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        let mut state = self.shared.lock();
        self.shared.unpin(&mut state, self.number);
    }
}
