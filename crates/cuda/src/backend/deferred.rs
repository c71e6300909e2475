//! Defers small operations until the next operation is known, whose kernel then does them as well.
//!
//! A small kernel takes as long as its launch, and for one row of activations everything except products is small. A
//! deferred operation names buffers and weights, never addresses. All later operations are recorded after it.

use forebay_engine::Result;
use forebay_engine::internals::backend::{Buf, Heads, Matrix, Precision, Vector};
use smallvec::SmallVec;

use super::products::VECTOR_COLS;
use super::{CudaBackend, NORM_THREADS, Scratch};
use crate::driver::Address;
use crate::program::{Args, Shape};

/// The most rows whose experts can be chosen by the kernel that computes the router's logits, and the most experts, so
/// that the data of eight choices fits in shared memory.
const MOST_ROUTED: usize = 64;
const MOST_EXPERTS: usize = 1024;

/// A deferred operation.
#[derive(Clone, Copy, Debug)]
pub enum Deferred {
    /// `x += y`
    Add { x: Buf, y: Buf },
    /// `out = norm(x) · w`
    Norm(Norm),
    /// `out = W x`, where `x` was just normed. `W` may be a router.
    Product { x: Buf, w: Matrix, out: Buf },
    /// Norms and rotates queries and keys.
    Rotate(Rotation),
}

#[derive(Clone, Copy, Debug)]
pub struct Norm {
    x: Buf,
    w: Vector,
    eps: f32,
    out: Buf,
}

#[derive(Clone, Copy, Debug)]
pub struct Rotation {
    pub q: Buf,
    pub k: Buf,
    pub q_norm: Option<Vector>,
    pub k_norm: Option<Vector>,
    pub heads: Heads,
}

/// A norm that a product's kernel does first: its input and its parameters.
pub struct PriorNorm {
    pub x: Address,
    w: Address,
    added: Address,
    sum: Address,
    normed: Address,
    eps: f32,
}

impl PriorNorm {
    /// Adds the kernels' struct `PriorNorm`.
    pub fn put(norm: Option<&PriorNorm>, args: Args) -> Args {
        let args = match norm {
            Some(n) => args.at(n.w).at(n.added).at(n.sum).at(n.normed).float(n.eps),
            None => args.at(0).at(0).at(0).at(0).float(0.0),
        };
        // Padding to the struct's alignment.
        args.int(0)
    }
}

impl CudaBackend {
    /// Defers an addition.
    pub(super) fn defer_add(&mut self, x: Buf, y: Buf) -> Result<()> {
        self.flush()?;
        self.deferred.push(Deferred::Add { x, y });
        Ok(())
    }

    /// Defers a norm. Its input may have a deferred addition.
    pub(super) fn defer_norm(&mut self, x: Buf, w: Vector, eps: f32, out: Buf) -> Result<()> {
        if self.leaves_rotation(&[x, out]) {
            return self.norm(Norm { x, w, eps, out }, 0);
        }
        if !matches!(self.deferred[..], [Deferred::Add { x: sum, .. }] if sum == x) {
            self.flush()?;
        }
        self.deferred.push(Deferred::Norm(Norm { x, w, eps, out }));
        Ok(())
    }

    /// Defers a rotation.
    pub(super) fn defer_rotation(&mut self, rotation: Rotation) -> Result<()> {
        self.flush()?;
        self.deferred.push(Deferred::Rotate(rotation));
        Ok(())
    }

    /// Defers a product that may be a router's, so that its kernel can also choose. Returns whether it did.
    pub(super) fn defer_product(&mut self, x: Buf, products: &[(Matrix, Buf)]) -> bool {
        let ([.., Deferred::Norm(norm)], &[(w, out)]) = (&self.deferred[..], products) else { return false };
        let matrix = &self.matrices[w.index()];
        let routes = matrix.kind.is_float() && matrix.rows <= MOST_EXPERTS;
        let fits = matrix.cols.is_multiple_of(4);
        let few = self.rows <= MOST_ROUTED && self.precision == Precision::Fast;
        if norm.out != x || !(routes && fits && few) {
            return false;
        }
        self.deferred.push(Deferred::Product { x, w, out });
        true
    }

    /// Records the deferred operations.
    pub(super) fn flush(&mut self) -> Result<()> {
        let deferred = std::mem::take(&mut self.deferred);
        let mut left = &deferred[..];
        while let [first, rest @ ..] = left {
            left = rest;
            match (*first, rest.first()) {
                // The norm's kernel also computes the sum.
                (Deferred::Add { x, y }, Some(&Deferred::Norm(norm)))
                    if norm.x == x && self.vectors[norm.w.index()].1 == x.width() =>
                {
                    left = &rest[1..];
                    self.norm(Norm { x: y, ..norm }, self.at(x))?;
                }
                (Deferred::Add { x, y }, _) => {
                    let kernels = self.kernels()?;
                    self.pairwise(kernels.add, x, self.at(y), y.width(), |args| args)?;
                }
                (Deferred::Norm(norm), _) => self.norm(norm, 0)?,
                (Deferred::Product { x, w, out }, _) => self.multiply_rows(x, &[(w, out)])?,
                (Deferred::Rotate(rotation), _) => self.rotate(&rotation)?,
            }
        }
        Ok(())
    }

    /// Norms rows, or parts of rows. If `sum` is not null, `x` is added to it first, and the sum is normed.
    fn norm(&mut self, Norm { x, w, eps, out }: Norm, sum: Address) -> Result<()> {
        let kernels = self.kernels()?;
        let width = self.vectors[w.index()].1;
        let parts = self.rows * x.width() / width;
        // Four floats per thread, if that is a whole number of warps.
        let threads = match width {
            _ if width.is_multiple_of(128) && width <= 4096 => width / 4,
            _ => width.next_multiple_of(32).min(NORM_THREADS),
        };
        let args = Args::new().at(self.at(x)).at(self.vector(w)).at(self.at(out));
        let args = args.int(width).float(eps).at(sum);
        self.record_beside(&[x, out], kernels.rms_norm, Shape::new([parts, 1, 1], threads), args)
    }

    /// Takes the deferred norm whose output is `normed`, if the kernel of these products can do it.
    pub(super) fn prior_norm(
        &mut self,
        normed: Buf,
        products: &[(Matrix, Buf)],
    ) -> Result<Option<PriorNorm>> {
        let (added, norm) = match self.deferred[..] {
            [Deferred::Norm(norm)] => (None, norm),
            [Deferred::Add { y, .. }, Deferred::Norm(norm)] => (Some(y), norm),
            _ => return Ok(None),
        };
        let Norm { x, w, eps, out } = norm;
        let whole = self.vectors[w.index()].1 == x.width() && x.width().is_multiple_of(32);
        // No block may write what another block reads.
        let used: SmallVec<[Buf; 7]> =
            [x, out].into_iter().chain(added).chain(products.iter().map(|&(_, out)| out)).collect();
        let apart = (1..used.len()).all(|i| used[..i].iter().all(|other| other.index() != used[i].index()));
        let movable =
            added.is_none() || self.entered.contains(&x) && self.moved.is_none_or(|moved| moved == x.index());
        let fits = x.width() <= VECTOR_COLS && self.precision == Precision::Fast;
        if out != normed || !(whole && apart && movable && fits) {
            return Ok(None);
        }
        let mut prior = PriorNorm {
            x: self.at(x),
            w: self.vector(w),
            added: added.map_or(0, |y| self.at(y)),
            sum: 0,
            normed: self.at(out),
            eps,
        };
        if added.is_some() {
            prior.sum = self.move_elsewhere(x)?;
        }
        self.deferred.clear();
        Ok(Some(prior))
    }

    /// Takes the deferred product whose output is `logits`, with the norm before it.
    pub(super) fn prior_product(&mut self, logits: Buf) -> Result<Option<(PriorNorm, Matrix)>> {
        let Some(&Deferred::Product { x, w, out }) = self.deferred.last() else { return Ok(None) };
        if out != logits {
            return Ok(None);
        }
        let product = self.deferred.pop().expect("it was just looked at");
        let prior = self.prior_norm(x, &[(w, out)])?;
        if prior.is_none() {
            self.deferred.push(product);
        }
        Ok(prior.map(|norm| (norm, w)))
    }

    /// Whether only a rotation is deferred, and an operation on these buffers may be done before it.
    pub(super) fn leaves_rotation(&self, touched: &[Buf]) -> bool {
        let [Deferred::Rotate(Rotation { q, k, heads, .. })] = self.deferred[..] else { return false };
        let of_rotation = |buf: &Buf| [q, k, heads.angles].iter().any(|other| other.index() == buf.index());
        !touched.iter().any(of_rotation)
    }

    /// Takes the deferred rotation, if it is the one of these queries and keys.
    pub(super) fn prior_rotation(&mut self, q: Buf, k: Buf) -> Option<Rotation> {
        match self.deferred[..] {
            [Deferred::Rotate(rotation)] if rotation.q == q && rotation.k == k => {
                self.deferred.clear();
                Some(rotation)
            }
            _ => None,
        }
    }

    /// Moves a buffer to another address: within one launch, no block may write where another block may still read.
    fn move_elsewhere(&mut self, x: Buf) -> Result<Address> {
        self.scratch(Scratch::Spare, self.rows * x.width() * 4)?;
        self.moved = if self.moved.is_some() { None } else { Some(x.index()) };
        Ok(self.at(x))
    }
}
