//! The prefix cache on disk: a folder of snapshots for each model, readable only by its owner, with one size limit for
//! all models.
//!
//! The index is read at start from the beginnings of the files; a file's name contains its tenant. Two threads write
//! and read whole files, so that computations never wait for the drive. A snapshot gets its final name when it is
//! complete. Files of interrupted writes have other names and are removed at the next start. Only one process at a time
//! uses a model's folder. To make space, it may remove files of other models; processes that use those notice it when
//! they read.

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

/// The extension of snapshots. A file that is being written has a further extension.
const EXTENSION: &str = "conversation";

/// This file is locked as long as a process uses the folder.
const LOCK: &str = "lock";

/// Conversations that wait to be written stay in memory, so only a few may wait.
const MOST_WAITING: usize = 2;

/// How long to wait for another process to leave the folder, in hundredths of a second.
const PATIENCE: usize = 50;

/// Identifies a file that is being read.
pub type Ticket = u64;

/// One model's folder.
pub struct Disk {
    folder: PathBuf,
    limit: u64,
    files: Vec<Stored>,
    /// Files of other models, as of the last write.
    elsewhere: Vec<Elsewhere>,
    /// Whether a conversation can be rewound to any prefix, and not only to marks.
    any_prefix: bool,
    writer: Worker<Writing, Written>,
    reader: Worker<Reading, Read>,
    /// Files that are being written, with their approximate sizes.
    writing: Vec<(PathBuf, u64)>,
    reading: Vec<Ticket>,
    tickets: Ticket,
    /// Whether a failed write was reported.
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
    /// Its outline and its size.
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
    /// Indexes the model's folder, and removes files that cannot be used.
    pub fn open(engine: &Engine, all: &Path, limit: u64, meters: &mut PrefixMeters) -> Result<Disk> {
        let folder = all.join(format!("{:016x}", engine.fingerprint()?));
        let cannot = |doing: &str, error| Error::io(&folder, doing, error);
        for folder in [all, &folder] {
            private_folder(folder).map_err(|error| cannot("cannot create the folder", error))?;
        }
        let mut options = private_options();
        options.write(true).create(true).truncate(true);
        let lock = options.open(folder.join(LOCK)).map_err(|error| cannot("cannot write", error))?;
        take_from_others(&folder.join(LOCK));
        own(&lock).map_err(|error| cannot("another process uses the folder", error))?;
        let shapes = engine.model().state();
        let read = engine.clone();
        let thread = |error| cannot("cannot start a thread for", error);
        let mut disk = Disk {
            limit,
            files: Vec::new(),
            elsewhere: Vec::new(),
            any_prefix: shapes
                .iter()
                .flatten()
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

    /// Reads the folder's index.
    fn look(&mut self, engine: &Engine, meters: &mut PrefixMeters) -> io::Result<()> {
        for entry in fs::read_dir(&self.folder)? {
            let path = entry?.path();
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            if name.contains(&format!(".{EXTENSION}.")) {
                tracing::info!("{}: removing the rest of an interrupted write", path.display());
                remove(&path);
            } else if let Some(name) = name.strip_suffix(&format!(".{EXTENSION}")) {
                let Some(tenant) = tenant_of(name) else {
                    tracing::info!("{}: removing a saved conversation of unknown owner", path.display());
                    remove(&path);
                    continue;
                };
                take_from_others(&path);
                match stored(engine, &path, tenant) {
                    Ok(stored) => self.files.push(stored),
                    Err(error) => {
                        meters.failures += 1;
                        tracing::warn!("removing a saved conversation: {error}");
                        remove(&path);
                    }
                }
            }
        }
        let all: Vec<_> = self.files.iter().map(|file| (file.tenant, file.outline.tokens.clone())).collect();
        all.iter().for_each(|(tenant, tokens)| self.supersede(*tenant, tokens));
        Ok(())
    }

    /// The tenant's file that shares the longest beginning with a text. At least the text's last token must be
    /// computed.
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

    /// The tokens of a file that was found.
    pub fn tokens(&self, index: usize) -> &[TokenId] {
        &self.files[index].outline.tokens
    }

    /// Starts to read a file that was found.
    pub fn read(&mut self, index: usize) -> Option<Ticket> {
        self.tickets += 1;
        let file = &mut self.files[index];
        file.used = SystemTime::now();
        let job = Reading { ticket: self.tickets, path: file.path.clone() };
        let given = self.reader.give(job);
        self.reading.extend(given.then_some(self.tickets));
        given.then_some(self.tickets)
    }

    /// Returns conversations that have been read. Damaged or foreign files are removed, and requests that wait for them
    /// get `None`.
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
                    Err(Error::format(&path, "the saved conversation has changed"))
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
                        tracing::debug!("a saved conversation was removed for another model's: {error}");
                    } else {
                        meters.failures += 1;
                        tracing::warn!("a saved conversation cannot be used: {error}");
                    }
                    // A later request may have enough memory.
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

    /// Starts to write a conversation in the background, unless too many wait for that. Returns whether it has been or
    /// will be written.
    pub fn write(&mut self, tenant: Tenant, session: &mut Session) -> bool {
        self.writing.len() < MOST_WAITING && self.write_later(tenant, session)
    }

    /// Like [`write`](Self::write), however many wait.
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

    /// Whether a file is being written.
    pub fn is_writing(&self) -> bool {
        !self.writing.is_empty()
    }

    /// Whether this conversation is being written.
    pub fn is_writing_of(&self, tenant: Tenant, tokens: &[TokenId]) -> bool {
        let path = self.path_of(tenant, tokens);
        self.writing.iter().any(|(writing, _)| *writing == path)
    }

    /// Records which files have been written. Waits up to `wait` if none has.
    pub fn collect(&mut self, wait: Duration, meters: &mut PrefixMeters) {
        let gone = self.writer.is_gone();
        for written in self.writer.results(wait) {
            self.note(written, meters);
        }
        if gone {
            // The thread is gone, and its jobs with it.
            self.writing.clear();
        }
    }

    /// The number of files and their bytes.
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
                    tracing::warn!(
                        "a conversation cannot be saved, and later ones may fail as well: {error}"
                    );
                }
            }
        }
    }

    /// Removes files of a tenant that hold only a prefix of these tokens.
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

    /// Removes the least recently used files of any model, until this many more bytes fit.
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
            tracing::debug!("{}: removed to free {} on disk", path.display(), Bytes(bytes));
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

/// The tenant in a file's name, without the extension.
fn tenant_of(name: &str) -> Option<Tenant> {
    let (tenant, hash) = name.split_once('-')?;
    let number = |text: &str| u128::from_str_radix(text, 16).ok().filter(|_| text.len() == 32);
    number(hash).and(number(tenant)).map(Tenant)
}

/// The saved conversations of other models. Files that change meanwhile are skipped.
fn elsewhere(folder: &Path) -> Vec<Elsewhere> {
    let list = |folder: &Path| fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path());
    let beside = folder.parent().into_iter().flat_map(list).filter(|other| other != folder);
    // Files that are being written have another extension, and belong to the process that writes them.
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

/// Removes other users' access to files of earlier versions.
fn take_from_others(path: &Path) {
    if let Err(error) = make_private(path) {
        tracing::warn!("{}: other users may be able to read saved conversations: {error}", path.display());
    }
}

/// Locks a file. A process that is ending may hold the lock for a moment longer.
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

/// An existing file, if its beginning shows that it can be used.
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

/// Whether the file no longer exists.
fn is_gone(error: &Error) -> bool {
    matches!(error, Error::Io { source, .. } if source.kind() == io::ErrorKind::NotFound)
}

/// Updates the time of last use for the next start. A failure does no harm.
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

/// A thread that works through a queue of jobs. Dropping it waits until the queue is empty.
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
                // The receiver may be gone.
                let _ = done.send(work(job));
            }
        })?;
        Ok(Worker { jobs: Some(jobs), results, thread: Some(thread) })
    }

    /// Adds a job. Returns false if the thread has ended.
    fn give(&self, job: Job) -> bool {
        self.jobs.as_ref().is_some_and(|jobs| jobs.send(job).is_ok())
    }

    /// Whether the thread has ended.
    fn is_gone(&self) -> bool {
        self.thread.as_ref().is_none_or(JoinHandle::is_finished)
    }

    /// Results so far. Waits up to `wait` for the first one.
    fn results(&self, wait: Duration) -> Vec<Done> {
        let first = if wait.is_zero() { None } else { self.results.recv_timeout(wait).ok() };
        first.into_iter().chain(self.results.try_iter()).collect()
    }
}

impl<Job, Done> Drop for Worker<Job, Done> {
    fn drop(&mut self) {
        self.jobs = None;
        if let Some(thread) = self.thread.take() {
            // A panic has already been printed.
            let _ = thread.join();
        }
    }
}
