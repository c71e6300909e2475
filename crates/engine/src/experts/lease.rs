//! Acquisitions, which wait for requested experts, and leases, which keep experts in their slots.

use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use forebay_kernels::{MatRef, Planes};
use smallvec::SmallVec;

use super::io::{Priority, Read};
use super::slots::Placement;
use super::tier::DeviceSlot;
use super::{ExpertStore, MAX_RANGES, PartShape, Residence, Shared, StoreState};
use crate::backend::{ExpertWeights, Parts};
use crate::error::{Error, Result};
use crate::{ExpertIdx, LayerIdx};

/// Leases. Those of one token fit without an allocation.
pub type Leases = SmallVec<[Lease; 16]>;

/// Experts that were requested and not yet handed out.
pub struct Acquisition<'a> {
    pub(super) store: &'a ExpertStore,
    pub(super) ready: Leases,
    /// Those that are in device memory.
    pub(super) on_device: SmallVec<[(ExpertIdx, DeviceSlot); 16]>,
    /// Whether the leases handed out get slots in device memory.
    pub(super) uploads: bool,
    /// Those being read; their slots are pinned.
    pub(super) reading: SmallVec<[usize; 16]>,
    /// Those without a slot yet, the next one last.
    pub(super) waiting: SmallVec<[usize; 16]>,
    /// The most reads under way at a time.
    pub(super) at_once: usize,
    pub(super) start: Instant,
}

impl Acquisition<'_> {
    /// The experts that have become ready since the last call, at least one: waits if there is none yet. `None` when
    /// all have been handed out.
    ///
    /// The order in which experts become ready is not fixed, so a result must not depend on it. Leases kept beyond
    /// the next call take slots that other experts may need.
    ///
    /// # Errors
    /// If reading an expert failed, or the drive does not answer.
    pub fn next_ready(&mut self) -> Result<Option<Leases>> {
        self.next_ready_releasing(&mut |_| Ok(false))
    }

    /// Like [`next_ready`](Self::next_ready), for a caller that keeps leases for a while. If no slot is free, it calls
    /// `release` to drop leases that are no longer needed, with `true` if `release` should wait for one. `release`
    /// returns whether it dropped any.
    ///
    /// # Errors
    /// Those of [`next_ready`](Self::next_ready), and those of `release`.
    pub fn next_ready_releasing(
        &mut self,
        release: &mut dyn FnMut(bool) -> Result<bool>,
    ) -> Result<Option<Leases>> {
        if !self.ready.is_empty() {
            return Ok(Some(self.hand_out()));
        }
        let shared = &self.store.shared;
        let start = Instant::now();
        let mut for_copies = Duration::ZERO;
        let mut state;
        loop {
            // The caller has dropped the last batch of leases, and reads that ended may have left free slots.
            self.start_reads();
            if self.reading.is_empty() && self.waiting.is_empty() {
                return Ok(None);
            }
            let short = self.reading.len() < self.at_once && !self.waiting.is_empty();
            if short && release(false)? {
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
                // The last read may have ended after the search for slots.
                let waiting = self.waiting.len();
                self.start_reads();
                if self.waiting.len() < waiting {
                    continue;
                }
                let asked = Instant::now();
                if release(true)? {
                    for_copies += asked.elapsed();
                    continue;
                }
                return Err(Error::Backend(
                    "every expert slot is leased, so an expert cannot be read: this is a bug in Forebay"
                        .into(),
                ));
            }
            let silent = state.last_progress.max(start).elapsed();
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

    /// The experts that are in device memory, with their slots. They stay there until the next call that hands out
    /// leases.
    pub fn on_device(&self) -> &[(ExpertIdx, DeviceSlot)] {
        &self.on_device
    }

    /// Leases of those that are in RAM and will be uploaded, so that uploads can start before device slots are
    /// chosen.
    pub fn demanded(&self) -> Leases {
        if self.uploads { self.ready.iter().map(Lease::again).collect() } else { Leases::new() }
    }

    /// How many experts can be handed out without waiting.
    pub fn ready(&self) -> usize {
        self.ready.len()
    }

    /// Takes `count` of the ready experts, to be computed in RAM: those with the lowest score in the eviction policy.
    pub fn take_coldest(&mut self, count: usize) -> Leases {
        let mut state = self.store.shared.lock();
        self.ready.sort_by(|a, b| state.policy.score(b.number).total_cmp(&state.policy.score(a.number)));
        state.meters.computed_in_memory += count as u64;
        self.ready.drain(self.ready.len() - count..).collect()
    }

    /// Takes the ready experts: all of them, or as many as are uploaded at a time.
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
        let same_class = leases.iter().take_while(|lease| shared.class(lease.number) == class).count();
        self.ready = leases.drain(same_class.min(tier.at_once(class))..).collect();
        let numbers: SmallVec<[usize; 16]> = leases.iter().map(|lease| lease.number).collect();
        let slots = tier.place(class, &numbers, &**policy);
        for (lease, slot) in leases.iter_mut().zip(slots) {
            lease.device_slot = Some(DeviceSlot { class, slot });
            // An expert that was prefetched to the device was counted then.
            match sent.iter().position(|&sent| sent == lease.number) {
                Some(at) => drop(sent.swap_remove(at)),
                None => meters.bytes_lifted += shared.expert_bytes(lease.number),
            }
        }
        leases
    }

    /// Starts reading waiting experts while slots are free for them.
    pub(super) fn start_reads(&mut self) {
        if self.waiting.is_empty() {
            return;
        }
        let shared = &self.store.shared;
        let mut reads: SmallVec<[Read; 96]> = SmallVec::new();
        let mut state = shared.lock();
        while let Some(&expert) = self.waiting.last().filter(|_| self.reading.len() < self.at_once) {
            // Another acquisition may have read it in the meantime.
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

    /// Leases of the experts that have arrived.
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

    /// The error of the first expert whose read failed, if any.
    fn failure(&mut self, state: &mut StoreState) -> Option<Error> {
        let lost = self.reading.iter().position(|&e| state.experts[e] == Residence::Drive)?;
        let lost = self.reading.remove(lost);
        let Some(at) = state.failures.iter().position(|(expert, _)| *expert == lost) else {
            // Another acquisition has taken the error. This one reads the expert again.
            self.waiting.push(lost);
            return None;
        };
        let (_, error) = state.failures.swap_remove(at);
        state.failures.retain(|(expert, _)| *expert != lost);
        Some(error)
    }

    fn stalled(&self, silent: Duration) -> Error {
        let shared = &self.store.shared;
        let expert = self.reading.first().or(self.waiting.last()).expect("an expert is waited for");
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

/// Keeps an expert in its slot until dropped.
pub struct Lease {
    pub(super) shared: Arc<Shared>,
    /// The expert's number among all experts.
    pub(super) number: usize,
    pub(super) slot: usize,
    pub(super) device_slot: Option<DeviceSlot>,
}

impl Lease {
    /// Another lease on the same expert.
    fn again(&self) -> Lease {
        let mut state = self.shared.lock();
        state.slots[self.shared.class(self.number)][self.slot].pins += 1;
        self.shared.lease(self.number, self.slot)
    }

    /// The expert's layer.
    pub fn layer(&self) -> LayerIdx {
        LayerIdx(self.shared.numbering.place(self.number).0)
    }

    /// The expert's slot in device memory, if it is being uploaded.
    pub fn device_slot(&self) -> Option<DeviceSlot> {
        self.device_slot
    }

    /// The bytes of the slot as they were read, and where each of the expert's ranges starts in them.
    pub fn raw(&self) -> (&[u8], SmallVec<[usize; MAX_RANGES]>) {
        // SAFETY: the expert was read into the slot, and the lease pins it, so nobody writes to it.
        unsafe { self.shared.raw(self.number, self.slot) }
    }

    /// The expert's index in its layer.
    pub fn expert(&self) -> ExpertIdx {
        ExpertIdx(self.shared.numbering.place(self.number).1 as u32)
    }

    /// The expert's matrices.
    pub fn weights(&self) -> ExpertWeights<'_> {
        let (layer, index) = self.shared.numbering.place(self.number);
        let layer = self.shared.layers[layer].as_ref().expect("it has experts");
        let extents = Placement::new(&layer.experts[index]).extents;
        let arena = &self.shared.arenas[self.shared.class(self.number)];
        let matrix = |&PartShape { encoding, rows, cols, planes, pick }: &PartShape| {
            let [codes, scales, biases] = planes.map(|plane| match plane {
                // SAFETY: the expert was read into the slot by this placement, and the lease pins it, so nobody writes
                // to it.
                Some(plane) => unsafe { arena.part(self.slot, &extents[plane]) },
                None => &[],
            });
            let stored =
                MatRef::from_planes(encoding, rows * pick.of, cols, Planes { codes, scales, biases });
            match pick.step {
                1 => stored.rows(pick.first..pick.first + rows),
                step => stored.every(pick.first, step),
            }
        };
        let block = |parts: &Parts<PartShape>| parts.each(matrix);
        ExpertWeights {
            expert: ExpertIdx(index as u32),
            parts: block(&layer.parts),
            adjugate: layer.adjugate.as_ref().map(block),
        }
    }
}

impl Shared {
    /// The bytes of an expert's slot as they were read, and where each of the expert's ranges starts in them.
    ///
    /// # Safety
    /// The expert was read into the slot, and nobody may write to it while the slice lives.
    pub(super) unsafe fn raw(&self, expert: usize, slot: usize) -> (&[u8], SmallVec<[usize; MAX_RANGES]>) {
        let placement = Placement::new(self.ranges(expert));
        let starts = placement.extents.iter().map(|extent| extent.place + extent.lead).collect();
        // SAFETY: promised by the caller.
        (unsafe { self.arenas[self.class(expert)].bytes(slot, placement.bytes) }, starts)
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        let mut state = self.shared.lock();
        self.shared.unpin(&mut state, self.number);
    }
}
