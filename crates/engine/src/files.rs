//! Files that are written whole or not at all.

use std::fs::{self, File};
use std::io;
use std::path::Path;

/// Writes a file beside its place and moves it there once it is on the drive. Where that fails, what was there before
/// is still there: another process may write the same file, the drive may be full, the power may go.
pub fn write_whole(path: &Path, write: impl FnOnce(&mut File) -> io::Result<()>) -> io::Result<()> {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(format!(".{}", std::process::id()));
    let temporary = path.with_file_name(name);
    let written = File::create(&temporary)
        .and_then(|mut file| {
            write(&mut file)?;
            file.sync_all()
        })
        .and_then(|()| fs::rename(&temporary, path));
    if written.is_err() {
        let _ = fs::remove_file(&temporary);
    }
    written
}
