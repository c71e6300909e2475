//! The matrix products of a token, grouped by weight type, to estimate speed.

use forebay_kernels::Encoding;

/// Products with matrices of one type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Product {
    /// The encoding of their weights.
    pub encoding: Encoding,
    /// Output features of a typical matrix.
    pub rows: usize,
    /// Input features of a typical matrix.
    pub cols: usize,
    /// How many are computed together.
    pub together: usize,
    /// Bytes of their weights that a token reads.
    pub read: u64,
    /// Bytes of their weights in the model.
    pub stored: u64,
}

impl Product {
    /// Adds the product to the entry of its type, if there is one. The largest matrix counts as typical.
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
