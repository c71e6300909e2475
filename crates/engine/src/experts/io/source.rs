//! Where weights are read from.
//!
//! A trait, so that tests can simulate slow, failing and corrupt drives and short reads.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

use crate::error::{Error, Result};
use crate::format::{FileIdx, ModelFile};

/// Random access to the bytes of a model's files.
pub trait ByteSource: Send + Sync {
    /// Reads bytes at `offset` as `pread` does: may return fewer than requested; zero means the end of the file.
    fn read_at(&self, file: FileIdx, offset: u64, buffer: &mut [u8]) -> io::Result<usize>;

    /// The file's path, for messages.
    fn path(&self, file: FileIdx) -> &Path;
}

impl dyn ByteSource + '_ {
    /// Fills `buffer` with the bytes at `offset`.
    ///
    /// # Errors
    /// Names the file and the offset at which reading failed or the file ended.
    pub fn read_exact_at(&self, file: FileIdx, offset: u64, buffer: &mut [u8]) -> Result<()> {
        self.read_at_least(file, offset, buffer, buffer.len())
    }

    /// Fills at least the first `needed` bytes of `buffer` with the bytes at `offset`; may fill more.
    ///
    /// # Errors
    /// Names the file and the offset at which reading failed or the file ended.
    pub fn read_at_least(&self, file: FileIdx, offset: u64, buffer: &mut [u8], needed: usize) -> Result<()> {
        let mut done = 0;
        while done < needed {
            let at = offset + done as u64;
            let failed = |e| Err(cannot_read(self.path(file), at, needed - done, e));
            match self.read_at(file, at, &mut buffer[done..]) {
                Ok(0) => return failed(ends_early()),
                Ok(n) => done += n,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return failed(e),
            }
        }
        Ok(())
    }
}

/// The error for `missing` bytes that could not be read.
pub(super) fn cannot_read(path: &Path, offset: u64, missing: usize, reason: io::Error) -> Error {
    Error::io(path, format!("cannot read {missing} bytes at offset {offset}"), reason)
}

/// The cause of the error when a file is shorter than its directory says.
pub(super) fn ends_early() -> io::Error {
    io::Error::new(io::ErrorKind::UnexpectedEof, "the file is too short (is it complete?)")
}

/// The files of a model, read with `pread`.
#[derive(Debug)]
pub struct FileSource {
    files: Vec<(PathBuf, File)>,
}

impl FileSource {
    /// Opens all files of a model.
    ///
    /// # Errors
    /// If a file cannot be opened.
    pub fn open(model: &ModelFile) -> Result<FileSource> {
        let files = model.files.iter().map(|part| {
            let file = File::open(&part.path).map_err(|e| Error::io(&part.path, "cannot open", e))?;
            Ok((part.path.clone(), file))
        });
        Ok(FileSource { files: files.collect::<Result<_>>()? })
    }

    /// Removes the files from the page cache, if the system allows it: the weights are in the process's own memory by
    /// now.
    pub fn forget(&self) {
        for (_, file) in &self.files {
            if let Ok(metadata) = file.metadata() {
                super::direct::forget(file, metadata.len());
            }
        }
    }
}

impl ByteSource for FileSource {
    fn read_at(&self, file: FileIdx, offset: u64, buffer: &mut [u8]) -> io::Result<usize> {
        read_file_at(&self.files[file.0].1, offset, buffer)
    }

    fn path(&self, file: FileIdx) -> &Path {
        &self.files[file.0].0
    }
}

/// Reads at an offset, on any thread.
#[cfg(unix)]
pub(super) fn read_file_at(file: &File, offset: u64, buffer: &mut [u8]) -> io::Result<usize> {
    std::os::unix::fs::FileExt::read_at(file, buffer, offset)
}

/// Reads at an offset, on any thread.
#[cfg(windows)]
pub(super) fn read_file_at(file: &File, offset: u64, buffer: &mut [u8]) -> io::Result<usize> {
    std::os::windows::fs::FileExt::seek_read(file, buffer, offset)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A drive that returns one byte at a time, is interrupted now and then, and ends or fails at a given offset.
    struct BadDrive {
        bytes: Vec<u8>,
        fails_at: u64,
    }

    impl ByteSource for BadDrive {
        fn read_at(&self, _: FileIdx, offset: u64, buffer: &mut [u8]) -> io::Result<usize> {
            if offset == self.fails_at {
                return Err(io::Error::other("medium error"));
            }
            match self.bytes.get(offset as usize) {
                Some(&byte) => buffer[0] = byte,
                None => return Ok(0),
            }
            Ok(1)
        }

        fn path(&self, _: FileIdx) -> &Path {
            Path::new("bad.gguf")
        }
    }

    fn read(drive: BadDrive, offset: u64, len: usize) -> Result<Vec<u8>> {
        let mut buffer = vec![0; len];
        let drive: &dyn ByteSource = &drive;
        drive.read_exact_at(FileIdx(0), offset, &mut buffer).map(|()| buffer)
    }

    #[test]
    fn short_reads_are_continued() {
        let drive = BadDrive { bytes: vec![1, 2, 3, 4], fails_at: 99 };
        assert_eq!(read(drive, 1, 3).unwrap(), [2, 3, 4]);
    }

    #[test]
    fn an_early_end_names_file_and_offset() {
        let drive = BadDrive { bytes: vec![1, 2, 3, 4], fails_at: 99 };
        let message = read(drive, 1, 9).unwrap_err().to_string();
        assert_eq!(
            message,
            "bad.gguf: cannot read 6 bytes at offset 4: the file is too short (is it complete?)"
        );
    }

    #[test]
    fn a_failing_drive_names_file_and_offset() {
        let drive = BadDrive { bytes: vec![1, 2, 3, 4], fails_at: 2 };
        let message = read(drive, 0, 4).unwrap_err().to_string();
        assert_eq!(message, "bad.gguf: cannot read 2 bytes at offset 2: medium error");
    }
}
