//! The router's choice: made on the GPU, and reported to the host if it needs it.

use std::hint::spin_loop;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use forebay_engine::internals::backend::{Buf, GroupScore, Router, RouterWeights, Routing, Scores};
use forebay_engine::{Error, Result};

use super::deferred::PriorNorm;
use super::products::tile_for;
use super::{CudaBackend, Scratch};
use crate::driver::{Address, Event, Gpu, Pinned, Stream};
use crate::program::{Args, Shape};

/// Up to this many rows, experts are computed pair by pair: hardly any two rows choose the same expert.
pub const MOST_APART: usize = 4;

/// Constants of the router's kernels: threads per block; the most columns and rows for the kernel with one expert and
/// one row per block; experts and rows per block of the other kernel.
const ROUTER_THREADS: usize = 256;
const ROUTER_COLS: usize = 4 * 4 * ROUTER_THREADS;
const MOST_ROW_BY_ROW: usize = 4;
const ROUTER_EXPERTS: usize = 4;
const ROUTER_ROWS: usize = ROUTER_THREADS / 32;

/// Bytes of a tile's description.
const TILE_BYTES: usize = 12;

/// How often to poll for a choice before asking the driver whether the GPU still works.
const LOOKS: usize = 2000;

/// The lists in which routing is stored.
#[derive(Clone, Copy)]
pub struct Lists {
    /// `[rows, top_k]` each
    pub experts: Address,
    pub weights: Address,
    pub places: Address,
    /// `[places]`
    pub tokens: Address,
    pub owners: Address,
    pub tile_count: Address,
    pub tiles: Address,
}

/// A router's choice on the device.
#[derive(Clone, Copy)]
pub struct Chosen {
    pub lists: Lists,
    /// The number of rows.
    pub rows: usize,
    /// Experts per row.
    pub top_k: usize,
    /// Experts of the layer.
    pub experts: usize,
}

impl Chosen {
    pub fn pairs(&self) -> usize {
        self.rows * self.top_k
    }

    /// Rows per tile: half as many again as an expert has on average.
    pub fn tile(&self) -> usize {
        tile_for((self.pairs() * 3).div_ceil(2 * self.experts))
    }
}

/// Choices that kernels report to the host by writing to pinned memory.
pub struct ReportedChoice {
    memory: Option<Pinned>,
    /// The number that precedes the rows of the last choice.
    turn: u32,
    /// Passes when all work that was started with the choice has ended.
    end: Event,
}

impl ReportedChoice {
    pub fn new(gpu: &Arc<Gpu>) -> Result<ReportedChoice> {
        Ok(ReportedChoice { memory: None, turn: 0, end: Event::new(gpu)? })
    }

    /// Where the next choice will be written, and the number that will precede each row.
    pub fn ask(&mut self, gpu: &Arc<Gpu>, rows: usize, top_k: usize) -> Result<(Address, u32)> {
        let bytes = rows * row_words(top_k) * 4;
        if self.memory.as_ref().is_none_or(|memory| memory.len() < bytes) {
            self.memory = Some(Pinned::new(gpu, bytes.next_power_of_two())?);
        }
        // Overwrites old numbers, so that they are not mistaken for an answer.
        let memory = self.memory.as_ref().expect("it was just made");
        self.turn = self.turn.wrapping_add(1).max(1);
        for row in 0..rows {
            memory.number(row * row_words(top_k)).store(0, Ordering::Relaxed);
        }
        Ok((memory.address(), self.turn))
    }

    /// Called after the kernel that writes the choice was started.
    pub fn started(&self) -> Result<()> {
        self.end.set(Stream::Compute)
    }

    /// Waits for the choice and returns it.
    pub fn await_choice(&self, chosen: &Chosen, routing: &mut Routing) -> Result<()> {
        let (rows, top_k) = (chosen.rows, chosen.top_k);
        let memory = self.memory.as_ref().expect("it was asked");
        let is_told = |row: usize| memory.number(row * row_words(top_k)).load(Ordering::Acquire) == self.turn;
        let mut row = 0;
        let mut ended = false;
        while row < rows {
            if (0..LOOKS).any(|_| {
                is_told(row) || {
                    spin_loop();
                    false
                }
            }) {
                row += 1;
            } else if ended {
                return Err(Error::Backend(
                    "the GPU cannot compute: a router's choice did not arrive".into(),
                ));
            } else {
                ended = self.end.has_passed()?;
            }
        }
        let (experts, weights) = routing.prepare(rows, top_k);
        for row in 0..rows {
            let number = |i: usize| memory.number(row * row_words(top_k) + 1 + i).load(Ordering::Relaxed);
            for rank in 0..top_k {
                experts[row * top_k + rank] = number(rank);
                weights[row * top_k + rank] = f32::from_bits(number(top_k + rank));
            }
        }
        routing.sort(chosen.experts);
        Ok(())
    }
}

/// Words per row: the preceding number, experts and weights.
pub fn row_words(top_k: usize) -> usize {
    1 + 2 * top_k
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

    /// Records the router's choice. If `reported` is given, the choice is also reported to the host.
    pub fn choose(
        &mut self,
        logits: Buf,
        router: &Router,
        weights: &RouterWeights,
        scratch: Scratch,
        reported: Option<(Address, u32)>,
    ) -> Result<Chosen> {
        let kernels = self.kernels()?;
        let lists = self.lists(scratch, self.rows * router.top_k, router.experts)?;
        let (reported, turn) = reported.unwrap_or_default();
        let groups = router.groups.filter(|groups| groups.used < groups.count);
        let args = Args::new().at(self.at(logits)).at(self.optional(weights.correction));
        let args = args.at(self.optional(weights.factors));
        let args = args.at(lists.experts).at(lists.weights).at(reported);
        let args = args.int(router.experts).int(router.top_k);
        let args = match router.scores {
            Scores::Softmax => args.int(0).float(0.0),
            Scores::Sigmoid => args.int(1).float(0.0),
            Scores::SparseMixer { tolerance } => args.int(2).float(tolerance),
        };
        let args = args.int(groups.map_or(0, |g| g.count)).int(groups.map_or(0, |g| g.used));
        let args = args.flag(groups.is_some_and(|g| g.score == GroupScore::BestTwo));
        let args = args.flag(router.normalise).float(router.epsilon).float(router.scale).int(turn as usize);
        // Shared memory that a choice needs.
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

    /// Implements [`Backend::route`](forebay_engine::internals::backend::Backend::route), for computing with the choice
    /// on the GPU.
    pub fn choose_and_tell(
        &mut self,
        logits: Buf,
        router: &Router,
        weights: &RouterWeights,
        routing: &mut Routing,
    ) -> Result<Chosen> {
        let reported = self.reported.ask(&self.gpu, self.rows, router.top_k)?;
        let chosen = self.choose(logits, router, weights, Scratch::Routing, Some(reported))?;
        self.sort(&chosen)?;
        self.start_once()?;
        self.started = true;
        self.reported.started()?;
        self.reported.await_choice(&chosen, routing)?;
        Ok(chosen)
    }

    /// Whether every pair of row and expert reads its expert separately.
    pub fn are_apart(&self, chosen: &Chosen) -> bool {
        self.by_vector(chosen.rows) || chosen.rows <= MOST_APART
    }

    /// Sorts the pairs by expert, if they are computed that way.
    pub fn sort(&mut self, chosen: &Chosen) -> Result<()> {
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
}
