//! Products with matrices.

use forebay_engine::Result;
use forebay_engine::backend::{Buf, HeadMatrices, Matrix, Precision, Vector};

use super::{CudaBackend, Scratch};
use crate::compile::{Kernel, Kernels};
use crate::driver::Address;
use crate::program::{Args, Shape};
use crate::weights::DeviceMatrix;

/// Of the kernels that multiply one row of activations.
pub const VECTOR_THREADS: usize = 256;
pub const VECTOR_WARPS: usize = VECTOR_THREADS / 32;

/// Columns whose activations are in shared memory at a time, and bytes of 32 of them.
const VECTOR_COLS: usize = 8192;
const VECTOR_GROUP: usize = 36 * 4;

/// Of the kernels that multiply many rows.
const GEMM_THREADS: usize = 128;

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

/// The tile for so many rows.
pub fn tile_for(rows: usize) -> usize {
    match rows {
        0..=8 => 8,
        9..=32 => 32,
        _ => 64,
    }
}

impl CudaBackend {
    /// Whether rows are multiplied one by one, in full precision.
    pub(super) fn by_vector(&self, rows: usize) -> bool {
        rows == 1 || self.precision == Precision::Exact
    }

    /// `out = W x` for several matrices.
    pub(super) fn multiply(&mut self, x: Buf, products: &[(Matrix, Buf)]) -> Result<()> {
        let kernels = self.kernels()?;
        self.flush_add()?;
        let (rows, from) = (self.rows, self.at(x));
        if self.by_vector(rows) {
            for some in products.chunks(MOST_PRODUCTS) {
                let rows = Rows { count: rows, x: from, x_width: x.width(), share: 1, experts: 0 };
                let (shape, kernel, args) = self.vector_products(&kernels, &self.named(some), rows);
                self.recorder.record(kernel, shape, args);
            }
            return Ok(());
        }
        let split = products.iter().any(|(w, _)| self.matrices[w.index()].kind.is_float());
        let halves = self.halve(from, rows, x.width(), split)?;
        // Those of floats apart from the others, which need less.
        let (floats, others): (Vec<_>, Vec<_>) =
            products.iter().copied().partition(|(w, _)| self.matrices[w.index()].kind.is_float());
        for some in floats.chunks(MOST_PRODUCTS).chain(others.chunks(MOST_PRODUCTS)) {
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

    /// Products of rows one by one.
    pub(super) fn vector_products(
        &self,
        kernels: &Kernels,
        products: &[Product<'_>],
        rows: Rows,
    ) -> (Shape, Kernel, Args) {
        let (args, blocks) = put_products(products, |w| w.rows.div_ceil(VECTOR_WARPS));
        let args = args.at(rows.x).int(rows.x_width).int(rows.share).at(rows.experts);
        let cols = products.iter().map(|p| p.w.cols).max().unwrap_or(0);
        (
            Shape::new([blocks, rows.count, 1], VECTOR_THREADS).shared(vector_shared(cols)),
            kernels.matvec_1,
            args,
        )
    }

    /// Products of tiles of rows with experts.
    pub(super) fn tiled_products(
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

    /// Rows as halves; `split`, for weights that are floats, with what is missing in them.
    pub(super) fn halve(&mut self, x: Address, rows: usize, width: usize, split: bool) -> Result<Halves> {
        let kernels = self.kernels()?;
        let bytes = (rows * width * 2).next_multiple_of(256);
        let high = self.scratch(Scratch::Halves, if split { 2 * bytes } else { bytes })?;
        let low = if split { high + bytes as u64 } else { 0 };
        let scales = self.scratch(Scratch::Scales, rows * 4)?;
        let args = Args::new().at(x).at(high).at(low).at(scales).int(width);
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
    pub(super) fn bias_addresses(&self, biases: Option<[Vector; 3]>) -> [Address; 3] {
        biases.map_or([0; 3], |biases| biases.map(|w| self.vector(w)))
    }
}
