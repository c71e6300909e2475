//! Computes experts wherever they are.

use forebay_engine::internals::backend::{ExpertBlock, Experts, Parts, Routing};
use forebay_engine::internals::experts::Mixture;
use forebay_engine::{ExpertIdx, LayerIdx, Result};
use smallvec::SmallVec;

use super::places::{ENTRY, Part, Places};
use crate::backend::choice::Chosen;
use crate::backend::{GpuBackend, activation_args};
use crate::device::{Memory, Span};
use crate::recorder::{Args, Bound};
use crate::shaders::{File, Name};

/// Up to this many rows, pairs are computed one by one: hardly any two rows choose the same expert.
const MOST_APART: usize = 4;

/// Threads of workgroups, and rows of a matrix that each computes.
const THREADS: usize = 256;
const ROWS: usize = 8;

/// Sizes of tiles.
const TILES: [usize; 4] = [1, 4, 8, 16];

/// Words of a tile.
const TILE: usize = 4;

/// What is computed.
#[derive(Clone)]
pub enum Jobs {
    /// All pairs of a choice, one by one. Their place is their number.
    Pairs(Chosen),
    /// Tiles of places that chose the same expert.
    Tiles {
        /// The tiles, and how many there are at most.
        tiles: Span,
        count: usize,
        /// The most places of one.
        size: usize,
        /// The token at each place.
        tokens: Span,
    },
}

impl Jobs {
    /// How many there are at most.
    fn count(&self) -> usize {
        match self {
            Jobs::Pairs(chosen) => chosen.pairs(),
            Jobs::Tiles { count, .. } => *count,
        }
    }
}

/// A block of the experts of a layer.
#[derive(Clone)]
struct BlockOf {
    layer: LayerIdx,
    top_k: usize,
    x: Span,
    x_width: usize,
    block: ExpertBlock,
    parts: Parts<Part>,
}

/// A batch's pairs, sorted by expert.
pub struct Sorted {
    pub jobs: Jobs,
    /// The place of each pair.
    pub places: Span,
}

/// The backend and the experts that it computes with.
pub struct GpuExperts {
    pub backend: GpuBackend,
    pub places: Places,
    /// Lists of sorted pairs.
    lists: Option<Memory>,
}

impl GpuExperts {
    pub fn new(backend: GpuBackend, places: Places) -> GpuExperts {
        GpuExperts { backend, places, lists: None }
    }

    /// Starts what is recorded.
    pub fn submit(&mut self) -> Result<()> {
        self.backend.flush()?;
        self.backend.recorder.submit().map(drop)
    }

    /// Computes the logits of a mixture's router, unless they are ready.
    pub fn router_logits(&mut self, mixture: &Mixture<'_>) -> Result<()> {
        match mixture.ready {
            true => Ok(()),
            false => mixture.weights.logits(&mut self.backend, mixture.input, mixture.logits),
        }
    }

    /// Computes a mixture whose experts are all in the table, without the host.
    pub fn mix(&mut self, mixture: &Mixture<'_>, chosen: &Chosen) -> Result<()> {
        let (experts, out) = (&mixture.experts, self.backend.at(mixture.out));
        let all = (0..chosen.count as u32).map(ExpertIdx);
        let windows = self.places.windows(experts.layer, all);
        if chosen.rows > MOST_APART {
            let sorted = self.sort(chosen)?;
            self.compute(experts, &sorted.jobs, &windows)?;
            return self.sum(mixture, chosen.weights.clone(), Some(sorted.places));
        }
        let jobs = Jobs::Pairs(chosen.clone());
        match windows[..] {
            // One kernel reaches all experts, so it can add up, too. The bits are those of two kernels.
            [window] if experts.adjugate.is_none() => {
                let of = self.block_of(experts);
                self.first_half(&of, &jobs, window)?;
                self.second_half(&of, &jobs, window, Some((chosen, out)))
            }
            _ => {
                self.compute(experts, &jobs, &windows)?;
                self.sum(mixture, chosen.weights.clone(), None)
            }
        }
    }

    /// Computes the experts of these jobs, which are in these windows of arenas.
    pub fn compute(&mut self, experts: &Experts, jobs: &Jobs, windows: &[usize]) -> Result<()> {
        let mut blocks: SmallVec<[BlockOf; 2]> = SmallVec::from_elem(self.block_of(experts), 1);
        if let Some((block, _)) = experts.adjugate {
            let parts = self.places.layer(experts.layer).adjugate.expect("it was declared");
            blocks.push(BlockOf { block, parts, ..blocks[0].clone() });
        }
        for of in &blocks {
            windows.iter().try_for_each(|&window| self.first_half(of, jobs, window))?;
            windows.iter().try_for_each(|&window| self.second_half(of, jobs, window, None))?;
        }
        Ok(())
    }

    /// The block of each expert.
    fn block_of(&self, experts: &Experts) -> BlockOf {
        let parts = self.places.layer(experts.layer).parts;
        let top_k = experts.block.inner.width() / parts.up.rows;
        let (x, x_width) = (self.backend.at(experts.x), experts.x.width());
        BlockOf { layer: experts.layer, top_k, x, x_width, block: experts.block, parts }
    }

    /// The products with gate and up, or with up alone, and what the activation function makes of them.
    fn first_half(&mut self, of: &BlockOf, jobs: &Jobs, window: usize) -> Result<()> {
        let parts: SmallVec<[Part; 2]> = of.parts.inputs().into_iter().flatten().collect();
        let (kind, alpha, limit) = activation_args(of.block.activation);
        let mut args = Args::new().int(window).int(of.x_width).int(of.top_k);
        args = args.int(kind).float(alpha).float(limit);
        let mut bound = self.common(of, jobs, window, [of.x.clone(), self.backend.at(of.block.inner)])?;
        bound.push(match jobs {
            Jobs::Pairs(_) => Bound::None,
            Jobs::Tiles { tokens, .. } => tokens.clone().into(),
        });
        let biases = of.block.biases.map_or([None; 2], |biases| biases.inputs());
        let scales = of.block.scales.inputs().map(Option::flatten);
        for ((part, bias), scale) in parts.iter().zip(biases).zip(scales) {
            args = args.int(part.matrix).int(part.ranges).flag(bias.is_some()).flag(scale.is_some());
            bound.push(bias.map(|bias| self.backend.vector(bias)).into());
            bound.push(scale.map(|scale| self.backend.vector(scale)).into());
        }
        let name = self.named(File::Gate, "gate_up", &parts, jobs);
        self.backend.record(&name, [of.parts.up.rows.div_ceil(ROWS), jobs.count(), 1], &args, &bound)
    }

    /// The product with down, and for all pairs the sum if `sum` has the choice and the output.
    fn second_half(
        &mut self,
        of: &BlockOf,
        jobs: &Jobs,
        window: usize,
        sum: Option<(&Chosen, Span)>,
    ) -> Result<()> {
        let down = of.parts.down;
        let (bias, scale) = (of.block.biases.map(|biases| biases.down), of.block.scales.down);
        let args = Args::new().int(window).int(down.cols).int(of.top_k);
        let args = args.flag(bias.is_some()).flag(scale.is_some()).int(down.matrix).int(down.ranges);
        let (entry, count, weights, out) = match sum {
            None => ("down", jobs.count(), None, self.backend.at(of.block.out)),
            Some((chosen, out)) => ("down_sum", chosen.rows, Some(chosen.weights.clone()), out),
        };
        let mut bound = self.common(of, jobs, window, [self.backend.at(of.block.inner), out])?;
        bound.push(bias.map(|bias| self.backend.vector(bias)).into());
        bound.push(scale.map(|scale| self.backend.vector(scale)).into());
        bound.push(weights.into());
        let name = self.named(File::Down, entry, &[down], jobs);
        self.backend.record(&name, [down.rows.div_ceil(ROWS), count, 1], &args, &bound)
    }

    /// The buffers that all kernels for experts have.
    fn common(
        &mut self,
        of: &BlockOf,
        jobs: &Jobs,
        window: usize,
        [x, out]: [Span; 2],
    ) -> Result<Vec<Bound>> {
        let mut bound = self.places.bound(window);
        bound.push(self.backend.descriptors()?.into());
        bound.push(self.places.table(of.layer).into());
        bound.push(match jobs {
            Jobs::Pairs(chosen) => chosen.experts.clone().into(),
            Jobs::Tiles { tiles, .. } => tiles.clone().into(),
        });
        bound.extend([x.into(), out.into()]);
        Ok(bound)
    }

    fn named(&self, file: File, entry: &'static str, parts: &[Part], jobs: &Jobs) -> Name {
        let (tiled, size) = match jobs {
            Jobs::Pairs(_) => (0, 1),
            Jobs::Tiles { size, .. } => (1, *size),
        };
        let name = Name::new(file, entry).reading(parts.iter().map(|part| part.source));
        let name = name.with("WINDOW", self.backend.gpu.window() as u32).with("ENTRY", ENTRY as u32);
        name.with("TILED", tiled).with("ROWS", size as u32)
    }

    /// Adds the outputs of each row's experts in the order of ranks. `weights` has those of all pairs, and `places`
    /// where their outputs are, if that is not their own number.
    pub fn sum(&mut self, mixture: &Mixture<'_>, weights: Span, places: Option<Span>) -> Result<()> {
        let backend = &mut self.backend;
        let (rows, width, top_k) = (backend.rows, mixture.out.width(), mixture.router.top_k);
        let (small, factor) = mixture.experts.adjugate.unzip();
        let args = Args::new().int(rows * top_k).int(top_k).int(width).int(0).int(0);
        let args = args.flag(places.is_some()).flag(small.is_some()).float(factor.unwrap_or(0.0));
        let [outputs, out] = [mixture.experts.block.out, mixture.out].map(|buf| Bound::from(backend.at(buf)));
        let added = small.map(|small| backend.at(small.out)).into();
        let places = places.into();
        let bound = [Bound::None, Bound::None, places, Bound::None, weights.into(), outputs, added, out];
        let name = Name::new(File::Mixing, "combine").with("EXPERTS", 1);
        backend.record(&name, [width.div_ceil(THREADS), rows, 1], &args, &bound)
    }

    /// Sorts the pairs of a choice by expert, on the GPU.
    fn sort(&mut self, chosen: &Chosen) -> Result<Sorted> {
        let backend = &mut self.backend;
        let pairs = chosen.pairs();
        // Half as many again as an expert has on average.
        let size = tile_for((pairs * 3).div_ceil(2 * chosen.count));
        let count = chosen.count.min(pairs) + pairs / size;
        let list = (pairs as u64 * 4).next_multiple_of(256);
        let bytes = 2 * list + (count * TILE * 4) as u64;
        let memory = match self.lists.take() {
            Some(memory) if memory.bytes() >= bytes => memory,
            _ => backend.gpu.allocate(bytes.next_power_of_two(), "scratch")?,
        };
        let whole = memory.whole();
        self.lists = Some(memory);
        let [tokens, places] = [0, list].map(|start| whole.part(start, pairs as u64 * 4));
        let tiles = whole.part(2 * list, (count * TILE * 4) as u64);
        let args = Args::new()
            .int(pairs)
            .int(chosen.top_k)
            .int(0)
            .int(size)
            .int(count)
            .flag(true)
            .flag(false)
            .float(0.0);
        let name = Name::new(File::Mixing, "sort").with("EXPERTS", chosen.count as u32);
        let lists = [&tokens, &places, &tiles].map(|span| Bound::from(span.clone()));
        let [of_tokens, of_places, of_tiles] = lists;
        let mut bound = vec![chosen.experts.clone().into(), of_tokens, of_places, of_tiles];
        bound.resize(8, Bound::None);
        backend.record(&name, [1, 1, 1], &args, &bound)?;
        Ok(Sorted { jobs: Jobs::Tiles { tiles, count, size, tokens }, places })
    }

    /// The places of a choice that the host knows: the token of each, and the place of each pair.
    pub fn sorted_places(&mut self, routing: &Routing) -> Result<[Span; 2]> {
        let (rows, pairs) = (self.backend.rows, routing.experts().len());
        let tokens = routing.tokens(0..pairs);
        let places: Vec<u32> =
            (0..rows).flat_map(|row| routing.ranks(row)).map(|(place, _)| place as u32).collect();
        let recorder = &mut self.backend.recorder;
        Ok([recorder.params(tokens)?, recorder.params(&places)?])
    }

    /// The jobs of some of the chosen experts.
    pub fn jobs_of(
        &mut self,
        routing: &Routing,
        experts: impl Iterator<Item = ExpertIdx> + Clone,
        tokens: &Span,
    ) -> Result<Jobs> {
        let longest = experts.clone().map(|expert| routing.bucket(expert).len()).max().unwrap_or(1);
        let size = tile_for(longest);
        let mut words: Vec<u32> = Vec::new();
        for expert in experts {
            let bucket = routing.bucket(expert);
            for first in bucket.clone().step_by(size) {
                words.extend([expert.0, first as u32, size.min(bucket.end - first) as u32, 0]);
            }
        }
        let count = words.len() / TILE;
        let tiles = self.backend.recorder.params(&words)?;
        Ok(Jobs::Tiles { tiles, count, size, tokens: tokens.clone() })
    }
}

/// The size of tiles for experts that have up to this many places.
fn tile_for(places: usize) -> usize {
    TILES.into_iter().find(|&size| size >= places).unwrap_or(TILES[TILES.len() - 1])
}
