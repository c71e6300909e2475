//! Products with matrices.

use forebay_engine::Result;
use forebay_engine::backend::{Buf, HeadMatrices, Matrix, Precision, Vector};

use super::{CudaBackend, Scratch};
use crate::compile::{Kernel, Kernels};
use crate::driver::Address;
use crate::program::{Args, Shape};
use crate::weights::DeviceMatrix;

/// Of the kernels that multiply one row of activations.
const VECTOR_THREADS: usize = 128;
const VECTOR_WARPS: usize = VECTOR_THREADS / 32;

/// Columns whose activations are in shared memory at a time, and bytes of 32 of them.
const VECTOR_COLS: usize = 8192;
const VECTOR_GROUP: usize = 36 * 4;

/// Of the kernels that multiply many rows.
const GEMM_THREADS: usize = 128;
pub const GEMM_ROWS: usize = 64;

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

/// The kernel for so many rows of activations together.
fn gemm(kernels: &Kernels, tokens: usize) -> Kernel {
    match tokens {
        8 => kernels.gemm_8,
        32 => kernels.gemm_32,
        64 => kernels.gemm_64,
        other => unreachable!("tiles of {other}"),
    }
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
        let (halves, scales) = self.halve(from, rows, x.width())?;
        for some in products.chunks(MOST_PRODUCTS) {
            let tile = tile_for(rows);
            let (args, blocks) = put_products(&self.named(some), |w| w.rows.div_ceil(GEMM_ROWS));
            let args = args.at(halves).at(scales).int(rows).at(0).at(0).at(0);
            let shape = Shape::new([blocks, rows.div_ceil(tile), 1], GEMM_THREADS);
            self.recorder.record(gemm(&kernels, tile), shape, args);
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
        let total: usize = products.iter().map(|p| p.w.rows).sum();
        // Two rows to a warp, unless that would leave processors idle.
        let enough = total * rows.count >= 4 * VECTOR_WARPS * self.gpu.multiprocessors as usize;
        let (kernel, each) = if enough { (kernels.matvec_2, 2) } else { (kernels.matvec_1, 1) };
        let (args, blocks) = put_products(products, |w| w.rows.div_ceil(VECTOR_WARPS * each));
        let args = args.at(rows.x).int(rows.x_width).int(rows.share).at(rows.experts);
        let cols = products.iter().map(|p| p.w.cols).max().unwrap_or(0);
        (Shape::new([blocks, rows.count, 1], VECTOR_THREADS).shared(vector_shared(cols)), kernel, args)
    }

    /// Products of tiles of rows with experts.
    pub(super) fn tiled_products(
        &self,
        kernels: &Kernels,
        products: &[Product<'_>],
        (halves, scales): (Address, Address),
        tiles: Tiles,
    ) -> (Shape, Kernel, Args) {
        let (args, blocks) = put_products(products, |w| w.rows.div_ceil(GEMM_ROWS));
        let args = args.at(halves).at(scales).int(0).at(tiles.tiles).at(tiles.count).at(tiles.sources);
        (Shape::new([blocks, tiles.most, 1], GEMM_THREADS), gemm(kernels, tiles.size), args)
    }

    /// Rows as halves, and what multiplies each.
    pub(super) fn halve(&mut self, x: Address, rows: usize, width: usize) -> Result<(Address, Address)> {
        let kernels = self.kernels()?;
        let halves = self.scratch(Scratch::Halves, rows * width * 2)?;
        let scales = self.scratch(Scratch::Scales, rows * 4)?;
        let args = Args::new().at(x).at(halves).at(scales).int(width);
        self.record(kernels.halve, Shape::new([rows, 1, 1], 256), args)?;
        Ok((halves, scales))
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
