//! Downloading a model: from a name to the files in the cache.

use std::fs;
use std::path::{Path, PathBuf};

use forebay_engine::Bytes;

use crate::cache::{Downloads, link};
use crate::choice::{File, Variant, variants};
use crate::client::{Client, Listing, RemoteFile};
use crate::download::{Meter, fetch, is_sound, partial};
use crate::error::{Context, Result, bail};
use crate::name::ModelName;
use crate::{decide, downloads};

/// Hears how something comes along. All methods do nothing by default.
pub trait Watcher {
    /// A file is next, such as the second (`number`) of three (`count`).
    fn begins(&self, _file: &File, _number: usize, _count: usize) {}

    /// So many bytes of all files are here.
    fn at(&self, _done: u64, _total: u64) {}

    /// Something holds the download up, or is done besides.
    fn note(&self, _text: &str) {}

    /// A file had the wrong checksum, and is downloaded again.
    fn damaged(&self, _file: &File) {}
}

/// A model of the hub, to be downloaded.
pub struct Pull {
    client: Client,
    downloads: Downloads,
    listing: Listing,
    name: ModelName,
    variant: Variant,
}

impl Pull {
    /// Asks the hub for a model. Nothing is downloaded yet.
    ///
    /// # Errors
    /// If the hub cannot be asked, or the name does not mean exactly one model.
    pub fn new(client: Client, name: &ModelName) -> Result<Pull> {
        let downloads = downloads()?;
        let listing = client.listing(&name.repo)?;
        let (name, variant) = decide(name, &listing)?;
        Ok(Pull { client, downloads, listing, name, variant })
    }

    /// The model's full name.
    pub fn name(&self) -> &ModelName {
        &self.name
    }

    /// Its files.
    pub fn variant(&self) -> &Variant {
        &self.variant
    }

    /// The version of the repository.
    pub fn commit(&self) -> &str {
        &self.listing.commit
    }

    /// The other models of the repository.
    pub fn others(&self) -> Vec<Variant> {
        let files: Vec<_> = self.listing.files.iter().map(|file| file.file.clone()).collect();
        let mut others = variants(&files);
        others.retain(|v| v.label != self.variant.label);
        others
    }

    /// What is to be opened when it has been downloaded.
    pub fn path(&self) -> PathBuf {
        match self.variant.entry() {
            "" => self.snapshot(),
            entry => self.snapshot().join(entry),
        }
    }

    /// The bytes that are to be downloaded of each file.
    pub fn left(&self) -> Vec<u64> {
        self.files().map(|file| file.file.bytes - self.held(file)).collect()
    }

    /// Bytes that are free where downloads are, if the system tells.
    pub fn free_space(&self) -> Option<u64> {
        free_space(self.downloads.folder())
    }

    /// Refuses what the drive has no room for, before hours go into it.
    ///
    /// # Errors
    /// If the drive has less space than the files need.
    pub fn check_space(&self) -> Result<()> {
        let need = self.left().into_iter().fold(0u64, u64::saturating_add);
        match self.free_space() {
            Some(free) if need > free => bail!(
                "{} needs {}, but {} is free in {}; remove downloads (`forebay list`, `forebay rm`), or set HF_HOME to a \
                 folder on a larger drive",
                self.name,
                Bytes(need),
                Bytes(free),
                self.downloads.folder().display()
            ),
            _ => Ok(()),
        }
    }

    /// Downloads what is missing. With `verify`, the checksums of files that are here already are compared, too.
    ///
    /// # Errors
    /// If the hub or the drive fails, or the client's [`Cancel`](forebay_engine::Cancel) is cancelled. What has come is kept.
    pub fn download(&self, verify: bool, watcher: &dyn Watcher) -> Result<()> {
        let total = self.variant.bytes();
        let count = self.variant.files.len();
        let mut before = 0;
        for (i, file) in self.files().enumerate() {
            watcher.begins(&file.file, i + 1, count);
            let meter = Meter { watcher, before, total };
            let (blob, place) = (self.blob(file), self.place(file));
            if verify && self.is_here(file) {
                let path = if blob.exists() { &blob } else { &place };
                if !is_sound(&self.client, path, file, &meter)? {
                    watcher.damaged(&file.file);
                    fs::remove_file(path).with_context(|| format!("cannot remove {}", path.display()))?;
                }
            }
            if !self.is_here(file) {
                fetch(&self.client, &self.listing, file, &blob, &meter)?;
            }
            if blob.exists() {
                link(&blob, &place)?;
            }
            before += file.file.bytes;
            watcher.at(before, total);
        }
        let folder = self.downloads.repo(&self.listing.repo);
        folder.create_ref(&self.listing.commit).context("cannot write which version was downloaded")
    }

    fn files(&self) -> impl Iterator<Item = &RemoteFile> {
        self.variant.files.iter().map(|file| self.listing.file(&file.name))
    }

    fn blob(&self, file: &RemoteFile) -> PathBuf {
        self.downloads.repo(&self.listing.repo).blob_path(file.blob())
    }

    /// Where a file is when it has been downloaded.
    fn place(&self, file: &RemoteFile) -> PathBuf {
        self.snapshot().join(&file.file.name)
    }

    fn snapshot(&self) -> PathBuf {
        self.downloads.repo(&self.listing.repo).pointer_path(&self.listing.commit)
    }

    /// Whether the file is here: as a blob, or in the version's folder where links cannot be had.
    fn is_here(&self, file: &RemoteFile) -> bool {
        let has_size =
            |path: &Path| fs::metadata(path).is_ok_and(|m| m.is_file() && m.len() == file.file.bytes);
        has_size(&self.blob(file)) || has_size(&self.place(file))
    }

    /// Bytes of a file that are here.
    fn held(&self, file: &RemoteFile) -> u64 {
        if self.is_here(file) {
            return file.file.bytes;
        }
        let part = fs::metadata(partial(&self.blob(file))).map_or(0, |m| m.len());
        if part > file.file.bytes { 0 } else { part }
    }
}

/// Bytes that are free where a folder is or will be; `None` where the system does not tell.
pub fn free_space(folder: &Path) -> Option<u64> {
    #[cfg(unix)]
    {
        let existing = folder.ancestors().find(|folder| folder.exists())?;
        let drive = rustix::fs::statvfs(existing).ok()?;
        Some(drive.f_bavail.saturating_mul(drive.f_frsize))
    }
    #[cfg(not(unix))]
    {
        let _ = folder;
        None
    }
}
