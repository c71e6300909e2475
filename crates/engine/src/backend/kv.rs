//! Attention memory on the CPU: keys and values in pages of [`KEY_BLOCK`] positions.
//!
//! Pages start at multiples of their length, so the steps of attention are the same however the positions came
//! in. Memory grows a page at a time, as it is used.

use std::any::Any;

use forebay_kernels::{KEY_BLOCK, KvRef};
use half::f16;
use half::slice::HalfFloatSliceExt;

use super::{Kv, KvShape};

/// The type in which keys and values are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KvType {
    /// Half precision.
    F16,
    /// Single precision.
    F32,
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
    pub fn push(&mut self, keys: &[f32], values: &[f32]) {
        let KvShape { heads, key_dim, value_dim } = self.shape;
        let (page, row) = (self.len / KEY_BLOCK, self.len % KEY_BLOCK);
        if page == self.pages.len() {
            self.pages.push(Page {
                keys: Cells::new(self.kind, heads * KEY_BLOCK * key_dim),
                values: Cells::new(self.kind, heads * KEY_BLOCK * value_dim),
            });
        }
        let page = &mut self.pages[page];
        for (head, (key, value)) in keys.chunks_exact(key_dim).zip(values.chunks_exact(value_dim)).enumerate()
        {
            page.keys.write((head * KEY_BLOCK + row) * key_dim, key);
            page.values.write((head * KEY_BLOCK + row) * value_dim, value);
        }
        self.len += 1;
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

enum Cells {
    F16(Box<[f16]>),
    F32(Box<[f32]>),
}

impl Cells {
    fn new(kind: KvType, len: usize) -> Cells {
        match kind {
            KvType::F16 => Cells::F16(vec![f16::ZERO; len].into()),
            KvType::F32 => Cells::F32(vec![0.0; len].into()),
        }
    }

    fn write(&mut self, at: usize, values: &[f32]) {
        match self {
            Cells::F16(cells) => cells[at..at + values.len()].convert_from_f32_slice(values),
            Cells::F32(cells) => cells[at..at + values.len()].copy_from_slice(values),
        }
    }

    fn read(&self, at: usize, len: usize) -> KvRef<'_> {
        match self {
            Cells::F16(cells) => KvRef::F16(&cells[at..at + len]),
            Cells::F32(cells) => KvRef::F32(&cells[at..at + len]),
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
                kv.push(&[p, p, p, -p, -p, -p], &[p, 2.0 * p, -p, -2.0 * p]);
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
