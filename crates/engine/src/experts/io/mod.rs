//! Reads weight bytes: at once through a [`ByteSource`], or in the background through a [`Reader`].
//!
//! A reader is a queue and the threads that work it off: one that drives an io_uring, or a pool of threads
//! that block in `pread`. The queue decides what is read next, so priorities are the same everywhere. How bytes are
//! read changes time, never bits.

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
    /// io_uring where the system allows it, a pool of threads elsewhere.
    #[default]
    Auto,
    /// io_uring, or an error.
    Uring,
    /// Threads that read with `pread`.
    Pool,
    /// Threads that copy from a mapping of the files, for comparison only: the page cache takes memory that no
    /// budget knows of, and a file that shrinks while it is mapped kills the process. So it is never chosen
    /// by itself.
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

/// What reads start and end at: the alignment that direct reads ask for.
pub const BLOCK: usize = 4096;

/// Names a read in its completion. Two reads under way at the same time have different names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ReadId(pub u64);

/// One read into memory of the caller's.
#[derive(Clone, Copy, Debug)]
pub struct Read {
    /// Its name.
    pub id: ReadId,
    /// The file.
    pub file: FileIdx,
    /// Where it starts in the file: a multiple of [`BLOCK`].
    pub offset: u64,
    /// Where the bytes go: aligned to [`BLOCK`].
    pub to: *mut u8,
    /// A multiple of [`BLOCK`]; may reach past the end of the file.
    pub len: usize,
    /// How many of the bytes must arrive: fewer is an error (the file ended early), more is not needed.
    pub needed: usize,
}

/// What is read first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Priority {
    /// Somebody waits for it: started before any prefetch.
    Demand,
    /// Somebody may want it soon: started only while the drive has no demand read waiting or under way, and only
    /// a few at a time, so that a demand read that comes meanwhile does not wait long.
    Prefetch,
}

/// Told of every read that ended, from a thread of the reader: once for each read that was not withdrawn, after the
/// last byte was written to its memory or when none ever will be. It should return soon and must not drop the reader.
///
/// The reader's threads hold it until they end. A closure that owns the memory reads go to thus keeps this
/// memory alive even if a drive stalls and the reader is dropped meanwhile.
pub type OnDone = Arc<dyn Fn(ReadId, Result<()>) + Send + Sync>;

/// Reads in the background.
///
/// Dropping it starts no further read: those that wait are reported as [cancelled](Error::Cancelled), those under
/// way are waited for. If a drive does not answer within seconds, its threads are left behind; they report when
/// it does, and hold their [`OnDone`] until then.
pub trait Reader: Send + Sync {
    /// Starts reading.
    ///
    /// # Safety
    /// The memory of each read is initialised, and it stays valid and unused by others until the read was
    /// reported or withdrawn, or until the last copy of the reader's [`OnDone`] was dropped.
    unsafe fn submit(&self, reads: &[Read], priority: Priority);

    /// Takes back reads of which nothing has started yet; they are not reported. Returns their names.
    fn withdraw(&self, ids: &[ReadId]) -> Vec<ReadId>;

    /// Turns prefetches into demand reads, whether they wait or are under way, because somebody now waits for
    /// them. Names of other reads are ignored.
    fn promote(&self, ids: &[ReadId]);

    /// Which method is in effect and why, for people: "io_uring, direct, registered buffers".
    fn describe(&self) -> String;
}

/// Opens the files of a model for background reading.
///
/// `buffers` are the regions that reads go to, by address and length. Where the limit on locked memory allows it, the
/// kernel is told of them once, which takes all their pages from the system now and spares it work with every
/// read. Their pages must not be given back to the system before the reader is dropped.
///
/// # Errors
/// If a file cannot be opened or the method asked for is not to be had.
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
/// If the system gives no more threads.
pub fn pool(source: Arc<dyn ByteSource>, threads: usize, on_done: OnDone) -> Result<Box<dyn Reader>> {
    let how = format!("{threads} threads");
    Ok(Box::new(pool::start(source, Drives::one(), pool::Setup { threads, how }, on_done)?))
}

/// [`open`], for files that are no model's.
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
                    "io_uring is refused here: {reason}; allow it (sysctl kernel.io_uring_disabled=0, or the \
                     container's seccomp profile), or run with Options::io = IoMethod::Pool"
                )));
            }
            Err(reason) => why = format!(" (io_uring is refused: {reason})"),
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
    Err(std::io::Error::new(std::io::ErrorKind::Unsupported, "only Linux has it"))
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

/// The one reader there is: a queue, the threads that work it off, and how to wake them.
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
            tracing::warn!("a drive has not answered for {PATIENCE:?}; its reads are left behind");
        }
    }
}

/// How long dropping a reader waits for reads under way.
const PATIENCE: Duration = Duration::from_secs(3);

/// Threads that end by themselves, and can be waited for with a limit.
struct Threads {
    /// Every thread holds a copy of it; when the last has gone, all have ended.
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
            // The call drops what the body owns, so whoever waits finds it released.
            body();
            drop(alive);
        };
        std::thread::Builder::new().name(name).spawn(life).map(drop)
    }

    /// Whether all threads have ended within the time.
    fn wait(&mut self, limit: Duration) -> bool {
        self.alive = None;
        let ended = self.ended.get_mut().unwrap_or_else(PoisonError::into_inner);
        ended.recv_timeout(limit) == Err(RecvTimeoutError::Disconnected)
    }
}
