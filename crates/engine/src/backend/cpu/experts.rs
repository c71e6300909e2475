//! Computes experts that are in RAM on the CPU, each for the rows that chose it.

use std::ops::Range;
use std::slice;

use forebay_kernels::{Grain, MatRef, TileMut};

use super::{Activations, Compute, CpuBackend, Few, Job, Reads};
use crate::ExpertIdx;
use crate::backend::{Buf, ExpertBlock, Experts, Parts, Routing, Vector};

/// The matrices of an expert, in the store's memory.
#[derive(Clone, Copy)]
pub struct ExpertWeights<'a> {
    /// The expert's index in its layer.
    pub expert: ExpertIdx,
    /// Those of its block.
    pub parts: Parts<MatRef<'a>>,
    /// Those of its adjugate expert, if it has one.
    pub adjugate: Option<Parts<MatRef<'a>>>,
}

impl CpuBackend {
    /// Computes these experts in ascending order, each for the rows routed to it.
    pub fn experts(&mut self, experts: &Experts, routing: &Routing, weights: &[ExpertWeights<'_>]) {
        let &Experts { x, block, adjugate, .. } = experts;
        if self.expert_input != Some(x.id) {
            // All experts of a layer have the same encodings.
            let blocks = weights.iter().take(1).flat_map(|w| [Some(w.parts), w.adjugate]).flatten();
            let encodings = blocks.flat_map(|parts| parts.inputs()).flatten().map(|w| w.encoding);
            let input = Activations { rows: &self.buffers[x.id][..self.rows * x.width], width: x.width };
            let compute = Compute { kernels: self.kernels, pool: &self.pool, precision: self.precision };
            compute.quantise(input, slice::from_ref(&(0..self.rows)), encodings, &mut self.expert_panels);
            self.expert_input = Some(x.id);
        }
        let parts: Few<_> = weights.iter().map(|w| (w.expert, &w.parts)).collect();
        self.expert_blocks(x, &block, routing, &parts);
        let Some((small, factor)) = adjugate else { return };
        let parts: Few<_> = weights.iter().filter_map(|w| Some((w.expert, w.adjugate.as_ref()?))).collect();
        self.expert_blocks(x, &small, routing, &parts);

        let mut out = self.take(block.out);
        let width = block.out.width / routing.top_k();
        let buckets: Few<_> = parts.iter().map(|(expert, _)| routing.bucket(*expert)).collect();
        let added = &self.buffers[small.out.id];
        let mut tiles = bucket_tiles(&mut out, width, &buckets);
        self.pool.for_tiles(&mut tiles, Grain { rows: 1, cols: width }, |piece, mut tile| {
            let row = buckets[piece.matrix].start + piece.rows.start;
            (self.kernels.add_scaled)(tile.row(0), factor, &added[row * width..][..width]);
        });
        drop(tiles);
        self.put(block.out, out);
    }

    /// Computes `W_d activation(W_g x, W_u x)`, or without gates `W_d activation(W_u x)`, plus biases if there are any.
    /// `expert_panels` has the quantised input.
    fn expert_blocks(
        &mut self,
        x: Buf,
        block: &ExpertBlock,
        routing: &Routing,
        experts: &[(ExpertIdx, &Parts<MatRef<'_>>)],
    ) {
        let &ExpertBlock { activation, biases, scales, .. } = block;
        let (mut first, mut out) = (self.take(block.inner), self.take(block.out));
        let mut second = block.up.map(|up| self.take(up)).unwrap_or_default();
        let x = Activations { rows: &self.buffers[x.id][..self.rows * x.width], width: x.width };
        let compute = Compute { kernels: self.kernels, pool: &self.pool, precision: self.precision };
        let buckets: Few<Range<usize>> = experts.iter().map(|(expert, _)| routing.bucket(*expert)).collect();
        let inner = block.inner.width / routing.top_k();
        let scale = |scales: Option<Vector>, expert: ExpertIdx| {
            scales.map_or(1.0, |scales| self.vectors[scales.0][expert.0 as usize])
        };

        let mut reads_x: Few<Job<'_>> = Few::new();
        for number in 0..if activation.is_gated() { 2 } else { 1 } {
            reads_x.extend(experts.iter().zip(&buckets).map(|((expert, parts), bucket)| Job {
                w: parts.inputs()[number].expect("a gated block has both"),
                scale: scale(scales.inputs()[number].flatten(), *expert),
                reads: Reads::Indexed(routing.tokens(bucket.clone())),
            }));
        }
        let mut outs = bucket_tiles(&mut first, inner, &buckets);
        if activation.is_gated() {
            outs.extend(bucket_tiles(&mut second, inner, &buckets));
        }
        compute.matmul(x, &self.expert_panels, &reads_x, &mut outs);
        drop(outs);

        // Each expert adds its own part of the bias vector to its rows.
        let add_bias = |data: &mut [f32], width: usize, bias: Vector| {
            let bias = &self.vectors[bias.0];
            let mut tiles = bucket_tiles(data, width, &buckets);
            self.pool.for_tiles(&mut tiles, Grain { rows: 1, cols: width }, |piece, mut tile| {
                let expert = experts[piece.matrix].0.0 as usize;
                (self.kernels.add)(tile.row(0), &bias[expert * width..][..width]);
            });
        };
        if let Some(biases) = biases {
            let [bias, other] = biases.inputs();
            for (data, bias) in [&mut first, &mut second].into_iter().zip([bias, other].into_iter().flatten())
            {
                add_bias(data, inner, bias);
            }
        }

        let mut tiles = bucket_tiles(&mut first, inner, &buckets);
        self.pool.for_tiles(&mut tiles, Grain { rows: 1, cols: inner }, |piece, mut tile| {
            let row = buckets[piece.matrix].start + piece.rows.start;
            let up = if activation.is_gated() { &second[row * inner..][..inner] } else { &[] };
            (self.kernels.activate)(tile.row(0), up, activation);
        });
        drop(tiles);

        let width = block.out.width / routing.top_k();
        let reads_inner: Few<Job<'_>> = experts
            .iter()
            .zip(&buckets)
            .map(|((expert, parts), bucket)| Job {
                w: parts.down,
                scale: scale(scales.down, *expert),
                reads: Reads::Rows(bucket.clone()),
            })
            .collect();
        let places = self.rows * routing.top_k();
        let activated = Activations { rows: &first[..places * inner], width: inner };
        compute.quantise(activated, &buckets, reads_inner.iter().map(|job| job.w.encoding), &mut self.panels);
        let mut outs = bucket_tiles(&mut out, width, &buckets);
        compute.matmul(activated, &self.panels, &reads_inner, &mut outs);
        drop(outs);
        if let Some(biases) = biases {
            add_bias(&mut out, width, biases.down);
        }

        self.put(block.inner, first);
        block.up.into_iter().for_each(|up| self.put(up, std::mem::take(&mut second)));
        self.put(block.out, out);
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
