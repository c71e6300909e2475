//! Reads weights: synchronously through a [`ByteSource`], or in the background through a [`Reader`].
//!
//! A reader is a queue and the threads that process it: one thread that drives an io_uring, or a pool of threads that
//! block in `pread`. The queue decides what is read next, so priorities work the same everywhere. The way of reading
//! changes speed, never bits.

mod direct;
#[cfg(unix)]
mod mmap;
mod pool;
mod queue;
mod source;
mod swift;
#[cfg(test)]
mod tests;
#[cfg(target_os = "linux")]
mod uring;

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

pub use source::{ByteSource, FileSource};

use direct::DirectSource;
use queue::{Drives, Queue};

use crate::error::{Error, Result};
use crate::format::{FileIdx, ModelFile};

/// How bytes are read in the background.
///
/// # Examples
/// ```
/// use forebay_engine::{IoMethod, Options};
///
/// let method: IoMethod = "pool".parse()?;
/// let options = Options::new().io(method);
/// # assert_eq!(options.io, IoMethod::Pool);
/// # Ok::<(), forebay_engine::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum IoMethod {
    /// io_uring if the system allows it, otherwise a pool of threads.
    #[default]
    Auto,
    /// io_uring, or an error.
    Uring,
    /// Threads that read with `pread`.
    Pool,
    /// Threads that copy from a mapping of the files, for comparison only: the page cache takes memory outside the
    /// budget, and a file that shrinks while it is mapped kills the process. `Auto` never chooses it.
    Mmap,
}

impl IoMethod {
    /// All methods.
    pub const ALL: [IoMethod; 4] = [IoMethod::Auto, IoMethod::Uring, IoMethod::Pool, IoMethod::Mmap];

    /// The name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            IoMethod::Auto => "auto",
            IoMethod::Uring => "uring",
            IoMethod::Pool => "pool",
            IoMethod::Mmap => "mmap",
        }
    }
}

impl fmt::Display for IoMethod {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for IoMethod {
    type Err = Error;

    fn from_str(name: &str) -> Result<IoMethod> {
        let unknown =
            || Error::Invalid(format!("unknown I/O method {name:?}: use auto, uring, pool or mmap"));
        IoMethod::ALL.into_iter().find(|method| method.name() == name).ok_or_else(unknown)
    }
}

/// The alignment of reads, as direct I/O requires it.
pub const BLOCK: usize = 4096;

/// Identifies a read in its completion. Two reads under way at the same time have different ids.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ReadId(pub u64);

/// One read into memory that the caller owns.
#[derive(Clone, Copy, Debug)]
pub struct Read {
    /// Its id.
    pub id: ReadId,
    /// The file.
    pub file: FileIdx,
    /// The offset in the file: a multiple of [`BLOCK`].
    pub offset: u64,
    /// The destination, aligned to [`BLOCK`].
    pub to: *mut u8,
    /// The length: a multiple of [`BLOCK`]. May reach past the end of the file.
    pub len: usize,
    /// How many bytes must arrive. Fewer are an error (the file ended early).
    pub needed: usize,
}

/// The priority of a read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Priority {
    /// Something waits for it. It starts before any prefetch.
    Demand,
    /// It may be needed soon. It starts only while no demand read of the drive is waiting or under way, and only a
    /// few run at a time, so that a new demand read does not wait long.
    Prefetch,
}

/// Receives each read that has ended and was not withdrawn, once, on a thread of the reader: after its last byte was
/// written, or when none will be. It should return soon and must not drop the reader.
///
/// The reader's threads keep it until they end. A closure that owns the destination memory thus keeps this memory
/// alive even if a drive stalls and the reader is dropped.
pub type OnDone = Arc<dyn Fn(ReadId, Result<()>) + Send + Sync>;

/// Reads in the background.
///
/// Dropping the reader starts no further read. It reports waiting reads as [cancelled](Error::Cancelled) and waits
/// for those under way. If a drive does not answer within seconds, its threads keep running without the reader; they
/// report when the drive answers, and keep their [`OnDone`] until then.
pub trait Reader: Send + Sync {
    /// Starts reading.
    ///
    /// # Safety
    /// The memory of each read is initialised, and stays valid and unused by others until the read was reported or
    /// withdrawn, or until the last copy of the reader's [`OnDone`] was dropped.
    unsafe fn submit(&self, reads: &[Read], priority: Priority);

    /// Withdraws those of the reads that have not started; they are not reported. Returns their ids.
    fn withdraw(&self, ids: &[ReadId]) -> Vec<ReadId>;

    /// Turns prefetches, waiting or under way, into demand reads, because something now waits for them. Ignores the
    /// ids of other reads.
    fn promote(&self, ids: &[ReadId]);

    /// The method in use, for people: "io_uring, direct, registered buffers".
    fn describe(&self) -> String;
}

/// Opens the files of a model for background reading.
///
/// `buffers` are the regions that reads write to, by address and length. If the limit on locked memory allows it,
/// they are registered with io_uring, which makes all their pages resident now and saves work in every read. Their
/// pages must not be given back to the operating system before the reader is dropped.
///
/// # Errors
/// If a file cannot be opened or the system does not support `method`.
pub fn open(
    model: &ModelFile,
    method: IoMethod,
    buffers: &[(*mut u8, usize)],
    on_done: OnDone,
) -> Result<Box<dyn Reader>> {
    let paths: Vec<PathBuf> = model.files.iter().map(|part| part.path.clone()).collect();
    open_paths(&paths, method, buffers, on_done)
}

/// A pool reader over any byte source, for tests.
///
/// # Errors
/// If threads cannot be started.
pub fn pool(source: Arc<dyn ByteSource>, threads: usize, on_done: OnDone) -> Result<Box<dyn Reader>> {
    let how = format!("{threads} threads");
    Ok(Box::new(pool::start(source, Drives::one(), pool::Setup { threads, how }, on_done)?))
}

/// Like [`open`], for any files.
pub(crate) fn open_paths(
    paths: &[PathBuf],
    method: IoMethod,
    buffers: &[(*mut u8, usize)],
    on_done: OnDone,
) -> Result<Box<dyn Reader>> {
    if method == IoMethod::Mmap {
        return open_mmap(paths, on_done);
    }
    let source = Arc::new(DirectSource::open(paths)?);
    let mut why = String::new();
    if method != IoMethod::Pool {
        match start_uring(&source, buffers, &on_done) {
            Ok(reader) => return Ok(Box::new(reader)),
            Err(reason) if method == IoMethod::Uring => {
                return Err(Error::Unsupported(format!(
                    "io_uring is not available: {reason}; allow it (sysctl kernel.io_uring_disabled=0, or the \
                     container's seccomp profile), or run with Options::io = IoMethod::Pool"
                )));
            }
            Err(reason) => why = format!(" (io_uring is not available: {reason})"),
        }
    }
    let drives = source.drives();
    let threads = pool::THREADS_PER_DRIVE * drives.count();
    let how = format!("{threads} threads, {}{why}", source.describe());
    Ok(Box::new(pool::start(source, drives, pool::Setup { threads, how }, on_done)?))
}

#[cfg(target_os = "linux")]
fn start_uring(
    source: &Arc<DirectSource>,
    buffers: &[(*mut u8, usize)],
    on_done: &OnDone,
) -> std::io::Result<Background> {
    uring::start(Arc::clone(source), buffers, uring::DEPTH_PER_DRIVE, Arc::clone(on_done))
}

#[cfg(not(target_os = "linux"))]
fn start_uring(_: &Arc<DirectSource>, _: &[(*mut u8, usize)], _: &OnDone) -> std::io::Result<Background> {
    Err(std::io::Error::new(std::io::ErrorKind::Unsupported, "it exists only on Linux"))
}

#[cfg(unix)]
fn open_mmap(paths: &[PathBuf], on_done: OnDone) -> Result<Box<dyn Reader>> {
    let source = Arc::new(mmap::MappedSource::open(paths)?);
    let threads = pool::THREADS_PER_DRIVE;
    let how = format!("{threads} threads, copying from a mapping");
    Ok(Box::new(pool::start(source, Drives::one(), pool::Setup { threads, how }, on_done)?))
}

#[cfg(not(unix))]
fn open_mmap(_: &[PathBuf], _: OnDone) -> Result<Box<dyn Reader>> {
    Err(Error::Unsupported(
        "files cannot be mapped on this system: run with Options::io = IoMethod::Pool".into(),
    ))
}

/// The implementation of [`Reader`]: a queue, the threads that process it, and a way to wake them.
struct Background {
    queue: Arc<Queue>,
    wake: Box<dyn Fn() + Send + Sync>,
    threads: Threads,
    how: String,
}

impl Reader for Background {
    unsafe fn submit(&self, reads: &[Read], priority: Priority) {
        self.queue.submit(reads, priority);
        (self.wake)();
    }

    fn withdraw(&self, ids: &[ReadId]) -> Vec<ReadId> {
        self.queue.withdraw(ids)
    }

    fn promote(&self, ids: &[ReadId]) {
        self.queue.promote(ids);
        (self.wake)();
    }

    fn describe(&self) -> String {
        self.how.clone()
    }
}

impl Drop for Background {
    fn drop(&mut self) {
        self.queue.stop();
        (self.wake)();
        if !self.threads.wait(PATIENCE) {
            tracing::warn!("a drive has not answered for {PATIENCE:?}; its reads are abandoned");
        }
    }
}

/// How long dropping a reader waits for reads under way.
const PATIENCE: Duration = Duration::from_secs(3);

/// Threads that end on their own. The caller can wait for them with a time limit.
struct Threads {
    /// Each thread keeps a clone. When the channel has no sender left, all threads have ended.
    alive: Option<Sender<()>>,
    ended: Mutex<Receiver<()>>,
}

impl Threads {
    fn new() -> Threads {
        let (alive, ended) = channel();
        Threads { alive: Some(alive), ended: Mutex::new(ended) }
    }

    fn start(&self, name: String, body: impl FnOnce() + Send + 'static) -> std::io::Result<()> {
        let alive = self.alive.clone();
        let life = move || {
            swift::run_at_once();
            // The call drops what the closure owns, so it is released before anybody who waits continues.
            body();
            drop(alive);
        };
        std::thread::Builder::new().name(name).spawn(life).map(drop)
    }

    /// Waits up to `limit`; returns whether all threads have ended.
    fn wait(&mut self, limit: Duration) -> bool {
        self.alive = None;
        let ended = self.ended.get_mut().unwrap_or_else(PoisonError::into_inner);
        ended.recv_timeout(limit) == Err(RecvTimeoutError::Disconnected)
    }
}
