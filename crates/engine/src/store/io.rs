//! Where weight bytes come from.
//!
//! The source is a trait so that tests can be slow, short, failing and corrupt drives.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

use crate::error::{Error, Result};
use crate::format::{FileIdx, ModelFile};

/// Random access to the bytes of a model's files.
pub trait ByteSource: Send + Sync {
    /// Reads some bytes at `offset`, as `pread` does: fewer than asked are possible, none means the end.
    fn read_at(&self, file: FileIdx, offset: u64, buffer: &mut [u8]) -> io::Result<usize>;

    /// The file's path, for messages.
    fn path(&self, file: FileIdx) -> &Path;
}

impl dyn ByteSource + '_ {
    /// Fills `buffer` from `offset` on.
    ///
    /// # Errors
    /// Names the file and the offset at which reading failed or the file ended.
    pub fn read_exact_at(&self, file: FileIdx, offset: u64, buffer: &mut [u8]) -> Result<()> {
        let (asked, mut done) = (buffer.len(), 0);
        while done < asked {
            let at = offset + done as u64;
            let doing = || format!("cannot read {} bytes at offset {at}", asked - done);
            match self.read_at(file, at, &mut buffer[done..]) {
                Ok(0) => {
                    let end = io::Error::new(io::ErrorKind::UnexpectedEof, "the file ends before them");
                    return Err(Error::io(self.path(file), doing(), end));
                }
                Ok(n) => done += n,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(Error::io(self.path(file), doing(), e)),
            }
        }
        Ok(())
    }
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
}

impl ByteSource for FileSource {
    #[cfg(unix)]
    fn read_at(&self, file: FileIdx, offset: u64, buffer: &mut [u8]) -> io::Result<usize> {
        std::os::unix::fs::FileExt::read_at(&self.files[file.0].1, buffer, offset)
    }

    #[cfg(windows)]
    fn read_at(&self, file: FileIdx, offset: u64, buffer: &mut [u8]) -> io::Result<usize> {
        std::os::windows::fs::FileExt::seek_read(&self.files[file.0].1, buffer, offset)
    }

    fn path(&self, file: FileIdx) -> &Path {
        &self.files[file.0].0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A drive that gives one byte at a time, is interrupted now and then, and ends or fails at a given place.
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
        assert_eq!(message, "bad.gguf: cannot read 6 bytes at offset 4: the file ends before them");
    }

    #[test]
    fn a_failing_drive_names_file_and_offset() {
        let drive = BadDrive { bytes: vec![1, 2, 3, 4], fails_at: 2 };
        let message = read(drive, 0, 4).unwrap_err().to_string();
        assert_eq!(message, "bad.gguf: cannot read 2 bytes at offset 2: medium error");
    }
}
