//! Conversations on disk: a folder of snapshots for each model, under one limit for all models, for their owner alone.
//!
//! What a folder holds is known from the beginnings of its files, read at the start; whose a conversation is, from its name.
//! Threads of their own write and read whole files, so that nobody else waits. A snapshot appears under its name when it is
//! whole; what an interrupted write leaves has another name and is removed at the next start. One process at a time uses a
//! model's folder. Where room is needed it may remove files of other models' folders, which processes that use those notice
//! when they read.

use std::fs::{self, File, TryLockError};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::{Builder, JoinHandle, sleep};
use std::time::{Duration, SystemTime};

use super::{Match, PrefixMeters, common, is_useless};
use crate::TokenId;
use crate::backend::StateShape;
use crate::engine::Engine;
use crate::error::{Bytes, Error, Result};
use crate::files::{make_private, private_folder, private_options};
use crate::generate::client::Tenant;
use crate::hash::fnv_128;
use crate::session::{Outline, Session, Snapshot};

/// How the names of snapshots end. What is being written has something after that.
const EXTENSION: &str = "conversation";

/// Held for as long as a process uses the folder.
const LOCK: &str = "lock";

/// Conversations that wait to be written are in memory until they are.
const MOST_WAITING: usize = 2;

/// Hundredths of a second that another process gets to leave the folder.
const PATIENCE: usize = 50;

/// Names a file that is being read.
pub type Ticket = u64;

/// A model's folder.
pub struct Disk {
    folder: PathBuf,
    limit: u64,
    files: Vec<Stored>,
    /// Those of other models, as they were when something was written last.
    elsewhere: Vec<Elsewhere>,
    /// Whether any prefix of a conversation can be gone back to, and not only marks.
    any_prefix: bool,
    writer: Worker<Writing, Written>,
    reader: Worker<Reading, Read>,
    /// What is being written, and about how many bytes that are.
    writing: Vec<(PathBuf, u64)>,
    reading: Vec<Ticket>,
    tickets: Ticket,
    /// Whether somebody was told that files cannot be written.
    warned: bool,
    _lock: File,
}

/// A file of another model.
struct Elsewhere {
    path: PathBuf,
    bytes: u64,
    used: SystemTime,
}

struct Stored {
    path: PathBuf,
    tenant: Tenant,
    outline: Outline,
    bytes: u64,
    used: SystemTime,
}

struct Writing {
    path: PathBuf,
    tenant: Tenant,
    snapshot: Snapshot,
}

struct Written {
    path: PathBuf,
    tenant: Tenant,
    elsewhere: Vec<Elsewhere>,
    /// Its outline and its length.
    result: Result<(Outline, u64)>,
}

struct Reading {
    ticket: Ticket,
    path: PathBuf,
}

struct Read {
    ticket: Ticket,
    path: PathBuf,
    result: Result<Session>,
}

impl Disk {
    /// Finds what is in the model's folder, and removes what is of no use.
    pub fn open(engine: &Engine, all: &Path, limit: u64, meters: &mut PrefixMeters) -> Result<Disk> {
        let folder = all.join(format!("{:016x}", engine.fingerprint()?));
        let cannot = |doing: &str, error| Error::io(&folder, doing, error);
        for folder in [all, &folder] {
            private_folder(folder).map_err(|error| cannot("cannot make the folder", error))?;
        }
        let mut options = private_options();
        options.write(true).create(true).truncate(true);
        let lock = options.open(folder.join(LOCK)).map_err(|error| cannot("cannot write", error))?;
        take_from_others(&folder.join(LOCK));
        own(&lock).map_err(|error| cannot("the folder is another process's", error))?;
        let shapes = engine.model().state();
        let read = engine.clone();
        let thread = |error| cannot("cannot start a thread for", error);
        let mut disk = Disk {
            limit,
            files: Vec::new(),
            elsewhere: Vec::new(),
            any_prefix: shapes
                .iter()
                .all(|shape| matches!(shape, StateShape::Attention(kv) if kv.window.is_none())),
            writer: Worker::start("prefix writer", write).map_err(thread)?,
            reader: Worker::start("prefix reader", move |job: Reading| {
                let Reading { ticket, path } = job;
                let result = Session::load(&read, &path);
                if result.is_ok() {
                    touch(&path);
                }
                Read { ticket, result, path }
            })
            .map_err(thread)?,
            writing: Vec::new(),
            reading: Vec::new(),
            tickets: 0,
            warned: false,
            _lock: lock,
            folder: folder.clone(),
        };
        disk.look(engine, meters).map_err(|error| cannot("cannot read the folder", error))?;
        disk.elsewhere = elsewhere(&folder);
        disk.elsewhere.iter().for_each(|file| take_from_others(&file.path));
        disk.shrink(0);
        Ok(disk)
    }

    /// Lists the folder.
    fn look(&mut self, engine: &Engine, meters: &mut PrefixMeters) -> io::Result<()> {
        for entry in fs::read_dir(&self.folder)? {
            let path = entry?.path();
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            if name.contains(&format!(".{EXTENSION}.")) {
                tracing::info!("{}: what is left of an interrupted write is removed", path.display());
                remove(&path);
            } else if let Some(name) = name.strip_suffix(&format!(".{EXTENSION}")) {
                let Some(tenant) = tenant_of(name) else {
                    tracing::info!("{}: a conversation of nobody knows whom is removed", path.display());
                    remove(&path);
                    continue;
                };
                take_from_others(&path);
                match stored(engine, &path, tenant) {
                    Ok(stored) => self.files.push(stored),
                    Err(error) => {
                        meters.failures += 1;
                        tracing::warn!("a kept conversation is removed: {error}");
                        remove(&path);
                    }
                }
            }
        }
        let all: Vec<_> = self.files.iter().map(|file| (file.tenant, file.outline.tokens.clone())).collect();
        all.iter().for_each(|(tenant, tokens)| self.supersede(*tenant, tokens));
        Ok(())
    }

    /// What a tenant has that begins like this text, of which at least the last token must be computed.
    pub fn find(&self, tenant: Tenant, text: &[TokenId]) -> Option<Match> {
        let of_tenant = self.files.iter().enumerate().filter(|(_, file)| file.tenant == tenant);
        Match::best(of_tenant.map(|(index, Stored { outline, .. })| {
            let same = common(&outline.tokens, text);
            let most = same.min(text.len() - 1);
            let places = outline.marks.iter().copied().chain([outline.tokens.len()]);
            let marked = places.filter(|&place| place <= most).max().unwrap_or(0);
            Match { index, same, reach: if self.any_prefix { most } else { marked } }
        }))
    }

    /// The tokens of one that was found.
    pub fn tokens(&self, index: usize) -> &[TokenId] {
        &self.files[index].outline.tokens
    }

    /// Begins to read one that was found.
    pub fn read(&mut self, index: usize) -> Option<Ticket> {
        self.tickets += 1;
        let file = &mut self.files[index];
        file.used = SystemTime::now();
        let job = Reading { ticket: self.tickets, path: file.path.clone() };
        let given = self.reader.give(job);
        self.reading.extend(given.then_some(self.tickets));
        given.then_some(self.tickets)
    }

    /// What was read. Files that are damaged or foreign are removed, and gone for those who waited for them.
    pub fn arrived(&mut self, wait: Duration, meters: &mut PrefixMeters) -> Vec<(Ticket, Option<Session>)> {
        let mut arrived = Vec::new();
        if self.reading.is_empty() {
            return arrived;
        }
        let gone = self.reader.is_gone();
        for Read { ticket, path, result } in self.reader.results(wait) {
            self.reading.retain(|reading| *reading != ticket);
            let expected = self.files.iter().find(|file| file.path == path);
            let result = result.and_then(|session| match expected {
                Some(file) if file.outline.tokens != session.tokens() => {
                    Err(Error::format(&path, "the saved conversation is another one than it was"))
                }
                _ => Ok(session),
            });
            match result {
                Ok(session) => {
                    meters.loads += 1;
                    arrived.push((ticket, Some(session)));
                }
                Err(error) => {
                    if is_gone(&error) {
                        tracing::debug!("a kept conversation had to make room for another model's: {error}");
                    } else {
                        meters.failures += 1;
                        tracing::warn!("a kept conversation cannot be used: {error}");
                    }
                    // For another one there may be memory.
                    if !matches!(error, Error::Budget { .. }) {
                        self.files.retain(|file| file.path != path);
                    }
                    if is_useless(&error) {
                        remove(&path);
                    }
                    arrived.push((ticket, None));
                }
            }
        }
        if gone {
            arrived.extend(self.reading.drain(..).map(|ticket| (ticket, None)));
        }
        arrived
    }

    /// Has a conversation written in the background, unless too many wait for that. Tells whether it has been, or will
    /// be.
    pub fn write(&mut self, tenant: Tenant, session: &mut Session) -> bool {
        self.writing.len() < MOST_WAITING && self.write_later(tenant, session)
    }

    /// As [`write`](Self::write), however many wait.
    pub fn write_later(&mut self, tenant: Tenant, session: &mut Session) -> bool {
        let path = self.path_of(tenant, session.tokens());
        if self.writing.iter().any(|(writing, _)| *writing == path)
            || self.files.iter().any(|file| file.path == path)
        {
            return true;
        }
        let bytes = session.bytes_for(session.tokens().len());
        if self.on_its_way().saturating_add(bytes) > self.limit {
            return false;
        }
        self.shrink(bytes);
        let given = self.writer.give(Writing { path: path.clone(), tenant, snapshot: session.freeze() });
        self.writing.extend(given.then_some((path, bytes)));
        given
    }

    /// Whether something is being written.
    pub fn is_writing(&self) -> bool {
        !self.writing.is_empty()
    }

    /// Whether this conversation is being written.
    pub fn is_writing_of(&self, tenant: Tenant, tokens: &[TokenId]) -> bool {
        let path = self.path_of(tenant, tokens);
        self.writing.iter().any(|(writing, _)| *writing == path)
    }

    /// Takes note of what has been written; waits for so long if nothing has been.
    pub fn collect(&mut self, wait: Duration, meters: &mut PrefixMeters) {
        let gone = self.writer.is_gone();
        for written in self.writer.results(wait) {
            self.note(written, meters);
        }
        if gone {
            // What the thread had is gone with it.
            self.writing.clear();
        }
    }

    /// Files and their bytes.
    pub fn size(&self) -> (usize, u64) {
        (self.files.len(), self.bytes())
    }

    fn note(&mut self, written: Written, meters: &mut PrefixMeters) {
        let Written { path, tenant, elsewhere, result } = written;
        self.elsewhere = elsewhere;
        self.writing.retain(|(writing, _)| *writing != path);
        match result {
            Ok((outline, bytes)) => {
                meters.writes += 1;
                self.supersede(tenant, &outline.tokens);
                self.files.push(Stored { path, tenant, outline, bytes, used: SystemTime::now() });
                self.shrink(0);
            }
            Err(error) => {
                meters.failures += 1;
                if !std::mem::replace(&mut self.warned, true) {
                    tracing::warn!("a conversation is not kept on disk, and others may not be: {error}");
                }
            }
        }
    }

    /// Removes the files of mere prefixes of a tenant's conversation.
    fn supersede(&mut self, tenant: Tenant, tokens: &[TokenId]) {
        self.files.retain(|file| {
            let shorter = file.tenant == tenant
                && file.outline.tokens.len() < tokens.len()
                && tokens.starts_with(&file.outline.tokens);
            if shorter {
                remove(&file.path);
            }
            !shorter
        });
    }

    /// Removes the files that were not used for longest, of whichever model, until so many bytes more would fit.
    fn shrink(&mut self, more: u64) {
        self.files.sort_by_key(|file| file.used);
        self.elsewhere.sort_by_key(|file| file.used);
        let more = more.saturating_add(self.on_its_way());
        loop {
            let others: u64 = self.elsewhere.iter().map(|file| file.bytes).sum();
            if self.bytes().saturating_add(others).saturating_add(more) <= self.limit {
                return;
            }
            let (path, bytes) = match (self.files.first(), self.elsewhere.first()) {
                (None, None) => return,
                (Some(own), other) if other.is_none_or(|other| own.used <= other.used) => {
                    let Stored { path, bytes, .. } = self.files.remove(0);
                    (path, bytes)
                }
                _ => {
                    let Elsewhere { path, bytes, .. } = self.elsewhere.remove(0);
                    (path, bytes)
                }
            };
            tracing::debug!("{}: {} make room on disk", path.display(), Bytes(bytes));
            remove(&path);
        }
    }

    /// Bytes of the model's files.
    fn bytes(&self) -> u64 {
        self.files.iter().map(|file| file.bytes).sum()
    }

    /// Bytes that are being written.
    fn on_its_way(&self) -> u64 {
        self.writing.iter().map(|(_, bytes)| bytes).sum()
    }

    fn path_of(&self, Tenant(tenant): Tenant, tokens: &[TokenId]) -> PathBuf {
        let hash = fnv_128(tokens.iter().flat_map(|token| token.0.to_le_bytes()));
        self.folder.join(format!("{tenant:032x}-{hash:032x}.{EXTENSION}"))
    }
}

/// Whose conversation has this name, without what it ends with.
fn tenant_of(name: &str) -> Option<Tenant> {
    let (tenant, hash) = name.split_once('-')?;
    let number = |text: &str| u128::from_str_radix(text, 16).ok().filter(|_| text.len() == 32);
    number(hash).and(number(tenant)).map(Tenant)
}

/// The conversations in the folders beside a model's. Where others write and remove files meanwhile, those are not counted.
fn elsewhere(folder: &Path) -> Vec<Elsewhere> {
    let list = |folder: &Path| fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path());
    let beside = folder.parent().into_iter().flat_map(list).filter(|other| other != folder);
    // What is being written has another ending, and is its writer's.
    let is_conversation = |path: &PathBuf| path.extension().is_some_and(|ending| ending == EXTENSION);
    let files = beside.filter(|path| path.is_dir()).flat_map(|other| {
        take_from_others(&other);
        list(&other).filter(is_conversation).collect::<Vec<_>>()
    });
    let described = files.filter_map(|path| {
        let metadata = fs::symlink_metadata(&path).ok().filter(fs::Metadata::is_file)?;
        Some(Elsewhere { bytes: metadata.len(), used: metadata.modified().ok()?, path })
    });
    described.collect()
}

/// Takes what an earlier version left readable from everybody but its owner.
fn take_from_others(path: &Path) {
    if let Err(error) = make_private(path) {
        tracing::warn!("{}: others may read conversations there: {error}", path.display());
    }
}

/// Locks a file. A process that is about to end may have the lock for a moment longer.
fn own(lock: &File) -> io::Result<()> {
    for _ in 0..PATIENCE {
        match lock.try_lock() {
            Ok(()) => return Ok(()),
            Err(TryLockError::WouldBlock) => sleep(Duration::from_millis(10)),
            Err(TryLockError::Error(error)) => return Err(error),
        }
    }
    lock.try_lock().map_err(io::Error::from)
}

/// A file that is there, if it can be used as far as its beginning says.
fn stored(engine: &Engine, path: &Path, tenant: Tenant) -> Result<Stored> {
    let outline = Outline::read(engine, path)?;
    let cannot = |error| Error::io(path, "cannot read its length", error);
    let metadata = fs::metadata(path).map_err(cannot)?;
    let used = metadata.modified().map_err(cannot)?;
    Ok(Stored { path: path.to_owned(), tenant, outline, bytes: metadata.len(), used })
}

fn write(Writing { path, tenant, snapshot }: Writing) -> Written {
    let length = || fs::metadata(&path).map_err(|error| Error::io(&path, "cannot read its length", error));
    let result = snapshot.save(&path).and_then(|()| length());
    let result = result.map(|metadata| (snapshot.outline(), metadata.len()));
    let elsewhere = path.parent().map_or_else(Vec::new, elsewhere);
    Written { path, tenant, elsewhere, result }
}

/// Whether a file is not there any more.
fn is_gone(error: &Error) -> bool {
    matches!(error, Error::Io { source, .. } if source.kind() == io::ErrorKind::NotFound)
}

/// The next start should know that a file was used; if it does not, nothing is lost.
fn touch(path: &Path) {
    let _ = File::options().append(true).open(path).and_then(|file| file.set_modified(SystemTime::now()));
}

fn remove(path: &Path) {
    if let Err(error) = fs::remove_file(path)
        && error.kind() != io::ErrorKind::NotFound
    {
        tracing::warn!("{}: cannot remove it: {error}", path.display());
    }
}

/// A thread that does one thing after another. Dropping it waits until all is done.
struct Worker<Job, Done> {
    jobs: Option<Sender<Job>>,
    results: Receiver<Done>,
    thread: Option<JoinHandle<()>>,
}

impl<Job: Send + 'static, Done: Send + 'static> Worker<Job, Done> {
    fn start(name: &str, work: impl Fn(Job) -> Done + Send + 'static) -> io::Result<Worker<Job, Done>> {
        let (jobs, waiting) = channel();
        let (done, results) = channel();
        let thread = Builder::new().name(name.into()).spawn(move || {
            for job in waiting {
                // Nobody may want to know any more.
                let _ = done.send(work(job));
            }
        })?;
        Ok(Worker { jobs: Some(jobs), results, thread: Some(thread) })
    }

    /// False if the thread is gone.
    fn give(&self, job: Job) -> bool {
        self.jobs.as_ref().is_some_and(|jobs| jobs.send(job).is_ok())
    }

    /// Whether nothing more will be done.
    fn is_gone(&self) -> bool {
        self.thread.as_ref().is_none_or(JoinHandle::is_finished)
    }

    /// What is done; waits so long for the first.
    fn results(&self, wait: Duration) -> Vec<Done> {
        let first = if wait.is_zero() { None } else { self.results.recv_timeout(wait).ok() };
        first.into_iter().chain(self.results.try_iter()).collect()
    }
}

impl<Job, Done> Drop for Worker<Job, Done> {
    fn drop(&mut self) {
        self.jobs = None;
        if let Some(thread) = self.thread.take() {
            // A thread that panicked has said so.
            let _ = thread.join();
        }
    }
}
