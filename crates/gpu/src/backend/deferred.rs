//! Defers sums, norms and rotations until the next operation is known: the kernel of a product or of attention then does
//! them as well.
//!
//! For few rows of activations a small kernel takes as long as its start. A deferred operation names buffers, never
//! where they are. All other operations are recorded after what is deferred.

use forebay_engine::Result;
use forebay_engine::internals::backend::{Buf, Matrix, Vector};
use smallvec::SmallVec;

use super::sequences::Rotation;
use super::{GpuBackend, RowArgs, grid_of};
use crate::device::Span;
use crate::recorder::Bound;

/// The most rows whose norm the kernel of a product computes: each of its workgroups computes it again.
const MOST_ROWS: usize = 8;

/// The most columns that such a kernel keeps in the memory of a workgroup.
pub const MOST_COLS: usize = 4096;

/// A deferred operation.
#[derive(Clone, Copy, Debug)]
pub enum Deferred {
    /// `x += y`
    Add { x: Buf, y: Buf },
    /// `out = norm(x) · w`
    Norm(Norm),
    /// Norms and rotations of queries and keys.
    Rotation(Rotation),
}

#[derive(Clone, Copy, Debug)]
pub struct Norm {
    pub x: Buf,
    pub w: Vector,
    pub eps: f32,
    pub out: Buf,
}

/// A norm that a product's kernel does first.
pub struct PriorNorm {
    /// What is normed, and what is added to it before.
    pub x: Span,
    pub added: Option<Span>,
    pub w: Span,
    pub eps: f32,
    /// Where the sum goes, if anything is added, and where the result of the norm goes.
    pub sum: Option<Span>,
    pub normed: Span,
}

impl GpuBackend {
    /// Defers an addition.
    pub(super) fn defer_add(&mut self, x: Buf, y: Buf) -> Result<()> {
        self.flush()?;
        self.deferred.push(Deferred::Add { x, y });
        Ok(())
    }

    /// Defers a norm. Its input may have a deferred addition.
    pub(super) fn defer_norm(&mut self, norm: Norm) -> Result<()> {
        if !matches!(self.deferred[..], [Deferred::Add { x, .. }] if x == norm.x) {
            self.flush()?;
        }
        self.deferred.push(Deferred::Norm(norm));
        Ok(())
    }

    /// Records the deferred operations.
    pub fn flush(&mut self) -> Result<()> {
        for deferred in std::mem::take(&mut self.deferred) {
            match deferred {
                Deferred::Add { x, y } => {
                    let y = self.at(y).into();
                    self.each_number("add", x, &RowArgs::default(), y, Bound::None)?;
                }
                Deferred::Rotation(rotation) => self.rotate(&rotation)?,
                Deferred::Norm(Norm { x, w, eps, out }) => {
                    let width = self.vectors[w.index()].1.len();
                    let count = self.rows * x.width() / width;
                    let args = RowArgs { count, width, alpha: eps, ..RowArgs::default() };
                    let bound = [self.at(x).into(), self.at(out).into(), self.vector(w).into()];
                    self.on_rows("rms_norm", grid_of(count), &args.args(), bound)?;
                }
            }
        }
        Ok(())
    }

    /// Takes the deferred norm whose output is `normed`, if the kernel of these products can do it.
    pub(super) fn prior_norm(
        &mut self,
        normed: Buf,
        products: &[(Matrix, Buf)],
    ) -> Result<Option<PriorNorm>> {
        let (added, Norm { x, w, eps, out }) = match self.deferred[..] {
            [Deferred::Norm(norm)] => (None, norm),
            [Deferred::Add { y, .. }, Deferred::Norm(norm)] => (Some(y), norm),
            _ => return Ok(None),
        };
        let whole = self.vectors[w.index()].1.len() == x.width() && x.width() <= MOST_COLS;
        // No workgroup may write what another one reads.
        let used: SmallVec<[Buf; 7]> =
            [x, out].into_iter().chain(added).chain(products.iter().map(|&(_, out)| out)).collect();
        let apart = (1..used.len()).all(|i| used[..i].iter().all(|other| other.index() != used[i].index()));
        let movable =
            added.is_none() || self.entered.contains(&x) && self.moved.is_none_or(|moved| moved == x.index());
        if out != normed || self.rows > MOST_ROWS || !(whole && apart && movable) {
            return Ok(None);
        }
        let (origin, added) = (self.at(x), added.map(|y| self.at(y)));
        let sum = added.is_some().then(|| self.move_elsewhere(x)).transpose()?;
        let (w, normed) = (self.vector(w), self.at(out));
        self.deferred.clear();
        Ok(Some(PriorNorm { x: origin, added, w, eps, sum, normed }))
    }

    /// The batch starts from this buffer, in its own memory.
    pub(super) fn enter(&mut self, x: Buf) {
        self.moved = self.moved.filter(|&moved| moved != x.index());
        self.entered.push(x);
    }

    /// Moves a buffer to other memory, or back.
    fn move_elsewhere(&mut self, x: Buf) -> Result<Span> {
        let bytes = (self.rows * x.width() * 4) as u64;
        if self.spare.as_ref().is_none_or(|spare| spare.bytes() < bytes) {
            assert!(self.moved.is_none(), "the rows of a batch do not grow");
            self.spare = Some(self.gpu.allocate((MOST_ROWS * x.width() * 4) as u64, "scratch")?);
        }
        self.moved = if self.moved.is_some() { None } else { Some(x.index()) };
        Ok(self.at(x))
    }
}
