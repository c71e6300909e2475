//! What the layers of a sequence keep, wherever it is computed.

use std::any::Any;
use std::io::{self, Read, Write};

/// What one layer of one sequence keeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StateShape {
    /// Keys and values.
    Attention(KvShape),
    /// So many floats, however many positions there are.
    Recurrent(usize),
}

/// What one layer of one sequence keeps of attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvShape {
    /// Key heads, and as many value heads.
    pub heads: usize,
    /// Channels of a key.
    pub key_dim: usize,
    /// Channels of a value.
    pub value_dim: usize,
    /// How many positions a query sees, its own among them, if not all.
    pub window: Option<usize>,
    /// Whether a value is nothing but the last channels of its key, and kept only there.
    pub latent: bool,
}

impl KvShape {
    /// Channels of a key before those that are its value, where they are; else all.
    pub fn own_key_dim(&self) -> usize {
        if self.latent { self.key_dim - self.value_dim } else { self.key_dim }
    }

    /// Numbers kept of a position.
    pub fn position(&self) -> usize {
        self.heads * (self.own_key_dim() + self.value_dim)
    }
}

/// What one layer keeps of one sequence, where the backend computes.
///
/// A layer need not be able to go back to every position: a window forgets, and a recurrent state has only the
/// positions that were *marked* before they were computed. All layers of a sequence have the same marks.
pub trait LayerState: Any + Send {
    /// The number of positions it has seen.
    fn len(&self) -> usize;

    /// Whether it has seen none.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The largest number of positions, not more than `len`, that it can go back to.
    fn reach(&self, len: usize) -> usize;

    /// Goes back to `len` positions, if it has seen more. They must be [within reach](Self::reach).
    fn truncate(&mut self, len: usize);

    /// Forgets what neither the positions after the last one need, nor those after `marks`.
    fn settle(&mut self, marks: &[usize]);

    /// Bytes that it takes once it has been computed up to `len` positions with these marks.
    fn bytes_for(&self, len: usize, marks: &[usize]) -> u64;

    /// The same state again. What both have seen they share.
    fn fork(&self) -> Box<dyn LayerState>;

    /// Bytes of what it shares with a fork for as long as neither goes back.
    fn shared_bytes(&self) -> u64;

    /// Writes it to a snapshot.
    ///
    /// # Errors
    /// The writer's.
    fn save(&self, to: &mut dyn Write) -> io::Result<()>;

    /// Reads what [`save`](Self::save) wrote after `len` positions, into a new state.
    ///
    /// # Errors
    /// The reader's; if what is there is something else, or there is no memory for it.
    fn load(&mut self, len: usize, from: &mut dyn Read) -> io::Result<()>;

    /// For the backend that made it.
    fn as_any_mut(&mut self) -> &mut dyn Any;
}

/// A number of a snapshot.
pub(super) fn read_number(from: &mut dyn Read) -> io::Result<usize> {
    let mut bytes = [0; 8];
    from.read_exact(&mut bytes)?;
    usize::try_from(u64::from_le_bytes(bytes)).map_err(|_| damaged())
}

pub(super) fn write_number(to: &mut dyn Write, number: usize) -> io::Result<()> {
    to.write_all(&(number as u64).to_le_bytes())
}

/// What a snapshot is that holds something else than it should.
pub(super) fn damaged() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "its state is not that of so many tokens")
}
