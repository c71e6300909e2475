//! Computes some of a layer's experts on the CPU, from RAM, while a device uploads and computes the others
//! (`--cpu-experts`).

use std::time::Instant;

use smallvec::SmallVec;

use super::{Lease, Leases};
use crate::backend::{Backend, CpuBackend, Experts, Routing};

/// Seconds to copy the activations to RAM and the results back.
const THERE_AND_BACK: f64 = 30e-6;

/// Weight of the newest measurement in the moving average.
const NEWEST: f64 = 0.1;

/// Computes some of a layer's experts on the CPU. Its results differ from the device's in their last bits.
pub struct Assistant {
    backend: CpuBackend,
    /// Measured seconds to upload one expert.
    link: f64,
    /// Measured seconds to compute one expert on the CPU.
    here: f64,
    /// `[rows, hidden]` The experts' input.
    x: Vec<f32>,
    outputs: Outputs,
}

/// The outputs of the experts that the CPU computed.
#[derive(Default)]
pub struct Outputs {
    /// The (token, expert) pairs of the outputs (see [`Routing`]).
    pub pairs: Vec<u32>,
    /// `[pairs, hidden]`
    pub values: Vec<f32>,
}

impl Assistant {
    /// The largest batch that it helps with. In larger batches several rows share an expert, and uploading it is
    /// faster.
    pub const ROWS: usize = 4;

    /// Computes with `backend`, which needs the model's weights and buffers for [`ROWS`](Self::ROWS) rows. `link` and
    /// `here` are the expected seconds to upload an expert and to compute it on the CPU.
    pub fn new(backend: CpuBackend, link: f64, here: f64) -> Assistant {
        Assistant { backend, link, here, x: Vec::new(), outputs: Outputs::default() }
    }

    /// How many of `experts` experts the CPU should compute, so that CPU and device finish at the earliest time.
    pub fn share(&self, experts: usize) -> usize {
        let seconds = |here: usize| {
            let own = if here > 0 { THERE_AND_BACK + here as f64 * self.here } else { 0.0 };
            own.max((experts - here) as f64 * self.link)
        };
        (0..=experts).min_by(|&a, &b| seconds(a).total_cmp(&seconds(b))).expect("none is a choice")
    }

    /// The buffer of `numbers` floats into which the device copies the experts' input.
    pub fn input(&mut self, numbers: usize) -> &mut [f32] {
        self.x.resize(numbers, 0.0);
        &mut self.x
    }

    /// Computes the leased experts on the data in [`input`](Self::input).
    pub fn compute(&mut self, experts: &Experts, routing: &Routing, mut leases: Leases) -> &Outputs {
        let begun = Instant::now();
        leases.sort_unstable_by_key(Lease::expert);
        let x = experts.x;
        let width = x.width();
        let weights: SmallVec<[_; 16]> = leases.iter().map(Lease::weights).collect();
        self.backend.begin(self.x.len() / width);
        self.backend.fill(x, &self.x);
        self.backend.experts(experts, routing, &weights);
        let Outputs { pairs, values } = &mut self.outputs;
        pairs.clear();
        values.clear();
        let all = self.backend.rows_of(experts.block.out);
        for (pair, place) in weights.iter().flat_map(|w| routing.pairs(w.expert)) {
            pairs.push(pair as u32);
            values.extend_from_slice(&all[place * width..][..width]);
        }
        let seconds = begun.elapsed().as_secs_f64() / weights.len() as f64;
        self.here += NEWEST * (seconds - self.here);
        &self.outputs
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::Precision;

    #[test]
    fn cpu_and_device_finish_at_about_the_same_time() {
        let share = |link, here, experts| {
            let backend = CpuBackend::new(1, Precision::Fast, &[]).unwrap();
            Assistant::new(backend, link, here).share(experts)
        };
        assert_eq!(share(50e-6, 50e-6, 8), 4);
        assert_eq!(share(50e-6, 150e-6, 8), 2);
        assert_eq!(share(50e-6, 10e-6, 8), 6);
        // A CPU that takes longer for one expert than all uploads together gets none.
        assert_eq!(share(50e-6, 500e-6, 8), 0);
        assert_eq!(share(50e-6, 50e-6, 0), 0);
    }
}
