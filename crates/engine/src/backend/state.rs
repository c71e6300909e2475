//! The state of a layer for one sequence, on any device.

use std::any::Any;
use std::io::{self, Read, Write};

/// The kind and size of a layer's state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StateShape {
    /// Keys and values.
    Attention(KvShape),
    /// This many floats, whatever the number of positions.
    Recurrent(usize),
}

/// The shape of one layer's KV cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvShape {
    /// The number of key heads and of value heads.
    pub heads: usize,
    /// Channels of a key.
    pub key_dim: usize,
    /// Channels of a value.
    pub value_dim: usize,
    /// The positions that a query sees; `None` for all before it and its own.
    pub window: Option<Window>,
    /// Whether a value is the last channels of its key and is not stored separately.
    pub latent: bool,
}

/// The positions that a query of a layer sees, if it does not see all.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Window {
    /// This many, up to its own.
    Last(usize),
    /// Those of its chunk, up to its own. Chunks of this length follow each other from position zero on.
    Chunk(usize),
}

impl Window {
    /// The most positions that a query sees.
    pub fn most(self) -> usize {
        match self {
            Window::Last(most) | Window::Chunk(most) => most,
        }
    }

    /// The first position that the last of `len` positions sees.
    pub fn start(self, len: usize) -> usize {
        match self {
            Window::Last(most) => len.saturating_sub(most),
            Window::Chunk(most) => len.saturating_sub(1) / most * most,
        }
    }
}

impl KvShape {
    /// Channels of a key without those that are its value.
    pub fn own_key_dim(&self) -> usize {
        if self.latent { self.key_dim - self.value_dim } else { self.key_dim }
    }

    /// Numbers stored per position.
    pub fn position(&self) -> usize {
        self.heads * (self.own_key_dim() + self.value_dim)
    }
}

/// The state of one layer for one sequence, in the memory of the device that computes.
///
/// A layer may not be able to go back to every position: a window drops old positions, and a recurrent state keeps
/// only the positions that were *marked* before they were computed. All layers of a sequence have the same marks.
pub trait LayerState: Any + Send {
    /// The largest position, at most `len`, that it can go back to.
    fn reach(&self, len: usize) -> usize;

    /// Goes back to `len` positions if it has more. It must be [able to](Self::reach).
    fn truncate(&mut self, len: usize);

    /// Drops what is needed neither for positions after the last one nor for going back to `marks`.
    fn settle(&mut self, marks: &[usize]);

    /// Bytes of the state once it is computed up to `len` positions with these marks.
    fn bytes_for(&self, len: usize, marks: &[usize]) -> u64;

    /// A copy of the state. It shares the positions of both.
    fn fork(&self) -> Box<dyn LayerState>;

    /// Bytes that a fork shares as long as neither goes back.
    fn shared_bytes(&self) -> u64;

    /// Writes the state to a snapshot.
    ///
    /// # Errors
    /// If writing fails.
    fn save(&self, to: &mut dyn Write) -> io::Result<()>;

    /// Reads what [`save`](Self::save) wrote for `len` positions, into a new state.
    ///
    /// # Errors
    /// If reading fails, the data do not match, or there is not enough memory.
    fn load(&mut self, len: usize, from: &mut dyn Read) -> io::Result<()>;

    /// For the backend that made the state.
    fn as_any_mut(&mut self) -> &mut dyn Any;
}

/// The state of a layer that keeps nothing, such as one without attention. It can go back to every position.
pub(super) struct Stateless;

impl LayerState for Stateless {
    fn reach(&self, len: usize) -> usize {
        len
    }

    fn truncate(&mut self, _: usize) {}

    fn settle(&mut self, _: &[usize]) {}

    fn bytes_for(&self, _: usize, _: &[usize]) -> u64 {
        0
    }

    fn fork(&self) -> Box<dyn LayerState> {
        Box::new(Stateless)
    }

    fn shared_bytes(&self) -> u64 {
        0
    }

    fn save(&self, _: &mut dyn Write) -> io::Result<()> {
        Ok(())
    }

    fn load(&mut self, _: usize, _: &mut dyn Read) -> io::Result<()> {
        Ok(())
    }

    fn as_any_mut(&mut self) -> &mut dyn Any {
        self
    }
}

/// Reads a number of a snapshot.
pub(super) fn read_number(from: &mut dyn Read) -> io::Result<usize> {
    let mut bytes = [0; 8];
    from.read_exact(&mut bytes)?;
    usize::try_from(u64::from_le_bytes(bytes)).map_err(|_| damaged())
}

pub(super) fn write_number(to: &mut dyn Write, number: usize) -> io::Result<()> {
    to.write_all(&(number as u64).to_le_bytes())
}

/// The error for a snapshot with unexpected contents.
pub(super) fn damaged() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "the saved state is damaged or has another number of tokens")
}
