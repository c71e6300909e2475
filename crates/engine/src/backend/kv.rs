//! Attention memory on the CPU: keys and values in pages of [`KEY_BLOCK`] positions.
//!
//! Pages start at multiples of their length, so the steps of attention are the same however the positions came
//! in. Memory grows a page at a time, as it is used, and goes back to the system with the page. Forks share pages;
//! one that is to be written to is copied first.

use std::any::Any;
use std::io::{self, Read, Write};
use std::iter;
use std::ops::Range;
use std::sync::Arc;

use bytemuck::{cast_slice, cast_slice_mut};
use forebay_kernels::{KEY_BLOCK, KvRef};
use half::f16;
use half::slice::HalfFloatSliceExt;
use smallvec::SmallVec;

use super::{KvShape, LayerState, damaged};
use crate::error::Result;
use crate::memory::Region;

/// The type in which keys and values are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KvType {
    /// Half precision.
    F16,
    /// Single precision.
    F32,
}

impl KvType {
    /// Bytes of a number.
    fn bytes(self) -> usize {
        match self {
            KvType::F16 => 2,
            KvType::F32 => 4,
        }
    }
}

/// One layer's keys and values of one sequence.
pub struct CpuKv {
    shape: KvShape,
    kind: KvType,
    /// The pages up to the last position; `None` where a window has left one behind.
    pages: Vec<Option<Arc<Page>>>,
    len: usize,
}

impl CpuKv {
    pub fn new(shape: KvShape, kind: KvType) -> CpuKv {
        CpuKv { shape, kind, pages: Vec::new(), len: 0 }
    }

    pub fn shape(&self) -> KvShape {
        self.shape
    }

    /// Adds one position: keys `[heads, own_key_dim]` and values `[heads, value_dim]`.
    ///
    /// # Errors
    /// If the system has no memory for another page.
    pub fn push(&mut self, keys: &[f32], values: &[f32]) -> Result<()> {
        let KvShape { key_dim, value_dim, .. } = self.shape;
        let own = self.shape.own_key_dim();
        let (page, row) = (self.len / KEY_BLOCK, self.len % KEY_BLOCK);
        if page == self.pages.len() {
            self.pages.push(Some(Arc::new(Page::new(self.shape, self.kind)?)));
        }
        let page = self.pages[page].as_mut().expect("the last page is kept");
        if Arc::get_mut(page).is_none() {
            *page = Arc::new(page.copy(self.shape, self.kind)?);
        }
        let page = Arc::get_mut(page).expect("it is ours alone");
        for (head, (key, value)) in keys.chunks_exact(own).zip(values.chunks_exact(value_dim)).enumerate() {
            let row = head * KEY_BLOCK + row;
            page.keys.write(row * key_dim, key);
            match &mut page.values {
                Some(values) => values.write(row * value_dim, value),
                None => page.keys.write(row * key_dim + own, value),
            }
        }
        self.len += 1;
        Ok(())
    }

    /// The positions that the last of the first `len` sees.
    pub fn sight(&self, len: usize) -> Range<usize> {
        self.shape.window.map_or(0, |window| len.saturating_sub(window))..len
    }

    /// One head's keys and values on one page, as far as they are among these positions. Latent values are inside the
    /// keys, and as far from each other as those.
    pub fn page(&self, head: usize, page: usize, positions: Range<usize>) -> (KvRef<'_>, KvRef<'_>) {
        let KvShape { key_dim, value_dim, .. } = self.shape;
        let first = page * KEY_BLOCK;
        let rows = positions.start.max(first) - first..KEY_BLOCK.min(positions.end - first);
        let page = self.pages[page].as_ref().expect("pages in sight are kept");
        let row = head * KEY_BLOCK + rows.start;
        let keys = page.keys.read(row * key_dim, rows.len() * key_dim);
        let values = match &page.values {
            Some(values) => values.read(row * value_dim, rows.len() * value_dim),
            None => {
                let own = self.shape.own_key_dim();
                page.keys.read(row * key_dim + own, rows.len() * key_dim - own)
            }
        };
        (keys, values)
    }
}

impl CpuKv {
    fn page_bytes(&self) -> u64 {
        (KEY_BLOCK * self.shape.position() * self.kind.bytes()) as u64
    }

    /// The pages that the position after the first `len` sees, and those that it shares a page with.
    fn seen_from(&self, len: usize) -> Range<usize> {
        self.sight(len + 1).start / KEY_BLOCK..len.div_ceil(KEY_BLOCK)
    }
}

impl LayerState for CpuKv {
    fn len(&self) -> usize {
        self.len
    }

    fn reach(&self, len: usize) -> usize {
        let len = len.min(self.len);
        // What is seen from a page is kept if it is seen from one of its positions, so a few steps find one.
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
        (kept + pages.saturating_sub(self.pages.len())) as u64 * self.page_bytes()
    }

    fn fork(&self) -> Box<dyn LayerState> {
        Box::new(CpuKv { shape: self.shape, kind: self.kind, pages: self.pages.clone(), len: self.len })
    }

    fn shared_bytes(&self) -> u64 {
        // The last page is written to, and a window moves on.
        let full = if self.shape.window.is_none() { self.len / KEY_BLOCK } else { 0 };
        full as u64 * self.page_bytes()
    }

    fn save(&self, to: &mut dyn Write) -> io::Result<()> {
        for page in &self.pages {
            to.write_all(&[u8::from(page.is_some())])?;
            if let Some(page) = page {
                for cells in page.cells() {
                    to.write_all(&cells.bytes)?;
                }
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
                [1] => {
                    let mut page = Page::new(self.shape, self.kind).map_err(io::Error::other)?;
                    for cells in page.cells_mut() {
                        from.read_exact(&mut cells.bytes)?;
                    }
                    Some(Arc::new(page))
                }
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

/// Keys and values of [`KEY_BLOCK`] positions, each `[heads, KEY_BLOCK, dim]`.
struct Page {
    keys: Cells,
    /// `None` where they are inside the keys.
    values: Option<Cells>,
}

impl Page {
    fn new(shape: KvShape, kind: KvType) -> Result<Page> {
        let cells = |dim| Cells::new(kind, shape.heads * KEY_BLOCK * dim);
        let values = if shape.latent { None } else { Some(cells(shape.value_dim)?) };
        Ok(Page { keys: cells(shape.key_dim)?, values })
    }

    fn copy(&self, shape: KvShape, kind: KvType) -> Result<Page> {
        let mut page = Page::new(shape, kind)?;
        for (to, from) in page.cells_mut().zip(self.cells()) {
            to.bytes.copy_from_slice(&from.bytes);
        }
        Ok(page)
    }

    fn cells(&self) -> impl Iterator<Item = &Cells> {
        iter::once(&self.keys).chain(&self.values)
    }

    fn cells_mut(&mut self) -> impl Iterator<Item = &mut Cells> {
        iter::once(&mut self.keys).chain(&mut self.values)
    }
}

/// Numbers in memory of their own: what an allocator is given back it keeps, and the budget counts.
struct Cells {
    kind: KvType,
    bytes: Region,
}

impl Cells {
    fn new(kind: KvType, len: usize) -> Result<Cells> {
        Ok(Cells { kind, bytes: Region::small(len * kind.bytes())? })
    }

    fn write(&mut self, at: usize, values: &[f32]) {
        let range = at..at + values.len();
        match self.kind {
            KvType::F16 => cast_slice_mut::<_, f16>(&mut self.bytes)[range].convert_from_f32_slice(values),
            KvType::F32 => cast_slice_mut(&mut self.bytes)[range].copy_from_slice(values),
        }
    }

    fn read(&self, at: usize, len: usize) -> KvRef<'_> {
        match self.kind {
            KvType::F16 => KvRef::F16(&cast_slice(&self.bytes)[at..at + len]),
            KvType::F32 => KvRef::F32(&cast_slice(&self.bytes)[at..at + len]),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WINDOWED: KvShape =
        KvShape { heads: 1, key_dim: 1, value_dim: 1, window: Some(100), latent: false };

    fn push(kv: &mut CpuKv, end: usize) {
        for position in kv.len()..end {
            kv.push(&[position as f32], &[0.0]).unwrap();
        }
    }

    /// What the last of the kept positions sees on each page that it sees.
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
    fn a_window_keeps_what_its_end_and_the_marks_see() {
        let mut kv = CpuKv::new(WINDOWED, KvType::F32);
        let page = kv.page_bytes();
        push(&mut kv, 1000);
        assert_eq!(kv.reach(500), 500);
        kv.settle(&[400]);
        // Of 400 pages 4 to 6, of 1000 pages 14 and 15.
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
        let mut kv = CpuKv::new(WINDOWED, KvType::F16);
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
    fn what_was_saved_comes_back_and_something_else_does_not() {
        let mut kv = CpuKv::new(WINDOWED, KvType::F32);
        push(&mut kv, 400);
        kv.settle(&[100]);
        let mut saved = Vec::new();
        kv.save(&mut saved).unwrap();
        let mut loaded = CpuKv::new(WINDOWED, KvType::F32);
        loaded.load(400, &mut &saved[..]).unwrap();
        assert_eq!((seen(&loaded), loaded.reach(300)), (seen(&kv), kv.reach(300)));
        let last_page = saved.len() - 1 - kv.page_bytes() as usize;
        saved[last_page] = 0;
        assert!(CpuKv::new(WINDOWED, KvType::F32).load(400, &mut &saved[..]).is_err());
    }

    #[test]
    fn positions_come_back_head_by_head_and_page_by_page() {
        let shape = KvShape { heads: 2, key_dim: 3, value_dim: 2, window: None, latent: false };
        for kind in [KvType::F16, KvType::F32] {
            let mut kv = CpuKv::new(shape, kind);
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
        let mut kv = CpuKv::new(shape, KvType::F32);
        for p in 0..70 {
            let p = p as f32;
            kv.push(&[p], &[10.0 * p, -p]).unwrap();
        }
        assert_eq!(kv.bytes_for(70, &[]), 2 * 64 * 3 * 4);
        let mut saved = Vec::new();
        kv.save(&mut saved).unwrap();
        let mut loaded = CpuKv::new(shape, KvType::F32);
        loaded.load(70, &mut &saved[..]).unwrap();
        for kv in [&kv, &loaded] {
            let (KvRef::F32(keys), KvRef::F32(values)) = kv.page(0, 1, 0..66) else { panic!("they are f32") };
            assert_eq!(keys, [64.0, 640.0, -64.0, 65.0, 650.0, -65.0]);
            assert_eq!(values, &keys[1..]);
        }
    }
}
