//! Computes mixtures.

mod experts;
mod places;
mod shared;

use forebay_engine::Result;
use forebay_engine::internals::backend::Backend;
use forebay_engine::internals::experts::{ExecutorBuilder, ExpertExecutor, ExpertSetup};

use crate::backend::GpuBackend;
use experts::GpuExperts;
use places::Places;
use shared::SharedExecutor;

impl ExecutorBuilder for GpuBackend {
    fn backend(&mut self) -> &mut dyn Backend {
        self
    }

    fn build(mut self: Box<Self>, setup: ExpertSetup<'_>) -> Result<Box<dyn ExpertExecutor>> {
        let ExpertSetup { store, prefetch, .. } = setup;
        assert!(self.gpu.unified, "slots in the memory of a card");
        let parts = store.slot_memory(self.gpu.largest_arena());
        let places = Places::new(&mut self, store.layers(), parts)?;
        Ok(Box::new(SharedExecutor::new(GpuExperts::new(*self, places), store, prefetch)))
    }
}
