//! The store's side of a device that has slots for experts in its own memory.

use smallvec::SmallVec;

use super::slots::Arena;
use super::tier::Tier;
use super::{Access, DevicePart, ExpertStore, Leases, Residence, Slot, SlotClass, SlotClasses};
use crate::error::Result;
use crate::memory::SharedBytes;
use crate::{ExpertIdx, LayerIdx};

/// Slots in a device's memory, as the store moves experts into them and lends them to conversations.
#[allow(clippy::missing_errors_doc)]
pub trait DeviceSlots {
    /// Starts to bring experts to their [slots](super::Lease::device_slot).
    fn upload(&mut self, leases: Leases) -> Result<()>;

    /// Drops leases that are kept while experts are on their way, and says whether it did. It may be told to `wait` until it can.
    fn let_go(&mut self, wait: bool) -> Result<bool>;

    /// Gives up the memory of some slots, which hold nobody, to conversations.
    fn lend(&mut self, part: DevicePart) -> Result<()>;

    /// Makes slots again whose memory was lent; `false` if there is none for them.
    fn take_back(&mut self, part: DevicePart) -> Result<bool>;
}

impl ExpertStore {
    /// From now on experts are computed in slots of the device's memory, of which it has so many of each class. A quarter of them is
    /// never lent, nor are those that a layer needs for a token.
    pub fn use_device_slots(&self, classes: &SlotClasses, slots: &[usize]) {
        let of_class =
            |(class, &slots): (&SlotClass, &usize)| (class.device_bytes as u64, class.used.max(slots / 4));
        let sizes = classes.classes.iter().zip(slots).map(of_class).collect();
        self.shared.lock().tier = Some(Tier::new(self.experts(), slots, sizes));
    }

    /// Slots of each class in the device's memory, if it has some.
    pub fn device_slots(&self) -> Option<Vec<usize>> {
        self.shared.lock().tier.as_ref().map(Tier::slot_counts)
    }

    /// Lends conversations what they need of the device's slots, and takes back what they do not. To be called while nothing is computed.
    ///
    /// # Errors
    /// The device's.
    pub fn lend_device(&self, device: &mut dyn DeviceSlots) -> Result<()> {
        let mut state = self.shared.lock();
        let asked = state.asked_of_device;
        let Some(tier) = &mut state.tier else { return Ok(()) };
        while tier.lent_bytes() < asked {
            let Some(part) = tier.lend() else { break };
            device.lend(part)?;
        }
        while let Some(part) = tier.comes_back(asked) {
            // Where others have taken the memory meanwhile, there are fewer slots.
            if !device.take_back(part)? {
                break;
            }
            tier.take_back();
        }
        Ok(())
    }

    /// Brings experts to the device, in the order given, as long as it has free slots for them. `progress` is told of the bytes of
    /// each.
    ///
    /// # Errors
    /// If reading fails or the device refuses.
    pub fn upload(
        &self,
        experts: impl Iterator<Item = usize>,
        device: &mut dyn DeviceSlots,
        progress: &mut dyn FnMut(u64),
    ) -> Result<()> {
        /// Enough to keep the drive busy.
        const AHEAD: usize = 128;
        let mut wanted: Vec<usize> = experts.collect();
        {
            let state = self.shared.lock();
            let Some(tier) = &state.tier else { return Ok(()) };
            let mut room = tier.room();
            wanted.retain(|&expert| {
                let room = &mut room[self.shared.class(expert)];
                let fits = *room > 0 && tier.find(expert).is_none();
                *room -= usize::from(fits);
                fits
            });
        }
        for some in wanted.chunks(AHEAD) {
            let mut acquisition = self.acquire_numbered(some.iter().copied(), Access::Preload);
            while let Some(leases) = acquisition.next_ready_letting_go(&mut |wait| device.let_go(wait))? {
                let bytes: u64 = leases.iter().map(|lease| self.shared.expert_bytes(lease.number)).sum();
                device.upload(leases)?;
                progress(bytes);
            }
        }
        Ok(())
    }

    /// Makes room in memory: what is on the device as well, and nobody uses, leaves.
    pub fn drop_doubles(&self) {
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

    /// Leases of experts of a layer that will probably be asked for next, the likeliest first: of those that are in memory and not on the
    /// device, as many as there is room for. They are counted as brought there.
    pub fn send_ahead(
        &self,
        layer: LayerIdx,
        experts: impl Iterator<Item = ExpertIdx>,
        room: usize,
    ) -> Leases {
        let first = self.shared.numbering.layer(layer.0).start;
        let mut leases = Leases::new();
        let mut state = self.shared.lock();
        for expert in experts.map(|e| first + e.0 as usize) {
            if leases.len() == room {
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

    /// Whether all experts of a layer are in the device's memory.
    pub fn device_holds(&self, layer: LayerIdx) -> bool {
        let state = self.shared.lock();
        let mut experts = self.shared.numbering.layer(layer.0);
        let here = |tier: &Tier| tier.holds_all() || experts.all(|expert| tier.find(expert).is_some());
        state.tier.as_ref().is_some_and(here)
    }

    /// Whether all experts of all layers are in the device's memory: then nobody ever leaves.
    pub fn device_holds_all(&self) -> bool {
        self.shared.lock().tier.as_ref().is_some_and(Tier::holds_all)
    }

    /// Experts were used of which nobody told at the time, because all of the layer's are on the device.
    pub fn note_used(&self, layer: LayerIdx, experts: &[u32]) {
        let first = self.shared.numbering.layer(layer.0).start;
        let mut distinct: SmallVec<[usize; 64]> = experts.iter().map(|&e| first + e as usize).collect();
        distinct.sort_unstable();
        distinct.dedup();
        let mut state = self.shared.lock();
        for expert in distinct {
            state.policy.used(expert);
            state.meters.count(true, self.shared.expert_bytes(expert));
            state.meters.device_hits += 1;
            let pictures = state.pictures;
            state.asked[expert].note(pictures, true);
        }
    }

    /// Forgets what is in the device's memory: something went wrong there.
    pub fn forget_device(&self) {
        let mut state = self.shared.lock();
        state.sent.clear();
        if let Some(tier) = &mut state.tier {
            tier.clear();
        }
    }

    /// The memory of all slots in parts of about so many bytes, each of whole slots, for a device that copies from it.
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
