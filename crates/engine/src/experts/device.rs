//! The store's part in the work of a device that has expert slots in its own memory.

use smallvec::SmallVec;

use super::slots::Arena;
use super::tier::Tier;
use super::{Access, DevicePart, ExpertStore, Leases, Residence, Slot, SlotClass, SlotClasses};
use crate::error::Result;
use crate::memory::SharedBytes;
use crate::{ExpertIdx, LayerIdx};

/// What the store asks of a device that has expert slots: uploads, and lending the slots' memory to conversations.
#[allow(clippy::missing_errors_doc)]
pub trait DeviceSlots {
    /// Starts to upload experts to their [slots](super::Lease::device_slot).
    fn upload(&mut self, leases: Leases) -> Result<()>;

    /// Drops leases of experts whose upload has finished; returns whether there were any. With `wait`, it waits for
    /// the first.
    fn release_leases(&mut self, wait: bool) -> Result<bool>;

    /// Frees the memory of a part's slots, which hold no experts, so that conversations can use it.
    fn lend(&mut self, part: DevicePart) -> Result<()>;

    /// Allocates the memory of a lent part again; returns `false` if the device has not enough.
    fn take_back(&mut self, part: DevicePart) -> Result<bool>;
}

impl ExpertStore {
    /// From now on experts are computed in device memory, which has `slots` slots of each class. A quarter of the
    /// slots of each class, and at least what one layer needs for a token, is never lent; the others are lent in at most
    /// `parts` parts.
    pub fn use_device_slots(&self, classes: &SlotClasses, slots: &[usize], parts: usize) {
        let of_class =
            |(class, &slots): (&SlotClass, &usize)| (class.device_bytes as u64, class.used.max(slots / 4));
        let sizes = classes.classes.iter().zip(slots).map(of_class).collect();
        self.shared.lock().tier = Some(Tier::new(self.experts(), slots, sizes, parts));
    }

    /// Slots of each class in device memory; `None` without a device that has slots.
    pub fn device_slots(&self) -> Option<Vec<usize>> {
        self.shared.lock().tier.as_ref().map(Tier::slot_counts)
    }

    /// Lends the slots that conversations need and takes back those they no longer need. Call it only between passes.
    ///
    /// # Errors
    /// If the device fails.
    pub fn lend_device(&self, device: &mut dyn DeviceSlots) -> Result<()> {
        let mut state = self.shared.lock();
        let asked = state.device_bytes_requested;
        let Some(tier) = &mut state.tier else { return Ok(()) };
        while tier.lent_bytes() < asked {
            let Some(part) = tier.lend() else { break };
            device.lend(part)?;
        }
        while let Some(part) = tier.next_to_take_back(asked) {
            // The device may have given the memory to something else since; it then has fewer slots.
            if !device.take_back(part)? {
                break;
            }
            tier.take_back();
        }
        Ok(())
    }

    /// Uploads experts in the given order while device memory has free slots for them. `progress` receives the bytes
    /// of each batch of experts.
    ///
    /// # Errors
    /// If reading fails or the device fails.
    pub fn upload(
        &self,
        experts: impl Iterator<Item = usize>,
        device: &mut dyn DeviceSlots,
        progress: &mut dyn FnMut(u64) -> Result<()>,
    ) -> Result<()> {
        /// Experts requested at a time: enough to keep the drive busy.
        const AHEAD: usize = 128;
        let mut wanted: Vec<usize> = experts.collect();
        {
            let state = self.shared.lock();
            let Some(tier) = &state.tier else { return Ok(()) };
            let mut free = tier.free_counts();
            wanted.retain(|&expert| {
                let free = &mut free[self.shared.class(expert)];
                let fits = *free > 0 && tier.find(expert).is_none();
                *free -= usize::from(fits);
                fits
            });
        }
        for some in wanted.chunks(AHEAD) {
            let mut acquisition = self.acquire_numbered(some.iter().copied(), Access::Preload);
            while let Some(leases) =
                acquisition.next_ready_releasing(&mut |wait| device.release_leases(wait))?
            {
                let bytes: u64 = leases.iter().map(|lease| self.shared.expert_bytes(lease.number)).sum();
                device.upload(leases)?;
                progress(bytes)?;
            }
        }
        Ok(())
    }

    /// Frees the RAM slots of experts that are in device memory too and that nobody leases.
    pub fn drop_duplicates(&self) {
        let mut state = self.shared.lock();
        for expert in 0..self.experts() {
            let Residence::Memory { slot } = state.experts[expert] else { continue };
            let class = self.shared.class(expert);
            if state.on_device(expert).is_some() && state.slots[class][slot].pins == 0 {
                state.experts[expert] = Residence::Drive;
                state.slots[class][slot] = Slot::default();
                state.free[class].push(slot);
            }
        }
    }

    /// Leases up to `limit` experts of a layer that are in RAM and not in device memory, for the device to prefetch.
    /// `experts` lists the layer's likely experts, the likeliest first. Counts the leased experts as uploaded.
    pub fn prefetch_to_device(
        &self,
        layer: LayerIdx,
        experts: impl Iterator<Item = ExpertIdx>,
        limit: usize,
    ) -> Leases {
        let first = self.shared.numbering.layer(layer.0).start;
        let mut leases = Leases::new();
        let mut state = self.shared.lock();
        for expert in experts.map(|e| first + e.0 as usize) {
            if leases.len() == limit {
                break;
            }
            let Residence::Memory { slot } = state.experts[expert] else { continue };
            if state.on_device(expert).is_none() && !state.sent.contains(&expert) {
                state.slots[self.shared.class(expert)][slot].pins += 1;
                state.sent.push(expert);
                state.meters.sent_ahead += 1;
                state.meters.bytes_lifted += self.shared.expert_bytes(expert);
                leases.push(self.shared.lease(expert, slot));
            }
        }
        leases
    }

    /// The experts of a layer, in order.
    pub fn layer_experts(&self, layer: LayerIdx) -> impl Iterator<Item = ExpertIdx> {
        (0..self.shared.numbering.layer(layer.0).len() as u32).map(ExpertIdx)
    }

    /// Whether all experts of a layer are in device memory.
    pub fn device_holds(&self, layer: LayerIdx) -> bool {
        let state = self.shared.lock();
        let mut experts = self.shared.numbering.layer(layer.0);
        let all_on_device =
            |tier: &Tier| tier.holds_all() || experts.all(|expert| tier.find(expert).is_some());
        state.tier.as_ref().is_some_and(all_on_device)
    }

    /// Whether all experts of all layers are in device memory. Then nothing is ever evicted.
    pub fn device_holds_all(&self) -> bool {
        self.shared.lock().tier.as_ref().is_some_and(Tier::holds_all)
    }

    /// Counts uses of experts that the device computed without asking the store, because the whole layer is in its
    /// memory, or in that which it shares with the process.
    pub fn note_used(&self, layer: LayerIdx, experts: &[u32]) {
        let first = self.shared.numbering.layer(layer.0).start;
        let mut distinct: SmallVec<[usize; 64]> = experts.iter().map(|&e| first + e as usize).collect();
        distinct.sort_unstable();
        distinct.dedup();
        let mut state = self.shared.lock();
        for expert in distinct {
            state.policy.used(expert);
            state.meters.count(true, self.shared.expert_bytes(expert));
            state.meters.device_hits += u64::from(state.tier.is_some());
            let pictures = state.pictures;
            state.asked[expert].note(pictures, true);
        }
    }

    /// Forgets which experts are in device memory, after an error on the device.
    pub fn forget_device(&self) {
        let mut state = self.shared.lock();
        state.sent.clear();
        if let Some(tier) = &mut state.tier {
            tier.clear();
        }
    }

    /// The memory of all slots, split into parts of about `bytes` bytes that contain whole slots, for pinning.
    pub fn slot_memory(&self, bytes: usize) -> Vec<SharedBytes> {
        let parts = |arena: &Arena| {
            let (region, step) =
                (arena.region(), (bytes / arena.slot_bytes().max(1)).max(1) * arena.slot_bytes());
            let part = |start: usize| region.share(start..region.len().min(start + step));
            (0..region.len()).step_by(step.max(1)).map(part).collect::<Vec<_>>()
        };
        self.shared.arenas.iter().flat_map(parts).collect()
    }
}
