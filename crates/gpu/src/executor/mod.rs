//! Computes mixtures.

use forebay_engine::Result;
use forebay_engine::internals::backend::Backend;
use forebay_engine::internals::experts::{ExecutorBuilder, ExpertExecutor, ExpertSetup};

use crate::backend::GpuBackend;

impl ExecutorBuilder for GpuBackend {
    fn backend(&mut self) -> &mut dyn Backend {
        self
    }

    fn build(self: Box<Self>, setup: ExpertSetup<'_>) -> Result<Box<dyn ExpertExecutor>> {
        unimplemented!("{}", setup.device_slots.len())
    }
}
