//! Operations that are put off until it is known what comes after them, whose kernel then does them, too.
//!
//! A kernel that does little takes as long as it takes to start, and one row of activations is little for all that is not a
//! product. What is put off names buffers and weights, never places, and every other operation is recorded after it.

use forebay_engine::Result;
use forebay_engine::internals::backend::{Buf, Heads, Matrix, Precision, Vector};

use super::products::VECTOR_COLS;
use super::{CudaBackend, NORM_THREADS, Scratch};
use crate::driver::Address;
use crate::program::{Args, Shape};

/// The most rows whose experts are chosen by the kernel that computes the router's logits, and the most experts: what eight
/// choices need fits into shared memory.
const MOST_ROUTED: usize = 64;
const MOST_EXPERTS: usize = 1024;

/// An operation that was put off.
#[derive(Clone, Copy, Debug)]
pub enum Deferred {
    /// `x += y`
    Add { x: Buf, y: Buf },
    /// `out = norm(x) · w`
    Norm(Norm),
    /// `out = W x`, where `x` was just normed: perhaps by a router.
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

/// A norm that the kernel of a product does before it: what it norms, and what it knows of that.
pub struct PriorNorm {
    pub x: Address,
    w: Address,
    added: Address,
    sum: Address,
    normed: Address,
    eps: f32,
}

impl PriorNorm {
    /// The `PriorNorm` of the kernels.
    pub fn put(norm: Option<&PriorNorm>, args: Args) -> Args {
        let args = match norm {
            Some(n) => args.at(n.w).at(n.added).at(n.sum).at(n.normed).float(n.eps),
            None => args.at(0).at(0).at(0).at(0).float(0.0),
        };
        // Structures are as long as their alignment asks for.
        args.int(0)
    }
}

impl CudaBackend {
    /// Puts an addition off.
    pub(super) fn defer_add(&mut self, x: Buf, y: Buf) -> Result<()> {
        self.flush()?;
        self.deferred.push(Deferred::Add { x, y });
        Ok(())
    }

    /// Puts a norm off, after an addition to what it norms.
    pub(super) fn defer_norm(&mut self, x: Buf, w: Vector, eps: f32, out: Buf) -> Result<()> {
        if !matches!(self.deferred[..], [Deferred::Add { x: sum, .. }] if sum == x) {
            self.flush()?;
        }
        self.deferred.push(Deferred::Norm(Norm { x, w, eps, out }));
        Ok(())
    }

    /// Puts a rotation off.
    pub(super) fn defer_rotation(&mut self, rotation: Rotation) -> Result<()> {
        self.flush()?;
        self.deferred.push(Deferred::Rotate(rotation));
        Ok(())
    }

    /// Puts a product off, if it may be a router's: then a choice follows.
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

    /// Records what was put off.
    pub(super) fn flush(&mut self) -> Result<()> {
        let deferred = std::mem::take(&mut self.deferred);
        let mut left = &deferred[..];
        while let [first, rest @ ..] = left {
            left = rest;
            match (*first, rest.first()) {
                // A sum that is normed next is made by the same kernel.
                (Deferred::Add { x, y }, Some(&Deferred::Norm(norm)))
                    if norm.x == x && self.vectors[norm.w.index()].1 == x.width() =>
                {
                    left = &rest[1..];
                    self.norm(Norm { x: y, ..norm }, self.at(x))?;
                }
                (Deferred::Add { x, y }, _) => {
                    let kernels = self.kernels()?;
                    self.pairwise(kernels.add, x, self.at(y), y.width())?;
                }
                (Deferred::Norm(norm), _) => self.norm(norm, 0)?,
                (Deferred::Product { x, w, out }, _) => self.multiply_rows(x, &[(w, out)])?,
                (Deferred::Rotate(rotation), _) => self.rotate(&rotation)?,
            }
        }
        Ok(())
    }

    /// Norms rows, or parts of them; what is normed is added to `sum` first, if there is one.
    fn norm(&mut self, Norm { x, w, eps, out }: Norm, sum: Address) -> Result<()> {
        let kernels = self.kernels()?;
        let width = self.vectors[w.index()].1;
        let parts = self.rows * x.width() / width;
        // Four floats to a thread, if that is a whole number of warps.
        let threads = match width {
            _ if width.is_multiple_of(128) && width <= 4096 => width / 4,
            _ => width.next_multiple_of(32).min(NORM_THREADS),
        };
        let args = Args::new().at(self.at(x)).at(self.vector(w)).at(self.at(out));
        let args = args.int(width).float(eps).at(sum);
        self.record(kernels.rms_norm, Shape::new([parts, 1, 1], threads), args)
    }

    /// Takes the norm that was put off and gives `normed`, if it can be done by a kernel that multiplies it.
    pub(super) fn prior_norm(&mut self, normed: Buf) -> Result<Option<PriorNorm>> {
        let (added, norm) = match self.deferred[..] {
            [Deferred::Norm(norm)] => (None, norm),
            [Deferred::Add { y, .. }, Deferred::Norm(norm)] => (Some(y), norm),
            _ => return Ok(None),
        };
        let Norm { x, w, eps, out } = norm;
        let whole = self.vectors[w.index()].1 == x.width() && x.width().is_multiple_of(32);
        let apart = out != x && added != Some(x) && added != Some(out);
        let movable = added.is_none() || self.moved.is_none_or(|moved| moved == x.index());
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

    /// Takes the router's product that was put off and gives `logits`: the norm before it, and the router.
    pub(super) fn prior_product(&mut self, logits: Buf) -> Result<Option<(PriorNorm, Matrix)>> {
        let Some(&Deferred::Product { x, w, out }) = self.deferred.last() else { return Ok(None) };
        if out != logits {
            return Ok(None);
        }
        let product = self.deferred.pop().expect("it was just looked at");
        let prior = self.prior_norm(x)?;
        if prior.is_none() {
            self.deferred.push(product);
        }
        Ok(prior.map(|norm| (norm, w)))
    }

    /// Takes the rotation that was put off, if it is that of these queries and keys.
    pub(super) fn prior_rotation(&mut self, q: Buf, k: Buf) -> Option<Rotation> {
        match self.deferred[..] {
            [Deferred::Rotate(rotation)] if rotation.q == q && rotation.k == k => {
                self.deferred.clear();
                Some(rotation)
            }
            _ => None,
        }
    }

    /// Another place for a buffer, where it is from now on: of blocks that run together, one may not write to where another
    /// may still read.
    fn move_elsewhere(&mut self, x: Buf) -> Result<Address> {
        self.scratch(Scratch::Spare, self.rows * x.width() * 4)?;
        self.moved = if self.moved.is_some() { None } else { Some(x.index()) };
        Ok(self.at(x))
    }
}
