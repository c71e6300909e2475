//! What a model on the hub is, before it is downloaded: its headers in files that are otherwise empty.

use std::fs::{self, File};
use std::io::{self, Cursor, Read, Write};
use std::path::{Path, PathBuf};

use forebay_engine::internals::format::{FileIdx, gguf, safetensors};
use tempfile::TempDir;

use crate::choice::Variant;
use crate::client::{Client, Listing};
use crate::error::{Context, Result};
use crate::pull::Watcher;

/// What a request asks for: most headers take one or two.
const PIECE: u64 = 4 << 20;

/// A model of which only headers and settings are here. The rest of its files is a hole.
pub struct Shell {
    folder: TempDir,
    /// What is to be opened.
    pub path: PathBuf,
}

impl Shell {
    /// Reads what describes a model, a few megabytes.
    pub fn read(
        client: &Client,
        listing: &Listing,
        variant: &Variant,
        watcher: &dyn Watcher,
    ) -> Result<Shell> {
        let folder = tempfile::Builder::new().prefix("forebay-").tempdir();
        let folder = folder.context("cannot make a temporary folder")?;
        let top = folder.path().join(&listing.repo);
        for file in &variant.files {
            watcher.note(&format!("reading the header of {}", file.name));
            let path = top.join(&file.name);
            let failed = || format!("cannot write {}", path.display());
            fs::create_dir_all(path.parent().unwrap_or(&top)).with_context(failed)?;
            let mut copy = File::create(&path).with_context(failed)?;
            let url = client.address(listing, &file.name);
            let mut source = Pieces {
                client,
                url,
                repo: &listing.repo,
                bytes: file.bytes,
                at: 0,
                piece: Cursor::default(),
            };
            let mut tee = Tee { source: &mut source, copy: &mut copy };
            if file.name.ends_with(".gguf") {
                gguf::parse(&path, &mut tee, file.bytes)?;
            } else if file.name.ends_with(".safetensors") {
                safetensors::parse(&path, &mut tee, file.bytes, FileIdx(0))?;
            } else {
                io::copy(&mut tee, &mut io::sink()).with_context(failed)?;
            }
            copy.set_len(file.bytes).with_context(failed)?;
        }
        let path = if variant.folder { top } else { top.join(variant.entry()) };
        Ok(Shell { folder, path })
    }

    /// A file of it by its name on the hub.
    pub fn name_of<'a>(&self, path: &'a Path) -> &'a Path {
        path.strip_prefix(self.folder.path()).unwrap_or(path)
    }
}

/// A file on the hub, of which nothing is asked for before it is read.
struct Pieces<'a> {
    client: &'a Client,
    url: String,
    repo: &'a str,
    bytes: u64,
    /// Where the next piece begins.
    at: u64,
    /// What has come.
    piece: Cursor<Vec<u8>>,
}

impl Read for Pieces<'_> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        let is_read = self.piece.position() == self.piece.get_ref().len() as u64;
        if is_read && self.at < self.bytes {
            let to = self.bytes.min(self.at + PIECE);
            let piece = self.client.read_range(&self.url, self.at, to, self.repo);
            self.piece = Cursor::new(piece.map_err(|error| io::Error::other(error.in_full()))?);
            self.at = to;
        }
        self.piece.read(out)
    }
}

/// A source of which a copy is made.
struct Tee<'a> {
    source: &'a mut dyn Read,
    copy: &'a mut File,
}

impl Read for Tee<'_> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        let count = self.source.read(out)?;
        self.copy.write_all(&out[..count])?;
        Ok(count)
    }
}
