//! Files that only their owner can read, and that are complete or absent.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

/// Writes a temporary file in the same folder and renames it once it is on the drive. If that fails, for example because
/// the drive is full or the power fails, the old file stays. Other processes may write the same file. Only its owner
/// can read it.
pub fn write_whole(path: &Path, write: impl FnOnce(&mut File) -> io::Result<()>) -> io::Result<()> {
    let (mut file, temporary) = create_beside(path)?;
    let written = write(&mut file).and_then(|()| file.sync_all()).and_then(|()| fs::rename(&temporary, path));
    if written.is_err() {
        let _ = fs::remove_file(&temporary);
        return written;
    }
    // The name is on the drive when its folder is. The file is in its place even where that cannot be waited for.
    if let Err(error) = sync_folder(path) {
        tracing::debug!("{}: its folder cannot be synchronised: {error}", path.display());
    }
    Ok(())
}

/// Creates a file with a name that no other writer uses, in this process or another.
fn create_beside(path: &Path) -> io::Result<(File, PathBuf)> {
    static WRITERS: AtomicU64 = AtomicU64::new(0);
    loop {
        let number = WRITERS.fetch_add(1, Ordering::Relaxed);
        let mut name = path.file_name().unwrap_or_default().to_owned();
        name.push(format!(".{}.{number}", std::process::id()));
        let temporary = path.with_file_name(name);
        match private_options().write(true).create_new(true).open(&temporary) {
            Ok(file) => return Ok((file, temporary)),
            // An earlier process of the same number was killed while it wrote.
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(error),
        }
    }
}

#[cfg(unix)]
fn sync_folder(path: &Path) -> io::Result<()> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    match File::open(folder)?.sync_all() {
        // Some file systems keep no folders that could be written.
        Err(error) if matches!(error.kind(), io::ErrorKind::InvalidInput | io::ErrorKind::Unsupported) => {
            Ok(())
        }
        other => other,
    }
}

#[cfg(not(unix))]
fn sync_folder(_: &Path) -> io::Result<()> {
    Ok(())
}

/// Options that create files which only their owner can read, if the system supports that.
pub fn private_options() -> OpenOptions {
    #[allow(unused_mut)]
    let mut options = OpenOptions::new();
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    options
}

/// Makes a folder that only its owner can read. An existing folder becomes such a folder.
pub fn private_folder(path: &Path) -> io::Result<()> {
    let mut builder = fs::DirBuilder::new();
    builder.recursive(true);
    #[cfg(unix)]
    std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
    builder.create(path)?;
    make_private(path)
}

/// Removes the permissions of everybody except the owner from a file or a folder.
#[cfg(unix)]
pub fn make_private(path: &Path) -> io::Result<()> {
    use std::os::unix::fs::PermissionsExt;
    let metadata = fs::symlink_metadata(path)?;
    let mode = if metadata.is_dir() { 0o700 } else { 0o600 };
    // A link's own permissions mean nothing, and what it leads to is not ours.
    if metadata.is_symlink() || metadata.permissions().mode() & 0o777 == mode {
        return Ok(());
    }
    fs::set_permissions(path, fs::Permissions::from_mode(mode))
}

/// Removes the permissions of everybody except the owner from a file or a folder.
#[cfg(not(unix))]
pub fn make_private(_: &Path) -> io::Result<()> {
    Ok(())
}
