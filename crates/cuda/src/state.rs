//! KV caches and recurrent states in GPU memory.

use std::io::{self, Read, Write};
use std::sync::Arc;

use forebay_engine::Result;
use forebay_engine::internals::backend::Pieces;

use crate::driver::{Address, Gpu};

/// Pieces in GPU memory.
#[derive(Clone)]
pub struct DevicePieces {
    gpu: Arc<Gpu>,
    bytes: usize,
}

impl DevicePieces {
    /// Pieces of this size.
    pub fn new(gpu: &Arc<Gpu>, bytes: usize) -> DevicePieces {
        DevicePieces { gpu: gpu.clone(), bytes }
    }
}

/// One piece.
pub struct DevicePiece {
    gpu: Arc<Gpu>,
    address: Address,
    bytes: u64,
}

impl DevicePiece {
    /// Its address.
    pub fn address(&self) -> Address {
        self.address
    }
}

impl Drop for DevicePiece {
    fn drop(&mut self) {
        self.gpu.return_piece(self.address, self.bytes);
    }
}

impl Pieces for DevicePieces {
    type Piece = DevicePiece;

    fn bytes(&self) -> u64 {
        self.bytes as u64
    }

    fn make(&self) -> Result<DevicePiece> {
        let address = self.gpu.take_piece(self.bytes as u64)?;
        Ok(DevicePiece { gpu: self.gpu.clone(), address, bytes: self.bytes as u64 })
    }

    fn copy(&self, piece: &DevicePiece) -> Result<DevicePiece> {
        let copy = self.make()?;
        self.gpu.copy(piece.address, copy.address, self.bytes)?;
        Ok(copy)
    }

    fn save(&self, piece: &DevicePiece, to: &mut dyn Write) -> io::Result<()> {
        let mut bytes = vec![0; self.bytes];
        self.gpu.read(piece.address, &mut bytes).map_err(io::Error::other)?;
        to.write_all(&bytes)
    }

    fn load(&self, from: &mut dyn Read) -> io::Result<DevicePiece> {
        let mut bytes = vec![0; self.bytes];
        from.read_exact(&mut bytes)?;
        let piece = self.make().map_err(io::Error::other)?;
        self.gpu.write(piece.address, &bytes).map_err(io::Error::other)?;
        Ok(piece)
    }
}
