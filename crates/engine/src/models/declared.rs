//! Declared dense weights: where their bytes are, and how they are converted when loaded.

use std::ops::Range;

use forebay_kernels::Encoding;

use crate::experts::ByteRange;
use crate::format::{StoredWeight, TensorInfo};

/// A dense weight that a family declared.
pub(super) enum Declared {
    Matrix(Planes),
    /// A matrix of which each token reads one row.
    Table(Planes),
    Vector(TensorInfo, Prepared),
    /// A vector that no file has: this number, this many times.
    Constant(f32, usize),
    /// A vector with the reciprocal of the length of each column of this matrix, which is declared, too.
    InverseColumnLengths(Planes),
}

/// How the numbers of a vector are converted when they are loaded.
#[derive(Clone, Copy)]
pub(super) enum Prepared {
    /// Not at all.
    Unchanged,
    /// By applying a function to each.
    By(fn(f32) -> f32),
    /// By multiplying each by a factor.
    Times(f32),
    /// By transposing rows of this length into columns.
    Transposed(usize),
    /// By keeping every other one, starting with this one.
    EveryOther(usize),
}

impl Prepared {
    /// How many of `len` numbers remain.
    pub(super) fn count(self, len: u64) -> u64 {
        match self {
            Prepared::Unchanged | Prepared::By(_) | Prepared::Times(_) | Prepared::Transposed(_) => len,
            Prepared::EveryOther(_) => len / 2,
        }
    }

    pub(super) fn apply(self, mut values: Vec<f32>) -> Vec<f32> {
        match self {
            Prepared::Unchanged => values,
            Prepared::By(function) => {
                values.iter_mut().for_each(|value| *value = function(*value));
                values
            }
            Prepared::Times(factor) => {
                values.iter_mut().for_each(|value| *value *= factor);
                values
            }
            Prepared::Transposed(cols) => {
                (0..cols).flat_map(|col| values.iter().skip(col).step_by(cols)).copied().collect()
            }
            Prepared::EveryOther(first) => values.into_iter().skip(first).step_by(2).collect(),
        }
    }
}

impl Declared {
    /// The byte ranges of its planes, then of its scale.
    pub(super) fn ranges(&self) -> impl Iterator<Item = ByteRange> {
        let (ranges, scale) = match self {
            Declared::Matrix(m) | Declared::Table(m) => (m.ranges, m.scale),
            Declared::Vector(t, _) => ([Some(whole(t)), None, None], None),
            Declared::Constant(..) | Declared::InverseColumnLengths(_) => ([None; 3], None),
        };
        ranges.into_iter().chain([scale]).flatten()
    }

    /// Its bytes in memory, where vectors are f32.
    pub(super) fn bytes(&self) -> u64 {
        match self {
            Declared::Matrix(_) | Declared::Table(_) => self.ranges().map(|range| range.len as u64).sum(),
            Declared::Vector(tensor, prepared) => prepared.count(tensor.elements()) * 4,
            Declared::Constant(_, count) => *count as u64 * 4,
            Declared::InverseColumnLengths(matrix) => matrix.cols as u64 * 4,
        }
    }
}

/// A dense matrix: its encoding, its shape, and where its planes are.
#[derive(Clone, Copy)]
pub(super) struct Planes {
    pub encoding: Encoding,
    pub rows: usize,
    pub cols: usize,
    pub ranges: [Option<ByteRange>; 3],
    /// The f32 factor of all its weights, if it has one.
    pub scale: Option<ByteRange>,
}

impl Planes {
    /// A stored weight as a matrix.
    pub(super) fn of(weight: &StoredWeight<'_>, rows: usize, cols: usize) -> Planes {
        let ranges = weight.planes.map(|plane| plane.map(whole));
        Planes { encoding: weight.encoding, rows, cols, ranges, scale: weight.scale.map(whole) }
    }

    /// Some of its rows; `None` if they share scales with other rows.
    pub(super) fn part(&self, rows: Range<usize>) -> Option<Planes> {
        if let Encoding::Tiles(tiles) = self.encoding
            && !rows.start.is_multiple_of(tiles.rows)
        {
            return None;
        }
        let before = self.encoding.plane_bytes(rows.start, self.cols)?;
        let bytes = self.encoding.plane_bytes(rows.len(), self.cols)?;
        let mut ranges = self.ranges;
        for (i, range) in ranges.iter_mut().enumerate() {
            if let Some(range) = range {
                *range =
                    ByteRange { file: range.file, offset: range.offset + before[i] as u64, len: bytes[i] };
            }
        }
        Some(Planes { rows: rows.len(), ranges, ..*self })
    }
}

/// `len` elements of a float tensor, starting at element `first`.
pub(super) fn elements(tensor: &TensorInfo, first: usize, len: usize) -> TensorInfo {
    let size = tensor.dtype.block_bytes();
    TensorInfo {
        shape: vec![len],
        offset: tensor.offset + (first * size) as u64,
        len: (len * size) as u64,
        ..tensor.clone()
    }
}

/// The byte range of a tensor.
pub(super) fn whole(tensor: &TensorInfo) -> ByteRange {
    ByteRange { file: tensor.file, offset: tensor.offset, len: tensor.len as usize }
}
