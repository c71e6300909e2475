//! Computes experts that are in RAM on the CPU, each for the rows that chose it.

use std::ops::Range;
use std::slice;

use forebay_kernels::{Grain, MatRef, TileMut};

use super::{Activations, Compute, CpuBackend, Few, Job, Reads};
use crate::ExpertIdx;
use crate::backend::{Buf, Experts, Routing, Vector};

/// The matrices of an expert, in the store's memory.
#[derive(Clone, Copy)]
pub struct ExpertWeights<'a> {
    /// The expert's index in its layer.
    pub expert: ExpertIdx,
    /// Gate, up and down.
    pub parts: [MatRef<'a>; 3],
}

const GATE: usize = 0;
const UP: usize = 1;
const DOWN: usize = 2;

impl CpuBackend {
    /// Computes `W_d( activation(W_g x, W_u x) )`, plus biases if there are any, for these experts in ascending
    /// order, each for the rows routed to it.
    pub fn experts(&mut self, experts: &Experts, routing: &Routing, weights: &[ExpertWeights<'_>]) {
        let Experts { buffers: b, activation, biases, scales, .. } = *experts;
        let (mut gate, mut up, mut out) = (self.take(b.gate), self.take(b.up), self.take(b.out));
        let x = Activations { rows: &self.buffers[b.x.id][..self.rows * b.x.width], width: b.x.width };
        let compute = Compute { kernels: self.kernels, pool: &self.pool, precision: self.precision };
        let buckets: Few<Range<usize>> = weights.iter().map(|w| routing.bucket(w.expert)).collect();
        let inner = b.gate.width / routing.top_k();
        let scale = |part: usize, expert: ExpertIdx| {
            scales[part].map_or(1.0, |scales| self.vectors[scales.0][expert.0 as usize])
        };

        let reads_x: Few<Job<'_>> = [GATE, UP]
            .iter()
            .flat_map(|&part| weights.iter().map(move |w| (part, w)))
            .zip(buckets.iter().cycle())
            .map(|((part, w), bucket)| Job {
                w: w.parts[part],
                scale: scale(part, w.expert),
                reads: Reads::Indexed(routing.tokens(bucket.clone())),
            })
            .collect();
        if self.expert_input != Some(b.x.id) {
            let encodings = reads_x.iter().map(|job| job.w.encoding);
            compute.quantise(x, slice::from_ref(&(0..self.rows)), encodings, &mut self.expert_panels);
            self.expert_input = Some(b.x.id);
        }
        let mut outs = bucket_tiles(&mut gate, inner, &buckets);
        outs.extend(bucket_tiles(&mut up, inner, &buckets));
        compute.matmul(x, &self.expert_panels, &reads_x, &mut outs);
        drop(outs);

        // Each expert adds its own part of the bias vector to its rows.
        let add_bias = |data: &mut [f32], width: usize, bias: Vector| {
            let bias = &self.vectors[bias.0];
            let mut tiles = bucket_tiles(data, width, &buckets);
            self.pool.for_tiles(&mut tiles, Grain { rows: 1, cols: width }, |piece, mut tile| {
                let expert = weights[piece.matrix].expert.0 as usize;
                (self.kernels.add)(tile.row(0), &bias[expert * width..][..width]);
            });
        };
        if let Some([gate_bias, up_bias, _]) = biases {
            add_bias(&mut gate, inner, gate_bias);
            add_bias(&mut up, inner, up_bias);
        }

        let mut gates = bucket_tiles(&mut gate, inner, &buckets);
        let whole_rows = Grain { rows: 1, cols: inner };
        self.pool.for_tiles(&mut gates, whole_rows, |piece, mut tile| {
            let row = buckets[piece.matrix].start + piece.rows.start;
            let up = &up[row * inner..][..inner];
            (self.kernels.activate)(tile.row(0), up, activation);
        });
        drop(gates);

        let hidden = b.out.width / routing.top_k();
        let reads_gate: Few<Job<'_>> = weights
            .iter()
            .zip(&buckets)
            .map(|(w, bucket)| Job {
                w: w.parts[DOWN],
                scale: scale(DOWN, w.expert),
                reads: Reads::Rows(bucket.clone()),
            })
            .collect();
        let places = self.rows * routing.top_k();
        let activated = Activations { rows: &gate[..places * inner], width: inner };
        compute.quantise(activated, &buckets, reads_gate.iter().map(|job| job.w.encoding), &mut self.panels);
        let mut outs = bucket_tiles(&mut out, hidden, &buckets);
        compute.matmul(activated, &self.panels, &reads_gate, &mut outs);
        drop(outs);
        if let Some([.., down_bias]) = biases {
            add_bias(&mut out, hidden, down_bias);
        }

        self.put(b.gate, gate);
        self.put(b.up, up);
        self.put(b.out, out);
    }

    /// Computes `out[t] = Σ weight · expert output`, in rank order.
    pub fn combine(&mut self, routing: &Routing, experts: Buf, out: Buf) {
        self.each_row(out, |this, token, values| {
            values.fill(0.0);
            let width = values.len();
            let outputs = this.get(experts);
            for (place, weight) in routing.ranks(token) {
                (this.kernels.add_scaled)(values, weight, &outputs[place * width..][..width]);
            }
        });
    }
}

/// The rows of each bucket as a separate matrix. Buckets are ascending and do not overlap.
pub(super) fn bucket_tiles<'a, T>(
    mut data: &'a mut [T],
    width: usize,
    buckets: &[Range<usize>],
) -> Few<TileMut<'a, T>> {
    let mut consumed = 0;
    let mut tiles = Few::new();
    for bucket in buckets {
        let (_, rest) = data.split_at_mut((bucket.start - consumed) * width);
        let (rows, rest) = rest.split_at_mut(bucket.len() * width);
        tiles.push(TileMut::new(rows, width));
        consumed = bucket.end;
        data = rest;
    }
    tiles
}
