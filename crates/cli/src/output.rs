//! Writes results: to standard output, or to files that are complete or absent.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use forebay_engine::Bytes;
use forebay_engine::internals::files::private_options;
use forebay_hub::free_space;

/// Writes a command's result to standard output.
pub fn print(text: &str) -> Result<()> {
    let mut stdout = io::stdout().lock();
    stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()).context(STDOUT_FAILED)
}

/// The error message if standard output cannot be written to.
pub const STDOUT_FAILED: &str = "cannot write to standard output";

/// A file to be written. Until it is complete, it has a temporary name in the same folder.
pub struct Output {
    file: File,
    path: PathBuf,
    /// `None` if the path is a device, a pipe or a link and not a file. Then it is written to directly
    /// and never replaced: a rename would turn `/dev/null` into a file.
    partial: Option<PathBuf>,
}

impl Output {
    /// Checks whether a file can be written. Leaves no file behind.
    pub fn check(path: &Path) -> Result<()> {
        // A pipe is not opened for the check: its reader would see the end of the data.
        if !is_in_place(path) {
            Output::create(path)?;
        }
        Ok(())
    }

    /// Opens what will be written.
    pub fn create(path: &Path) -> Result<Output> {
        Output::open(path, File::options())
    }

    /// Like [`create`](Self::create), for a file that only its owner may read.
    pub fn private(path: &Path) -> Result<Output> {
        Output::open(path, private_options())
    }

    fn open(path: &Path, mut options: OpenOptions) -> Result<Output> {
        let partial = (!is_in_place(path)).then(|| {
            let mut name = path.as_os_str().to_owned();
            name.push(format!(".{}.partial", std::process::id()));
            PathBuf::from(name)
        });
        let opened = match &partial {
            Some(partial) => options.write(true).create(true).truncate(true).open(partial),
            // It is not truncated before there is something to write.
            None => File::options().write(true).open(path),
        };
        let file = opened.with_context(|| cannot_write(path))?;
        Ok(Output { file, path: path.to_owned(), partial })
    }

    /// Refuses a file that does not fit on the drive, if the system reports the free space.
    pub fn require_space(path: &Path, bytes: u64) -> Result<()> {
        if is_in_place(path) {
            return Ok(());
        }
        // The temporary file is in the same folder.
        let folder = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
        match free_space(folder) {
            Some(free) if free < bytes => {
                let (path, need, free) = (path.display(), Bytes(bytes), Bytes(free));
                bail!(
                    "{path} needs {need}, but only {free} are free on its drive: free some space, or choose another path"
                )
            }
            _ => Ok(()),
        }
    }

    /// Writes the file.
    pub fn finish(self, bytes: &[u8]) -> Result<()> {
        let path = self.path.clone();
        self.finish_with(|file| file.write_all(bytes).with_context(|| cannot_write(&path)))
    }

    /// Writes the file in pieces.
    pub fn finish_with(mut self, write: impl FnOnce(&mut File) -> Result<()>) -> Result<()> {
        self.begin().with_context(|| cannot_write(&self.path))?;
        write(&mut self.file)?;
        self.complete().with_context(|| cannot_write(&self.path))
    }

    fn begin(&self) -> io::Result<()> {
        if self.partial.is_none() && self.file.metadata()?.is_file() {
            self.file.set_len(0)?;
        }
        Ok(())
    }

    fn complete(&mut self) -> io::Result<()> {
        if let Some(partial) = &self.partial {
            fs::rename(partial, &self.path)?;
            self.partial = None;
        }
        Ok(())
    }
}

impl Drop for Output {
    fn drop(&mut self) {
        if let Some(partial) = &self.partial {
            let _ = fs::remove_file(partial);
        }
    }
}

fn is_in_place(path: &Path) -> bool {
    fs::symlink_metadata(path).is_ok_and(|m| !m.is_file())
}

fn cannot_write(path: &Path) -> String {
    format!("cannot write {}", path.display())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(folder: &Path) -> Vec<String> {
        let entries = fs::read_dir(folder).unwrap();
        entries.map(|e| e.unwrap().file_name().into_string().unwrap()).collect()
    }

    #[test]
    fn a_file_appears_when_it_is_complete_and_leaves_nothing_beside_it() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("out");
        fs::write(&path, "before").unwrap();
        Output::check(&path).unwrap();
        drop(Output::create(&path).unwrap());
        assert_eq!(fs::read(&path).unwrap(), b"before");
        assert_eq!(names(folder.path()), ["out"]);
        Output::create(&path).unwrap().finish(b"after").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"after");
        assert_eq!(names(folder.path()), ["out"]);
    }

    #[cfg(unix)]
    #[test]
    fn what_a_link_leads_to_is_written_and_the_link_stays() {
        let folder = tempfile::tempdir().unwrap();
        let (target, link) = (folder.path().join("target"), folder.path().join("link"));
        fs::write(&target, "something longer").unwrap();
        std::os::unix::fs::symlink(&target, &link).unwrap();
        Output::create(&link).unwrap().finish(b"short").unwrap();
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
        assert_eq!(fs::read(&target).unwrap(), b"short");
    }

    /// A pipe stands for devices here: a test must not be able to damage a real one.
    #[cfg(unix)]
    #[test]
    fn a_pipe_is_written_to_and_not_replaced() {
        use std::os::unix::fs::FileTypeExt;
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("pipe");
        assert!(std::process::Command::new("mkfifo").arg(&path).status().unwrap().success());
        let reader = std::thread::spawn({
            let path = path.clone();
            move || fs::read(path).unwrap()
        });
        Output::check(&path).unwrap();
        Output::create(&path).unwrap().finish(b"bytes").unwrap();
        assert_eq!(reader.join().unwrap(), b"bytes");
        assert!(fs::symlink_metadata(&path).unwrap().file_type().is_fifo());
    }
}
