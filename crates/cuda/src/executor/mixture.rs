//! Computes mixtures from the router's logits to the sum: without the host if all of a layer's experts are on the
//! device, otherwise in steps.

use forebay_engine::internals::backend::{Buf, Experts, Precision};
use forebay_engine::internals::experts::Mixture;
use forebay_engine::{LayerIdx, Result};
use smallvec::{SmallVec, smallvec};

use super::experts::GpuExperts;
use crate::backend::choice::Chosen;
use crate::backend::products::{
    EIGHT, GATE_UP_BLOCKS, Product, Rows, Tiles, VECTOR_COLS, VECTOR_THREADS, VECTOR_WARPS, asks_ahead,
    down_shared, one_shared, put_activation, vector_shared,
};
use crate::backend::{CudaBackend, Scratch};
use crate::driver::Address;
use crate::program::{Args, Shape};
use crate::weights::{DeviceMatrix, WeightKind};

/// Constants of the kernel that multiplies with down and adds up: rows per block, experts per row, and the shared
/// memory that lets another block run on the same multiprocessor.
const DOWN_ROWS: usize = 8;
const MOST_CHOSEN: usize = 64;
const MOST_DOWN_SHARED: usize = 96 << 10;

impl GpuExperts {
    /// Chooses, computes and adds up without the host, because all of the layer's experts are on the GPU. If `noted`,
    /// the choice is reported after the batch.
    pub fn mix(&mut self, mixture: &Mixture<'_>, noted: bool) -> Result<()> {
        let Mixture { router, weights, logits, ref experts, out, .. } = *mixture;
        let layer = experts.layer;
        let note = if noted { Some((self.note(layer, router.top_k)?, 0)) } else { None };
        self.halves = None;
        let chosen = self.backend.choose(logits, router, &weights, Scratch::Routing, note)?;
        self.backend.sort(&chosen)?;
        let table = self.slots.table(layer.0);
        if self.backend.are_apart(&chosen) && self.adds_up(layer, &chosen) {
            self.slots.look_in(layer.0, table);
            return self.pair_by_pair(experts, &chosen, Some(out));
        }
        self.compute(experts, &chosen, table)?;
        self.sum(&chosen, experts.buffers.out, out)
    }

    /// Whether one kernel can multiply with down and add up. Its bits are the same as those of two separate kernels.
    fn adds_up(&self, layer: LayerIdx, chosen: &Chosen) -> bool {
        let [gate, ..] = self.slots.products(layer.0);
        let whole = gate.rows.is_multiple_of(32) && chosen.top_k <= MOST_CHOSEN;
        let fits = down_shared(chosen.top_k * gate.rows) <= MOST_DOWN_SHARED;
        whole && fits && self.backend.precision == Precision::Fast
    }

    /// Computes the experts in a table, for all pairs that chose them.
    pub fn compute(&mut self, experts: &Experts, chosen: &Chosen, table: Address) -> Result<()> {
        self.slots.look_in(experts.layer.0, table);
        match self.backend.are_apart(chosen) {
            true => self.pair_by_pair(experts, chosen, None),
            false => self.tile_by_tile(experts, chosen),
        }
    }

    /// Every pair reads its expert separately.
    fn pair_by_pair(&mut self, experts: &Experts, chosen: &Chosen, sum: Option<Buf>) -> Result<()> {
        let GpuExperts { backend, slots, .. } = self;
        let kernels = backend.kernels()?;
        let b = experts.buffers;
        let pairs = chosen.pairs();
        let [gate_bias, up_bias, down_bias] = backend.bias_addresses(experts.biases);
        let [gate, up, down] = slots.products(experts.layer.0);
        let (inner, hidden) = (gate.rows, down.rows);
        let rows = Rows {
            count: pairs,
            x: backend.at(b.x),
            x_width: b.x.width(),
            share: chosen.top_k,
            experts: chosen.lists.experts,
        };
        if gate.is_like(up) && gate.cols <= VECTOR_COLS {
            let args = up.put(gate.put(Args::new())).at(gate_bias).at(up_bias);
            let args = args.at(rows.x).at(backend.at(b.gate)).int(rows.x_width).int(rows.share);
            // Uses the tensor cores where that loses nothing. There a block computes eight rows at a time, otherwise
            // one per warp.
            let halves = matches!(gate.kind, WeightKind::Q4_K | WeightKind::Q5_K)
                && backend.precision == Precision::Fast;
            let (kernel, each) =
                if halves { (kernels.gate_up_one, 8) } else { (kernels.gate_up, VECTOR_WARPS) };
            let turns = backend.turns(inner * pairs, GATE_UP_BLOCKS);
            let ahead = asks_ahead([gate, up, down].into_iter(), pairs);
            let args = put_activation(args.at(rows.experts), experts.activation).int(turns).flag(ahead);
            let args = down.put(args);
            let cols = b.x.width();
            let shared = if halves { one_shared(cols, turns) } else { vector_shared(cols) };
            let shape = Shape::new([inner.div_ceil(each * turns), pairs, 1], VECTOR_THREADS);
            backend.record(kernel, shape.shared(shared), args)?;
        } else {
            let both = [
                Product { w: gate, out: backend.at(b.gate), width: inner, bias: gate_bias },
                Product { w: up, out: backend.at(b.up), width: inner, bias: up_bias },
            ];
            let (shape, kernel, args) = backend.vector_products(&kernels, &both, rows, None);
            backend.record(kernel, shape, args)?;
            backend.activate_pairs(experts, gate, pairs, chosen.lists.experts)?;
        }
        if let Some(out) = sum {
            let shared = down_shared(chosen.top_k * inner);
            let args = down.put(Args::new()).at(down_bias).at(backend.at(b.gate));
            let args =
                args.at(chosen.lists.experts).at(chosen.lists.weights).at(backend.at(out)).int(chosen.top_k);
            let shape = Shape::new([hidden.div_ceil(DOWN_ROWS), chosen.rows, 1], VECTOR_THREADS);
            return backend.record(kernels.down_combine, shape.shared(shared), args);
        }
        let product = Product { w: down, out: backend.at(b.out), width: hidden, bias: down_bias };
        let rows = Rows { x: backend.at(b.gate), x_width: inner, share: 1, ..rows };
        let (shape, kernel, args) = backend.vector_products(&kernels, &[product], rows, None);
        backend.record(kernel, shape, args)
    }

    /// Sorts the pairs by expert and reads every expert once per tile.
    fn tile_by_tile(&mut self, experts: &Experts, chosen: &Chosen) -> Result<()> {
        let GpuExperts { backend, slots, halves: kept, .. } = self;
        let kernels = backend.kernels()?;
        let (b, lists) = (experts.buffers, chosen.lists);
        let (pairs, size) = (chosen.pairs(), chosen.tile());
        let [gate_bias, up_bias, down_bias] = backend.bias_addresses(experts.biases);
        let [gate, up, down] = slots.products(experts.layer.0);
        let inner = gate.rows;
        let tiles = Tiles {
            size,
            most: chosen.experts.min(pairs) + pairs / size,
            tiles: lists.tiles,
            count: lists.tile_count,
            sources: lists.tokens,
        };
        let split = [gate, up, down].iter().any(|w| w.kind.is_float());
        // If experts have few rows each, other kernels are faster.
        let few =
            size == EIGHT && !split && [gate.cols, inner].iter().all(|&cols| backend.few_fit(cols, EIGHT));
        let gated = (few && gate.is_like(up)).then_some(experts.activation);
        // Later experts of the layer have the same input.
        let halves = match kept.filter(|_| !few) {
            None if !few => {
                let scratch = [Scratch::ExpertHalves, Scratch::ExpertScales];
                Some(backend.halve_to(
                    scratch,
                    backend.at(b.x),
                    [backend.rows, b.x.width()],
                    split,
                    [0; 2],
                )?)
            }
            known => known,
        };
        *kept = halves;
        let both = [
            Product { w: gate, out: backend.at(b.gate), width: inner, bias: gate_bias },
            Product { w: up, out: backend.at(b.up), width: inner, bias: up_bias },
        ];
        let starts: SmallVec<[_; 2]> = match halves {
            None => {
                let gated = gated.map(|activation| (activation, down));
                smallvec![backend.few_products(&kernels, &both, backend.at(b.x), tiles, gated)]
            }
            Some(halves) => {
                // Float weights have their own kernels.
                let apart = gate.kind.is_float() != up.kind.is_float();
                let together = both.chunks(if apart { 1 } else { 2 });
                together.map(|both| backend.tiled_products(&kernels, both, halves, tiles)).collect()
            }
        };
        for (shape, kernel, args) in starts {
            backend.record(kernel, shape, args)?;
        }
        if gated.is_none() {
            backend.activate_pairs(experts, gate, pairs, lists.owners)?;
        }
        let halves = match few {
            true => None,
            false => {
                let there = [lists.owners, gate.slots];
                let scratch = [Scratch::Halves, Scratch::Scales];
                Some(backend.halve_to(scratch, backend.at(b.gate), [pairs, inner], split, there)?)
            }
        };
        let product = Product { w: down, out: backend.at(b.out), width: down.rows, bias: down_bias };
        let tiles = Tiles { sources: 0, ..tiles };
        let (shape, kernel, args) = match halves {
            None => backend.few_products(&kernels, &[product], backend.at(b.gate), tiles, None),
            Some(halves) => backend.tiled_products(&kernels, &[product], halves, tiles),
        };
        backend.record(kernel, shape, args)
    }

    /// Adds the experts' outputs of each row.
    pub fn sum(&mut self, chosen: &Chosen, from: Buf, out: Buf) -> Result<()> {
        let backend = &mut self.backend;
        let kernels = backend.kernels()?;
        let width = out.width();
        let places = if backend.are_apart(chosen) { 0 } else { chosen.lists.places };
        let args = Args::new().at(backend.at(from)).at(chosen.lists.weights).at(places);
        let args = args.at(backend.at(out)).int(width).int(chosen.top_k);
        backend.record(kernels.combine, Shape::new([width.div_ceil(128), chosen.rows, 1], 128), args)
    }
}

impl CudaBackend {
    /// Combines the outputs of gate and up, in the rows of these experts.
    fn activate_pairs(
        &mut self,
        experts: &Experts,
        gate: &DeviceMatrix,
        rows: usize,
        owners: Address,
    ) -> Result<()> {
        let kernels = self.kernels()?;
        let b = experts.buffers;
        let args = Args::new().at(self.at(b.gate)).at(self.at(b.up)).int(gate.rows);
        let args = put_activation(args, experts.activation).at(owners).at(gate.slots);
        self.record(kernels.activate_rows, Shape::new([rows, 1, 1], 256), args)
    }
}
