//! The processor beside a device: it computes experts that are in the computer's memory while others are brought to the device.

use std::time::Instant;

use smallvec::SmallVec;

use super::{Lease, Leases};
use crate::backend::{Backend, CpuBackend, Experts, Routing};

/// Seconds that it takes beside the computing: activations come here, and results go back.
const THERE_AND_BACK: f64 = 30e-6;

/// How much the last measurement counts.
const NEWEST: f64 = 0.1;

/// Computes some of a layer's experts on the processor. What it gives has other bits than the device's.
pub struct Assistant {
    backend: CpuBackend,
    /// Seconds that an expert takes to the device.
    link: f64,
    /// Seconds that one takes here.
    here: f64,
    /// `[rows, hidden]` What experts read.
    x: Vec<f32>,
    outputs: Outputs,
}

/// What experts gave.
#[derive(Default)]
pub struct Outputs {
    /// The pairs (see [`Routing`]) that they were computed for.
    pub pairs: Vec<u32>,
    /// `[pairs, hidden]`
    pub values: Vec<f32>,
}

impl Assistant {
    /// Rows of the largest batch that it helps with. More of them share their experts, which are better brought to the device.
    pub const ROWS: usize = 4;

    /// One that computes with this backend, which has a model's weights, and buffers for a few rows. An expert takes so many
    /// seconds to the device, and here.
    pub fn new(backend: CpuBackend, link: f64, here: f64) -> Assistant {
        Assistant { backend, link, here, x: Vec::new(), outputs: Outputs::default() }
    }

    /// How many of so many experts are computed here, so that all are done soonest.
    pub fn share(&self, experts: usize) -> usize {
        let seconds = |here: usize| {
            let own = if here > 0 { THERE_AND_BACK + here as f64 * self.here } else { 0.0 };
            own.max((experts - here) as f64 * self.link)
        };
        (0..=experts).min_by(|&a, &b| seconds(a).total_cmp(&seconds(b))).expect("none is a choice")
    }

    /// Where a device puts what experts read: so many numbers.
    pub fn input(&mut self, numbers: usize) -> &mut [f32] {
        self.x.resize(numbers, 0.0);
        &mut self.x
    }

    /// Computes experts with what was put into [`input`](Self::input).
    pub fn compute(&mut self, experts: &Experts, routing: &Routing, mut leases: Leases) -> &Outputs {
        let begun = Instant::now();
        leases.sort_unstable_by_key(Lease::expert);
        let buffers = experts.buffers;
        let width = buffers.x.width();
        let weights: SmallVec<[_; 16]> = leases.iter().map(Lease::weights).collect();
        self.backend.begin(self.x.len() / width);
        self.backend.fill(buffers.x, &self.x);
        self.backend.experts(experts, routing, &weights);
        let Outputs { pairs, values } = &mut self.outputs;
        pairs.clear();
        values.clear();
        let all = self.backend.rows_of(buffers.out);
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
    fn both_ways_end_at_about_the_same_time() {
        let share = |link, here, experts| {
            let backend = CpuBackend::new(1, Precision::Fast, &[]).unwrap();
            Assistant::new(backend, link, here).share(experts)
        };
        assert_eq!(share(50e-6, 50e-6, 8), 4);
        assert_eq!(share(50e-6, 150e-6, 8), 2);
        assert_eq!(share(50e-6, 10e-6, 8), 6);
        // Where it takes longer than all copies, it is not worth it; nor for nothing.
        assert_eq!(share(50e-6, 500e-6, 8), 0);
        assert_eq!(share(50e-6, 50e-6, 0), 0);
    }
}
