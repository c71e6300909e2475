//! Computes mixtures from the router's logits to the sum: without the host if all of a layer's experts are on the
//! device, otherwise in steps.

use forebay_engine::internals::backend::{Buf, ExpertBlock, Experts, Parts, Precision};
use forebay_engine::internals::experts::Mixture;
use forebay_engine::{LayerIdx, Result};
use smallvec::{SmallVec, smallvec};

use super::experts::GpuExperts;
use super::slots::ExpertSlots;
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
            return self.pair_by_pair(&BlockOf::each(experts), &chosen, Some(out));
        }
        self.compute(experts, &chosen, table)?;
        self.sum(&chosen, experts.block.out, out)
    }

    /// Whether one kernel can multiply with down and add up. Its bits are the same as those of two separate kernels.
    fn adds_up(&self, layer: LayerIdx, chosen: &Chosen) -> bool {
        let experts = self.slots.layer(layer);
        let inner = experts.parts.up.rows;
        let whole = inner.is_multiple_of(32) && chosen.top_k <= MOST_CHOSEN && experts.adjugate.is_none();
        let fits = down_shared(chosen.top_k * inner) <= MOST_DOWN_SHARED;
        whole && fits && self.backend.precision == Precision::Fast
    }

    /// Computes the experts in a table, for all pairs that chose them.
    pub fn compute(&mut self, experts: &Experts, chosen: &Chosen, table: Address) -> Result<()> {
        self.slots.look_in(experts.layer.0, table);
        self.compute_blocks(&BlockOf::each(experts), chosen)?;
        let Some((small, factor)) = experts.adjugate else { return Ok(()) };
        self.compute_blocks(&BlockOf { block: small, is_adjugate: true, ..BlockOf::each(experts) }, chosen)?;
        let backend = &mut self.backend;
        let (kernels, out) = (backend.kernels()?, experts.block.out);
        let owners = if backend.are_apart(chosen) { chosen.lists.experts } else { chosen.lists.owners };
        let args = Args::new().at(backend.at(out)).at(backend.at(small.out)).int(experts.x.width());
        let args = args.float(factor).at(owners).at(table);
        backend.record(kernels.add_rows, Shape::new([chosen.pairs(), 1, 1], 256), args)
    }

    /// Computes one block of the experts in the table.
    fn compute_blocks(&mut self, of: &BlockOf, chosen: &Chosen) -> Result<()> {
        match self.backend.are_apart(chosen) {
            true => self.pair_by_pair(of, chosen, None),
            false => self.tile_by_tile(of, chosen),
        }
    }

    /// Every pair reads its expert separately.
    fn pair_by_pair(&mut self, of: &BlockOf, chosen: &Chosen, sum: Option<Buf>) -> Result<()> {
        let GpuExperts { backend, slots, .. } = self;
        let kernels = backend.kernels()?;
        let BlockOf { x, block, .. } = *of;
        let pairs = chosen.pairs();
        let biases = backend.bias_addresses(block.biases);
        let w = of.matrices(slots);
        let (inner, width) = (w.up.rows, w.down.rows);
        let rows = Rows {
            count: pairs,
            x: backend.at(x),
            x_width: x.width(),
            share: chosen.top_k,
            experts: chosen.lists.experts,
        };
        if let Some(gate) = w.gate.as_ref().filter(|gate| gate.is_like(&w.up) && gate.cols <= VECTOR_COLS) {
            let args = w.up.put(gate.put(Args::new())).at(biases.gate.unwrap_or_default()).at(biases.up);
            let args = args.at(rows.x).at(backend.at(block.inner)).int(rows.x_width).int(rows.share);
            // Uses the tensor cores where that loses nothing. There a block computes eight rows at a time, otherwise
            // one per warp.
            let halves = matches!(gate.kind, WeightKind::Q4_K | WeightKind::Q5_K)
                && backend.precision == Precision::Fast;
            let (kernel, each) =
                if halves { (kernels.gate_up_one, 8) } else { (kernels.gate_up, VECTOR_WARPS) };
            let turns = backend.turns(inner * pairs, GATE_UP_BLOCKS);
            let ahead = asks_ahead(w.iter(), pairs);
            let args = put_activation(args.at(rows.experts), block.activation).int(turns).flag(ahead);
            let args = w.down.put(args);
            let cols = x.width();
            let shared = if halves { one_shared(cols, turns) } else { vector_shared(cols) };
            let shape = Shape::new([inner.div_ceil(each * turns), pairs, 1], VECTOR_THREADS);
            backend.record(kernel, shape.shared(shared), args)?;
        } else {
            let products = backend.input_products(&block, w, biases);
            let (shape, kernel, args) = backend.vector_products(&kernels, &products, rows, None);
            backend.record(kernel, shape, args)?;
            backend.activate_pairs(&block, &w.up, pairs, chosen.lists.experts)?;
        }
        if let Some(out) = sum {
            let shared = down_shared(chosen.top_k * inner);
            let args = w.down.put(Args::new()).at(biases.down).at(backend.at(block.inner));
            let args =
                args.at(chosen.lists.experts).at(chosen.lists.weights).at(backend.at(out)).int(chosen.top_k);
            let shape = Shape::new([width.div_ceil(DOWN_ROWS), chosen.rows, 1], VECTOR_THREADS);
            return backend.record(kernels.down_combine, shape.shared(shared), args);
        }
        let product = Product { w: &w.down, out: backend.at(block.out), width, bias: biases.down };
        let rows = Rows { x: backend.at(block.inner), x_width: inner, share: 1, ..rows };
        let (shape, kernel, args) = backend.vector_products(&kernels, &[product], rows, None);
        backend.record(kernel, shape, args)
    }

    /// Sorts the pairs by expert and reads every expert once per tile.
    fn tile_by_tile(&mut self, of: &BlockOf, chosen: &Chosen) -> Result<()> {
        let GpuExperts { backend, slots, halves: kept, .. } = self;
        let kernels = backend.kernels()?;
        let BlockOf { x, block, .. } = *of;
        let lists = chosen.lists;
        let (pairs, size) = (chosen.pairs(), chosen.tile());
        let biases = backend.bias_addresses(block.biases);
        let w = of.matrices(slots);
        let inner = w.up.rows;
        let tiles = Tiles {
            size,
            most: chosen.experts.min(pairs) + pairs / size,
            tiles: lists.tiles,
            count: lists.tile_count,
            sources: lists.tokens,
        };
        let split = slots.layer(of.layer).matrices().any(|w| w.kind.is_float());
        // If experts have few rows each, other kernels are faster.
        let few =
            size == EIGHT && !split && [x.width(), inner].iter().all(|&cols| backend.few_fit(cols, EIGHT));
        let is_fused = few && w.gate.as_ref().is_some_and(|gate| gate.is_like(&w.up));
        // Later experts of the layer have the same input.
        let halves = match kept.filter(|_| !few) {
            None if !few => {
                let scratch = [Scratch::ExpertHalves, Scratch::ExpertScales];
                Some(backend.halve_to(scratch, backend.at(x), [backend.rows, x.width()], split, [0; 2])?)
            }
            known => known,
        };
        *kept = halves;
        let products = backend.input_products(&block, w, biases);
        let starts: SmallVec<[_; 2]> = match halves {
            None => {
                let gated = is_fused.then_some((block.activation, &w.down));
                smallvec![backend.few_products(&kernels, &products, backend.at(x), tiles, gated)]
            }
            Some(halves) => {
                // Float weights have their own kernels.
                let apart = products.iter().any(|p| p.w.kind.is_float() != w.up.kind.is_float());
                let together = products.chunks(if apart { 1 } else { 2 });
                together.map(|some| backend.tiled_products(&kernels, some, halves, tiles)).collect()
            }
        };
        for (shape, kernel, args) in starts {
            backend.record(kernel, shape, args)?;
        }
        if !is_fused {
            backend.activate_pairs(&block, &w.up, pairs, lists.owners)?;
        }
        let halves = match few {
            true => None,
            false => {
                let there = [lists.owners, w.up.slots];
                let scratch = [Scratch::Halves, Scratch::Scales];
                Some(backend.halve_to(scratch, backend.at(block.inner), [pairs, inner], split, there)?)
            }
        };
        let product =
            Product { w: &w.down, out: backend.at(block.out), width: w.down.rows, bias: biases.down };
        let tiles = Tiles { sources: 0, ..tiles };
        let (shape, kernel, args) = match halves {
            None => backend.few_products(&kernels, &[product], backend.at(block.inner), tiles, None),
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

/// A block of the experts of a layer.
#[derive(Clone, Copy)]
struct BlockOf {
    layer: LayerIdx,
    x: Buf,
    block: ExpertBlock,
    /// Whether it is that of the adjugate experts.
    is_adjugate: bool,
}

impl BlockOf {
    /// The block of each expert.
    fn each(experts: &Experts) -> BlockOf {
        BlockOf { layer: experts.layer, x: experts.x, block: experts.block, is_adjugate: false }
    }

    fn matrices<'s>(&self, slots: &'s ExpertSlots) -> &'s Parts<DeviceMatrix> {
        let layer = slots.layer(self.layer);
        match self.is_adjugate {
            true => layer.adjugate.as_ref().expect("it was declared"),
            false => &layer.parts,
        }
    }
}

impl CudaBackend {
    /// The products with a block's input: with gate and up, or with up alone.
    fn input_products<'w>(
        &self,
        block: &ExpertBlock,
        w: &'w Parts<DeviceMatrix>,
        biases: Parts<Address>,
    ) -> SmallVec<[Product<'w>; 2]> {
        let product =
            |w: &'w DeviceMatrix, out: Buf, bias| Product { w, out: self.at(out), width: w.rows, bias };
        match w.gate.as_ref().zip(block.up) {
            Some((gate, up)) => smallvec![
                product(gate, block.inner, biases.gate.unwrap_or_default()),
                product(&w.up, up, biases.up)
            ],
            None => smallvec![product(&w.up, block.inner, biases.up)],
        }
    }

    /// Applies the activation function in the rows of these experts.
    fn activate_pairs(
        &mut self,
        block: &ExpertBlock,
        w: &DeviceMatrix,
        rows: usize,
        owners: Address,
    ) -> Result<()> {
        let kernels = self.kernels()?;
        // Without a gate, the function ignores the other operand.
        let up = block.up.unwrap_or(block.inner);
        let args = Args::new().at(self.at(block.inner)).at(self.at(up)).int(w.rows);
        let args = put_activation(args, block.activation).at(owners).at(w.slots);
        self.record(kernels.activate_rows, Shape::new([rows, 1, 1], 256), args)
    }
}
