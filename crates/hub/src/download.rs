//! One file from the hub to the cache: resumed where it was cut, and checked before it takes its name.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use ring::digest;

use crate::client::{Checksum, Client, Failure, Listing, RemoteFile};
use crate::error::{Context, Error, Result, bail, failure};
use crate::pull::Watcher;

/// How much is read at a time.
const CHUNK: usize = 1 << 20;

/// Tells a watcher of all files about one.
pub struct Meter<'a> {
    pub watcher: &'a dyn Watcher,
    /// Bytes of the files before it.
    pub before: u64,
    /// Bytes of all files.
    pub total: u64,
}

impl Meter<'_> {
    /// So many bytes of the file are here.
    fn at(&self, bytes: u64) {
        self.watcher.at(self.before + bytes, self.total);
    }
}

/// The file in which a blob grows.
pub fn partial(blob: &Path) -> PathBuf {
    blob.with_extension("part")
}

/// Downloads a file to `blob`, from where an earlier attempt stopped.
pub fn fetch(
    client: &Client,
    listing: &Listing,
    wanted: &RemoteFile,
    blob: &Path,
    meter: &Meter,
) -> Result<()> {
    if let Some(folder) = blob.parent() {
        fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
    }
    let mut part = PartialFile::open(&partial(blob), wanted)?;
    let resumed = part.have > 0;
    part.hash_what_is_there(client, meter)?;
    part.complete(client, listing, meter)?;
    if !part.is_sound() && resumed {
        // The error may be in what was there before.
        meter.watcher.note(&format!(
            "{} was damaged when the download continued; downloading it again",
            wanted.file.name
        ));
        part.restart()?;
        part.complete(client, listing, meter)?;
    }
    if !part.is_sound() {
        let _ = fs::remove_file(&part.path);
        bail!(
            "{} of {} has the wrong checksum, so it was damaged on its way or on the hub, and has been removed; pull it \
             again",
            wanted.file.name,
            listing.repo
        );
    }
    part.file.sync_data().map_err(|e| part.write_failed(e))?;
    fs::rename(&part.path, blob).with_context(|| format!("cannot rename {}", part.path.display()))
}

/// Whether a file has the checksum that the hub gives.
pub fn is_sound(client: &Client, path: &Path, wanted: &RemoteFile, meter: &Meter) -> Result<bool> {
    let failed = || format!("cannot read {}", path.display());
    let mut file = File::open(path).with_context(failed)?;
    let mut sum = Sum::new(wanted);
    let (mut buffer, mut done) = (vec![0; CHUNK], 0);
    loop {
        client.check()?;
        match file.read(&mut buffer).with_context(failed)? {
            0 => return Ok(done == wanted.file.bytes && sum.is(&wanted.checksum)),
            count => {
                sum.0.update(&buffer[..count]);
                done += count as u64;
                meter.at(done);
            }
        }
    }
}

/// A file that is not complete.
struct PartialFile<'a> {
    wanted: &'a RemoteFile,
    path: PathBuf,
    /// Locked, so that two programs do not write it together.
    file: File,
    have: u64,
    sum: Sum,
}

impl PartialFile<'_> {
    fn open<'a>(path: &Path, wanted: &'a RemoteFile) -> Result<PartialFile<'a>> {
        let failed = || format!("cannot write {}", path.display());
        let file = OpenOptions::new().read(true).append(true).create(true).open(path).with_context(failed)?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => bail!(
                "another program is downloading {} to {}; wait for it, or stop it",
                wanted.file.name,
                path.display()
            ),
            // Some network drives have no locks.
            Err(TryLockError::Error(_)) => {}
        }
        let have = file.metadata().with_context(failed)?.len();
        let mut part = PartialFile { wanted, path: path.to_owned(), file, have, sum: Sum::new(wanted) };
        if have > wanted.file.bytes {
            part.restart()?;
        }
        Ok(part)
    }

    fn restart(&mut self) -> Result<()> {
        self.file.set_len(0).map_err(|e| self.write_failed(e))?;
        (self.have, self.sum) = (0, Sum::new(self.wanted));
        Ok(())
    }

    fn hash_what_is_there(&mut self, client: &Client, meter: &Meter) -> Result<()> {
        let failed = || format!("cannot read {}", self.path.display());
        self.file.seek(SeekFrom::Start(0)).with_context(failed)?;
        let mut buffer = vec![0; CHUNK];
        let mut left = self.have;
        while left > 0 {
            client.check()?;
            let count = (CHUNK as u64).min(left) as usize;
            self.file.read_exact(&mut buffer[..count]).with_context(failed)?;
            self.sum.0.update(&buffer[..count]);
            left -= count as u64;
        }
        meter.at(self.have);
        Ok(())
    }

    /// Gets what is missing. A cut connection costs an attempt only if nothing came through it.
    fn complete(&mut self, client: &Client, listing: &Listing, meter: &Meter) -> Result<()> {
        let url = client.address(listing, &self.wanted.file.name);
        while self.have < self.wanted.file.bytes {
            client.patiently(client.retries(), &|text| meter.watcher.note(&text), &mut || {
                let before = self.have;
                match self.receive(client, &url, &listing.repo, meter) {
                    Err(Failure::Passing(..)) if self.have > before => Ok(()),
                    other => other,
                }
            })?;
        }
        Ok(())
    }

    fn receive(&mut self, client: &Client, url: &str, repo: &str, meter: &Meter) -> Result<(), Failure> {
        let range = (self.have > 0).then_some((self.have, None));
        let response = client.get(url, range, repo)?;
        if range.is_some() {
            let start = response.headers().get("content-range").and_then(|v| v.to_str().ok());
            let expected = format!("bytes {}-", self.have);
            if response.status() != 206 || !start.is_some_and(|start| start.starts_with(&expected)) {
                // It begins at the beginning.
                self.restart()?;
                if response.status() == 206 {
                    return Err(failure!("the hub sent the wrong part of {url}").into());
                }
            }
        }
        let mut body = response.into_body().into_with_config().limit(u64::MAX).reader();
        let mut buffer = vec![0; CHUNK];
        while self.have < self.wanted.file.bytes {
            client.check()?;
            let most = (CHUNK as u64).min(self.wanted.file.bytes - self.have) as usize;
            let cut = |text: String| Failure::Passing(failure!("the connection was cut{text}"), None);
            let count = match body.read(&mut buffer[..most]) {
                Ok(0) => return Err(cut(String::new())),
                Ok(count) => count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(cut(format!(": {error}"))),
            };
            self.file.write_all(&buffer[..count]).map_err(|e| self.write_failed(e))?;
            self.sum.0.update(&buffer[..count]);
            self.have += count as u64;
            meter.at(self.have);
        }
        Ok(())
    }

    fn is_sound(&self) -> bool {
        self.sum.is(&self.wanted.checksum)
    }

    fn write_failed(&self, error: io::Error) -> Error {
        let remedy = if error.kind() == io::ErrorKind::StorageFull {
            "; free some space and run the command again to continue"
        } else {
            ""
        };
        failure!("cannot write {}: {error}{remedy}", self.path.display())
    }
}

/// A checksum in the making.
struct Sum(digest::Context);

impl Sum {
    fn new(wanted: &RemoteFile) -> Sum {
        match wanted.checksum {
            Checksum::Sha256(_) => Sum(digest::Context::new(&digest::SHA256)),
            Checksum::GitSha1(_) => {
                let mut context = digest::Context::new(&digest::SHA1_FOR_LEGACY_USE_ONLY);
                context.update(format!("blob {}\0", wanted.file.bytes).as_bytes());
                Sum(context)
            }
        }
    }

    fn is(&self, expected: &Checksum) -> bool {
        let (Checksum::Sha256(expected) | Checksum::GitSha1(expected)) = expected;
        let sum: String = self.0.clone().finish().as_ref().iter().map(|byte| format!("{byte:02x}")).collect();
        sum == *expected
    }
}
