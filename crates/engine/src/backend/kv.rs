//! The KV cache of a layer: keys and values in pages of [`KEY_BLOCK`] positions.
//!
//! Pages start at multiples of their length, so attention takes the same steps however the positions were added.
//! Pages are allocated as they are needed. Forks share pages; a shared page is copied before it is written to.
//!
//! A page holds keys `[heads, KEY_BLOCK, key_dim]`, then values `[heads, KEY_BLOCK, value_dim]`. If values are the
//! last channels of their keys, it holds only keys.

use std::any::Any;
use std::io::{self, Read, Write};
use std::ops::Range;
use std::sync::Arc;

use bytemuck::{cast_slice, cast_slice_mut};
use forebay_kernels::{KEY_BLOCK, KvRef};
use half::f16;
use half::slice::HalfFloatSliceExt;
use smallvec::SmallVec;

use super::pieces::{HostPieces, Pieces};
use super::{KvShape, LayerState, damaged};
use crate::error::Result;

/// The type in which keys and values are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KvType {
    /// Half precision.
    F16,
    /// Single precision.
    F32,
}

impl KvType {
    /// Bytes of a number.
    pub fn bytes(self) -> usize {
        match self {
            KvType::F16 => 2,
            KvType::F32 => 4,
        }
    }

    /// Bytes of a page.
    pub fn page_bytes(self, shape: &KvShape) -> usize {
        KEY_BLOCK * shape.position() * self.bytes()
    }
}

/// One layer's keys and values of one sequence, in the memory of any device.
pub struct KvPages<P: Pieces> {
    shape: KvShape,
    kind: KvType,
    memory: P,
    /// The pages up to the last position; `None` for a page that a window has passed.
    pages: Vec<Option<Arc<P::Piece>>>,
    len: usize,
}

impl<P: Pieces> KvPages<P> {
    /// No positions yet. `memory` makes pieces of the size of a [page](KvType::page_bytes).
    pub fn new(shape: KvShape, kind: KvType, memory: P) -> KvPages<P> {
        assert_eq!(memory.bytes(), kind.page_bytes(&shape) as u64);
        KvPages { shape, kind, memory, pages: Vec::new(), len: 0 }
    }

    /// The number of positions.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it has no positions.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The shape of keys and values.
    pub fn shape(&self) -> KvShape {
        self.shape
    }

    /// Adds positions up to `end`, to be written to. Afterwards their pages exist and are not shared.
    ///
    /// # Errors
    /// If there is not enough memory for another page.
    pub fn grow(&mut self, end: usize) -> Result<()> {
        let first = self.len / KEY_BLOCK;
        for page in first..end.div_ceil(KEY_BLOCK) {
            if page == self.pages.len() {
                self.pages.push(Some(Arc::new(self.memory.make()?)));
                continue;
            }
            let page = self.pages[page].as_mut().expect("the last page exists");
            if Arc::get_mut(page).is_none() {
                *page = Arc::new(self.memory.copy(page)?);
            }
        }
        self.len = self.len.max(end);
        Ok(())
    }

    /// A page, unless a window has passed it.
    pub fn piece(&self, page: usize) -> Option<&Arc<P::Piece>> {
        self.pages[page].as_ref()
    }

    /// The number of pages.
    pub fn page_count(&self) -> usize {
        self.pages.len()
    }

    /// The positions that the last of the first `len` positions sees.
    pub fn sight(&self, len: usize) -> Range<usize> {
        self.shape.window.map_or(0, |window| window.start(len))..len
    }

    /// The pages with the positions before `len` that position `len` sees.
    fn seen_from(&self, len: usize) -> Range<usize> {
        self.sight(len + 1).start / KEY_BLOCK..len.div_ceil(KEY_BLOCK)
    }
}

/// Keys and values in RAM.
pub type CpuKv = KvPages<HostPieces>;

impl CpuKv {
    /// No positions yet.
    pub fn on_host(shape: KvShape, kind: KvType) -> CpuKv {
        KvPages::new(shape, kind, HostPieces(kind.page_bytes(&shape)))
    }

    /// Adds one position: keys `[heads, own_key_dim]` and values `[heads, value_dim]`.
    ///
    /// # Errors
    /// If there is not enough memory for another page.
    pub fn push(&mut self, keys: &[f32], values: &[f32]) -> Result<()> {
        let KvShape { key_dim, value_dim, latent, .. } = self.shape;
        let (own, kind) = (self.shape.own_key_dim(), self.kind);
        let (page, row) = (self.len / KEY_BLOCK, self.len % KEY_BLOCK);
        self.grow(self.len + 1)?;
        let all_keys = self.values_at();
        let page = self.pages[page].as_mut().and_then(Arc::get_mut).expect("`grow` made the page unshared");
        for (head, (key, value)) in keys.chunks_exact(own).zip(values.chunks_exact(value_dim)).enumerate() {
            let row = head * KEY_BLOCK + row;
            write(kind, page, row * key_dim, key);
            let place = if latent { row * key_dim + own } else { all_keys + row * value_dim };
            write(kind, page, place, value);
        }
        Ok(())
    }

    /// One head's keys and values at those of the positions that are on this page. Latent values are inside the keys,
    /// with the same distance from each other.
    pub fn page(&self, head: usize, page: usize, positions: Range<usize>) -> (KvRef<'_>, KvRef<'_>) {
        let KvShape { key_dim, value_dim, latent, .. } = self.shape;
        let first = page * KEY_BLOCK;
        let rows = positions.start.max(first) - first..KEY_BLOCK.min(positions.end - first);
        let page = self.pages[page].as_ref().expect("pages in sight exist");
        let row = head * KEY_BLOCK + rows.start;
        let keys = read(self.kind, page, row * key_dim, rows.len() * key_dim);
        let values = if latent {
            let own = self.shape.own_key_dim();
            read(self.kind, page, row * key_dim + own, rows.len() * key_dim - own)
        } else {
            read(self.kind, page, self.values_at() + row * value_dim, rows.len() * value_dim)
        };
        (keys, values)
    }

    /// The offset of the values in a page, if they are stored separately.
    fn values_at(&self) -> usize {
        self.shape.heads * KEY_BLOCK * self.shape.key_dim
    }
}

/// Writes numbers to a page, starting at number `at`.
fn write(kind: KvType, page: &mut [u8], at: usize, values: &[f32]) {
    let range = at..at + values.len();
    match kind {
        KvType::F16 => cast_slice_mut::<_, f16>(page)[range].convert_from_f32_slice(values),
        KvType::F32 => cast_slice_mut(page)[range].copy_from_slice(values),
    }
}

/// The numbers of a page, starting at number `at`.
fn read(kind: KvType, page: &[u8], at: usize, len: usize) -> KvRef<'_> {
    match kind {
        KvType::F16 => KvRef::F16(&cast_slice(page)[at..at + len]),
        KvType::F32 => KvRef::F32(&cast_slice(page)[at..at + len]),
    }
}

impl<P: Pieces> LayerState for KvPages<P> {
    fn reach(&self, len: usize) -> usize {
        let len = len.min(self.len);
        // Tries one position after another, each of which needs few pages.
        (0..=len).rev().find(|&len| self.pages[self.seen_from(len)].iter().all(Option::is_some)).unwrap_or(0)
    }

    fn truncate(&mut self, len: usize) {
        self.len = self.len.min(len);
        self.pages.truncate(self.len.div_ceil(KEY_BLOCK));
    }

    fn settle(&mut self, marks: &[usize]) {
        if self.shape.window.is_none() {
            return;
        }
        let ends = marks.iter().copied().filter(|&mark| mark < self.len).chain([self.len]);
        let seen: SmallVec<[Range<usize>; 8]> = ends.map(|end| self.seen_from(end)).collect();
        for (i, page) in self.pages.iter_mut().enumerate() {
            if !seen.iter().any(|pages| pages.contains(&i)) {
                *page = None;
            }
        }
    }

    fn bytes_for(&self, len: usize, _: &[usize]) -> u64 {
        let pages = len.div_ceil(KEY_BLOCK);
        let kept = self.pages.iter().take(pages).flatten().count();
        (kept + pages.saturating_sub(self.pages.len())) as u64 * self.memory.bytes()
    }

    fn fork(&self) -> Box<dyn LayerState> {
        Box::new(KvPages {
            shape: self.shape,
            kind: self.kind,
            memory: self.memory.clone(),
            pages: self.pages.clone(),
            len: self.len,
        })
    }

    fn shared_bytes(&self) -> u64 {
        // The last page is written to, and a window moves on, so neither stays shared.
        let full = if self.shape.window.is_none() { self.len / KEY_BLOCK } else { 0 };
        full as u64 * self.memory.bytes()
    }

    fn save(&self, to: &mut dyn Write) -> io::Result<()> {
        for page in &self.pages {
            to.write_all(&[u8::from(page.is_some())])?;
            if let Some(page) = page {
                self.memory.save(page, to)?;
            }
        }
        Ok(())
    }

    fn load(&mut self, len: usize, from: &mut dyn Read) -> io::Result<()> {
        for _ in 0..len.div_ceil(KEY_BLOCK) {
            let mut kept = [0];
            from.read_exact(&mut kept)?;
            self.pages.push(match kept {
                [0] => None,
                [1] => Some(Arc::new(self.memory.load(from)?)),
                _ => return Err(damaged()),
            });
        }
        self.len = len;
        if self.reach(len) == len { Ok(()) } else { Err(damaged()) }
    }

    fn as_any_mut(&mut self) -> &mut dyn Any {
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::Window;

    const WINDOWED: KvShape =
        KvShape { heads: 1, key_dim: 1, value_dim: 1, window: Some(Window::Last(100)), latent: false };

    fn push(kv: &mut CpuKv, end: usize) {
        for position in kv.len()..end {
            kv.push(&[position as f32], &[0.0]).unwrap();
        }
    }

    /// What the last position sees on each page that it sees.
    fn seen(kv: &CpuKv) -> Vec<f32> {
        let mut seen = Vec::new();
        for page in kv.seen_from(kv.len()) {
            match kv.page(0, page, 0..kv.len()).0 {
                KvRef::F16(keys) => seen.extend(keys.iter().map(|key| key.to_f32())),
                KvRef::F32(keys) => seen.extend(keys),
            }
        }
        seen
    }

    #[test]
    fn a_window_keeps_the_pages_that_its_end_and_the_marks_see() {
        let mut kv = CpuKv::on_host(WINDOWED, KvType::F32);
        let page = kv.memory.bytes();
        push(&mut kv, 1000);
        assert_eq!(kv.reach(500), 500);
        kv.settle(&[400]);
        // The pages 4 to 6 for position 400, 14 and 15 for 1000.
        assert_eq!(kv.bytes_for(1000, &[400]), 5 * page);
        assert_eq!([1000, 999, 995, 800, 400, 399].map(|len| kv.reach(len)), [1000, 999, 995, 448, 400, 399]);
        kv.truncate(400);
        assert_eq!(seen(&kv), (256..400).map(|p| p as f32).collect::<Vec<_>>());
        push(&mut kv, 450);
        kv.settle(&[]);
        assert_eq!(kv.reach(450), 450);
        assert_eq!(kv.reach(300), 0);
    }

    #[test]
    fn a_fork_shares_pages_until_it_writes() {
        let mut kv = CpuKv::on_host(WINDOWED, KvType::F16);
        push(&mut kv, 70);
        let mut fork = kv.fork();
        let fork = fork.as_any_mut().downcast_mut::<CpuKv>().unwrap();
        fork.truncate(65);
        fork.push(&[-1.0], &[0.0]).unwrap();
        push(&mut kv, 72);
        assert!(Arc::ptr_eq(kv.pages[0].as_ref().unwrap(), fork.pages[0].as_ref().unwrap()));
        assert_eq!(seen(&kv)[64..], [64.0, 65.0, 66.0, 67.0, 68.0, 69.0, 70.0, 71.0]);
        assert_eq!(seen(fork)[64..], [64.0, -1.0]);
    }

    #[test]
    fn a_saved_cache_is_loaded_and_a_wrong_one_is_refused() {
        let mut kv = CpuKv::on_host(WINDOWED, KvType::F32);
        push(&mut kv, 400);
        kv.settle(&[100]);
        let mut saved = Vec::new();
        kv.save(&mut saved).unwrap();
        let mut loaded = CpuKv::on_host(WINDOWED, KvType::F32);
        loaded.load(400, &mut &saved[..]).unwrap();
        assert_eq!((seen(&loaded), loaded.reach(300)), (seen(&kv), kv.reach(300)));
        let last_page = saved.len() - 1 - kv.memory.bytes() as usize;
        saved[last_page] = 0;
        assert!(CpuKv::on_host(WINDOWED, KvType::F32).load(400, &mut &saved[..]).is_err());
    }

    #[test]
    fn positions_come_back_head_by_head_and_page_by_page() {
        let shape = KvShape { heads: 2, key_dim: 3, value_dim: 2, window: None, latent: false };
        for kind in [KvType::F16, KvType::F32] {
            let mut kv = CpuKv::on_host(shape, kind);
            for p in 0..100 {
                let p = p as f32;
                kv.push(&[p, p, p, -p, -p, -p], &[p, 2.0 * p, -p, -2.0 * p]).unwrap();
            }
            kv.truncate(80);
            assert_eq!(kv.len(), 80);
            let mut seen = Vec::new();
            for page in 0..2 {
                match kv.page(1, page, 0..70).1 {
                    KvRef::F16(v) => seen.extend(v.iter().map(|v| v.to_f32())),
                    KvRef::F32(v) => seen.extend(v),
                }
            }
            let expected: Vec<f32> = (0..70).flat_map(|p| [-(p as f32), -2.0 * p as f32]).collect();
            assert_eq!(seen, expected);
        }
    }

    #[test]
    fn latent_values_are_kept_once_inside_the_keys() {
        let shape = KvShape { heads: 1, key_dim: 3, value_dim: 2, window: None, latent: true };
        let mut kv = CpuKv::on_host(shape, KvType::F32);
        for p in 0..70 {
            let p = p as f32;
            kv.push(&[p], &[10.0 * p, -p]).unwrap();
        }
        assert_eq!(kv.bytes_for(70, &[]), 2 * 64 * 3 * 4);
        let mut saved = Vec::new();
        kv.save(&mut saved).unwrap();
        let mut loaded = CpuKv::on_host(shape, KvType::F32);
        loaded.load(70, &mut &saved[..]).unwrap();
        for kv in [&kv, &loaded] {
            let (KvRef::F32(keys), KvRef::F32(values)) = kv.page(0, 1, 0..66) else { panic!("they are f32") };
            assert_eq!(keys, [64.0, 640.0, -64.0, 65.0, 650.0, -65.0]);
            assert_eq!(values, &keys[1..]);
        }
    }
}
