//! Matrix products.

use forebay_engine::Result;
use forebay_engine::internals::backend::{Activation, Buf, HeadMatrices, Matrix, Parts, Precision, Vector};

use super::deferred::PriorNorm;
use super::{CudaBackend, Scratch};
use crate::compile::{Kernel, Kernels};
use crate::driver::Address;
use crate::program::{Args, Shape};
use crate::weights::{DeviceMatrix, WeightKind};

/// Threads per block of the kernels that multiply one row of activations.
pub const VECTOR_THREADS: usize = 256;
pub const VECTOR_WARPS: usize = VECTOR_THREADS / 32;

/// Columns whose activations are in shared memory at a time, and the bytes of 32 of them.
pub const VECTOR_COLS: usize = 8192;
const VECTOR_GROUP: usize = 36 * 4;

/// Blocks of these kernels that run on a multiprocessor at once: of `matvec`, and of `gate_up`.
const MATVEC_BLOCKS: usize = 3;
pub const GATE_UP_BLOCKS: usize = 2;

/// The most rows that a warp computes in sequence.
const MOST_TURNS: usize = 16;

/// The most bytes of weights that a one-row kernel prefetches at once: the GPU's cache holds the weights of some such
/// kernels. With 0, each thread loads only its own.
const MOST_AHEAD: usize = 24 << 20;

/// Threads per block of the kernels for many rows.
const GEMM_THREADS: usize = 128;

/// Constants of the kernels for a few rows: threads per block, columns per step of a warp, and the most activation rows
/// for which they are faster, for matrices with few rows and with many.
const FEW_THREADS: usize = 256;
const FEW_WARPS: usize = FEW_THREADS / 32;
const STRIP: usize = 256;
const MOST_FEW: usize = 64;
const MOST_FEW_TALL: usize = 16;

/// The most tiles of 16 rows that a block computes in sequence if its warps share the columns.
const MOST_FEW_TURNS: usize = 8;

/// The experts' tiles whose next weights are prefetched while a product ends; 0 turns that off.
const TILES_AHEAD: usize = 16;

/// The most products per kernel.
const MOST_PRODUCTS: usize = 4;

/// One product.
#[derive(Clone, Copy)]
pub struct Product<'a> {
    pub w: &'a DeviceMatrix,
    pub out: Address,
    /// Floats between rows of the output.
    pub width: usize,
    /// `[experts, rows]`, or none.
    pub bias: Address,
}

/// Adds the fields that all kernels for several products begin with. `blocks` returns a matrix's number of blocks.
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

/// Shared memory for one row's activations.
pub fn vector_shared(cols: usize) -> usize {
    cols.min(VECTOR_COLS).div_ceil(32) * VECTOR_GROUP
}

/// Shared memory for the activations of several rows.
pub fn down_shared(cols: usize) -> usize {
    cols.div_ceil(32) * VECTOR_GROUP
}

/// Adds the kernels' struct `Activation`.
pub fn put_activation(args: Args, activation: Activation) -> Args {
    let (kind, alpha, limit) = match activation {
        Activation::SwiGlu => (0, 0.0, 0.0),
        Activation::Clamped { alpha, limit } => (1, alpha, limit),
        Activation::ClippedBefore(limit) => (2, 0.0, limit),
        Activation::ClippedAfter(limit) => (3, 0.0, limit),
        Activation::GeGlu => (4, 0.0, 0.0),
        Activation::ReGlu => (5, 0.0, 0.0),
        Activation::ReluSquared => (6, 0.0, 0.0),
    };
    args.int(kind).float(alpha).float(limit)
}

/// Whether all weights of some matrices are prefetched at once, for this many experts each.
pub fn asks_ahead<'a>(matrices: impl Iterator<Item = &'a DeviceMatrix>, experts: usize) -> bool {
    matrices.map(|w| w.row_bytes() * w.rows * experts).sum::<usize>() <= MOST_AHEAD
}

/// Output rows of products that are computed row by row.
#[derive(Clone, Copy)]
pub struct Rows {
    pub count: usize,
    pub x: Address,
    pub x_width: usize,
    /// This many outputs read the same row of `x`.
    pub share: usize,
    /// The expert of each output, or null.
    pub experts: Address,
}

/// How products on the tensor cores find their rows.
#[derive(Clone, Copy)]
pub struct Tiles {
    /// Rows per tile.
    pub size: usize,
    /// The most tiles.
    pub most: usize,
    pub tiles: Address,
    pub count: Address,
    /// The row of `x` that each output row reads, or null for its own.
    pub sources: Address,
}

/// The kernel for this many activation rows at a time; `split` for float weights.
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

/// Matrix rows per block of that kernel: fewer if there is less work per weight.
fn gemm_rows(tokens: usize, split: bool) -> usize {
    match (tokens, split) {
        (64, _) => 64,
        (32, true) | (8, false) => 32,
        _ => 16,
    }
}

/// Shared memory of a few-rows kernel: the activations as f16, and the sums of every 32 of them.
fn few_shared(cols: usize, rows: usize) -> usize {
    let strips = cols.div_ceil(STRIP);
    rows * ((STRIP / 8 * strips + 1) * 16 + 4 * (strips | 1) * 8)
}

/// Shared memory for the warps' sums if the warps share the columns.
fn few_parts(rows: usize, turns: usize) -> usize {
    turns * FEW_WARPS * rows * 16 * 4
}

/// Shared memory of the one-row kernels on the tensor cores: two rows of activations, and sums of 16 weight rows per
/// turn.
pub fn one_shared(cols: usize, turns: usize) -> usize {
    few_shared(cols, 2) + turns * FEW_WARPS * 16 * 4
}

/// Whether a product needs more than f16.
fn any_floats(products: &[Product<'_>]) -> bool {
    products.iter().any(|p| p.w.kind.is_float())
}

/// Activations for the tensor cores.
#[derive(Clone, Copy)]
pub struct Halves {
    high: Address,
    /// The remainder that f16 cannot represent, or null.
    low: Address,
    /// One scale per row.
    scales: Address,
}

/// The smallest tile.
pub const EIGHT: usize = 8;

/// The tile size for this many rows.
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
        let norm = if alone { self.prior_norm(x, products)? } else { None };
        let Some(norm) = norm else { return self.multiply_rows(x, products) };
        let kernels = self.kernels()?;
        let rows = Rows { count: 1, x: norm.x, x_width: x.width(), share: 1, experts: 0 };
        let (shape, kernel, args) = self.vector_products(&kernels, &self.named(products), rows, Some(&norm));
        self.record(kernel, shape, args)
    }

    /// Like [`multiply`](Self::multiply), but without fusing other operations.
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
        // Float weights are computed separately, because the others need less precision.
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
            // If there are few blocks, smaller tiles make more of them.
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

    /// Products of single rows. A single row may be normed first.
    pub fn vector_products(
        &self,
        kernels: &Kernels,
        products: &[Product<'_>],
        rows: Rows,
        norm: Option<&PriorNorm>,
    ) -> (Shape, Kernel, Args) {
        let cols = products.iter().map(|p| p.w.cols).max().unwrap_or(0);
        // Uses the tensor cores where that loses nothing. There a block computes 16 rows at a time, otherwise one per
        // warp.
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

    /// How many rows a warp computes in sequence, so that all blocks run at once if `blocks` fit a multiprocessor.
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

    /// Products of a few rows, if there is a kernel that is faster for them than those for many rows.
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
        // If there are not enough rows for all warps, the warps of a block share the columns.
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
                // One block per multiprocessor: it loads all activations to shared memory, so it computes as many rows
                // as fit beside them.
                let room = (self.gpu.shared_limit as usize - shared) / few_parts(tile, 1);
                let turns = (sixteens * tiles).div_ceil(processors).clamp(1, MOST_FEW_TURNS.min(room.max(1)));
                (if tile == 8 { kernels.few_shared_8 } else { kernels.few_shared_16 }, turns, 1)
            }
        };
        let (args, blocks) = put_products(products, |w| w.rows.div_ceil(16 * turns * each));
        let args = args.at(x).int(self.rows).int(turns);
        let args = put_activation(args.at(0).at(0).at(0), Activation::SwiGlu);
        let args = DeviceMatrix::put_none(args).int(0);
        let parts = if tall { 0 } else { few_parts(tile, turns) };
        Some((Shape::new([blocks, tiles, 1], FEW_THREADS).shared(shared + parts), kernel, args))
    }

    /// Whether the shared memory of a block suffices for this many rows of activations, which are read eight at a time.
    pub fn few_fit(&self, cols: usize, rows: usize) -> bool {
        let shared = few_shared(cols, rows) + few_parts(rows, 1);
        cols.is_multiple_of(8) && shared <= self.gpu.shared_limit as usize
    }

    /// Products of tiles of eight rows with experts. If `gated`, computes gate and up together; the product with
    /// another matrix of the same experts follows.
    pub fn few_products(
        &self,
        kernels: &Kernels,
        products: &[Product<'_>],
        x: Address,
        tiles: Tiles,
        gated: Option<(Activation, &DeviceMatrix)>,
    ) -> (Shape, Kernel, Args) {
        let cols = products[0].w.cols;
        // A warp needs enough work to outweigh its start: about eight strips.
        let turns = if cols < 4 * STRIP { 2 } else { 1 };
        let rows = FEW_WARPS * turns * if gated.is_some() { 8 } else { 16 };
        let (args, blocks) = put_products(products, |w| w.rows.div_ceil(rows));
        let args = args.at(x).int(0).int(turns);
        let args = args.at(tiles.tiles).at(tiles.count).at(tiles.sources);
        let args = put_activation(args, gated.map_or(Activation::SwiGlu, |(activation, _)| activation));
        let args = match gated {
            Some((_, next)) => next.put(args).int(TILES_AHEAD),
            None => DeviceMatrix::put_none(args).int(0),
        };
        // If gate and up are computed together, they have the same blocks.
        let (kernel, blocks) = match gated {
            Some(_) => (kernels.few_gate_up, blocks / 2),
            None => (kernels.few_8, blocks),
        };
        let shape = Shape::new([blocks, tiles.most, 1], FEW_THREADS);
        (shape.shared(few_shared(cols, 8)), kernel, args)
    }

    /// Converts rows to f16. With `split`, for float weights, the remainders are kept as well.
    pub(super) fn halve(&mut self, x: Address, rows: usize, width: usize, split: bool) -> Result<Halves> {
        self.halve_to([Scratch::Halves, Scratch::Scales], x, [rows, width], split, [0; 2])
    }

    /// Like [`halve`](Self::halve), with this scratch memory. For experts' rows, converts only those whose expert is in
    /// a table, given the list of their experts and the table.
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

    /// Products of each head with its own matrix.
    pub(super) fn multiply_heads(&mut self, x: Buf, w: &HeadMatrices, out: Buf) -> Result<()> {
        let kernels = self.kernels()?;
        let stored = &self.matrices[w.stored.index()];
        let args = stored.put(Args::new()).at(self.at(x)).at(self.at(out));
        let args = args.int(w.heads).int(w.first).int(w.rows).flag(w.transposed);
        let args = args.int(x.width()).int(out.width()).int(self.rows);
        let each = out.width() / w.heads;
        self.record(kernels.head_products, Shape::new([each.div_ceil(4), w.heads, self.rows], 128), args)
    }

    /// The addresses of the biases of a layer's experts, or null.
    pub fn bias_addresses(&self, biases: Option<Parts<Vector>>) -> Parts<Address> {
        biases.map_or(Parts::default(), |biases| biases.each(|&w| self.vector(w)))
    }
}
