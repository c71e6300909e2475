//! The products of a token, by the types of their weights.

use forebay_kernels::Encoding;

/// Matrices of one type that a token is multiplied with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Product {
    /// How their weights are stored.
    pub encoding: Encoding,
    /// Output features of a typical one.
    pub rows: usize,
    /// Input features of a typical one.
    pub cols: usize,
    /// How many are computed together.
    pub together: usize,
    /// Bytes that a token reads of all of them.
    pub read: u64,
    /// Bytes that the model has of them.
    pub stored: u64,
}

impl Product {
    /// Adds it to those of its type, of which the largest matrix is the typical one.
    pub(crate) fn join(self, products: &mut Vec<Product>) {
        let Some(known) = products.iter_mut().find(|known| known.encoding == self.encoding) else {
            products.push(self);
            return;
        };
        let (read, stored) = (known.read + self.read, known.stored + self.stored);
        if self.rows * self.cols > known.rows * known.cols {
            *known = self;
        }
        (known.read, known.stored) = (read, stored);
    }
}
