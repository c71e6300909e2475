//! Computes experts wherever they are.

use forebay_engine::internals::backend::{Buf, ExpertBlock, Experts, Parts, Routing};
use forebay_engine::internals::experts::Mixture;
use forebay_engine::{ExpertIdx, LayerIdx, Result};
use smallvec::SmallVec;

use super::places::{ENTRY, Part, Places};
use crate::backend::choice::Chosen;
use crate::backend::products::{MOST_FEW, padded};
use crate::backend::{GpuBackend, activation_args};
use crate::device::{Memory, Span};
use crate::recorder::{Args, Bound};
use crate::shaders::{File, Half, Name};

/// Threads of most workgroups.
const THREADS: usize = 256;

/// Of few rows of activations: rows of a matrix that a team computes, and teams of a workgroup. For sums of all experts
/// of a token, a workgroup has a team for each expert.
const ROWS: usize = 2;
const TEAMS: usize = 4;
const SUM_ROWS: usize = 8;

/// Of many rows: sizes of tiles, and rows of matrices that a workgroup computes.
const TILES: [usize; 2] = [32, 64];
const LARGE_TILE: usize = 128;
/// The memory of a workgroup that computes larger ones by matrices.
const LARGE_BYTES: u32 = 40 << 10;
const TILE_ROWS: usize = 64;
const MATRICES_ROWS: usize = 128;

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
        /// The most places of one. It is 1 for few rows of activations.
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

/// A kernel for a half of experts.
struct Kernel {
    name: Name,
    /// Rows of the output that a workgroup computes.
    each: usize,
    /// What the kernel reads x from, and the numbers between its rows.
    x: Vec<Bound>,
    x_width: usize,
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
        let experts = &mixture.experts;
        let all = (0..chosen.count as u32).map(ExpertIdx);
        let windows = self.places.windows(experts.layer, all);
        if chosen.rows > MOST_FEW {
            let sorted = self.sort(experts.layer, chosen)?;
            self.compute(experts, &sorted.jobs, &windows)?;
            return self.sum(mixture, chosen.weights.clone(), Some(sorted.places));
        }
        let jobs = Jobs::Pairs(chosen.clone());
        match windows[..] {
            // One kernel reaches all experts, so it can add up, too. The bits are those of two kernels.
            [window] if experts.adjugate.is_none() => {
                let of = self.block_of(experts);
                self.first_half(&of, &jobs, window)?;
                self.second_half(&of, &jobs, window, Some((chosen, mixture.out)))
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
        let rows = [self.backend.rows, of.x_width, of.parts.up.cols];
        let mut kernel = self.kernel(Half::Gate, &parts, jobs, (of.x.clone(), rows))?;
        let (kind, alpha, limit) = activation_args(of.block.activation);
        let mut args = Args::new().int(window).int(kernel.x_width).int(of.top_k);
        args = args.int(kind).float(alpha).float(limit);
        let mut bound = self.common(of, jobs, window, of.block.inner)?;
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
        bound.append(&mut kernel.x);
        let grid = [of.parts.up.rows.div_ceil(kernel.each), jobs.count(), 1];
        self.backend.record(&kernel.name, grid, &args, &bound)
    }

    /// The product with down, and for all pairs the sum if `sum` has the choice and the output.
    fn second_half(
        &mut self,
        of: &BlockOf,
        jobs: &Jobs,
        window: usize,
        sum: Option<(&Chosen, Buf)>,
    ) -> Result<()> {
        let down = of.parts.down;
        let (bias, scale) = (of.block.biases.map(|biases| biases.down), of.block.scales.down);
        let rows = [self.backend.rows * of.top_k, down.cols, down.cols];
        let inner = self.backend.at(of.block.inner);
        let mut kernel = self.kernel(Half::Down, &[down], jobs, (inner, rows))?;
        let args = Args::new().int(window).int(kernel.x_width).int(of.top_k).int(down.matrix);
        let args = args.int(down.ranges).flag(bias.is_some()).flag(scale.is_some());
        let (mut count, mut weights, mut out) = (jobs.count(), None, of.block.out);
        if let Some((chosen, sum)) = sum {
            (count, weights, out) = (chosen.rows, Some(chosen.weights.clone()), sum);
            kernel = Kernel { each: SUM_ROWS, ..kernel };
            kernel.name.entry = "down_sum";
            kernel.name.constants.retain(|(name, _)| *name != "ROWS");
            kernel.name.constants.push(("ROWS", SUM_ROWS as u32));
        }
        let mut bound = self.common(of, jobs, window, out)?;
        bound.push(weights.into());
        bound.push(bias.map(|bias| self.backend.vector(bias)).into());
        bound.push(scale.map(|scale| self.backend.vector(scale)).into());
        bound.append(&mut kernel.x);
        self.backend.record(&kernel.name, [down.rows.div_ceil(kernel.each), count, 1], &args, &bound)
    }

    /// The buffers that all kernels for experts have first.
    fn common(&mut self, of: &BlockOf, jobs: &Jobs, window: usize, out: Buf) -> Result<Vec<Bound>> {
        let mut bound = self.places.bound(window);
        bound.push(self.backend.descriptors()?.into());
        bound.push(self.places.table(of.layer).into());
        bound.push(match jobs {
            Jobs::Pairs(chosen) => chosen.experts.clone().into(),
            Jobs::Tiles { tiles, .. } => tiles.clone().into(),
        });
        bound.push(self.backend.at(out).into());
        Ok(bound)
    }

    /// The kernel for these matrices and jobs. Which one it is depends on the number of rows alone, so that neither places
    /// nor tiles change a bit. `x` has so many rows of this width, of which so many columns are used.
    fn kernel(
        &mut self,
        half: Half,
        parts: &[Part],
        jobs: &Jobs,
        (x, [rows, width, cols]): (Span, [usize; 3]),
    ) -> Result<Kernel> {
        let named = |file, entry| {
            let name = Name::new(file, entry).reading(parts.iter().map(|part| part.source));
            name.with("WINDOW", self.backend.gpu.window() as u32).with("ENTRY", ENTRY as u32)
        };
        let size = match jobs {
            Jobs::Tiles { size, .. } if self.backend.rows > MOST_FEW => *size as u32,
            _ => {
                let tiled = matches!(jobs, Jobs::Tiles { .. });
                let name = named(File::Experts(half), "apart").with("TILED", tiled.into());
                let name = name.with("ROWS", ROWS as u32);
                return Ok(Kernel { name, each: TEAMS * ROWS, x: vec![x.into()], x_width: width });
            }
        };
        if parts.iter().all(|part| self.backend.halves_suffice(part.source)) {
            let name = named(File::ExpertMatrices(half), "tiles_by_matrices").with("TILED", 1);
            let name = name.with("TOKENS", size).with("SLOTS", parts.len() as u32);
            let x = self.backend.halve(x, [rows, width, cols])?.map(Bound::from).to_vec();
            return Ok(Kernel { name, each: MATRICES_ROWS / parts.len(), x, x_width: padded(cols) });
        }
        let wide = width.is_multiple_of(4) && cols.is_multiple_of(4);
        let name = named(File::ExpertTiles(half), "tiles").with("TILED", 1);
        let name = name.with("TOKENS", size).with("WIDE", wide.into());
        Ok(Kernel { name, each: TILE_ROWS, x: vec![x.into()], x_width: width })
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
    fn sort(&mut self, layer: LayerIdx, chosen: &Chosen) -> Result<Sorted> {
        let pairs = chosen.pairs();
        // Half as many again as an expert has on average.
        let size = self.tile_for(layer, (pairs * 3).div_ceil(2 * chosen.count));
        let backend = &mut self.backend;
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
        (layer, routing): (LayerIdx, &Routing),
        experts: impl Iterator<Item = ExpertIdx> + Clone,
        tokens: &Span,
    ) -> Result<Jobs> {
        let longest = experts.clone().map(|expert| routing.bucket(expert).len()).max().unwrap_or(1);
        let size = if self.backend.rows > MOST_FEW { self.tile_for(layer, longest) } else { 1 };
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

    /// The size of tiles for experts of a layer that have up to this many places.
    fn tile_for(&self, layer: LayerIdx, places: usize) -> usize {
        let there = self.places.layer(layer);
        let mut blocks = std::iter::once(there.parts).chain(there.adjugate);
        let by_matrices = blocks.all(|parts| {
            let inputs = parts.inputs().into_iter().flatten();
            inputs.chain([parts.down]).all(|part| self.backend.halves_suffice(part.source))
        });
        let fits = self.backend.gpu.limits.max_compute_workgroup_storage_size >= LARGE_BYTES;
        let large = (by_matrices && fits).then_some(LARGE_TILE);
        let sizes = TILES.into_iter().chain(large);
        sizes.clone().find(|&size| size >= places).or(sizes.last()).expect("there are sizes")
    }
}
