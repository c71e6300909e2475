//! Borrowed views that kernels work on: a stored matrix, rows of activations, a tile of output.

use std::marker::PhantomData;
use std::ops::Range;

use crate::DType;
use crate::encoding::Encoding;
use crate::quant::planes::{dequantise, float_at};

/// A matrix in the layout of its file.
#[derive(Clone, Copy, Debug)]
pub struct MatRef<'a> {
    /// How the weights are stored.
    pub encoding: Encoding,
    /// Output features.
    pub rows: usize,
    /// Input features.
    pub cols: usize,
    planes: Planes<'a>,
    /// Rows in the planes, of which `first`, `first + step`, … belong to the matrix.
    stored: usize,
    first: usize,
    step: usize,
}

/// The bytes of a matrix, plane by plane; empty if an [`Encoding`] has no such plane.
#[derive(Clone, Copy, Debug, Default)]
pub struct Planes<'a> {
    /// The weights, or integers to be scaled.
    pub codes: &'a [u8],
    /// Factors of the codes.
    pub scales: &'a [u8],
    /// Summands, added after scaling.
    pub biases: &'a [u8],
}

impl<'a> MatRef<'a> {
    /// A view of one plane of elements or blocks.
    ///
    /// # Panics
    /// If the shape does not fit the type or the length of the data.
    pub fn new(dtype: DType, rows: usize, cols: usize, data: &'a [u8]) -> Self {
        let planes = Planes { codes: data, ..Planes::default() };
        MatRef::from_planes(dtype.into(), rows, cols, planes)
    }

    /// A view of planes.
    ///
    /// # Panics
    /// If the shape does not fit the encoding or the length of a plane.
    pub fn from_planes(encoding: Encoding, rows: usize, cols: usize, planes: Planes<'a>) -> Self {
        let lengths = [planes.codes, planes.scales, planes.biases].map(<[u8]>::len);
        assert_eq!(encoding.plane_bytes(rows, cols), Some(lengths), "{encoding} [{rows}, {cols}]");
        MatRef { encoding, rows, cols, planes, stored: rows, first: 0, step: 1 }
    }

    /// The stored bytes of one row's codes, which are contiguous in all encodings except [`Encoding::Columns`].
    #[inline]
    pub fn row(&self, row: usize) -> &'a [u8] {
        self.row_of(self.planes.codes, row)
    }

    /// The scales of one row's groups or tiles.
    #[inline]
    pub fn scales(&self, row: usize) -> &'a [u8] {
        match self.encoding {
            Encoding::Tiles(tiles) => {
                assert!(row < self.rows);
                let tile_row = (self.first + row * self.step) / tiles.rows;
                let bytes = self.planes.scales.len() / self.stored.div_ceil(tiles.rows);
                &self.planes.scales[tile_row * bytes..][..bytes]
            }
            _ => self.row_of(self.planes.scales, row),
        }
    }

    /// The biases of one row's groups.
    #[inline]
    pub fn biases(&self, row: usize) -> &'a [u8] {
        self.row_of(self.planes.biases, row)
    }

    /// The sub-matrix of these rows.
    pub fn rows(&self, rows: Range<usize>) -> MatRef<'a> {
        assert!(rows.start <= rows.end && rows.end <= self.rows);
        MatRef { rows: rows.len(), first: self.first + rows.start * self.step, ..*self }
    }

    /// The sub-matrix of every `step`-th row, starting with `first`.
    pub fn every(&self, first: usize, step: usize) -> MatRef<'a> {
        assert!(step > 0 && first < step);
        MatRef {
            rows: self.rows.saturating_sub(first).div_ceil(step),
            first: self.first + first * self.step,
            step: self.step * step,
            ..*self
        }
    }

    /// The weights of a row.
    pub fn dequantise_row(&self, row: usize, out: &mut [f32]) {
        assert_eq!(out.len(), self.cols);
        dequantise(*self, row, 0, out);
    }

    /// One weight of a matrix that is stored column after column.
    #[inline(always)]
    pub(crate) fn element(&self, dtype: DType, row: usize, col: usize) -> f32 {
        assert!(row < self.rows);
        float_at(dtype, self.planes.codes, col * self.stored + self.first + row * self.step)
    }

    #[inline]
    fn row_of(&self, plane: &'a [u8], row: usize) -> &'a [u8] {
        assert!(row < self.rows);
        let bytes = plane.len() / self.stored;
        &plane[(self.first + row * self.step) * bytes..][..bytes]
    }
}

/// Rows of activations, possibly selected by index from a larger set, such as the tokens of one expert. They may be
/// parts of longer rows, such as one head of each token.
#[derive(Debug)]
pub struct Rows<'a, T> {
    data: &'a [T],
    width: usize,
    /// The distance between the starts of two rows.
    stride: usize,
    index: Option<&'a [u32]>,
}

// A derived implementation would require `T: Clone`.
impl<T> Clone for Rows<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Rows<'_, T> {}

impl<'a, T> Rows<'a, T> {
    /// All rows of `data`, which holds `width` values for each.
    pub fn new(data: &'a [T], width: usize) -> Self {
        assert!(width > 0 && data.len().is_multiple_of(width));
        Rows { data, width, stride: width, index: None }
    }

    /// The `columns` of all rows.
    pub fn columns(self, columns: Range<usize>) -> Self {
        assert!(columns.start < columns.end && columns.end <= self.width);
        // The last row may be shorter now, but the number of rows stays.
        Rows { data: &self.data[columns.start.min(self.data.len())..], width: columns.len(), ..self }
    }

    /// The rows of `data` that `index` lists, in that order.
    pub fn indexed(data: &'a [T], width: usize, index: &'a [u32]) -> Self {
        Rows { index: Some(index), ..Rows::new(data, width) }
    }

    /// The number of rows.
    pub fn len(&self) -> usize {
        self.index.map_or(self.data.len().div_ceil(self.stride), <[u32]>::len)
    }

    /// Whether there are no rows.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Values in a row.
    pub fn width(&self) -> usize {
        self.width
    }

    /// One row.
    #[inline]
    pub fn row(&self, i: usize) -> &'a [T] {
        let i = self.index.map_or(i, |index| index[i] as usize);
        &self.data[i * self.stride..][..self.width]
    }
}

/// A rectangle of a row-major matrix, which one thread writes.
#[derive(Debug)]
pub struct TileMut<'a, T> {
    first: *mut T,
    rows: usize,
    cols: usize,
    stride: usize,
    lifetime: PhantomData<&'a mut [T]>,
}

// SAFETY: a tile is an exclusive borrow of its elements, like `&mut [T]`.
unsafe impl<T: Send> Send for TileMut<'_, T> {}
// SAFETY: a shared tile gives no access to its elements.
unsafe impl<T: Send> Sync for TileMut<'_, T> {}

impl<'a, T> TileMut<'a, T> {
    /// All of `data`, as rows of `width`.
    pub fn new(data: &'a mut [T], width: usize) -> Self {
        assert!(width > 0 && data.len().is_multiple_of(width));
        TileMut {
            first: data.as_mut_ptr(),
            rows: data.len() / width,
            cols: width,
            stride: width,
            lifetime: PhantomData,
        }
    }

    /// The number of rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// The number of columns.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// One row of the tile.
    #[inline]
    pub fn row(&mut self, row: usize) -> &mut [T] {
        assert!(row < self.rows);
        // SAFETY: the row lies inside the matrix this tile was cut from, and the tile is borrowed
        // exclusively for as long as the slice lives.
        unsafe { std::slice::from_raw_parts_mut(self.first.add(row * self.stride), self.cols) }
    }

    /// Splits the tile into its first columns and the others.
    pub fn split_cols(self, at: usize) -> (Self, Self) {
        assert!(at <= self.cols);
        // SAFETY: the corner is inside the tile's first row, or at its end.
        let second = unsafe { self.first.add(at) };
        let lifetime = PhantomData;
        let (rows, stride) = (self.rows, self.stride);
        let right = TileMut { first: second, rows, cols: self.cols - at, stride, lifetime };
        (TileMut { cols: at, ..self }, right)
    }

    /// The part of the tile at `rows` and `cols`.
    ///
    /// # Safety
    /// Parts that exist at the same time must not overlap, and this tile's rows must not be used while a part exists.
    pub(crate) unsafe fn part(&self, rows: Range<usize>, cols: Range<usize>) -> TileMut<'_, T> {
        assert!(rows.start <= rows.end && rows.end <= self.rows);
        assert!(cols.start <= cols.end && cols.end <= self.cols);
        TileMut {
            // SAFETY: the asserts above keep the corner inside the matrix, or one past its end.
            first: unsafe { self.first.add(rows.start * self.stride + cols.start) },
            rows: rows.len(),
            cols: cols.len(),
            stride: self.stride,
            lifetime: PhantomData,
        }
    }
}

/// 256 activations as bytes, with a scale for every 32 lanes, and sums for types that have minima.
///
/// Lanes that share a scale correspond to the blocks of the weights' type: if a weight block has 256 lanes, all eight
/// scales are equal. The last panel of a row is padded with zeros.
#[derive(Clone, Debug)]
#[repr(C, align(64))]
pub struct Q8Panel {
    /// The activations divided by their scale.
    pub lanes: [i8; Q8Panel::LEN],
    /// The sum of every 16 lanes.
    pub sums: [i16; Q8Panel::LEN / 16],
    /// The scale of every 32 lanes.
    pub scales: [f32; Q8Panel::LEN / 32],
}

impl Q8Panel {
    /// Lanes in a panel.
    pub const LEN: usize = 256;

    /// Panels for a row of `cols` activations.
    pub fn count(cols: usize) -> usize {
        cols.div_ceil(Q8Panel::LEN)
    }

    /// The sum of `len` lanes starting at `first`. Both are multiples of 16.
    #[inline(always)]
    pub(crate) fn sum_of(&self, first: usize, len: usize) -> i32 {
        self.sums[first / 16..(first + len) / 16].iter().map(|&sum| i32::from(sum)).sum()
    }
}

impl Default for Q8Panel {
    fn default() -> Self {
        Q8Panel { lanes: [0; Q8Panel::LEN], sums: [0; Q8Panel::LEN / 16], scales: [0.0; Q8Panel::LEN / 32] }
    }
}
