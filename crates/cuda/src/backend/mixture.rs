//! Mixtures of experts, from the router's logits to the sum: without a word to the host where all of a layer's experts are on
//! the device, else in steps.

use forebay_engine::backend::{
    Buf, Experts, GroupScore, Mixture, Precision, Router, Routing, Scores, Vector,
};
use forebay_engine::{LayerIdx, Result};
use smallvec::{SmallVec, smallvec};

use super::deferred::PriorNorm;
use super::products::{
    EIGHT, GATE_UP_BLOCKS, Product, Rows, Tiles, VECTOR_COLS, VECTOR_THREADS, VECTOR_WARPS, asks_ahead,
    clamps, down_shared, one_shared, tile_for, vector_shared,
};
use super::{CudaBackend, Scratch};
use crate::driver::Address;
use crate::program::{Args, Shape};
use crate::weights::Kind;

/// The most rows whose experts are computed pair by pair: few enough for hardly any two to choose the same.
pub const MOST_APART: usize = 4;

/// Of the router's kernels: threads of a block, the most columns and rows where a block has one expert and one row, and, of
/// the other one, experts and rows of a block.
const ROUTER_THREADS: usize = 256;
const ROUTER_COLS: usize = 4 * 4 * ROUTER_THREADS;
const MOST_ROW_BY_ROW: usize = 4;
const ROUTER_EXPERTS: usize = 4;
const ROUTER_ROWS: usize = ROUTER_THREADS / 32;

/// Of the kernel that multiplies with down and adds up: rows of a block, experts of a row, and bytes of shared memory that
/// leave room for another block on the same processor.
const DOWN_ROWS: usize = 8;
const MOST_CHOSEN: usize = 64;
const MOST_DOWN_SHARED: usize = 96 << 10;

/// Bytes of a tile's description.
const TILE_BYTES: usize = 12;

/// Where routing keeps its lists.
#[derive(Clone, Copy)]
struct Lists {
    /// `[rows, top_k]` each
    experts: Address,
    weights: Address,
    places: Address,
    /// `[places]`
    tokens: Address,
    owners: Address,
    tile_count: Address,
    tiles: Address,
}

/// A router's choice, on the device.
#[derive(Clone, Copy)]
pub struct Chosen {
    lists: Lists,
    rows: usize,
    top_k: usize,
    /// Of the layer.
    experts: usize,
}

impl Chosen {
    fn pairs(&self) -> usize {
        self.rows * self.top_k
    }

    /// Rows that chose.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Experts of each row.
    pub fn top_k(&self) -> usize {
        self.top_k
    }

    /// Experts of the layer.
    pub fn experts(&self) -> usize {
        self.experts
    }

    /// Rows of a tile: as many as an expert has on average, and half as many again.
    fn tile(&self) -> usize {
        tile_for((self.pairs() * 3).div_ceil(2 * self.experts))
    }
}

impl CudaBackend {
    fn lists(&mut self, scratch: Scratch, pairs: usize, experts: usize) -> Result<Lists> {
        let list = (pairs * 4).next_multiple_of(256);
        let tiles = (experts + pairs.div_ceil(8) + 1) * TILE_BYTES;
        let first = self.scratch(scratch, 5 * list + 256 + tiles)?;
        let at = |i: usize| first + (i * list) as u64;
        Ok(Lists {
            experts: at(0),
            weights: at(1),
            places: at(2),
            tokens: at(3),
            owners: at(4),
            tile_count: at(5),
            tiles: at(5) + 256,
        })
    }

    /// Records the router's choice, which is also told to the host, if it says where, and what stands before a row then.
    fn choose(
        &mut self,
        logits: Buf,
        router: &Router,
        correction: Option<Vector>,
        scratch: Scratch,
        told: Option<(Address, u32)>,
    ) -> Result<Chosen> {
        let kernels = self.kernels()?;
        let lists = self.lists(scratch, self.rows * router.top_k, router.experts)?;
        if matches!(scratch, Scratch::Routing) {
            self.expert_halves = None;
        }
        let (told, turn) = told.unwrap_or_default();
        let groups = router.groups.filter(|groups| groups.used < groups.count);
        let args = Args::new().at(self.at(logits)).at(self.optional(correction));
        let args = args.at(lists.experts).at(lists.weights).at(told);
        let args = args.int(router.experts).int(router.top_k);
        let args = args.flag(router.scores == Scores::Sigmoid);
        let args = args.int(groups.map_or(0, |g| g.count)).int(groups.map_or(0, |g| g.used));
        let args = args.flag(groups.is_some_and(|g| g.score == GroupScore::BestTwo));
        let args = args.flag(router.normalise).float(router.scale).int(turn as usize);
        // What a choice needs.
        let floats = 2 * router.experts + 2 * groups.map_or(0, |g| g.count) + router.top_k;
        if let Some((norm, w)) = self.prior_product(logits)? {
            let w = &self.matrices[w.index()];
            let args = args.at(w.first()).int(w.kind as usize).int(w.cols).at(norm.x);
            let args = PriorNorm::put(Some(&norm), args);
            let args = args.at(self.at(logits)).at(self.counters.address()).int(self.rows).int(floats);
            let (kernel, grid, choices) = if self.rows <= MOST_ROW_BY_ROW && w.cols <= ROUTER_COLS {
                (kernels.norm_and_route, [w.rows, self.rows, 1], 1)
            } else {
                let grid = [w.rows.div_ceil(ROUTER_EXPERTS), self.rows.div_ceil(ROUTER_ROWS), 1];
                (kernels.norm_and_route_rows, grid, ROUTER_ROWS)
            };
            self.record(kernel, Shape::new(grid, ROUTER_THREADS).shared(choices * floats * 4), args)?;
        } else {
            self.record(kernels.route, Shape::new([self.rows, 1, 1], 32).shared(floats * 4), args)?;
        }
        Ok(Chosen { lists, rows: self.rows, top_k: router.top_k, experts: router.experts })
    }

    /// As [`Backend::route`](forebay_engine::backend::Backend::route).
    pub(super) fn route_and_tell(
        &mut self,
        logits: Buf,
        router: &Router,
        correction: Option<Vector>,
        routing: &mut Routing,
    ) -> Result<()> {
        let told = self.told.ask(&self.gpu, self.rows, router.top_k)?;
        let chosen = self.choose(logits, router, correction, Scratch::Routing, Some(told))?;
        self.sort(&chosen)?;
        self.chosen = Some(chosen);
        self.flush()?;
        self.recorder.submit_once()?;
        self.started = true;
        self.told.started()?;
        self.told.hear(&chosen, routing)
    }

    /// As [`Backend::foresee`](forebay_engine::backend::Backend::foresee).
    pub(super) fn ask_ahead(
        &mut self,
        logits: Buf,
        router: &Router,
        correction: Option<Vector>,
    ) -> Result<()> {
        let told = self.told_ahead.ask(&self.gpu, self.rows, router.top_k)?;
        self.foreseen = Some(self.choose(logits, router, correction, Scratch::Foreseen, Some(told))?);
        Ok(())
    }

    /// As [`Backend::foreseen`](forebay_engine::backend::Backend::foreseen).
    pub(super) fn hear_ahead(&mut self, routing: &mut Routing) -> Result<()> {
        let chosen = self.foreseen.take().expect("it was asked what is foreseen");
        self.flush()?;
        self.recorder.submit_once()?;
        self.told_ahead.started()?;
        self.told_ahead.hear(&chosen, routing)
    }

    /// A layer's experts: gate, up and down.
    fn expert_products(&self, layer: LayerIdx) -> [&crate::weights::DeviceMatrix; 3] {
        let slots = self.slots.as_ref().expect("slots were made");
        slots.layers[layer.0].as_ref().expect("it has experts").parts.each_ref()
    }

    /// As [`Backend::mixture`](forebay_engine::backend::Backend::mixture).
    pub(super) fn mix(&mut self, mixture: &Mixture<'_>) -> Result<()> {
        let layer = mixture.experts.layer;
        let note = match mixture.noted {
            true => Some((self.note(layer, mixture.router.top_k)?, 0)),
            false => None,
        };
        let chosen =
            self.choose(mixture.logits, mixture.router, mixture.correction, Scratch::Routing, note)?;
        self.sort(&chosen)?;
        let slots = self.slots.as_ref().expect("slots were made");
        let table = slots.table(layer.0);
        if self.are_apart(&chosen) && self.adds_up(layer, &chosen) {
            let slots = self.slots.as_mut().expect("slots were made");
            slots.layers[layer.0].as_mut().expect("it has experts").look_in(table);
            return self.pair_by_pair(&mixture.experts, &chosen, Some(mixture.out));
        }
        self.compute(&mixture.experts, &chosen, table)?;
        self.sum(&chosen, mixture.experts.buffers.out, mixture.out)
    }

    /// Whether the kernel that multiplies with down and adds up, with the same bits as those that do one of it each, can do so.
    fn adds_up(&self, layer: LayerIdx, chosen: &Chosen) -> bool {
        let [gate, ..] = self.expert_products(layer);
        let whole = gate.rows.is_multiple_of(32) && chosen.top_k <= MOST_CHOSEN;
        let fits = down_shared(chosen.top_k * gate.rows) <= MOST_DOWN_SHARED;
        whole && fits && self.precision == Precision::Fast
    }

    /// Computes the experts that a table has, for all pairs that chose them.
    pub(super) fn compute(&mut self, experts: &Experts, chosen: &Chosen, table: Address) -> Result<()> {
        let slots = self.slots.as_mut().expect("slots were made");
        slots.layers[experts.layer.0].as_mut().expect("it has experts").look_in(table);
        match self.are_apart(chosen) {
            true => self.pair_by_pair(experts, chosen, None),
            false => self.tile_by_tile(experts, chosen),
        }
    }

    /// Whether every pair reads its expert by itself.
    fn are_apart(&self, chosen: &Chosen) -> bool {
        self.by_vector(chosen.rows) || chosen.rows <= MOST_APART
    }

    /// Sorts pairs by expert, if they are computed that way.
    fn sort(&mut self, chosen: &Chosen) -> Result<()> {
        if self.are_apart(chosen) {
            return Ok(());
        }
        let kernels = self.kernels()?;
        let lists = chosen.lists;
        let args = Args::new().at(lists.experts).int(chosen.pairs()).int(chosen.top_k).int(chosen.experts);
        let args =
            args.at(lists.tokens).at(lists.places).at(lists.owners).at(lists.tiles).at(lists.tile_count);
        let shape = Shape::new([1, 1, 1], 1024).shared(2 * chosen.experts * 4);
        self.record(kernels.sort, shape, args.int(chosen.tile()))
    }

    /// Every pair reads its expert by itself.
    fn pair_by_pair(&mut self, experts: &Experts, chosen: &Chosen, sum: Option<Buf>) -> Result<()> {
        let kernels = self.kernels()?;
        let b = experts.buffers;
        let pairs = chosen.pairs();
        let [gate_bias, up_bias, down_bias] = self.bias_addresses(experts.biases);
        let [gate, up, down] = self.expert_products(experts.layer);
        let (inner, hidden) = (gate.rows, down.rows);
        let rows = Rows {
            count: pairs,
            x: self.at(b.x),
            x_width: b.x.width(),
            share: chosen.top_k,
            experts: chosen.lists.experts,
        };
        if gate.is_like(up) && gate.cols <= VECTOR_COLS {
            let (alpha, limit) = clamps(experts.activation);
            let args = up.put(gate.put(Args::new())).at(gate_bias).at(up_bias);
            let args = args.at(rows.x).at(self.at(b.gate)).int(rows.x_width).int(rows.share);
            // On the tensor cores where that loses nothing. A block takes eight rows at a time there, or one for each warp.
            let halves = matches!(gate.kind, Kind::Q4_K | Kind::Q5_K) && self.precision == Precision::Fast;
            let (kernel, each) =
                if halves { (kernels.gate_up_one, 8) } else { (kernels.gate_up, VECTOR_WARPS) };
            let turns = self.turns(inner * pairs, GATE_UP_BLOCKS);
            let ahead = asks_ahead([gate, up, down].into_iter(), pairs);
            let args = args.at(rows.experts).float(alpha).float(limit).int(turns).flag(ahead);
            let args = down.put(args);
            let cols = b.x.width();
            let shared = if halves { one_shared(cols, turns) } else { vector_shared(cols) };
            let shape = Shape::new([inner.div_ceil(each * turns), pairs, 1], VECTOR_THREADS);
            self.record(kernel, shape.shared(shared), args)?;
        } else {
            let both = [
                Product { w: gate, out: self.at(b.gate), width: inner, bias: gate_bias },
                Product { w: up, out: self.at(b.up), width: inner, bias: up_bias },
            ];
            let (shape, kernel, args) = self.vector_products(&kernels, &both, rows, None);
            self.record(kernel, shape, args)?;
            self.activate(experts, pairs, chosen.lists.experts)?;
        }
        let [.., down] = self.expert_products(experts.layer);
        if let Some(out) = sum {
            let shared = down_shared(chosen.top_k * inner);
            let args = down.put(Args::new()).at(down_bias).at(self.at(b.gate));
            let args =
                args.at(chosen.lists.experts).at(chosen.lists.weights).at(self.at(out)).int(chosen.top_k);
            let shape = Shape::new([hidden.div_ceil(DOWN_ROWS), chosen.rows, 1], VECTOR_THREADS);
            return self.record(kernels.down_combine, shape.shared(shared), args);
        }
        let product = Product { w: down, out: self.at(b.out), width: hidden, bias: down_bias };
        let rows = Rows { x: self.at(b.gate), x_width: inner, share: 1, ..rows };
        let (shape, kernel, args) = self.vector_products(&kernels, &[product], rows, None);
        self.record(kernel, shape, args)
    }

    /// Joins what gate and up gave, in rows of these experts.
    fn activate(&mut self, experts: &Experts, rows: usize, owners: Address) -> Result<()> {
        let kernels = self.kernels()?;
        let b = experts.buffers;
        let gate = self.expert_products(experts.layer)[0];
        let (alpha, limit) = clamps(experts.activation);
        let args = Args::new().at(self.at(b.gate)).at(self.at(b.up)).int(gate.rows);
        let args = args.float(alpha).float(limit).at(owners).at(gate.slots);
        self.record(kernels.activate_rows, Shape::new([rows, 1, 1], 256), args)
    }

    /// Pairs are sorted by expert, and every expert is read once for each tile of them.
    fn tile_by_tile(&mut self, experts: &Experts, chosen: &Chosen) -> Result<()> {
        let kernels = self.kernels()?;
        let (b, lists) = (experts.buffers, chosen.lists);
        let (pairs, size) = (chosen.pairs(), chosen.tile());
        let [gate_bias, up_bias, down_bias] = self.bias_addresses(experts.biases);
        let inner = self.expert_products(experts.layer)[0].rows;
        let tiles = Tiles {
            size,
            most: chosen.experts.min(pairs) + pairs / size,
            tiles: lists.tiles,
            count: lists.tile_count,
            sources: lists.tokens,
        };
        let split = self.expert_products(experts.layer).iter().any(|w| w.kind.is_float());
        let [gate, up, _] = self.expert_products(experts.layer);
        // Where experts have few rows each, other kernels are better.
        let few = size == EIGHT && !split && [gate.cols, inner].iter().all(|&cols| self.few_fit(cols, EIGHT));
        let gated = (few && gate.is_like(up)).then_some(experts.activation);
        // Those of the layer that come later read the same.
        let halves = match self.expert_halves.filter(|_| !few) {
            None if !few => {
                let scratch = [Scratch::ExpertHalves, Scratch::ExpertScales];
                Some(self.halve_to(scratch, self.at(b.x), [self.rows, b.x.width()], split, [0; 2])?)
            }
            known => known,
        };
        self.expert_halves = halves;
        let [gate, up, down] = self.expert_products(experts.layer);
        let both = [
            Product { w: gate, out: self.at(b.gate), width: inner, bias: gate_bias },
            Product { w: up, out: self.at(b.up), width: inner, bias: up_bias },
        ];
        let starts: SmallVec<[_; 2]> = match halves {
            None => {
                let gated = gated.map(|activation| (activation, down));
                smallvec![self.few_products(&kernels, &both, self.at(b.x), tiles, gated)]
            }
            Some(halves) => {
                // Floats have kernels of their own.
                let apart = gate.kind.is_float() != up.kind.is_float();
                let together = both.chunks(if apart { 1 } else { 2 });
                together.map(|both| self.tiled_products(&kernels, both, halves, tiles)).collect()
            }
        };
        for (shape, kernel, args) in starts {
            self.record(kernel, shape, args)?;
        }
        if gated.is_none() {
            self.activate(experts, pairs, lists.owners)?;
        }
        let halves = match few {
            true => None,
            false => {
                let there = [lists.owners, self.expert_products(experts.layer)[0].slots];
                let scratch = [Scratch::Halves, Scratch::Scales];
                Some(self.halve_to(scratch, self.at(b.gate), [pairs, inner], split, there)?)
            }
        };
        let [.., down] = self.expert_products(experts.layer);
        let product = Product { w: down, out: self.at(b.out), width: down.rows, bias: down_bias };
        let tiles = Tiles { sources: 0, ..tiles };
        let (shape, kernel, args) = match halves {
            None => self.few_products(&kernels, &[product], self.at(b.gate), tiles, None),
            Some(halves) => self.tiled_products(&kernels, &[product], halves, tiles),
        };
        self.record(kernel, shape, args)
    }

    /// Adds what the experts of each row gave.
    pub(super) fn sum(&mut self, chosen: &Chosen, from: Buf, out: Buf) -> Result<()> {
        let kernels = self.kernels()?;
        let width = out.width();
        let places = if self.are_apart(chosen) { 0 } else { chosen.lists.places };
        let args = Args::new().at(self.at(from)).at(chosen.lists.weights).at(places);
        let args = args.at(self.at(out)).int(width).int(chosen.top_k);
        self.record(kernels.combine, Shape::new([width.div_ceil(128), chosen.rows, 1], 128), args)
    }
}
