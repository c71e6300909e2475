//! Hashes of bytes, the same on every machine and in every version.

use std::ops::Range;

use crate::format::ModelFile;

/// FNV-1a with 128 bits, for names that must not collide by chance.
pub fn fnv_128(bytes: impl IntoIterator<Item = u8>) -> u128 {
    let (basis, prime) = (0x6c62_272e_07bb_0142_62b8_2175_6295_c58d, 0x0100_0000_0000_0000_0000_013b);
    bytes.into_iter().fold(basis, |hash: u128, byte| (hash ^ u128::from(byte)).wrapping_mul(prime))
}

/// FNV-1a: the same on every machine and in every version.
pub struct Fnv(pub u64);

impl Default for Fnv {
    fn default() -> Self {
        Fnv(0xcbf2_9ce4_8422_2325)
    }
}

impl Fnv {
    /// The hash of some bytes.
    pub fn of(bytes: &[u8]) -> u64 {
        let mut hash = Fnv::default();
        hash.add(bytes);
        hash.0
    }

    /// Continues with more bytes.
    pub fn add(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.0 = (self.0 ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
        }
    }

    /// Goes on with a range.
    pub(crate) fn add_range(&mut self, range: &Range<usize>) {
        self.add(&(range.start as u64).to_le_bytes());
        self.add(&(range.end as u64).to_le_bytes());
    }

    /// A model's table of tensors.
    pub(crate) fn add_table(&mut self, model: &ModelFile) {
        for tensor in &model.tensors {
            self.add(tensor.name.as_bytes());
            self.add(tensor.dtype.name().as_bytes());
            self.add(&tensor.offset.to_le_bytes());
            self.add(&tensor.len.to_le_bytes());
        }
    }
}
