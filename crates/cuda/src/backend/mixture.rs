//! Mixtures of experts, from the router's logits to the sum, without a word to the host.

use bytemuck::cast_slice_mut;
use forebay_engine::backend::{
    Activation, Buf, GroupScore, Mixture, Precision, Router, Routing, Scores, Vector,
};
use forebay_engine::{LayerIdx, Result};

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
const MOST_APART: usize = 4;

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
    tile_count: Address,
    tiles: Address,
}

impl CudaBackend {
    fn lists(&mut self, pairs: usize, experts: usize) -> Result<Lists> {
        let list = (pairs * 4).next_multiple_of(256);
        let tiles = (experts + pairs.div_ceil(8) + 1) * TILE_BYTES;
        let first = self.scratch(Scratch::Routing, 4 * list + 256 + tiles)?;
        let at = |i: usize| first + (i * list) as u64;
        Ok(Lists {
            experts: at(0),
            weights: at(1),
            places: at(2),
            tokens: at(3),
            tile_count: at(4),
            tiles: at(4) + 256,
        })
    }

    /// Records the router's choice.
    fn choose(&mut self, logits: Buf, router: &Router, correction: Option<Vector>) -> Result<Lists> {
        let kernels = self.kernels()?;
        let lists = self.lists(self.rows * router.top_k, router.experts)?;
        let groups = router.groups.filter(|groups| groups.used < groups.count);
        let args = Args::new().at(self.at(logits)).at(self.optional(correction));
        let args = args.at(lists.experts).at(lists.weights).int(router.experts).int(router.top_k);
        let args = args.flag(router.scores == Scores::Sigmoid);
        let args = args.int(groups.map_or(0, |g| g.count)).int(groups.map_or(0, |g| g.used));
        let args = args.flag(groups.is_some_and(|g| g.score == GroupScore::BestTwo));
        let args = args.flag(router.normalise).float(router.scale);
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
        Ok(lists)
    }

    /// As [`Backend::route`](forebay_engine::backend::Backend::route).
    pub(super) fn route_and_tell(
        &mut self,
        logits: Buf,
        router: &Router,
        correction: Option<Vector>,
        routing: &mut Routing,
    ) -> Result<()> {
        let lists = self.choose(logits, router, correction)?;
        self.flush()?;
        self.row_facts = None;
        self.recorder.submit()?;
        let (experts, weights) = routing.prepare(self.rows, router.top_k);
        self.gpu.read(lists.experts, cast_slice_mut(experts))?;
        self.gpu.read(lists.weights, cast_slice_mut(weights))?;
        routing.sort(router.experts);
        Ok(())
    }

    /// A layer's experts: gate, up and down.
    fn expert_products(&self, layer: LayerIdx) -> [&crate::weights::DeviceMatrix; 3] {
        let parts = &self.experts[layer.0];
        [0, 1, 2].map(|i| parts[i].as_ref().expect("all experts were handed over"))
    }

    /// As [`Backend::mixture`](forebay_engine::backend::Backend::mixture).
    pub(super) fn mix(&mut self, mixture: &Mixture<'_>) -> Result<()> {
        let lists = self.choose(mixture.logits, mixture.router, mixture.correction)?;
        if self.by_vector(self.rows) || self.rows <= MOST_APART {
            self.pair_by_pair(mixture, lists)
        } else {
            self.sorted(mixture, lists)
        }
    }

    /// Every pair reads its expert by itself.
    fn pair_by_pair(&mut self, mixture: &Mixture<'_>, lists: Lists) -> Result<()> {
        let kernels = self.kernels()?;
        let (b, top_k) = (mixture.experts.buffers, mixture.router.top_k);
        let pairs = self.rows * top_k;
        let [gate_bias, up_bias, down_bias] = self.bias_addresses(mixture.experts.biases);
        let [gate, up, down] = self.expert_products(mixture.layer);
        let (inner, hidden) = (gate.rows, down.rows);
        let rows = Rows {
            count: pairs,
            x: self.at(b.x),
            x_width: b.x.width(),
            share: top_k,
            experts: lists.experts,
        };
        if gate.kind == up.kind && gate.cols <= VECTOR_COLS {
            let (alpha, limit) = clamps(mixture.experts.activation);
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
            self.activate(mixture, pairs * inner, inner)?;
        }
        let [.., down] = self.expert_products(mixture.layer);
        let shared = down_shared(top_k * inner);
        let whole = inner.is_multiple_of(32) && top_k <= MOST_CHOSEN && shared <= MOST_DOWN_SHARED;
        if whole && self.precision == Precision::Fast {
            let args = down.put(Args::new()).at(down_bias).at(self.at(b.gate));
            let args = args.at(lists.experts).at(lists.weights).at(self.at(mixture.out)).int(top_k);
            let shape = Shape::new([hidden.div_ceil(DOWN_ROWS), self.rows, 1], VECTOR_THREADS);
            return self.record(kernels.down_combine, shape.shared(shared), args);
        }
        let product = Product { w: down, out: self.at(b.out), width: hidden, bias: down_bias };
        let rows = Rows { x: self.at(b.gate), x_width: inner, share: 1, ..rows };
        let (shape, kernel, args) = self.vector_products(&kernels, &[product], rows, None);
        self.record(kernel, shape, args)?;
        self.sum(mixture, lists, 0)
    }

    /// Joins what gate and up gave.
    fn activate(&mut self, mixture: &Mixture<'_>, count: usize, inner: usize) -> Result<()> {
        let kernels = self.kernels()?;
        let b = mixture.experts.buffers;
        let args = Args::new().at(self.at(b.gate)).at(self.at(b.up)).long(count);
        match mixture.experts.activation {
            Activation::SwiGlu => self.record(kernels.swiglu, Shape::each(count), args.int(inner).int(inner)),
            Activation::Clamped { alpha, limit } => {
                self.record(kernels.clamped_swiglu, Shape::each(count), args.float(alpha).float(limit))
            }
        }
    }

    /// Pairs are sorted by expert, and every expert is read once for each tile of them.
    fn sorted(&mut self, mixture: &Mixture<'_>, lists: Lists) -> Result<()> {
        let kernels = self.kernels()?;
        let (b, top_k, count) = (mixture.experts.buffers, mixture.router.top_k, mixture.router.experts);
        let pairs = self.rows * top_k;
        // As many as an expert has on average, and half as many again.
        let size = tile_for((pairs * 3).div_ceil(2 * count));
        let args = Args::new().at(lists.experts).int(pairs).int(top_k).int(count);
        let args = args.at(lists.tokens).at(lists.places).at(lists.tiles).at(lists.tile_count).int(size);
        self.record(kernels.sort, Shape::new([1, 1, 1], 1024).shared(2 * count * 4), args)?;

        let [gate_bias, up_bias, down_bias] = self.bias_addresses(mixture.experts.biases);
        let inner = self.expert_products(mixture.layer)[0].rows;
        let tiles = Tiles {
            size,
            most: count.min(pairs) + pairs / size,
            tiles: lists.tiles,
            count: lists.tile_count,
            sources: lists.tokens,
        };
        let split = self.expert_products(mixture.layer).iter().any(|w| w.kind.is_float());
        let [gate, up, _] = self.expert_products(mixture.layer);
        // Where experts have few rows each, other kernels are better.
        let few = size == EIGHT && !split && self.few_fit(gate.cols.max(inner), EIGHT);
        let gated = (few && gate.kind == up.kind).then_some(mixture.experts.activation);
        let halves = match few {
            true => None,
            false => Some(self.halve(self.at(b.x), self.rows, b.x.width(), split)?),
        };
        let [gate, up, down] = self.expert_products(mixture.layer);
        let both = [
            Product { w: gate, out: self.at(b.gate), width: inner, bias: gate_bias },
            Product { w: up, out: self.at(b.up), width: inner, bias: up_bias },
        ];
        let (shape, kernel, args) = match halves {
            None => {
                let gated = gated.map(|activation| (activation, down));
                self.few_products(&kernels, &both, self.at(b.x), tiles, gated)
            }
            Some(halves) => self.tiled_products(&kernels, &both, halves, tiles),
        };
        self.record(kernel, shape, args)?;
        if gated.is_none() {
            self.activate(mixture, pairs * inner, inner)?;
        }
        let halves = match few {
            true => None,
            false => Some(self.halve(self.at(b.gate), pairs, inner, split)?),
        };
        let [.., down] = self.expert_products(mixture.layer);
        let product = Product { w: down, out: self.at(b.out), width: down.rows, bias: down_bias };
        let tiles = Tiles { sources: 0, ..tiles };
        let (shape, kernel, args) = match halves {
            None => self.few_products(&kernels, &[product], self.at(b.gate), tiles, None),
            Some(halves) => self.tiled_products(&kernels, &[product], halves, tiles),
        };
        self.record(kernel, shape, args)?;
        self.sum(mixture, lists, lists.places)
    }

    /// Adds what the experts of each row gave.
    fn sum(&mut self, mixture: &Mixture<'_>, lists: Lists, places: Address) -> Result<()> {
        let kernels = self.kernels()?;
        let width = mixture.out.width();
        let args = Args::new().at(self.at(mixture.experts.buffers.out)).at(lists.weights).at(places);
        let args = args.at(self.at(mixture.out)).int(width).int(mixture.router.top_k);
        self.record(kernels.combine, Shape::new([width.div_ceil(128), self.rows, 1], 128), args)
    }
}
