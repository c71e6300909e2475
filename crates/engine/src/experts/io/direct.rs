//! Reads the files of a model past the page cache: the expert store is a cache already, and a second copy of experts
//! would take memory from it.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

use super::BLOCK;
use super::queue::Drives;
use super::source::{ByteSource, read_file_at};
use crate::error::{Error, Result};
use crate::format::FileIdx;

/// The files of a model, each opened for direct I/O if its file system allows it.
pub(super) struct DirectSource {
    files: Vec<DirectFile>,
}

/// One file.
pub(super) struct DirectFile {
    pub path: PathBuf,
    /// Reads through the page cache: everything if direct I/O is refused, otherwise only unaligned reads, such as the
    /// rest of a read that stopped inside a block.
    pub plain: File,
    /// Reads past the page cache.
    pub direct: Option<File>,
    device: u64,
}

impl DirectSource {
    /// Opens all files.
    pub fn open(paths: &[PathBuf]) -> Result<DirectSource> {
        let open = |path: &PathBuf| DirectFile::open(path).map_err(|e| Error::io(path, "cannot open", e));
        Ok(DirectSource { files: paths.iter().map(open).collect::<Result<_>>()? })
    }

    /// Like [`open`](Self::open) on a file system that refuses direct I/O.
    #[cfg(test)]
    pub fn buffered(paths: &[PathBuf]) -> Result<DirectSource> {
        let mut source = DirectSource::open(paths)?;
        source.files.iter_mut().for_each(|file| file.direct = None);
        Ok(source)
    }

    /// The drive of each file.
    pub fn drives(&self) -> Drives {
        Drives::by_device(self.files.iter().map(|file| file.device))
    }

    /// The files, in the model's order.
    #[cfg(target_os = "linux")]
    pub fn files(&self) -> &[DirectFile] {
        &self.files
    }

    /// How the files are read, for people.
    pub fn describe(&self) -> String {
        let buffered = self.files.iter().filter(|file| file.direct.is_none()).count();
        match self.files.len() {
            _ if buffered == 0 => "direct".into(),
            all if all == buffered => "buffered (direct I/O is not available)".into(),
            all => {
                format!("direct ({buffered} of {all} files buffered: their file systems refuse direct I/O)")
            }
        }
    }
}

impl ByteSource for DirectSource {
    fn read_at(&self, file: FileIdx, offset: u64, buffer: &mut [u8]) -> io::Result<usize> {
        let file = &self.files[file.0];
        match &file.direct {
            Some(direct) if is_aligned(offset, buffer.as_ptr(), buffer.len()) => {
                read_file_at(direct, offset, buffer)
            }
            _ => {
                let count = read_file_at(&file.plain, offset, buffer)?;
                file.forget(offset, count);
                Ok(count)
            }
        }
    }

    fn path(&self, file: FileIdx) -> &Path {
        &self.files[file.0].path
    }
}

impl DirectFile {
    fn open(path: &Path) -> io::Result<DirectFile> {
        let plain = File::open(path)?;
        let direct = platform::open_direct(path);
        if direct.is_none() {
            platform::expect_random_reads(&plain);
        }
        let device = platform::device(&plain)?;
        Ok(DirectFile { path: path.to_owned(), plain, direct, device })
    }

    /// Removes bytes that were read through the page cache from it again.
    pub fn forget(&self, offset: u64, len: usize) {
        platform::forget(&self.plain, offset, len);
    }
}

/// Removes a whole file from the page cache.
pub(super) fn forget(file: &File, len: u64) {
    platform::forget(file, 0, len as usize);
}

/// Whether a read with this offset, address and length can be direct.
pub(super) fn is_aligned(offset: u64, to: *const u8, len: usize) -> bool {
    offset.is_multiple_of(BLOCK as u64) && to.addr().is_multiple_of(BLOCK) && len.is_multiple_of(BLOCK)
}

#[cfg(target_os = "linux")]
mod platform {
    use std::fs::{File, OpenOptions};
    use std::io;
    use std::num::NonZeroU64;
    use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
    use std::path::Path;

    use rustix::fs::{Advice, OFlags, fadvise};

    use super::{BLOCK, read_file_at};

    /// Opens a file for direct I/O and reads a block: some file systems accept the flag and refuse the reads.
    pub fn open_direct(path: &Path) -> Option<File> {
        #[repr(align(4096))]
        struct Block([u8; BLOCK]);

        let flags = OFlags::DIRECT.bits() as i32;
        let file = OpenOptions::new().read(true).custom_flags(flags).open(path).ok()?;
        let mut first = Box::new(Block([0; BLOCK]));
        match read_file_at(&file, 0, &mut first.0) {
            Err(e) if e.kind() == io::ErrorKind::InvalidInput => None,
            // The first real read reports any other failure.
            _ => Some(file),
        }
    }

    /// Turns readahead off: it would read bytes that are not needed.
    pub fn expect_random_reads(file: &File) {
        // A refusal costs only speed.
        let _ = fadvise(file, 0, None, Advice::Random);
    }

    pub fn forget(file: &File, offset: u64, len: usize) {
        if let Some(len) = NonZeroU64::new(len as u64) {
            let _ = fadvise(file, offset, Some(len), Advice::DontNeed);
        }
    }

    pub fn device(file: &File) -> io::Result<u64> {
        Ok(file.metadata()?.dev())
    }
}

#[cfg(target_os = "macos")]
mod platform {
    use std::fs::File;
    use std::io;
    use std::os::unix::fs::MetadataExt;
    use std::path::Path;

    use rustix::fs::fcntl_nocache;

    /// Opens a file whose reads are not kept in the page cache.
    pub fn open_direct(path: &Path) -> Option<File> {
        let file = File::open(path).ok()?;
        fcntl_nocache(&file, true).ok()?;
        Some(file)
    }

    pub fn expect_random_reads(_: &File) {}

    pub fn forget(_: &File, _: u64, _: usize) {}

    pub fn device(file: &File) -> io::Result<u64> {
        Ok(file.metadata()?.dev())
    }
}

/// Other systems read through the page cache.
#[cfg(not(any(target_os = "linux", target_os = "macos")))]
mod platform {
    use std::fs::File;
    use std::io;
    use std::path::Path;

    pub fn open_direct(_: &Path) -> Option<File> {
        None
    }

    pub fn expect_random_reads(_: &File) {}

    pub fn forget(_: &File, _: u64, _: usize) {}

    /// All files count as being on one drive.
    pub fn device(_: &File) -> io::Result<u64> {
        Ok(0)
    }
}
