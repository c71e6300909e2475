//! Products of each head with its own matrix, on the CPU.

use forebay_kernels::{Grain, Q8Panel, Rows, TileMut};

use super::cpu::{Activations, Compute, Panels, scale_by};
use super::{HeadMatrices, HostMatrix};

/// Tokens per piece of work: they share the head's matrix.
const TOKEN_TILE: usize = 64;

/// Heads of a token that one piece of work quantises.
const HEAD_TILE: usize = 16;

impl Compute<'_> {
    /// Computes [`Backend::head_products`](super::Backend::head_products) with the stored matrix of `by`.
    pub(super) fn head_products(
        &self,
        matrix: &HostMatrix,
        by: &HeadMatrices,
        x: Activations<'_>,
        panels: &mut Panels,
        out: TileMut<'_, f32>,
    ) {
        let HeadMatrices { heads, first, rows, transposed, .. } = *by;
        let stored = matrix.view();
        let cols = if transposed { rows } else { stored.cols };
        let head_dim = x.width / heads;
        // A transposed product adds stored rows one after another, as floats.
        let block = self.panel_block(stored.encoding).filter(|_| !transposed);
        let width = Q8Panel::count(cols);
        if let Some(block) = block {
            let panels = panels.get_mut(block);
            let needed = x.rows.len() / head_dim * width;
            panels.resize(needed.max(panels.len()), Q8Panel::default());
            let mut tiles = [TileMut::new(&mut panels[..needed], width)];
            self.pool.for_tiles(&mut tiles, Grain { rows: HEAD_TILE, cols: width }, |piece, mut tile| {
                for (i, head) in piece.rows.enumerate() {
                    (self.kernels.quantise)(&x.rows[head * head_dim..][..cols], block, tile.row(i));
                }
            });
        }
        let panels = block.map(|block| panels.get(block));
        let grain = Grain { rows: TOKEN_TILE, cols: out.cols() / heads };
        self.pool.for_tiles(&mut [out], grain, |piece, tile| {
            let head = piece.cols.start / grain.cols;
            let first = head * (stored.rows / heads) + first;
            let w = stored.rows(first..first + rows);
            let x = Rows::new(&x.rows[piece.rows.start * x.width..piece.rows.end * x.width], x.width);
            let x = x.columns(head * head_dim..(head + 1) * head_dim);
            let (mut rest, mut product) = tile.split_cols(head_dim - cols);
            for i in 0..rest.rows() {
                rest.row(i).copy_from_slice(&x.row(i)[cols..]);
            }
            match panels {
                Some(panels) => {
                    let all = heads * width;
                    let panels = Rows::new(&panels[piece.rows.start * all..piece.rows.end * all], all);
                    let panels = panels.columns(head * width..(head + 1) * width);
                    (self.kernels.matmul_q8)(w, panels, &mut product);
                }
                None if transposed => (self.kernels.matmul_transposed)(w, x.columns(0..cols), &mut product),
                None => (self.kernels.matmul_f32)(w, x.columns(0..cols), &mut product),
            }
            for row in 0..product.rows() {
                scale_by(matrix.scale, product.row(row));
            }
        });
    }
}
