//! Memory for layer states in pieces of one size: pages of keys and values, recurrent states.

use std::io::{self, Read, Write};

use crate::error::Result;
use crate::memory::Region;

/// Makes pieces of memory of the same size on the device that computes. A piece has the same bytes on every device,
/// so that snapshots can move between devices.
pub trait Pieces: Clone + Send + 'static {
    /// One piece.
    type Piece: Send + Sync + 'static;

    /// The size of a piece.
    fn bytes(&self) -> u64;

    /// A new piece with arbitrary contents.
    ///
    /// # Errors
    /// If there is not enough memory.
    fn make(&self) -> Result<Self::Piece>;

    /// A copy of a piece.
    ///
    /// # Errors
    /// If there is not enough memory.
    fn copy(&self, piece: &Self::Piece) -> Result<Self::Piece>;

    /// Writes a piece to a snapshot.
    ///
    /// # Errors
    /// If writing or the device fails.
    fn save(&self, piece: &Self::Piece, to: &mut dyn Write) -> io::Result<()>;

    /// Reads a piece that [`save`](Self::save) wrote.
    ///
    /// # Errors
    /// If reading fails or there is not enough memory.
    fn load(&self, from: &mut dyn Read) -> io::Result<Self::Piece>;
}

/// Pieces in RAM. Each is a mapping of its own, so that dropping it returns its memory to the operating system; an
/// allocator would keep it, and it would still count as resident.
#[derive(Clone, Copy, Debug)]
pub struct HostPieces(pub usize);

impl Pieces for HostPieces {
    type Piece = Region;

    fn bytes(&self) -> u64 {
        self.0 as u64
    }

    fn make(&self) -> Result<Region> {
        Region::small(self.0)
    }

    fn copy(&self, piece: &Region) -> Result<Region> {
        let mut copy = self.make()?;
        copy.copy_from_slice(piece);
        Ok(copy)
    }

    fn save(&self, piece: &Region, to: &mut dyn Write) -> io::Result<()> {
        to.write_all(piece)
    }

    fn load(&self, from: &mut dyn Read) -> io::Result<Region> {
        let mut piece = self.make().map_err(io::Error::other)?;
        from.read_exact(&mut piece)?;
        Ok(piece)
    }
}
