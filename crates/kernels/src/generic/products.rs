//! Products with f32 activations.

use super::{Cell, MAX_PARTS, Vector, fold, from_lanes, store_lanes, to_lanes};
use crate::quant::MAX_BLOCK;
use crate::scalar::{self, LANES};
use crate::tensor::{MatRef, Rows, TileMut};

/// Like [`scalar::matmul_f32`], for a matrix of `C`. Weights go from memory to registers. `ahead` is called with the
/// number of bytes of the matrix that are about to be read for the first time.
///
/// # Safety
/// The processor must have the register's instructions.
#[inline(always)]
pub(crate) unsafe fn matmul_floats<V: Vector, C: Cell>(
    w: MatRef<'_>,
    x: Rows<'_, f32>,
    out: &mut TileMut<'_, f32>,
    mut ahead: impl FnMut(usize),
) {
    assert_eq!((out.rows(), out.cols()), (x.len(), w.rows));
    assert_eq!(x.width(), w.cols);
    let ahead = &mut ahead;
    for row in (0..w.rows).step_by(2) {
        for token in (0..x.len()).step_by(2) {
            // SAFETY: the caller's promise; so many rows and tokens are left.
            unsafe {
                match (w.rows - row, x.len() - token) {
                    (1, 1) => dot_tile::<V, C, 1, 1>(w, x, out, row, token, ahead),
                    (1, _) => dot_tile::<V, C, 1, 2>(w, x, out, row, token, ahead),
                    (_, 1) => dot_tile::<V, C, 2, 1>(w, x, out, row, token, ahead),
                    _ => dot_tile::<V, C, 2, 2>(w, x, out, row, token, ahead),
                }
            }
        }
    }
}

/// The products of `R` rows with `T` tokens, each with the sixteen accumulators of [`scalar::dot`].
///
/// # Safety
/// As [`matmul_floats`].
#[inline(always)]
unsafe fn dot_tile<V: Vector, C: Cell, const R: usize, const T: usize>(
    w: MatRef<'_>,
    x: Rows<'_, f32>,
    out: &mut TileMut<'_, f32>,
    row: usize,
    token: usize,
    ahead: &mut impl FnMut(usize),
) {
    let rows: [&[u8]; R] = std::array::from_fn(|r| w.row(row + r));
    let x: [&[f32]; T] = std::array::from_fn(|t| x.row(token + t));
    // SAFETY: the caller's promise.
    let zero = unsafe { V::splat(0.0) };
    let mut acc = [[[zero; MAX_PARTS]; T]; R];
    let whole = w.cols / LANES * LANES;
    // Only the first tokens read the rows from memory; later ones find them in the cache.
    let fresh = if token == 0 { R * LANES * size_of::<C>() } else { 0 };
    for col in (0..whole).step_by(LANES) {
        ahead(fresh);
        for part in 0..V::PARTS {
            let at = col + part * V::LANES;
            let mut weights = [zero; R];
            for r in 0..R {
                // SAFETY: a row has as many elements as the matrix has columns.
                weights[r] = unsafe { C::load(rows[r].as_ptr().cast::<C>().add(at)) };
            }
            for t in 0..T {
                // SAFETY: and so has a row of activations.
                let x = unsafe { V::load(x[t].as_ptr().add(at)) };
                for r in 0..R {
                    acc[r][t][part] = weights[r].mul_add(x, acc[r][t][part]);
                }
            }
        }
    }
    for r in 0..R {
        let mut tail = [0.0; LANES];
        for (i, tail) in tail[..w.cols - whole].iter_mut().enumerate() {
            // SAFETY: as above.
            *tail = unsafe { rows[r].as_ptr().cast::<C>().add(whole + i).read_unaligned() }.into();
        }
        for t in 0..T {
            let mut lanes = to_lanes(&acc[r][t]);
            add_products(&tail, &x[t][whole..], &mut lanes);
            out.row(token + t)[row + r] = scalar::sum_lanes(&lanes);
        }
    }
}

/// Adds the last products of a row, fewer than there are accumulators.
#[inline(always)]
fn add_products(w: &[f32], x: &[f32], lanes: &mut [f32; LANES]) {
    for ((lane, w), x) in lanes.iter_mut().zip(w).zip(x) {
        *lane = w.mul_add(*x, *lane);
    }
}

/// Tokens that share four widened rows.
const TOKENS: usize = 32;

/// Like [`scalar::matmul_f32`], for any type. `widen` converts four rows to floats in pieces, given a row and the
/// piece's first column. Several tokens use each piece.
///
/// # Safety
/// The processor must have the register's instructions.
#[inline(always)]
pub(crate) unsafe fn matmul_widened<V: Vector>(
    w: MatRef<'_>,
    x: Rows<'_, f32>,
    out: &mut TileMut<'_, f32>,
    widen: impl Fn(usize, usize, &mut [f32]),
) {
    assert_eq!((out.rows(), out.cols()), (x.len(), w.rows));
    assert_eq!(x.width(), w.cols);
    // SAFETY: the caller's promise.
    unsafe {
        match x.len() {
            1 => in_chunks::<V, 1>(w, x, out, widen),
            _ => in_chunks::<V, TOKENS>(w, x, out, widen),
        }
    }
}

/// Aligned to cache lines, so that no register is loaded from two of them.
#[repr(align(64))]
struct Aligned<T>(T);

/// [`matmul_widened`], `T` tokens at a time.
///
/// # Safety
/// As there.
#[inline(always)]
unsafe fn in_chunks<V: Vector, const T: usize>(
    w: MatRef<'_>,
    x: Rows<'_, f32>,
    out: &mut TileMut<'_, f32>,
    widen: impl Fn(usize, usize, &mut [f32]),
) {
    // SAFETY: the caller's promise.
    let zero = unsafe { V::splat(0.0) };
    let whole = w.cols / LANES * LANES;
    let Aligned(weights) = &mut Aligned([[0.0; MAX_BLOCK]; 4]);
    let Aligned(acc) = &mut Aligned([[[0.0; LANES]; 4]; T]);
    for chunk in (0..x.len()).step_by(T) {
        let tokens = T.min(x.len() - chunk);
        for first in (0..w.rows).step_by(4) {
            acc[..tokens].fill([[0.0; LANES]; 4]);
            for col in (0..whole).step_by(MAX_BLOCK) {
                let cols = MAX_BLOCK.min(whole - col);
                for (row, weights) in weights.iter_mut().enumerate() {
                    widen((first + row).min(w.rows - 1), col, &mut weights[..cols]);
                }
                let piece = |t: usize| &x.row(chunk + t)[col..col + cols];
                // If registers are left, four tokens share the loads of the weights.
                let four = if 16 * V::PARTS <= V::SUMS { tokens / 4 * 4 } else { 0 };
                for t in (0..four).step_by(4) {
                    let x = [piece(t), piece(t + 1), piece(t + 2), piece(t + 3)];
                    let acc = acc[t..].first_chunk_mut().expect("four tokens");
                    // SAFETY: the caller's promise.
                    unsafe { multiply::<V, 4>(weights, x, acc) };
                }
                for t in four..tokens {
                    let acc = acc[t..].first_chunk_mut().expect("a token");
                    // SAFETY: the caller's promise.
                    unsafe { multiply::<V, 1>(weights, [piece(t)], acc) };
                }
            }
            if whole < w.cols {
                for row in 0..4 {
                    let weights = &mut weights[row][..w.cols - whole];
                    widen((first + row).min(w.rows - 1), whole, weights);
                    for t in 0..tokens {
                        add_products(weights, &x.row(chunk + t)[whole..], &mut acc[t][row]);
                    }
                }
            }
            for t in (0..tokens).step_by(V::LANES / 4) {
                let here = (V::LANES / 4).min(tokens - t);
                let mut sums = [zero; LANES];
                for i in 0..4 * here {
                    // SAFETY: the caller's promise.
                    sums[i] = fold(&unsafe { from_lanes(&acc[t + i / 4][i % 4]) });
                }
                let mut fours = [[0.0; 4]; LANES / 4];
                // SAFETY: it is as long as the longest register.
                unsafe { V::sum_across(&sums).store(fours.as_mut_ptr().cast()) };
                for i in 0..here {
                    let out = &mut out.row(chunk + t + i)[first..];
                    match out.first_chunk_mut() {
                        Some(out) => *out = fours[i],
                        None => out.copy_from_slice(&fours[i][..out.len()]),
                    }
                }
            }
        }
    }
}

/// Adds the products of four rows' pieces with those of `T` tokens, lane by lane.
///
/// # Safety
/// As [`matmul_widened`].
#[inline(always)]
unsafe fn multiply<V: Vector, const T: usize>(
    weights: &[[f32; MAX_BLOCK]; 4],
    x: [&[f32]; T],
    acc: &mut [[[f32; LANES]; 4]; T],
) {
    let cols = x[0].len();
    assert!(cols <= MAX_BLOCK && cols.is_multiple_of(LANES) && x.iter().all(|x| x.len() == cols));
    // SAFETY: the caller's promise.
    let zero = unsafe { V::splat(0.0) };
    let mut sums = [[[zero; MAX_PARTS]; 4]; T];
    for t in 0..T {
        for row in 0..4 {
            // SAFETY: the caller's promise.
            sums[t][row] = unsafe { from_lanes(&acc[t][row]) };
        }
    }
    for col in (0..cols).step_by(LANES) {
        for part in 0..V::PARTS {
            let at = col + part * V::LANES;
            let mut rows = [zero; 4];
            for row in 0..4 {
                // SAFETY: a piece has so many columns.
                rows[row] = unsafe { V::load(weights[row].as_ptr().add(at)) };
            }
            for t in 0..T {
                // SAFETY: as above.
                let x = unsafe { V::load(x[t].as_ptr().add(at)) };
                for row in 0..4 {
                    sums[t][row][part] = rows[row].mul_add(x, sums[t][row][part]);
                }
            }
        }
    }
    for t in 0..T {
        for row in 0..4 {
            store_lanes(&sums[t][row], &mut acc[t][row]);
        }
    }
}

/// Converts the elements of a row of `C` to floats.
///
/// # Safety
/// The processor must have the register's instructions.
#[inline(always)]
pub(crate) unsafe fn widen_cells<V: Vector, C: Cell>(row: &[u8], out: &mut [f32]) {
    assert_eq!(row.len(), out.len() * size_of::<C>());
    let cells = row.as_ptr().cast::<C>();
    let whole = out.len() / V::LANES * V::LANES;
    for at in (0..whole).step_by(V::LANES) {
        // SAFETY: both have that many elements, by the assertion.
        unsafe { C::load::<V>(cells.add(at)).store(out.as_mut_ptr().add(at)) };
    }
    for at in whole..out.len() {
        // SAFETY: as above.
        out[at] = unsafe { cells.add(at).read_unaligned() }.into();
    }
}
