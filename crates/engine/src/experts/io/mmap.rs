//! Maps the files of a model into memory, for comparison with the other I/O methods.
//!
//! If a file shrinks while it is mapped, a signal kills the process; no error can be reported.

use std::ffi::c_void;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::ptr::NonNull;

use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

use super::source::ByteSource;
use crate::error::{Error, Result};
use crate::format::FileIdx;

/// The files of a model, each mapped as a whole.
pub(super) struct MappedSource {
    files: Vec<(PathBuf, Mapping)>,
}

impl MappedSource {
    /// Maps all files.
    pub fn open(paths: &[PathBuf]) -> Result<MappedSource> {
        let files = paths.iter().map(|path| {
            let mapping = Mapping::new(path).map_err(|e| Error::io(path, "cannot map", e))?;
            Ok((path.clone(), mapping))
        });
        Ok(MappedSource { files: files.collect::<Result<_>>()? })
    }
}

impl ByteSource for MappedSource {
    fn read_at(&self, file: FileIdx, offset: u64, buffer: &mut [u8]) -> io::Result<usize> {
        Ok(self.files[file.0].1.copy(offset, buffer))
    }

    fn path(&self, file: FileIdx) -> &Path {
        &self.files[file.0].0
    }
}

/// A whole file in memory, read-only. An empty file has no mapping.
struct Mapping {
    start: Option<NonNull<c_void>>,
    len: usize,
}

// SAFETY: the mapping is owned and never written to.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    fn new(path: &Path) -> io::Result<Mapping> {
        let file = File::open(path)?;
        let len = usize::try_from(file.metadata()?.len()).map_err(|_| io::ErrorKind::OutOfMemory)?;
        if len == 0 {
            return Ok(Mapping { start: None, len });
        }
        // SAFETY: a new mapping at an address of the system's choice touches no other memory.
        let start = unsafe { mmap(std::ptr::null_mut(), len, ProtFlags::READ, MapFlags::PRIVATE, &file, 0)? };
        Ok(Mapping { start: NonNull::new(start), len })
    }

    /// Copies what the file has from `offset` on, at most the length of `buffer`; returns the number of bytes.
    fn copy(&self, offset: u64, buffer: &mut [u8]) -> usize {
        let Some(start) = self.start else { return 0 };
        let offset = usize::try_from(offset).map_or(self.len, |offset| offset.min(self.len));
        let count = buffer.len().min(self.len - offset);
        let from = start.as_ptr().cast::<u8>().wrapping_add(offset);
        // SAFETY: the bytes are in the mapping, and the buffer is not, because it is borrowed exclusively. They are
        // copied without a reference to them, because another process may write to the file.
        unsafe { std::ptr::copy_nonoverlapping(from, buffer.as_mut_ptr(), count) };
        count
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        if let Some(start) = self.start {
            // SAFETY: this owns the mapping, and nothing points into it any more.
            let unmapped = unsafe { munmap(start.as_ptr(), self.len) };
            debug_assert!(unmapped.is_ok());
        }
    }
}
