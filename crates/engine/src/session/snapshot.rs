//! Saving conversations to files, and loading them again.
//!
//! A snapshot is written to a temporary file and then renamed, so that it is complete or absent. It ends with a
//! checksum and contains the model's fingerprint, because a state is useless with other weights.

use std::fs::File;
use std::io::{self, BufReader, BufWriter, Read, Write};
use std::path::Path;
use std::sync::Arc;

use bytemuck::{cast_slice, cast_slice_mut};
use crc32fast::Hasher;

use super::{FROZEN, Session};
use crate::TokenId;
use crate::backend::{MARKS, SequenceState};
use crate::engine::Engine;
use crate::error::{Error, Result};
use crate::files::write_whole;
use crate::memory::Hold;
use crate::models::Span;

/// The file's magic number, which ends with the format's version.
const MAGIC: &[u8; 8] = b"FBCHAT\0\x02";

/// Bytes of the checksum at the end of the file.
const CHECKSUM: u64 = 4;

/// A copy of a conversation, to be written while the conversation goes on.
pub(crate) struct Snapshot {
    engine: Engine,
    state: SequenceState,
    tokens: Vec<TokenId>,
    logits: Vec<f32>,
    /// The budget's memory that the copy shares with the conversation.
    _memory: Vec<Arc<Hold>>,
}

impl Snapshot {
    /// Writes the file completely or not at all.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub fn save(&self, path: &Path) -> Result<()> {
        let Snapshot { engine, state, tokens, logits, .. } = self;
        let fingerprint = engine.fingerprint()?;
        let written = write_whole(path, |file| {
            let mut to = Checked { inner: BufWriter::new(file), hasher: Hasher::new() };
            to.write_all(MAGIC)?;
            let Span { first, end, all } = engine.span();
            for number in [first, end, all] {
                to.write_all(&(number as u64).to_le_bytes())?;
            }
            write(fingerprint, tokens, logits, state, &mut to)?;
            let Checked { mut inner, hasher } = to;
            inner.write_all(&hasher.finalize().to_le_bytes())?;
            inner.flush()
        });
        written.map_err(|error| Error::io(path, "cannot save the conversation", error))
    }

    /// What the file says before the states.
    pub fn outline(&self) -> Outline {
        Outline { tokens: self.tokens.clone(), marks: self.state.marks().to_vec() }
    }
}

fn write(
    fingerprint: u64,
    tokens: &[TokenId],
    logits: &[f32],
    state: &SequenceState,
    to: &mut dyn Write,
) -> io::Result<()> {
    to.write_all(&fingerprint.to_le_bytes())?;
    for count in [tokens.len(), state.marks().len(), logits.len()] {
        to.write_all(&(count as u64).to_le_bytes())?;
    }
    for token in tokens {
        to.write_all(&token.0.to_le_bytes())?;
    }
    for &mark in state.marks() {
        to.write_all(&(mark as u64).to_le_bytes())?;
    }
    to.write_all(cast_slice(logits))?;
    state.save(to)
}

/// What a file says before the states: the tokens, and the positions to rewind to.
pub(crate) struct Outline {
    pub tokens: Vec<TokenId>,
    pub marks: Vec<usize>,
}

impl Outline {
    /// Reads only the outline. Only [`Session::load`] checks that the whole file is valid.
    ///
    /// # Errors
    /// As [`Session::load`], for the part that is read.
    pub fn read(engine: &Engine, path: &Path) -> Result<Outline> {
        let read = || -> Result<Outline, Trouble> {
            let mut from = BufReader::new(File::open(path)?);
            check_kind(&mut from, path)?;
            Ok(Head::read(engine, path, &mut from)?.outline)
        };
        read().map_err(|trouble| trouble.error(path))
    }
}

/// What a file says before the logits.
struct Head {
    outline: Outline,
    logits: usize,
}

impl Head {
    /// Reads the part after the magic number.
    fn read(engine: &Engine, path: &Path, from: &mut dyn Read) -> Result<Head, Trouble> {
        let mut number = || {
            let mut bytes = [0; 8];
            from.read_exact(&mut bytes).map(|()| u64::from_le_bytes(bytes))
        };
        let [first, end, all] = [number()?, number()?, number()?];
        let span = engine.span();
        if all == span.all as u64 && (first, end) != (span.first as u64, span.end as u64) {
            let message = format!(
                "the conversation was saved by a stage with layers {first}..{end} of {all}; here are {span}"
            );
            return Err(Error::format(path, message).into());
        }
        if number()? != engine.fingerprint()? {
            let message =
                "the conversation was saved with another model, or with this model at another precision";
            return Err(Error::format(path, message).into());
        }
        let [tokens, marks, logits] = [number()?, number()?, number()?];
        let context = engine.context();
        if tokens > context as u64 {
            return Err(Error::Context { tokens: tokens as usize, limit: context }.into());
        }
        if marks > MARKS as u64 || (logits != 0 && logits != engine.vocab_size() as u64) {
            return Err(Trouble::Damaged("its header has impossible counts"));
        }
        let mut ids = vec![0u32; tokens as usize];
        from.read_exact(cast_slice_mut(&mut ids))?;
        if ids.iter().any(|&id| id as usize >= engine.vocab_size()) {
            return Err(Trouble::Damaged("a token is not in the vocabulary"));
        }
        let mut places = vec![0u64; marks as usize];
        from.read_exact(cast_slice_mut(&mut places))?;
        let outline = Outline {
            tokens: ids.into_iter().map(TokenId).collect(),
            marks: places.into_iter().map(|place| place as usize).collect(),
        };
        Ok(Head { outline, logits: logits as usize })
    }
}

impl Session {
    /// Writes the conversation to a file, completely or not at all.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub fn save(&self, path: &Path) -> Result<()> {
        self.snapshot(Vec::new()).save(path)
    }

    /// A copy of the conversation, to be written on another thread. The ledger counts shared memory until both are
    /// dropped.
    pub(crate) fn freeze(&mut self) -> Snapshot {
        let own = self.hold.split(u64::MAX);
        self.shared.push((FROZEN, Arc::new(own)));
        self.snapshot(self.shared.iter().map(|(_, hold)| hold.clone()).collect())
    }

    fn snapshot(&self, memory: Vec<Arc<Hold>>) -> Snapshot {
        Snapshot {
            engine: self.engine.clone(),
            // After a failed batch, some layers may hold more tokens than others. A fork does not copy those.
            state: self.state.fork(),
            tokens: self.tokens.clone(),
            logits: self.logits.clone(),
            _memory: memory,
        }
    }

    /// Loads a conversation that [`save`](Self::save) wrote. It continues with the same bits as if it had never been
    /// saved.
    ///
    /// # Errors
    /// If the file cannot be read, is not a snapshot, is damaged, or belongs to another model or precision; if there is
    /// not enough memory.
    ///
    /// # Examples
    /// ```
    /// use forebay_engine::Session;
    ///
    /// # let model = std::path::Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/tales-qwen3moe-Q4_K_M.gguf"));
    /// # let engine = forebay_engine::Engine::open(model, &forebay_engine::Options::new().threads(1))?;
    /// # let folder = tempfile::tempdir().expect("a folder");
    /// # let path = folder.path().join("conversation");
    /// let mut session = engine.session();
    /// session.extend(&engine.tokenizer().encode("Once upon a time", Default::default())?)?;
    /// session.save(&path)?;
    ///
    /// let again = Session::load(&engine, &path)?;
    /// assert_eq!(again.tokens(), session.tokens());
    /// assert_eq!(again.logits(), session.logits());
    /// # Ok::<(), forebay_engine::Error>(())
    /// ```
    pub fn load(engine: &Engine, path: &Path) -> Result<Session> {
        let mut session = engine.session();
        session.read_file(path).map_err(|trouble| trouble.error(path))?;
        Ok(session)
    }

    fn read_file(&mut self, path: &Path) -> Result<(), Trouble> {
        let file = File::open(path)?;
        let len = file.metadata()?.len();
        check(file, len, path)?;
        let mut from = BufReader::new(File::open(path)?).take(len - CHECKSUM);
        self.read(path, &mut from)?;
        if from.limit() > 0 {
            return Err(Trouble::Damaged("it has extra bytes at its end"));
        }
        Ok(())
    }

    fn read(&mut self, path: &Path, from: &mut dyn Read) -> Result<(), Trouble> {
        from.read_exact(&mut [0; MAGIC.len()])?; // The magic number has been checked.
        let Head { outline: Outline { tokens, marks }, logits } = Head::read(&self.engine, path, from)?;
        self.logits.resize(logits, 0.0);
        from.read_exact(cast_slice_mut(&mut self.logits))?;
        self.make_room(tokens.len())?;
        if self.engine.plan().device.is_some() {
            // The state is written to the device at once, even while others compute, so the device must have memory for
            // it now.
            self.engine.compute().lend_device()?;
        }
        self.state.load(tokens.len(), &marks, from)?;
        self.tokens.extend(tokens);
        self.make_room(self.tokens.len())?;
        Ok(())
    }
}

/// Why a snapshot cannot be loaded.
enum Trouble {
    Reading(io::Error),
    Damaged(&'static str),
    Refused(Error),
}

impl Trouble {
    fn error(self, path: &Path) -> Error {
        match self {
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
        }
    }
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

/// Checks the magic number and the checksum before anything else in the file is used.
fn check(file: File, len: u64, path: &Path) -> Result<(), Trouble> {
    if len < MAGIC.len() as u64 + CHECKSUM {
        return Err(Error::format(path, "not a saved conversation").into());
    }
    let mut from = BufReader::with_capacity(1 << 20, file);
    let magic = check_kind(&mut from, path)?;
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

/// Checks the magic number, and returns it.
fn check_kind(from: &mut dyn Read, path: &Path) -> Result<[u8; MAGIC.len()], Trouble> {
    let mut magic = [0; MAGIC.len()];
    from.read_exact(&mut magic)?;
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
    Ok(magic)
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
