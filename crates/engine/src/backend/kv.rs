//! Attention memory on the CPU: keys and values in pages of [`KEY_BLOCK`] positions.
//!
//! Pages start at multiples of their length, so the steps of attention are the same however the positions came
//! in. Memory grows a page at a time, as it is used, and goes back to the system with the page.

use std::any::Any;

use bytemuck::{cast_slice, cast_slice_mut};
use forebay_kernels::{KEY_BLOCK, KvRef};
use half::f16;
use half::slice::HalfFloatSliceExt;

use super::{Kv, KvShape};
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
    pages: Vec<Page>,
    len: usize,
}

impl CpuKv {
    pub fn new(shape: KvShape, kind: KvType) -> CpuKv {
        CpuKv { shape, kind, pages: Vec::new(), len: 0 }
    }

    pub fn shape(&self) -> KvShape {
        self.shape
    }

    /// Adds one position: keys `[heads, key_dim]` and values `[heads, value_dim]`.
    ///
    /// # Errors
    /// If the system has no memory for another page.
    pub fn push(&mut self, keys: &[f32], values: &[f32]) -> Result<()> {
        let KvShape { key_dim, value_dim, .. } = self.shape;
        let (page, row) = (self.len / KEY_BLOCK, self.len % KEY_BLOCK);
        if page == self.pages.len() {
            self.pages.push(Page::new(self.shape, self.kind)?);
        }
        let page = &mut self.pages[page];
        for (head, (key, value)) in keys.chunks_exact(key_dim).zip(values.chunks_exact(value_dim)).enumerate()
        {
            page.keys.write((head * KEY_BLOCK + row) * key_dim, key);
            page.values.write((head * KEY_BLOCK + row) * value_dim, value);
        }
        self.len += 1;
        Ok(())
    }

    /// One head's keys and values on one page, as far as the first `len` positions reach.
    pub fn page(&self, head: usize, page: usize, len: usize) -> (KvRef<'_>, KvRef<'_>) {
        let KvShape { key_dim, value_dim, .. } = self.shape;
        let rows = KEY_BLOCK.min(len - page * KEY_BLOCK);
        let page = &self.pages[page];
        let keys = page.keys.read(head * KEY_BLOCK * key_dim, rows * key_dim);
        (keys, page.values.read(head * KEY_BLOCK * value_dim, rows * value_dim))
    }
}

impl Kv for CpuKv {
    fn len(&self) -> usize {
        self.len
    }

    fn bytes_for(&self, len: usize) -> u64 {
        let KvShape { heads, key_dim, value_dim } = self.shape;
        let page = heads * KEY_BLOCK * (key_dim + value_dim) * self.kind.bytes();
        len.div_ceil(KEY_BLOCK) as u64 * page as u64
    }

    fn truncate(&mut self, len: usize) {
        self.len = self.len.min(len);
        self.pages.truncate(self.len.div_ceil(KEY_BLOCK));
    }

    fn as_any_mut(&mut self) -> &mut dyn Any {
        self
    }
}

/// Keys and values of [`KEY_BLOCK`] positions, each `[heads, KEY_BLOCK, dim]`.
struct Page {
    keys: Cells,
    values: Cells,
}

impl Page {
    fn new(shape: KvShape, kind: KvType) -> Result<Page> {
        let cells = |dim| Cells::new(kind, shape.heads * KEY_BLOCK * dim);
        Ok(Page { keys: cells(shape.key_dim)?, values: cells(shape.value_dim)? })
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

    #[test]
    fn positions_come_back_head_by_head_and_page_by_page() {
        let shape = KvShape { heads: 2, key_dim: 3, value_dim: 2 };
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
                match kv.page(1, page, 70).1 {
                    KvRef::F16(v) => seen.extend(v.iter().map(|v| v.to_f32())),
                    KvRef::F32(v) => seen.extend(v),
                }
            }
            let expected: Vec<f32> = (0..70).flat_map(|p| [-(p as f32), -2.0 * p as f32]).collect();
            assert_eq!(seen, expected);
        }
    }
}
