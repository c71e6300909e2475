//! Handles of weights and buffers that a backend keeps. Only the backend knows where they are.

use forebay_kernels::{Encoding, MatRef, Planes};

use crate::memory::SharedBytes;

/// A weight matrix of the dense part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Matrix(pub(crate) usize);

impl Matrix {
    /// The matrix with this index in the order of loading.
    pub fn nth(index: usize) -> Matrix {
        Matrix(index)
    }

    /// The matrix's index in the order of [loading](super::Backend::load).
    pub fn index(self) -> usize {
        self.0
    }
}

/// A small vector of weights: a norm, a bias.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Vector(pub(crate) usize);

impl Vector {
    /// The vector with this index in the order of loading.
    pub fn nth(index: usize) -> Vector {
        Vector(index)
    }

    /// The vector's index in the order of [loading](super::Backend::load).
    pub fn index(self) -> usize {
        self.0
    }
}

/// A buffer for activations: rows of `width` floats, of which the last [`begin`](super::Backend::begin) set the
/// number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Buf {
    pub(crate) id: usize,
    pub(crate) width: usize,
}

impl Buf {
    /// The backend's buffer with this number, whose rows have `width` floats.
    pub fn nth(index: usize, width: usize) -> Buf {
        Buf { id: index, width }
    }

    /// The same memory, as rows of `width` floats, which must not be longer than the buffer's own.
    pub fn narrow(self, width: usize) -> Buf {
        assert!(width <= self.width);
        Buf { width, ..self }
    }

    /// The buffer's number.
    pub fn index(self) -> usize {
        self.id
    }

    /// Floats in a row.
    pub fn width(self) -> usize {
        self.width
    }
}

/// The shape of a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BufShape {
    /// The most rows that it ever holds.
    pub rows: usize,
    /// Floats in a row.
    pub width: usize,
}

/// A matrix to be loaded into the backend.
pub struct HostMatrix {
    /// The encoding of its weights.
    pub encoding: Encoding,
    /// Output features.
    pub rows: usize,
    /// Input features.
    pub cols: usize,
    /// Codes, scales and biases as in the file; a plane that the encoding does not have is empty.
    pub planes: [SharedBytes; 3],
    /// A factor of all its weights.
    pub scale: f32,
}

impl HostMatrix {
    /// The matrix for the kernels, which ignore its factor.
    pub fn view(&self) -> MatRef<'_> {
        let [codes, scales, biases] = &self.planes;
        MatRef::from_planes(self.encoding, self.rows, self.cols, Planes { codes, scales, biases })
    }
}

/// A weight to be loaded into the backend.
pub enum Weight {
    /// The next [`Matrix`].
    Matrix(HostMatrix),
    /// The next [`Vector`].
    Vector(Vec<f32>),
}
