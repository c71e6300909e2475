//! Handles of what a backend keeps: weights and scratch memory. Only the backend knows where they are.

use forebay_kernels::{Encoding, MatRef, Planes};

use crate::memory::SharedBytes;

/// A weight matrix of the dense part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Matrix(pub(crate) usize);

impl Matrix {
    /// The matrix that was loaded so many matrices after the first.
    pub fn nth(index: usize) -> Matrix {
        Matrix(index)
    }

    /// Which of the matrices it is, in the order in which they were [loaded](super::Backend::load).
    pub fn index(self) -> usize {
        self.0
    }
}

/// A small vector of weights: a norm, a bias.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Vector(pub(crate) usize);

impl Vector {
    /// The vector that was loaded so many vectors after the first.
    pub fn nth(index: usize) -> Vector {
        Vector(index)
    }

    /// Which of the vectors it is, in the order in which they were [loaded](super::Backend::load).
    pub fn index(self) -> usize {
        self.0
    }
}

/// Scratch memory for activations: rows of `width` floats, as many as the current [`begin`](super::Backend::begin)
/// says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Buf {
    pub(crate) id: usize,
    pub(crate) width: usize,
}

impl Buf {
    /// The backend's buffer of this number, whose rows have so many floats.
    pub fn nth(index: usize, width: usize) -> Buf {
        Buf { id: index, width }
    }

    /// Which of the backend's buffers it is.
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
    /// The most rows it ever holds.
    pub rows: usize,
    /// Floats in a row.
    pub width: usize,
}

/// A matrix on its way from the file to the backend.
pub struct HostMatrix {
    /// How its weights are stored.
    pub encoding: Encoding,
    /// Output features.
    pub rows: usize,
    /// Input features.
    pub cols: usize,
    /// Codes, scales and biases as the file has them; empty where there are none.
    pub planes: [SharedBytes; 3],
    /// What multiplies all its weights besides.
    pub scale: f32,
}

impl HostMatrix {
    /// The matrix for the kernels, which do not know its scale.
    pub fn view(&self) -> MatRef<'_> {
        let [codes, scales, biases] = &self.planes;
        MatRef::from_planes(self.encoding, self.rows, self.cols, Planes { codes, scales, biases })
    }
}

/// A weight on its way to the backend.
pub enum Weight {
    /// The next [`Matrix`].
    Matrix(HostMatrix),
    /// The next [`Vector`].
    Vector(Vec<f32>),
}
