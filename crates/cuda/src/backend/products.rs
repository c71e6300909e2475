//! Products with matrices.

use forebay_engine::Result;
use forebay_engine::internals::backend::{Activation, Buf, HeadMatrices, Matrix, Precision, Vector};

use super::deferred::PriorNorm;
use super::{CudaBackend, Scratch};
use crate::compile::{Kernel, Kernels};
use crate::driver::Address;
use crate::program::{Args, Shape};
use crate::weights::{DeviceMatrix, WeightKind};

/// Of the kernels that multiply one row of activations.
pub const VECTOR_THREADS: usize = 256;
pub const VECTOR_WARPS: usize = VECTOR_THREADS / 32;

/// Columns whose activations are in shared memory at a time, and bytes of 32 of them.
pub const VECTOR_COLS: usize = 8192;
const VECTOR_GROUP: usize = 36 * 4;

/// Blocks of them that run on a processor at once: of `matvec`, and of `gate_up`.
const MATVEC_BLOCKS: usize = 3;
pub const GATE_UP_BLOCKS: usize = 2;

/// The most rows that a warp takes one after the other.
const MOST_TURNS: usize = 16;

/// The most bytes of weights that a kernel for one row asks for at once: the GPU's cache has room for some such kernels'.
/// 0 leaves it at what each thread asks for.
const MOST_AHEAD: usize = 24 << 20;

/// Of the kernels that multiply many rows.
const GEMM_THREADS: usize = 128;

/// Of the kernels for a few rows: threads of a block, columns that a warp takes at a time, and the most rows that they
/// are worth it for where a matrix has few rows, and where it has many.
const FEW_THREADS: usize = 256;
const FEW_WARPS: usize = FEW_THREADS / 32;
const STRIP: usize = 256;
const MOST_FEW: usize = 64;
const MOST_FEW_TALL: usize = 16;

/// The most sixteens of rows that a block of those takes one after the other where its warps share the columns.
const MOST_FEW_TURNS: usize = 8;

/// The tiles of experts whose weights for the next product are asked for while the product before ends; 0 for none.
const TILES_AHEAD: usize = 16;

/// Products of one kernel.
const MOST_PRODUCTS: usize = 4;

/// One product.
#[derive(Clone, Copy)]
pub struct Product<'a> {
    pub w: &'a DeviceMatrix,
    pub out: Address,
    /// Floats from one row of the output to the next.
    pub width: usize,
    /// `[experts, rows]`, or none.
    pub bias: Address,
}

/// The fields that all kernels for several products start with; `blocks` says how many blocks a matrix has.
fn put_products(products: &[Product<'_>], blocks: impl Fn(&DeviceMatrix) -> usize) -> (Args, usize) {
    assert!(products.len() <= MOST_PRODUCTS);
    let missing = MOST_PRODUCTS - products.len();
    let mut args = products.iter().fold(Args::new(), |args, p| p.w.put(args));
    args = (0..missing).fold(args, |args, _| DeviceMatrix::put_none(args));
    for field in [|p: &Product<'_>| p.out, |p: &Product<'_>| p.bias] {
        args = products.iter().fold(args, |args, p| args.at(field(p)));
        args = (0..missing).fold(args, |args, _| args.at(0));
    }
    let mut end = 0;
    for p in products {
        end += blocks(p.w);
        args = args.int(end);
    }
    args = (0..missing).fold(args, |args, _| args.int(end));
    args = products.iter().fold(args, |args, p| args.int(p.width));
    ((0..missing).fold(args, |args, _| args.int(0)), end)
}

/// Shared memory for the activations of a row.
pub fn vector_shared(cols: usize) -> usize {
    cols.min(VECTOR_COLS).div_ceil(32) * VECTOR_GROUP
}

/// Shared memory for so many activations, of several rows.
pub fn down_shared(cols: usize) -> usize {
    cols.div_ceil(32) * VECTOR_GROUP
}

/// What the kernels know of an activation.
pub fn clamps(activation: Activation) -> (f32, f32) {
    match activation {
        Activation::SwiGlu => (0.0, 0.0),
        Activation::Clamped { alpha, limit } => (alpha, limit),
    }
}

/// Whether all weights of some matrices are asked for at once, of so many experts each.
pub fn asks_ahead<'a>(matrices: impl Iterator<Item = &'a DeviceMatrix>, experts: usize) -> bool {
    matrices.map(|w| w.row_bytes() * w.rows * experts).sum::<usize>() <= MOST_AHEAD
}

/// Rows of the output, for products of one row each.
#[derive(Clone, Copy)]
pub struct Rows {
    pub count: usize,
    pub x: Address,
    pub x_width: usize,
    /// So many outputs read the same row of `x`.
    pub share: usize,
    /// The expert of each output, or none.
    pub experts: Address,
}

/// How rows of many are found, for products on the tensor cores.
#[derive(Clone, Copy)]
pub struct Tiles {
    /// Rows of a tile.
    pub size: usize,
    /// The most there can be.
    pub most: usize,
    pub tiles: Address,
    pub count: Address,
    /// Which row of `x` each row of the output reads, or its own.
    pub sources: Address,
}

/// The kernel for so many rows of activations together, `split` where weights are floats.
fn gemm(kernels: &Kernels, tokens: usize, split: bool) -> Kernel {
    match (tokens, split) {
        (8, false) => kernels.gemm_8,
        (32, false) => kernels.gemm_32,
        (64, false) => kernels.gemm_64,
        (8, true) => kernels.gemm_split_8,
        (32, true) => kernels.gemm_split_32,
        (64, true) => kernels.gemm_split_64,
        (other, _) => unreachable!("tiles of {other}"),
    }
}

/// Rows of a matrix that a block of that kernel takes: fewer where there is less to do with each weight.
fn gemm_rows(tokens: usize, split: bool) -> usize {
    match (tokens, split) {
        (64, _) => 64,
        (32, true) | (8, false) => 32,
        _ => 16,
    }
}

/// Shared memory of a kernel for a few rows: activations of so many rows as halves, and the sums of 32 of them each.
fn few_shared(cols: usize, rows: usize) -> usize {
    let strips = cols.div_ceil(STRIP);
    rows * ((STRIP / 8 * strips + 1) * 16 + 4 * (strips | 1) * 8)
}

/// Shared memory for the sums of a block's warps, where they share the columns.
fn few_parts(rows: usize, turns: usize) -> usize {
    turns * FEW_WARPS * rows * 16 * 4
}

/// Shared memory of the kernels for one row on the tensor cores: two rows of activations, and sums of sixteen rows of
/// weights for each turn.
pub fn one_shared(cols: usize, turns: usize) -> usize {
    few_shared(cols, 2) + turns * FEW_WARPS * 16 * 4
}

/// Whether a product needs more than halves.
fn any_floats(products: &[Product<'_>]) -> bool {
    products.iter().any(|p| p.w.kind.is_float())
}

/// Activations for the tensor cores.
#[derive(Clone, Copy)]
pub struct Halves {
    high: Address,
    /// What is missing in those, or none.
    low: Address,
    /// By row.
    scales: Address,
}

/// The smallest tile.
pub const EIGHT: usize = 8;

/// The tile for so many rows.
pub fn tile_for(rows: usize) -> usize {
    match rows {
        0..=8 => EIGHT,
        9..=32 => 32,
        _ => 64,
    }
}

impl CudaBackend {
    /// Whether rows are multiplied one by one, in full precision.
    pub fn by_vector(&self, rows: usize) -> bool {
        rows == 1 || self.precision == Precision::Exact
    }

    /// `out = W x` for several matrices.
    pub(super) fn multiply(&mut self, x: Buf, products: &[(Matrix, Buf)]) -> Result<()> {
        if self.defer_product(x, products) {
            return Ok(());
        }
        let alone = self.rows == 1 && products.len() <= MOST_PRODUCTS;
        let norm = if alone { self.prior_norm(x)? } else { None };
        let Some(norm) = norm else { return self.multiply_rows(x, products) };
        let kernels = self.kernels()?;
        let rows = Rows { count: 1, x: norm.x, x_width: x.width(), share: 1, experts: 0 };
        let (shape, kernel, args) = self.vector_products(&kernels, &self.named(products), rows, Some(&norm));
        self.record(kernel, shape, args)
    }

    /// As [`multiply`](Self::multiply), with nothing else in the same kernel.
    pub(super) fn multiply_rows(&mut self, x: Buf, products: &[(Matrix, Buf)]) -> Result<()> {
        let kernels = self.kernels()?;
        self.flush()?;
        let (rows, from) = (self.rows, self.at(x));
        if self.by_vector(rows) {
            for some in products.chunks(MOST_PRODUCTS) {
                let rows = Rows { count: rows, x: from, x_width: x.width(), share: 1, experts: 0 };
                let (shape, kernel, args) = self.vector_products(&kernels, &self.named(some), rows, None);
                self.recorder.record(kernel, shape, args);
            }
            return Ok(());
        }
        // Those of floats apart from the others, which need less.
        let (floats, others): (Vec<_>, Vec<_>) =
            products.iter().copied().partition(|(w, _)| self.matrices[w.index()].kind.is_float());
        let mut halves = None;
        for some in floats.chunks(MOST_PRODUCTS).chain(others.chunks(MOST_PRODUCTS)) {
            if let Some((shape, kernel, args)) = self.few_rows(&kernels, &self.named(some), from) {
                self.recorder.record(kernel, shape, args);
                continue;
            }
            let halves = match halves {
                Some(halves) => halves,
                None => *halves.insert(self.halve(from, rows, x.width(), !floats.is_empty())?),
            };
            let named = self.named(some);
            // Where there are few blocks, smaller tiles make more of them.
            let total: usize = named.iter().map(|p| p.w.rows).sum();
            let few = total / gemm_rows(32, any_floats(&named)) < 2 * self.gpu.multiprocessors as usize;
            let tile = if few && rows <= 64 { 8 } else { tile_for(rows) };
            let each = gemm_rows(tile, any_floats(&named));
            let (args, blocks) = put_products(&named, |w| w.rows.div_ceil(each));
            let args = args.at(halves.high).at(halves.low).at(halves.scales).int(rows).at(0).at(0).at(0);
            let shape = Shape::new([blocks, rows.div_ceil(tile), 1], GEMM_THREADS);
            let kernel = gemm(&kernels, tile, any_floats(&named));
            self.recorder.record(kernel, shape, args);
        }
        Ok(())
    }

    fn named(&self, products: &[(Matrix, Buf)]) -> Vec<Product<'_>> {
        let product = |&(w, out): &(Matrix, Buf)| Product {
            w: &self.matrices[w.index()],
            out: self.at(out),
            width: out.width(),
            bias: 0,
        };
        products.iter().map(product).collect()
    }

    /// Products of rows one by one; of one row, it may be normed first.
    pub fn vector_products(
        &self,
        kernels: &Kernels,
        products: &[Product<'_>],
        rows: Rows,
        norm: Option<&PriorNorm>,
    ) -> (Shape, Kernel, Args) {
        let cols = products.iter().map(|p| p.w.cols).max().unwrap_or(0);
        // On the tensor cores where that loses nothing: a block takes sixteen rows at a time there, or one for each warp.
        let one = rows.count == 1 && rows.experts == 0 && self.precision == Precision::Fast;
        let exact =
            |p: &Product<'_>| matches!(p.w.kind, WeightKind::Q4_K | WeightKind::Q5_K | WeightKind::Q6_K);
        let halves = one && products.iter().all(exact) && self.few_fit(cols, 2);
        let (kernel, each, turns, shared) = if halves {
            let sixteens: usize = products.iter().map(|p| p.w.rows.div_ceil(16)).sum();
            let turns = sixteens.div_ceil(self.gpu.multiprocessors as usize).clamp(1, MOST_TURNS);
            (kernels.product_one, 16, turns, one_shared(cols, turns))
        } else {
            let total: usize = products.iter().map(|p| p.w.rows).sum();
            let turns = self.turns(total * rows.count, MATVEC_BLOCKS);
            (kernels.matvec, VECTOR_WARPS, turns, vector_shared(cols))
        };
        let (args, blocks) = put_products(products, |w| w.rows.div_ceil(each * turns));
        let args = args.at(rows.x).int(rows.x_width).int(rows.share).at(rows.experts);
        let ahead = rows.count == 1 && asks_ahead(products.iter().map(|p| p.w), 1);
        let args = PriorNorm::put(norm, args).int(turns).flag(ahead);
        (Shape::new([blocks, rows.count, 1], VECTOR_THREADS).shared(shared), kernel, args)
    }

    /// How many rows a warp takes one after the other, so that all blocks run at once if so many do on a processor.
    pub fn turns(&self, rows: usize, blocks: usize) -> usize {
        rows.div_ceil(VECTOR_WARPS * blocks * self.gpu.multiprocessors as usize).clamp(1, MOST_TURNS)
    }

    /// Products of tiles of rows with experts.
    pub fn tiled_products(
        &self,
        kernels: &Kernels,
        products: &[Product<'_>],
        halves: Halves,
        tiles: Tiles,
    ) -> (Shape, Kernel, Args) {
        let each = gemm_rows(tiles.size, any_floats(products));
        let (args, blocks) = put_products(products, |w| w.rows.div_ceil(each));
        let args = args.at(halves.high).at(halves.low).at(halves.scales).int(0);
        let args = args.at(tiles.tiles).at(tiles.count).at(tiles.sources);
        let kernel = gemm(kernels, tiles.size, any_floats(products));
        (Shape::new([blocks, tiles.most, 1], GEMM_THREADS), kernel, args)
    }

    /// Products of a few rows, if there is a kernel for them that is better than those for many.
    fn few_rows(
        &self,
        kernels: &Kernels,
        products: &[Product<'_>],
        x: Address,
    ) -> Option<(Shape, Kernel, Args)> {
        // They read the same rows.
        let cols = products.first()?.w.cols;
        let sixteens: usize = products.iter().map(|p| p.w.rows.div_ceil(16)).sum();
        let processors = self.gpu.multiprocessors as usize;
        // Where all warps would not have rows of their own, those of a block share the columns.
        let tall = sixteens >= 2 * FEW_WARPS * processors;
        let tile = if self.rows > 8 && self.few_fit(cols, 16) { 16 } else { 8 };
        let most = if tall { MOST_FEW_TALL } else { MOST_FEW };
        if self.rows > most || any_floats(products) || !self.few_fit(cols, tile) {
            return None;
        }
        let tiles = self.rows.div_ceil(tile);
        let shared = few_shared(cols, tile);
        let (kernel, turns, each) = match (tall, tile) {
            (true, 8) => (kernels.few_8, 2, FEW_WARPS),
            (true, _) => (kernels.few_16, 2, FEW_WARPS),
            (false, _) => {
                // A block for each processor: it takes all activations to shared memory, for as many rows as that allows.
                let room = (self.gpu.shared_limit as usize - shared) / few_parts(tile, 1);
                let turns = (sixteens * tiles).div_ceil(processors).clamp(1, MOST_FEW_TURNS.min(room.max(1)));
                (if tile == 8 { kernels.few_shared_8 } else { kernels.few_shared_16 }, turns, 1)
            }
        };
        let (args, blocks) = put_products(products, |w| w.rows.div_ceil(16 * turns * each));
        let args = args.at(x).int(self.rows).int(turns);
        let args = DeviceMatrix::put_none(args.at(0).at(0).at(0).float(0.0).float(0.0)).int(0);
        let parts = if tall { 0 } else { few_parts(tile, turns) };
        Some((Shape::new([blocks, tiles, 1], FEW_THREADS).shared(shared + parts), kernel, args))
    }

    /// Whether a block has the shared memory for so many rows of activations, which are read eight at a time.
    pub fn few_fit(&self, cols: usize, rows: usize) -> bool {
        let shared = few_shared(cols, rows) + few_parts(rows, 1);
        cols.is_multiple_of(8) && shared <= self.gpu.shared_limit as usize
    }

    /// Products of tiles of eight rows with experts; `gated`, of gate and up together, after which comes the product with
    /// another matrix of the same experts.
    pub fn few_products(
        &self,
        kernels: &Kernels,
        products: &[Product<'_>],
        x: Address,
        tiles: Tiles,
        gated: Option<(Activation, &DeviceMatrix)>,
    ) -> (Shape, Kernel, Args) {
        let cols = products[0].w.cols;
        // A warp has enough to do for its start to count little: eight strips or so.
        let turns = if cols < 4 * STRIP { 2 } else { 1 };
        let rows = FEW_WARPS * turns * if gated.is_some() { 8 } else { 16 };
        let (args, blocks) = put_products(products, |w| w.rows.div_ceil(rows));
        let args = args.at(x).int(0).int(turns);
        let args = args.at(tiles.tiles).at(tiles.count).at(tiles.sources);
        let (alpha, limit) = gated.map_or((0.0, 0.0), |(activation, _)| clamps(activation));
        let args = args.float(alpha).float(limit);
        let args = match gated {
            Some((_, next)) => next.put(args).int(TILES_AHEAD),
            None => DeviceMatrix::put_none(args).int(0),
        };
        // Where gate and up go together, the blocks of the second are those of the first.
        let (kernel, blocks) = match gated {
            Some(_) => (kernels.few_gate_up, blocks / 2),
            None => (kernels.few_8, blocks),
        };
        let shape = Shape::new([blocks, tiles.most, 1], FEW_THREADS);
        (shape.shared(few_shared(cols, 8)), kernel, args)
    }

    /// Rows as halves; `split`, for weights that are floats, with what is missing in them.
    pub(super) fn halve(&mut self, x: Address, rows: usize, width: usize, split: bool) -> Result<Halves> {
        self.halve_to([Scratch::Halves, Scratch::Scales], x, [rows, width], split, [0; 2])
    }

    /// As [`halve`](Self::halve), to this scratch memory; of rows of experts only those whose expert is in a table: the list of
    /// their experts, and the table.
    pub fn halve_to(
        &mut self,
        scratch: [Scratch; 2],
        x: Address,
        [rows, width]: [usize; 2],
        split: bool,
        there: [Address; 2],
    ) -> Result<Halves> {
        let kernels = self.kernels()?;
        let bytes = (rows * width * 2).next_multiple_of(256);
        let high = self.scratch(scratch[0], if split { 2 * bytes } else { bytes })?;
        let low = if split { high + bytes as u64 } else { 0 };
        let scales = self.scratch(scratch[1], rows * 4)?;
        let args = Args::new().at(x).at(high).at(low).at(scales).int(width).at(there[0]).at(there[1]);
        self.record(kernels.halve, Shape::new([rows, 1, 1], 256), args)?;
        Ok(Halves { high, low, scales })
    }

    /// Products of each head with a matrix of its own.
    pub(super) fn multiply_heads(&mut self, x: Buf, w: &HeadMatrices, out: Buf) -> Result<()> {
        let kernels = self.kernels()?;
        let stored = &self.matrices[w.stored.index()];
        let args = stored.put(Args::new()).at(self.at(x)).at(self.at(out));
        let args = args.int(w.heads).int(w.first).int(w.rows).flag(w.transposed);
        let args = args.int(x.width()).int(out.width()).int(self.rows);
        let each = out.width() / w.heads;
        self.record(kernels.head_products, Shape::new([each.div_ceil(4), w.heads, self.rows], 128), args)
    }

    /// Where a layer's biases are.
    pub fn bias_addresses(&self, biases: Option<[Vector; 3]>) -> [Address; 3] {
        biases.map_or([0; 3], |biases| biases.map(|w| self.vector(w)))
    }
}
