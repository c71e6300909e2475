//! Memory for what layers keep, in pieces of one size: pages of keys and values, recurrent states.

use std::io::{self, Read, Write};

use crate::error::Result;
use crate::memory::Region;

/// Makes pieces of memory, all alike, where a backend computes. What a piece holds is the same bytes wherever it is, so
/// that snapshots can move.
pub trait Pieces: Clone + Send + 'static {
    /// One of them.
    type Piece: Send + Sync + 'static;

    /// The size of a piece.
    fn bytes(&self) -> u64;

    /// A new piece. What it holds is anything.
    ///
    /// # Errors
    /// If there is no memory for it.
    fn make(&self) -> Result<Self::Piece>;

    /// A piece that holds the same.
    ///
    /// # Errors
    /// If there is no memory for it.
    fn copy(&self, piece: &Self::Piece) -> Result<Self::Piece>;

    /// Writes what it holds to a snapshot.
    ///
    /// # Errors
    /// The writer's, and the device's.
    fn save(&self, piece: &Self::Piece, to: &mut dyn Write) -> io::Result<()>;

    /// Reads what [`save`](Self::save) wrote.
    ///
    /// # Errors
    /// The reader's; if there is no memory for it.
    fn load(&self, from: &mut dyn Read) -> io::Result<Self::Piece>;
}

/// Pieces in the computer's memory, which goes back to the system with them: what an allocator is given back it keeps,
/// and the budget counts.
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
