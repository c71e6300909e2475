//! The demo model: the file in the checkout, or the copy in the binary.

use std::ffi::OsString;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

#[cfg(unix)]
use crate::error::bail;
use crate::error::{Context, Result};

const NAME: &str = "tales-qwen3moe-Q4_K_M.gguf";
const BYTES: &[u8] = include_bytes!("../../../models/tales-qwen3moe-Q4_K_M.gguf");

/// The path of the demo model: in the checkout that the program was built from, if it is there. Otherwise the copy that every
/// program carries is written to the user's cache, once.
///
/// # Errors
/// If the copy cannot be written.
pub fn demo() -> Result<PathBuf> {
    let checkout = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../models")).join(NAME);
    if checkout.is_file() {
        return Ok(checkout);
    }
    let folder = match user_folder(|name| std::env::var_os(name)) {
        Some(folder) => folder,
        None => private_folder(&std::env::temp_dir())?,
    };
    extract(&folder).with_context(|| format!("cannot write the demo model to {}", folder.display()))
}

/// Where something is kept from run to run, such as `heat`; `None` without a home folder.
pub fn cache_folder(what: &str) -> Option<PathBuf> {
    Some(user_folder(|name| std::env::var_os(name))?.join(what))
}

/// The user's folder for caches; `None` without a home folder.
fn user_folder(environment: impl Fn(&str) -> Option<OsString>) -> Option<PathBuf> {
    let variable = |name| environment(name).filter(|v| !v.is_empty()).map(PathBuf::from);
    let caches = variable("XDG_CACHE_HOME")
        .or_else(|| variable("LOCALAPPDATA"))
        .or_else(|| variable("HOME").map(|home| home.join(".cache")))?;
    Some(caches.join("forebay"))
}

/// A folder among the temporary files that nobody but this user can look into or write to. Everybody may write beside it, so
/// one that is there already is taken only if it is this user's and closed to others: another user could have put it there
/// and exchange the file between its check and its use.
#[cfg(unix)]
fn private_folder(temporary: &Path) -> Result<PathBuf> {
    use std::os::unix::fs::{MetadataExt, PermissionsExt};
    // Its name is unpredictable, so it is new; and its owner is this user.
    let fresh = tempfile::Builder::new()
        .prefix("forebay-")
        .permissions(fs::Permissions::from_mode(0o700))
        .tempdir_in(temporary)
        .with_context(|| format!("cannot make a folder in {}", temporary.display()))?;
    let user = fresh.path().metadata().with_context(|| format!("cannot read {}", fresh.path().display()))?;
    let user = user.uid();
    let folder = temporary.join(format!("forebay-{user}"));
    // Fails where there is something of this name already, which then has to be what it should be.
    let _ = fs::rename(fresh.path(), &folder);
    let found = fs::symlink_metadata(&folder)
        .with_context(|| format!("cannot make the folder {}", folder.display()))?;
    if !found.is_dir() || found.uid() != user || found.mode() & 0o077 != 0 {
        bail!(
            "{} is not a folder of this user alone, so the demo model is not written there: remove it, or set HOME or \
         XDG_CACHE_HOME",
            folder.display()
        );
    }
    Ok(folder)
}

/// On other systems, every user has their own folder of temporary files.
#[cfg(not(unix))]
fn private_folder(temporary: &Path) -> Result<PathBuf> {
    Ok(temporary.join("forebay"))
}

/// Writes the copy to a folder unless it is there already, whole or not at all.
fn extract(folder: &Path) -> std::io::Result<PathBuf> {
    let path = folder.join(NAME);
    if fs::read(&path).is_ok_and(|bytes| bytes == BYTES) {
        return Ok(path);
    }
    fs::create_dir_all(folder)?;
    let partial = folder.join(format!("{NAME}.{}.partial", std::process::id()));
    let written = fs::File::create(&partial).and_then(|mut file| file.write_all(BYTES));
    if let Err(error) = written.and_then(|()| fs::rename(&partial, &path)) {
        let _ = fs::remove_file(&partial);
        return Err(error);
    }
    Ok(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_copy_is_written_once_and_repaired() {
        let folder = tempfile::tempdir().unwrap();
        let path = extract(folder.path()).unwrap();
        assert_eq!(fs::read(&path).unwrap(), BYTES);
        fs::write(&path, "damaged").unwrap();
        assert_eq!(extract(folder.path()).unwrap(), path);
        assert_eq!(fs::read(&path).unwrap(), BYTES);
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }
    #[test]
    fn a_folder_that_cannot_be_made_is_an_error() {
        let file = tempfile::NamedTempFile::new().unwrap();
        assert!(extract(&file.path().join("forebay")).is_err());
    }

    #[test]
    fn the_cache_is_where_the_user_keeps_caches() {
        let folder = |set: &[(&str, &str)]| {
            user_folder(|name| set.iter().find(|(n, _)| *n == name).map(|(_, value)| value.into()))
        };
        let home = ("HOME", "/home/me");
        let is = |path: &str| Some(PathBuf::from(path));
        assert_eq!(folder(&[home, ("XDG_CACHE_HOME", "/caches")]), is("/caches/forebay"));
        assert_eq!(folder(&[home, ("XDG_CACHE_HOME", "")]), is("/home/me/.cache/forebay"));
        assert_eq!(folder(&[]), None);
    }

    #[cfg(unix)]
    #[test]
    fn without_a_home_the_copy_is_where_nobody_else_can_change_it() {
        use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
        let temporary = tempfile::tempdir().unwrap();
        let folder = private_folder(temporary.path()).unwrap();
        assert_eq!(folder.metadata().unwrap().mode() & 0o777, 0o700);
        extract(&folder).unwrap();
        // The second call finds the same folder with its contents, and leaves nothing beside it.
        assert_eq!(private_folder(temporary.path()).unwrap(), folder);
        assert!(folder.join(NAME).is_file());
        assert_eq!(fs::read_dir(temporary.path()).unwrap().count(), 1);

        fs::set_permissions(&folder, fs::Permissions::from_mode(0o770)).unwrap();
        let refusal = private_folder(temporary.path()).unwrap_err().to_string();
        assert!(refusal.contains("is not a folder of this user alone"), "{refusal}");
        // A link is never followed.
        fs::remove_dir_all(&folder).unwrap();
        let elsewhere = tempfile::tempdir().unwrap();
        symlink(elsewhere.path(), &folder).unwrap();
        assert!(private_folder(temporary.path()).is_err());
    }
}
