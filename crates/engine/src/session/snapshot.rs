//! Conversations in files, to go on with later.
//!
//! A snapshot is written beside its place and then moved there, so that it is whole or not there at all. It ends with a
//! checksum, and it names the model it belongs to: a state means nothing to other weights.

use std::fs::File;
use std::io::{self, BufReader, BufWriter, Read, Write};
use std::path::Path;

use bytemuck::{cast_slice, cast_slice_mut};
use crc32fast::Hasher;

use super::{MARKS, Session};
use crate::TokenId;
use crate::engine::Engine;
use crate::error::{Error, Result};
use crate::files::write_whole;

/// What the file is, and its version.
const MAGIC: &[u8; 8] = b"FBCHAT\0\x01";

/// The checksum at the end of the file.
const CHECKSUM: u64 = 4;

impl Session {
    /// Writes the conversation to a file, whole or not at all.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub fn save(&self, path: &Path) -> Result<()> {
        let fingerprint = self.engine.fingerprint()?;
        let written = write_whole(path, |file| {
            let mut to = Checked { inner: BufWriter::new(file), hasher: Hasher::new() };
            self.write(fingerprint, &mut to)?;
            let Checked { mut inner, hasher } = to;
            inner.write_all(&hasher.finalize().to_le_bytes())?;
            inner.flush()
        });
        written.map_err(|error| Error::io(path, "cannot save the conversation", error))
    }

    fn write(&self, fingerprint: u64, to: &mut dyn Write) -> io::Result<()> {
        to.write_all(MAGIC)?;
        to.write_all(&fingerprint.to_le_bytes())?;
        // The layers may hold more than all have computed: of a batch that failed.
        let state = self.state.fork();
        for count in [self.tokens.len(), state.marks().len(), self.logits.len()] {
            to.write_all(&(count as u64).to_le_bytes())?;
        }
        for token in &self.tokens {
            to.write_all(&token.0.to_le_bytes())?;
        }
        for &mark in state.marks() {
            to.write_all(&(mark as u64).to_le_bytes())?;
        }
        to.write_all(cast_slice(&self.logits))?;
        state.save(to)
    }

    /// The conversation that [`save`](Self::save) wrote. It goes on with the bits of one that was never stopped.
    ///
    /// # Errors
    /// If the file cannot be read, is not a snapshot, is damaged, or is one of another model, or of this one computed
    /// with other precision; if there is no memory for it.
    pub fn load(engine: &Engine, path: &Path) -> Result<Session> {
        let mut session = engine.session();
        session.read_file(path).map_err(|trouble| match trouble {
            Trouble::Refused(error) => error,
            Trouble::Damaged(what) => {
                Error::format(path, format!("the saved conversation is damaged: {what}"))
            }
            Trouble::Reading(error) => match error.kind() {
                io::ErrorKind::UnexpectedEof | io::ErrorKind::InvalidData => {
                    Error::format(path, format!("the saved conversation is damaged: {error}"))
                }
                _ => Error::io(path, "cannot read the saved conversation", error),
            },
        })?;
        Ok(session)
    }

    fn read_file(&mut self, path: &Path) -> Result<(), Trouble> {
        let file = File::open(path)?;
        let len = file.metadata()?.len();
        check(file, len, path)?;
        let mut from = BufReader::new(File::open(path)?).take(len - CHECKSUM);
        self.read(path, &mut from)?;
        if from.limit() > 0 {
            return Err(Trouble::Damaged("something follows its end"));
        }
        Ok(())
    }

    fn read(&mut self, path: &Path, from: &mut dyn Read) -> Result<(), Trouble> {
        let mut number = || {
            let mut bytes = [0; 8];
            from.read_exact(&mut bytes).map(|()| u64::from_le_bytes(bytes))
        };
        number()?; // What the file is was checked.
        if number()? != self.engine.fingerprint()? {
            let message =
                "the conversation was saved with another model, or with this one and other precision";
            return Err(Error::format(path, message).into());
        }
        let [tokens, marks, logits] = [number()?, number()?, number()?];
        let context = self.engine.context();
        if tokens > context as u64 {
            return Err(Error::Context { tokens: tokens as usize, limit: context }.into());
        }
        if marks > MARKS as u64 || (logits != 0 && logits != self.engine.vocab_size() as u64) {
            return Err(Trouble::Damaged("its counts are not those of a conversation"));
        }
        let mut ids = vec![0u32; tokens as usize];
        from.read_exact(cast_slice_mut(&mut ids))?;
        if ids.iter().any(|&id| id as usize >= self.engine.vocab_size()) {
            return Err(Trouble::Damaged("a token is not in the vocabulary"));
        }
        let mut places = vec![0u64; marks as usize];
        from.read_exact(cast_slice_mut(&mut places))?;
        let places: Vec<usize> = places.into_iter().map(|place| place as usize).collect();
        self.logits.resize(logits as usize, 0.0);
        from.read_exact(cast_slice_mut(&mut self.logits))?;
        self.make_room(ids.len())?;
        self.state.load(ids.len(), &places, from)?;
        self.tokens.extend(ids.into_iter().map(TokenId));
        self.make_room(self.tokens.len())?;
        Ok(())
    }
}

/// Why a snapshot cannot be used.
enum Trouble {
    Reading(io::Error),
    Damaged(&'static str),
    Refused(Error),
}

impl From<io::Error> for Trouble {
    fn from(error: io::Error) -> Trouble {
        Trouble::Reading(error)
    }
}

impl From<Error> for Trouble {
    fn from(error: Error) -> Trouble {
        Trouble::Refused(error)
    }
}

/// Checks what the file is and its checksum, before anything in it is believed.
fn check(file: File, len: u64, path: &Path) -> Result<(), Trouble> {
    let mut from = BufReader::with_capacity(1 << 20, file);
    let mut magic = [0; MAGIC.len()];
    if len >= MAGIC.len() as u64 + CHECKSUM {
        from.read_exact(&mut magic)?;
    }
    let ([name @ .., version], [their_name @ .., their_version]) = (MAGIC, &magic);
    if their_name != name {
        return Err(Error::format(path, "not a saved conversation").into());
    }
    if their_version != version {
        return Err(Error::Unsupported(format!(
            "{}: a saved conversation of version {their_version}; this program reads version {version}",
            path.display()
        ))
        .into());
    }
    let mut to = Checked { inner: io::sink(), hasher: Hasher::new() };
    to.write_all(&magic)?;
    io::copy(&mut (&mut from).take(len - CHECKSUM - MAGIC.len() as u64), &mut to)?;
    let mut checksum = [0; CHECKSUM as usize];
    from.read_exact(&mut checksum)?;
    if u32::from_le_bytes(checksum) != to.hasher.finalize() {
        return Err(Trouble::Damaged("its checksum is wrong"));
    }
    Ok(())
}

/// A writer that computes a checksum on the way.
struct Checked<W> {
    inner: W,
    hasher: Hasher,
}

impl<W: Write> Write for Checked<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.inner.write(bytes)?;
        self.hasher.update(&bytes[..written]);
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.inner.flush()
    }
}
