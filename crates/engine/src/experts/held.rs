//! Layers whose experts all stay in their slots for a while, so that a device can choose among them without the host.

use std::sync::Arc;

use smallvec::SmallVec;

use super::{ExpertStore, MAX_RANGES, Residence, Shared};
use crate::{ExpertIdx, LayerIdx};

impl ExpertStore {
    /// Keeps all experts of a layer in their slots. `None` unless all of them are there.
    pub fn hold(&self, layer: LayerIdx) -> Option<Held> {
        let mut state = self.shared.lock();
        let mut experts = self.shared.numbering.layer(layer.0);
        if !experts.all(|expert| matches!(state.experts[expert], Residence::Memory { .. })) {
            return None;
        }
        state.held[layer.0] += 1;
        let arrivals = state.arrivals[layer.0];
        Some(Held { shared: Arc::clone(&self.shared), layer, arrivals })
    }

    /// Whether all experts of all layers are in their slots. Then none is evicted unless slots are given back.
    pub fn holds_all(&self) -> bool {
        let state = self.shared.lock();
        state.experts.iter().all(|place| matches!(place, Residence::Memory { .. }))
    }
}

/// Keeps all experts of a layer in their slots until dropped.
pub struct Held {
    shared: Arc<Shared>,
    layer: LayerIdx,
    arrivals: u64,
}

impl Held {
    /// How often an expert of the layer has arrived in a slot. As long as this is the same, all are in the same slots.
    pub fn arrivals(&self) -> u64 {
        self.arrivals
    }

    /// The bytes of an expert's slot as they were read, and where each of its ranges starts in them.
    pub fn raw(&self, expert: ExpertIdx) -> (&[u8], SmallVec<[usize; MAX_RANGES]>) {
        let number = self.shared.numbering.layer(self.layer.0).start + expert.0 as usize;
        let Residence::Memory { slot } = self.shared.lock().experts[number] else {
            unreachable!("a held expert stays in its slot")
        };
        // SAFETY: the expert was read into the slot and stays there while the layer is held, so nobody writes to it.
        unsafe { self.shared.raw(number, slot) }
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.shared.lock().held[self.layer.0] -= 1;
    }
}
