//! Computes mixtures, and decides in which order experts are acquired, copied and computed.

mod card;
mod experts;
mod notes;
mod places;
mod shared;

use forebay_engine::Result;
use forebay_engine::internals::backend::Backend;
use forebay_engine::internals::experts::{ExecutorBuilder, ExpertExecutor, ExpertSetup};

use crate::backend::GpuBackend;
use card::{CardExecutor, CardSetup};
use experts::GpuExperts;
use places::Places;
use shared::SharedExecutor;

impl ExecutorBuilder for GpuBackend {
    fn backend(&mut self) -> &mut dyn Backend {
        self
    }

    fn build(mut self: Box<Self>, setup: ExpertSetup<'_>) -> Result<Box<dyn ExpertExecutor>> {
        let ExpertSetup { store, classes, device_slots, prefetch, assistant } = setup;
        let places = Places::new(&mut self, store.layers())?;
        let unified = self.gpu.unified;
        let gpu = GpuExperts::new(*self, places);
        if unified {
            return Ok(Box::new(SharedExecutor::new(gpu, store, prefetch)));
        }
        let setup = CardSetup { gpu, store, classes, device_slots, prefetch, assistant };
        Ok(Box::new(CardExecutor::new(setup)?))
    }
}
