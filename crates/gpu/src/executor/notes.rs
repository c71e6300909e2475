//! The choices of layers whose experts are all at hand, which the store learns of after the pass.

use bytemuck::cast_slice_mut;
use forebay_engine::internals::experts::ExpertStore;
use forebay_engine::{LayerIdx, Result};

use crate::backend::GpuBackend;
use crate::backend::choice::Chosen;
use crate::device::Memory;

/// The most numbers that are noted of a layer: the choices of a few tokens.
const NOTED: usize = 2048;

/// The choices of a pass.
#[derive(Default)]
pub struct Notes {
    /// `[layers, NOTED]`
    memory: Option<Memory>,
    /// The layers, with the number of pairs of each.
    layers: Vec<(LayerIdx, usize)>,
}

impl Notes {
    /// Drops the choices of a failed pass.
    pub fn forget(&mut self) {
        self.layers.clear();
    }

    /// Notes a layer's choice. The model has this many layers.
    ///
    /// # Errors
    /// If there is no memory.
    pub fn add(
        &mut self,
        backend: &mut GpuBackend,
        layers: usize,
        (layer, chosen): (LayerIdx, &Chosen),
    ) -> Result<()> {
        assert!(chosen.pairs() <= NOTED, "{} numbers of a layer are noted", chosen.pairs());
        let memory = match &mut self.memory {
            Some(memory) => memory,
            none => none.insert(backend.gpu.allocate((layers * NOTED * 4) as u64, "scratch")?),
        };
        let to = memory.whole().part((layer.0 * NOTED * 4) as u64, chosen.experts.bytes);
        backend.flush()?;
        backend.recorder.copy(&chosen.experts, &to);
        self.layers.push((layer, chosen.pairs()));
        Ok(())
    }

    /// Tells the store of all noted choices.
    ///
    /// # Errors
    /// If the GPU fails.
    pub fn tell(&mut self, backend: &mut GpuBackend, store: &ExpertStore) -> Result<()> {
        let noted = std::mem::take(&mut self.layers);
        let Some(memory) = self.memory.as_ref().filter(|_| !noted.is_empty()) else { return Ok(()) };
        let mut words = vec![0u32; memory.bytes() as usize / 4];
        backend.recorder.read(&memory.whole(), cast_slice_mut(&mut words))?;
        for (layer, pairs) in noted {
            store.note_used(layer, &words[layer.0 * NOTED..][..pairs]);
        }
        Ok(())
    }
}
