//! Writes a file of any size with little memory: all CPUs draw pieces, which are written in order.

use std::io::Write;
use std::path::Path;
use std::sync::mpsc::sync_channel;
use std::thread;

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::SeedableRng;

use super::layout::{Layout, Tensor};
use crate::blocks::Cancel;
use crate::error::{Error, Result};

/// The bytes of a piece, unless a row has more.
const PIECE: usize = 4 << 20;

/// Some rows of a tensor.
struct Piece<'a> {
    tensor: &'a Tensor,
    rows: usize,
    /// Zero bytes after it.
    padding: usize,
}

impl Piece<'_> {
    /// The bytes of the piece, from its own stream of random numbers, so that they do not depend on the thread.
    fn draw(&self, seed: u64, stream: u64) -> Vec<u8> {
        let Piece { tensor, rows, padding } = *self;
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        rng.set_stream(stream);
        let len = rows * tensor.row_bytes;
        let mut bytes = vec![0; len + padding];
        tensor.content.fill(tensor.dtype, tensor.cols, &mut rng, &mut bytes[..len]);
        bytes
    }
}

/// Writes the file. `progress` receives the bytes written so far.
pub(super) fn write(
    path: &Path,
    layout: &Layout,
    seed: u64,
    out: &mut dyn Write,
    cancel: &Cancel,
    progress: &mut dyn FnMut(u64),
) -> Result<()> {
    let pieces: Vec<Piece<'_>> = layout.tensors.iter().flat_map(pieces).collect();
    let threads = thread::available_parallelism().map_or(1, usize::from);
    let mut done = layout.header.len() as u64;
    let failed = |source| Error::io(path, "cannot write", source);
    out.write_all(&layout.header).map_err(failed)?;
    thread::scope(|scope| {
        let mut receivers = Vec::with_capacity(threads);
        for first in 0..threads {
            let (sender, receiver) = sync_channel(1);
            receivers.push(receiver);
            let mine = pieces.iter().enumerate().skip(first).step_by(threads);
            scope.spawn(move || {
                for (stream, piece) in mine {
                    // After writing has failed, nobody receives.
                    if sender.send(piece.draw(seed, stream as u64)).is_err() {
                        return;
                    }
                }
            });
        }
        for receiver in (0..pieces.len()).map(|i| &receivers[i % threads]) {
            cancel.check()?;
            let bytes = receiver.recv().expect("a thread draws every piece");
            out.write_all(&bytes).map_err(failed)?;
            done += bytes.len() as u64;
            progress(done);
        }
        drop(receivers);
        Ok(())
    })
}

fn pieces(tensor: &Tensor) -> impl Iterator<Item = Piece<'_>> {
    let most = (PIECE / tensor.row_bytes.max(1)).max(1);
    (0..tensor.rows).step_by(most).map(move |first| {
        let rows = most.min(tensor.rows - first);
        let padding = if first + rows == tensor.rows { tensor.padding } else { 0 };
        Piece { tensor, rows, padding }
    })
}
