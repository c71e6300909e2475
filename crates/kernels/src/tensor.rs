//! Borrowed views that the kernels work on: a stored matrix, rows of activations, a tile of output.

use std::marker::PhantomData;
use std::ops::Range;

use crate::DType;

/// A matrix as it lies in a file: `rows` rows of `cols` weights, each row a whole number of blocks.
#[derive(Clone, Copy, Debug)]
pub struct MatRef<'a> {
    /// The type of the weights.
    pub dtype: DType,
    /// Output features.
    pub rows: usize,
    /// Input features.
    pub cols: usize,
    data: &'a [u8],
    row_bytes: usize,
}

impl<'a> MatRef<'a> {
    /// A view of `data`.
    ///
    /// # Panics
    /// If the shape does not fit the type or the length of the data.
    pub fn new(dtype: DType, rows: usize, cols: usize, data: &'a [u8]) -> Self {
        let row_bytes = dtype.row_bytes(cols).expect("a row is a whole number of blocks");
        assert_eq!(row_bytes.checked_mul(rows), Some(data.len()), "{dtype} [{rows}, {cols}]");
        MatRef { dtype, rows, cols, data, row_bytes }
    }

    /// The bytes of one row.
    pub fn row(&self, row: usize) -> &'a [u8] {
        &self.data[row * self.row_bytes..][..self.row_bytes]
    }

    /// The sub-matrix of these rows.
    pub fn rows(&self, rows: Range<usize>) -> MatRef<'a> {
        let data = &self.data[rows.start * self.row_bytes..rows.end * self.row_bytes];
        MatRef { rows: rows.len(), data, ..*self }
    }
}

/// Rows of activations, perhaps picked by index from a larger set: the tokens that one expert serves.
#[derive(Debug)]
pub struct Rows<'a, T> {
    data: &'a [T],
    width: usize,
    index: Option<&'a [u32]>,
}

// Derived, these would ask for elements that can be copied.
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
        Rows { data, width, index: None }
    }

    /// The rows of `data` that `index` names, in its order.
    pub fn indexed(data: &'a [T], width: usize, index: &'a [u32]) -> Self {
        Rows { index: Some(index), ..Rows::new(data, width) }
    }

    /// The number of rows.
    pub fn len(&self) -> usize {
        self.index.map_or(self.data.len() / self.width, <[u32]>::len)
    }

    /// Whether there is none.
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
        &self.data[i * self.width..][..self.width]
    }
}

/// A rectangle of a row-major matrix, written by one thread.
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
    /// The whole of `data` as rows of `width`.
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

    /// The part of the tile at `rows` and `cols`.
    ///
    /// # Safety
    /// Parts that are alive at the same time must not overlap, and this tile's rows must not be used
    /// while a part is alive.
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

/// 256 activations as bytes, with a scale for every 32 and sums for the types that have minima.
///
/// The blocks that share a scale are those of the weights' type: where a weight block has 256 lanes all
/// eight scales are equal. A row that does not fill its last panel is padded with zeros.
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
}

impl Default for Q8Panel {
    fn default() -> Self {
        Q8Panel { lanes: [0; Q8Panel::LEN], sums: [0; Q8Panel::LEN / 16], scales: [0.0; Q8Panel::LEN / 32] }
    }
}
