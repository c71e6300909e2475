//! The demo model: the checkout's file, or the copy that every binary carries.

use std::ffi::OsString;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use crate::hub;

const NAME: &str = "tales-qwen3moe-Q4_K_M.gguf";
const BYTES: &[u8] = include_bytes!("../../../models/tales-qwen3moe-Q4_K_M.gguf");

/// The model that was named, by its path or as a download, or the demo model.
pub fn or_demo(model: Option<&Path>) -> Result<PathBuf> {
    model.map_or_else(path, hub::locate)
}

/// The path of the demo model. An installed binary writes its copy to the user's cache, once.
fn path() -> Result<PathBuf> {
    let checkout = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../models")).join(NAME);
    if checkout.is_file() {
        return Ok(checkout);
    }
    let folder = cache_folder(|name| std::env::var_os(name));
    extract(&folder).with_context(|| format!("cannot write the demo model to {}", folder.display()))
}

fn cache_folder(environment: impl Fn(&str) -> Option<OsString>) -> PathBuf {
    let variable = |name| environment(name).filter(|v| !v.is_empty()).map(PathBuf::from);
    variable("XDG_CACHE_HOME")
        .or_else(|| variable("LOCALAPPDATA"))
        .or_else(|| variable("HOME").map(|home| home.join(".cache")))
        .unwrap_or_else(std::env::temp_dir)
        .join("forebay")
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
            cache_folder(|name| set.iter().find(|(n, _)| *n == name).map(|(_, value)| value.into()))
        };
        let home = ("HOME", "/home/me");
        assert_eq!(folder(&[home, ("XDG_CACHE_HOME", "/caches")]), Path::new("/caches/forebay"));
        assert_eq!(folder(&[home, ("XDG_CACHE_HOME", "")]), Path::new("/home/me/.cache/forebay"));
        assert_eq!(folder(&[]), std::env::temp_dir().join("forebay"));
    }
}
