//! Reads a header's primitive values in order; checks each against the bytes that are left in the file.

use std::fmt;
use std::io::{self, BufRead, BufReader, Read};
use std::path::Path;

use super::MAX_HEADER_BYTES;
use crate::error::{Error, Result};
use crate::format::foreign::CUT_SHORT;

/// The most that is allocated before any byte has been read.
const FIRST_STEP: usize = 64 << 10;

/// A position in a file's header. The argument `what` of its functions names the value being read, for messages.
pub(super) struct Reader<'a> {
    path: &'a Path,
    source: BufReader<&'a mut dyn Read>,
    offset: u64,
    /// The length of the whole file.
    len: u64,
}

impl<'a> Reader<'a> {
    pub fn new(path: &'a Path, source: &'a mut dyn Read, len: u64) -> Reader<'a> {
        Reader { path, source: BufReader::with_capacity(FIRST_STEP, source), offset: 0, len }
    }

    pub fn offset(&self) -> u64 {
        self.offset
    }

    pub fn file_len(&self) -> u64 {
        self.len
    }

    pub fn is_empty_file(&self) -> bool {
        self.len == 0
    }

    /// Bytes from the current position to the end of the file.
    pub fn remaining(&self) -> u64 {
        self.len.saturating_sub(self.offset)
    }

    /// An error about a file that violates the GGUF format.
    pub fn damaged(&self, message: impl Into<String>) -> Error {
        Error::format(self.path, message)
    }

    /// An error about something valid but not supported.
    pub fn unsupported(&self, message: impl fmt::Display) -> Error {
        Error::Unsupported(format!("{}: {message}", self.path.display()))
    }

    /// Some of the next bytes, without moving past them.
    pub fn peek(&mut self) -> Result<&[u8]> {
        let (path, offset) = (self.path, self.offset);
        self.source.fill_buf().map_err(|e| Error::io(path, format!("cannot read at offset {offset}"), e))
    }

    pub fn u32(&mut self, what: fmt::Arguments) -> Result<u32> {
        self.array(what).map(u32::from_le_bytes)
    }

    pub fn u64(&mut self, what: fmt::Arguments) -> Result<u64> {
        self.array(what).map(u64::from_le_bytes)
    }

    pub fn array<const N: usize>(&mut self, what: fmt::Arguments) -> Result<[u8; N]> {
        let mut bytes = [0; N];
        self.fill(&mut bytes, what)?;
        Ok(bytes)
    }

    /// Fills `out` with the next bytes.
    pub fn fill(&mut self, out: &mut [u8], what: fmt::Arguments) -> Result<()> {
        let need = out.len() as u64;
        self.check_available(need, what)?;
        self.source.read_exact(out).map_err(|e| {
            if e.kind() == io::ErrorKind::UnexpectedEof {
                self.truncated(need, what)
            } else {
                Error::io(self.path, format!("cannot read {need} bytes at offset {}", self.offset), e)
            }
        })?;
        self.offset += need;
        Ok(())
    }

    /// Reads `count` bytes. Allocates at most twice the bytes that have been read.
    pub fn bytes(&mut self, count: u64, what: fmt::Arguments) -> Result<Vec<u8>> {
        let mut out = Vec::new();
        self.bytes_into(&mut out, count, what)?;
        Ok(out)
    }

    /// Reads a string of at most `limit` bytes: its length, then UTF-8.
    pub fn string(&mut self, limit: u64, what: fmt::Arguments) -> Result<String> {
        let start = self.offset;
        let mut bytes = Vec::new();
        self.string_bytes(&mut bytes, limit, what)?;
        String::from_utf8(bytes).map_err(|_| self.not_utf8(start, what))
    }

    /// Like [`string`](Self::string) without a limit, into a buffer that the caller reuses.
    pub fn str_in<'b>(&mut self, buffer: &'b mut Vec<u8>, what: fmt::Arguments) -> Result<&'b str> {
        let start = self.offset;
        self.string_bytes(buffer, u64::MAX, what)?;
        std::str::from_utf8(buffer).map_err(|_| self.not_utf8(start, what))
    }

    fn string_bytes(&mut self, out: &mut Vec<u8>, limit: u64, what: fmt::Arguments) -> Result<()> {
        let start = self.offset;
        let count = u64::from_le_bytes(self.array(format_args!("the length of {what}"))?);
        let left = self.remaining();
        if count > left {
            return Err(self.damaged(format!(
                "{what} at offset {start} claims to be {count} bytes long, but the file has only {left} more"
            )));
        }
        if count > limit {
            return Err(self.damaged(format!(
                "{what} at offset {start} is {count} bytes long, more than the limit of {limit}"
            )));
        }
        self.bytes_into(out, count, what)
    }

    fn bytes_into(&mut self, out: &mut Vec<u8>, count: u64, what: fmt::Arguments) -> Result<()> {
        self.check_available(count, what)?;
        out.clear();
        let mut left = usize::try_from(count).map_err(|_| self.too_large(what))?;
        while left > 0 {
            let filled = out.len();
            let step = left.min(filled.max(FIRST_STEP));
            out.reserve_exact(step);
            out.resize(filled + step, 0);
            self.fill(&mut out[filled..], what)?;
            left -= step;
        }
        Ok(())
    }

    /// Refuses to read `need` bytes that the file does not have or that exceed the largest header.
    fn check_available(&self, need: u64, what: fmt::Arguments) -> Result<()> {
        if need > self.remaining() {
            return Err(self.truncated(need, what));
        }
        if self.offset.saturating_add(need) > MAX_HEADER_BYTES {
            return Err(self.too_large(what));
        }
        Ok(())
    }

    fn truncated(&self, need: u64, what: fmt::Arguments) -> Error {
        let Reader { offset, len, .. } = self;
        self.damaged(format!(
            "truncated while reading {what}: {need} bytes are needed at offset {offset}, but the file has {len} bytes; \
             {CUT_SHORT}"
        ))
    }

    fn too_large(&self, what: fmt::Arguments) -> Error {
        self.damaged(format!(
            "the header is larger than {MAX_HEADER_BYTES} bytes, reached at offset {} while reading {what}",
            self.offset
        ))
    }

    fn not_utf8(&self, start: u64, what: fmt::Arguments) -> Error {
        self.damaged(format!("{what} at offset {start} is not UTF-8"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_source_shorter_than_its_file_claims_is_truncated() {
        let mut source: &[u8] = &[1, 2, 3];
        let mut reader = Reader::new(Path::new("short"), &mut source, 1 << 40);
        let error = reader.bytes(1 << 20, format_args!("everything")).unwrap_err();
        assert!(error.to_string().contains("truncated while reading everything"), "{error}");
    }

    #[test]
    fn a_failing_source_is_an_io_error_with_the_offset() {
        struct Broken;
        impl Read for Broken {
            fn read(&mut self, _: &mut [u8]) -> io::Result<usize> {
                Err(io::Error::other("the disk is on fire"))
            }
        }
        let error = Reader::new(Path::new("p"), &mut Broken, 8).u32(format_args!("x")).unwrap_err();
        assert_eq!(error.to_string(), "p: cannot read 4 bytes at offset 0: the disk is on fire");
    }
}
