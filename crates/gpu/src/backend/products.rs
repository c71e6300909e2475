//! Matrix products.

use forebay_engine::Result;
use forebay_engine::internals::backend::{Buf, HeadMatrices, Matrix, Precision};

use super::deferred::PriorNorm;
use super::{GpuBackend, THREADS};
use crate::device::Span;
use crate::recorder::{Args, Bound};
use crate::shaders::{File, Name};
use crate::weights::Source;

/// The most products of one kernel.
const MOST_PRODUCTS: usize = 4;

/// Threads that compute a number of the kernel for a few rows of activations, and the teams of them in a workgroup.
const TEAM: usize = 32;
const TEAMS: usize = THREADS / TEAM;

/// The most rows of activations of that kernel, and those that it computes together.
pub const MOST_FEW: usize = 8;
const FEW_TOGETHER: usize = 4;

/// Workgroups that keep a GPU busy. If there are more, each computes more rows.
const BUSY: usize = 512;

/// Rows of a matrix per workgroup of the kernel for many rows of activations.
const TILE_ROWS: usize = 64;

impl GpuBackend {
    /// `out = W x` for several matrices.
    pub(super) fn multiply(&mut self, x: Buf, products: &[(Matrix, Buf)]) -> Result<()> {
        if self.rows == 1
            && products.len() <= MOST_PRODUCTS
            && let Some(norm) = self.prior_norm(x, products)?
        {
            return self.multiply_few(x, products, Some(norm));
        }
        if self.rows <= MOST_FEW {
            return products.chunks(MOST_PRODUCTS).try_for_each(|some| self.multiply_few(x, some, None));
        }
        let by_matrices = |(w, _): &(Matrix, Buf)| self.halves_suffice(self.matrices[w.index()].source);
        let (halves, others): (Vec<_>, Vec<_>) = products.iter().copied().partition(by_matrices);
        halves.chunks(MOST_PRODUCTS).try_for_each(|some| self.multiply_matrices(x, some))?;
        others.chunks(MOST_PRODUCTS).try_for_each(|some| self.multiply_many(x, some))
    }

    /// Whether halves suffice for products with a matrix, and the GPU multiplies small matrices of them.
    pub fn halves_suffice(&self, source: Source) -> bool {
        self.gpu.variants.matrices && self.precision == Precision::Fast && !source.kind.is_float()
    }

    /// Records that rows of so many numbers become halves. Returns these and the scales of the rows.
    pub fn halve(&mut self, x: Span, [rows, width, cols]: [usize; 3]) -> Result<[Span; 2]> {
        let [halves, scales] = self.room_for_halves(rows, padded(cols))?;
        let args = Args::new().int(width).int(cols).int(padded(cols));
        let bound = [x.into(), halves.clone().into(), scales.clone().into()];
        self.record(&Name::new(File::Halve, "halve"), [rows, 1, 1], &args, &bound)?;
        Ok([halves, scales])
    }

    /// The kernel of products, without its constants, and what it binds and is told of each product. A workgroup
    /// computes this many rows of a matrix.
    fn products(
        &mut self,
        file: (File, &'static str),
        x: Buf,
        products: &[(Matrix, Buf)],
        (each, args): (usize, Args),
    ) -> Result<Products> {
        let matrices = self.descriptors()?;
        let name = Name::new(file.0, file.1);
        let mut all = Products { name, bound: Vec::with_capacity(16), args, workgroups: 0 };
        for &(w, out) in products {
            let there = &self.matrices[w.index()];
            all.name.slots.push(there.source);
            all.bound.extend(there.spans.iter().cloned().map(Bound::from));
            all.workgroups += (there.descriptor.rows as usize).div_ceil(each);
            all.args = all.args.int(w.index()).int(out.width()).int(all.workgroups);
        }
        all.bound.extend([matrices.into(), self.at(x).into()]);
        all.bound.extend(products.iter().map(|(_, out)| Bound::from(self.at(*out))));
        Ok(all)
    }

    /// The columns of matrices that are multiplied with the same rows.
    fn common_cols(&self, products: &[(Matrix, Buf)]) -> usize {
        let cols = |(w, _): &(Matrix, Buf)| self.matrices[w.index()].descriptor.cols as usize;
        let first = products.first().map_or(0, cols);
        assert!(products.iter().all(|product| cols(product) == first), "matrices with different columns");
        first
    }

    /// Products with one or a few rows of activations. A single row may be normed first.
    fn multiply_few(&mut self, x: Buf, products: &[(Matrix, Buf)], norm: Option<PriorNorm>) -> Result<()> {
        let together = self.rows.next_power_of_two().min(FEW_TOGETHER);
        let rows: usize =
            products.iter().map(|(w, _)| self.matrices[w.index()].descriptor.rows as usize).sum();
        let cols = self.common_cols(products);
        let turns = [4, 2].into_iter().find(|turns| rows / (TEAMS * turns) >= BUSY).unwrap_or(1);
        let args = Args::new().int(x.width()).int(cols).int(self.rows);
        let args = args.float(norm.as_ref().map_or(0.0, |norm| norm.eps));
        let each = TEAMS * turns;
        let mut all = self.products((File::Products, "matvec"), x, products, (each, args))?;
        let any_min = all.name.slots.iter().any(|slot| slot.kind.has_min());
        let added = norm.as_ref().is_some_and(|norm| norm.added.is_some());
        let constants = [
            ("TOKENS", together as u32),
            ("ROWS", turns as u32),
            ("ANY_MIN", any_min.into()),
            ("NORM", norm.is_some().into()),
            ("ADDED", added.into()),
        ];
        all.name.constants.extend(constants);
        if let Some(PriorNorm { x: origin, added, w, sum, normed, .. }) = norm {
            let at_x = all.bound.len() - products.len() - 1;
            all.bound[at_x] = origin.into();
            all.bound.extend([added.into(), w.into(), sum.into(), normed.into()]);
        }
        self.record(&all.name, [all.workgroups, self.rows.div_ceil(together), 1], &all.args, &all.bound)
    }

    /// Memory for rows of halves, and for the scales of these rows.
    fn room_for_halves(&mut self, rows: usize, width: usize) -> Result<[Span; 2]> {
        let sizes = [rows * width * 2, (rows * 4).next_multiple_of(256)].map(|bytes| bytes as u64);
        let wanted = sizes[0] + sizes[1];
        let there = match self.halves.take().filter(|there| there.bytes() >= wanted) {
            Some(there) => there,
            None => self.gpu.allocate(wanted.next_power_of_two(), "scratch")?,
        };
        let whole = self.halves.insert(there).whole();
        // Bindings start at multiples of 256.
        Ok([whole.part(sizes[1], sizes[0]), whole.part(0, sizes[1])])
    }

    /// Products with many rows of activations, by products of small matrices.
    fn multiply_matrices(&mut self, x: Buf, products: &[(Matrix, Buf)]) -> Result<()> {
        let together = if self.rows <= 64 { 64 } else { 128 };
        let cols = self.common_cols(products);
        let [halves, scales] = self.halve(self.at(x), [self.rows, x.width(), cols])?;
        let args = Args::new().int(padded(cols)).int(cols).int(self.rows);
        let mut all =
            self.products((File::Matrices, "matrices_by_matrices"), x, products, (TILE_ROWS, args))?;
        all.name.constants.push(("TOKENS", together as u32));
        let at_x = all.bound.len() - products.len() - 1;
        all.bound[at_x] = halves.into();
        all.bound.push(scales.into());
        self.record(&all.name, [all.workgroups, self.rows.div_ceil(together), 1], &all.args, &all.bound)
    }

    /// Products with many rows of activations.
    fn multiply_many(&mut self, x: Buf, products: &[(Matrix, Buf)]) -> Result<()> {
        let together = if self.rows <= 32 { 32 } else { 64 };
        let cols = self.common_cols(products);
        let args = Args::new().int(x.width()).int(cols).int(self.rows);
        let mut all = self.products((File::Tiles, "tiles"), x, products, (TILE_ROWS, args))?;
        let wide = x.width().is_multiple_of(4) && cols.is_multiple_of(4);
        all.name.constants.extend([("TOKENS", together as u32), ("WIDE", wide.into())]);
        self.record(&all.name, [all.workgroups, self.rows.div_ceil(together), 1], &all.args, &all.bound)
    }

    /// Products of each head with its own matrix.
    pub(super) fn multiply_heads(&mut self, x: Buf, w: &HeadMatrices, out: Buf) -> Result<()> {
        let matrices = self.descriptors()?;
        let stored = &self.matrices[w.stored.index()];
        let stored_cols = stored.descriptor.cols as usize;
        let (entry, cols, groups) = match w.transposed {
            true => ("head_products_transposed", w.rows, stored_cols.div_ceil(32 * 32)),
            false => ("head_products", stored_cols, w.rows.div_ceil(TEAMS)),
        };
        let name = Name::new(File::Heads, entry).reading([stored.source]);
        let mut bound: Vec<Bound> = stored.spans.iter().cloned().map(Bound::from).collect();
        bound.extend([matrices.into(), self.at(x).into(), self.at(out).into()]);
        let args = Args::new().int(w.stored.index()).int(w.heads).int(w.first).int(w.rows).int(cols);
        let args = args.int(x.width()).int(out.width());
        self.record(&name, [groups, w.heads, self.rows], &args, &bound)
    }
}

/// The halves of a row: kernels read 32 at a time.
pub fn padded(cols: usize) -> usize {
    cols.next_multiple_of(32)
}

/// A kernel of products.
struct Products {
    name: Name,
    bound: Vec<Bound>,
    args: Args,
    workgroups: usize,
}
