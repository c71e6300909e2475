//! KV caches and recurrent states in GPU memory.

use std::io::{self, Read, Write};
use std::sync::Arc;

use forebay_engine::Result;
use forebay_engine::internals::backend::Pieces;

use crate::heap::{Address, Heap};

/// Pieces in a heap.
#[derive(Clone)]
pub struct DevicePieces {
    heap: Arc<Heap>,
    bytes: usize,
}

impl DevicePieces {
    /// Pieces of this size.
    pub fn new(heap: &Arc<Heap>, bytes: usize) -> DevicePieces {
        DevicePieces { heap: Arc::clone(heap), bytes }
    }
}

/// One piece.
pub struct DevicePiece {
    heap: Arc<Heap>,
    address: Address,
    bytes: u64,
}

impl DevicePiece {
    /// Where it is.
    pub fn address(&self) -> Address {
        self.address
    }
}

impl Drop for DevicePiece {
    fn drop(&mut self) {
        self.heap.give_back(self.address, self.bytes);
    }
}

impl Pieces for DevicePieces {
    type Piece = DevicePiece;

    fn bytes(&self) -> u64 {
        self.bytes as u64
    }

    fn make(&self) -> Result<DevicePiece> {
        let address = self.heap.take(self.bytes as u64)?;
        Ok(DevicePiece { heap: Arc::clone(&self.heap), address, bytes: self.bytes as u64 })
    }

    fn copy(&self, piece: &DevicePiece) -> Result<DevicePiece> {
        let copy = self.make()?;
        self.heap.copy(piece.address, copy.address, piece.bytes)?;
        Ok(copy)
    }

    fn save(&self, piece: &DevicePiece, to: &mut dyn Write) -> io::Result<()> {
        let mut bytes = vec![0; self.bytes];
        self.heap.read(piece.address, &mut bytes).map_err(io::Error::other)?;
        to.write_all(&bytes)
    }

    fn load(&self, from: &mut dyn Read) -> io::Result<DevicePiece> {
        let mut bytes = vec![0; self.bytes];
        from.read_exact(&mut bytes)?;
        let piece = self.make().map_err(io::Error::other)?;
        self.heap.write(piece.address, &bytes).map_err(io::Error::other)?;
        Ok(piece)
    }
}
