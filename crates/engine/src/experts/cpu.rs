//! The executor of the CPU, which computes experts directly in the store's slots.

use std::sync::Arc;

use smallvec::SmallVec;

use super::executor::{Access, BatchShape, ExecutorBuilder, ExpertExecutor, ExpertSetup, Meanwhile, Mixture};
use super::{ExpertStore, Lease};
use crate::ExpertIdx;
use crate::backend::{Backend, CpuBackend, ExpertWeights, Routing};
use crate::error::Result;

/// Computes mixtures on the CPU.
pub struct CpuExecutor {
    backend: CpuBackend,
    store: Arc<ExpertStore>,
    prefetch: bool,
    access: Access,
    /// The routing of the current layer, and the expected routing of the next one. Both reuse their allocations.
    routing: Routing,
    expected: Routing,
}

impl ExecutorBuilder for CpuBackend {
    fn backend(&mut self) -> &mut dyn Backend {
        self
    }

    fn build(self: Box<Self>, experts: ExpertSetup<'_>) -> Result<Box<dyn ExpertExecutor>> {
        let ExpertSetup { store, prefetch, .. } = experts;
        Ok(Box::new(CpuExecutor::new(*self, store, prefetch)))
    }
}

impl CpuExecutor {
    /// Computes with the experts of `store`. With `prefetch`, it reads the experts that the next layer will probably
    /// use while the drive is idle.
    pub fn new(backend: CpuBackend, store: Arc<ExpertStore>, prefetch: bool) -> CpuExecutor {
        let (routing, expected) = (Routing::default(), Routing::default());
        CpuExecutor { backend, store, prefetch, access: Access::Prompt, routing, expected }
    }
}

impl ExpertExecutor for CpuExecutor {
    fn backend(&mut self) -> &mut dyn Backend {
        &mut self.backend
    }

    fn upload(
        &mut self,
        _: &mut dyn Iterator<Item = usize>,
        _: &mut dyn FnMut(u64) -> Result<()>,
    ) -> Result<()> {
        Ok(())
    }

    fn preload(
        &mut self,
        experts: &mut dyn Iterator<Item = usize>,
        progress: &mut dyn FnMut(u64) -> Result<()>,
    ) -> Result<()> {
        self.store.preload(experts, progress)
    }

    fn lend(&mut self) -> Result<()> {
        Ok(())
    }

    fn begin(&mut self, batch: BatchShape) -> Result<()> {
        self.access = batch.access();
        if batch.is_step() {
            self.store.tick();
        }
        self.backend.begin(batch.rows);
        Ok(())
    }

    /// Computes experts in the order in which they become ready. It keeps their outputs apart and adds them in rank
    /// order, so that the order of arrival changes no bit.
    fn mixture(&mut self, mixture: Mixture<'_>, meanwhile: &mut Meanwhile<'_>) -> Result<()> {
        let Mixture { router, weights, next, input, logits, ready, experts, out, observer } = mixture;
        let CpuExecutor { backend, store, routing, expected, .. } = self;
        let layer = experts.layer;
        if !ready {
            weights.logits(backend, input, logits)?;
        }
        backend.route(logits, router, &weights, routing)?;
        if let Some(observer) = observer {
            observer(layer, routing);
        }
        let mut acquisition = store.acquire(layer, routing.chosen(), self.access);
        // A prompt uses nearly all experts, and the store reads ahead for it anyway.
        if let Some(next) = next.filter(|_| self.prefetch && self.access == Access::Token) {
            next.router.logits(backend, input, logits)?;
            backend.route(logits, router, &next.router, expected)?;
            let likely: SmallVec<[ExpertIdx; 32]> = expected.likeliest().collect();
            store.prefetch(next.layer, &likely);
        }
        // The drive reads in the meantime.
        meanwhile(backend)?;
        while let Some(mut leases) = acquisition.next_ready()? {
            leases.sort_unstable_by_key(Lease::expert);
            let weights: SmallVec<[ExpertWeights<'_>; 16]> = leases.iter().map(Lease::weights).collect();
            backend.experts(&experts, routing, &weights);
        }
        backend.combine(routing, experts.block.out, out);
        Ok(())
    }

    fn end(&mut self) -> Result<()> {
        self.backend.submit()
    }

    fn count_used(&mut self) -> Result<()> {
        Ok(())
    }

    fn forget(&mut self) {}
}
