//! Downloads on this machine: the cache that the hub's own tools use, too.
//!
//! A repository has a folder with `blobs`, named by their checksums; `snapshots`, one folder for each version, whose
//! files are links to blobs; and `refs`, which say which version a branch is.

use std::collections::BTreeSet;
use std::fmt;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use hf_hub::{Cache, CacheRepo, Repo};

use crate::choice::{self, File, Undecided, Variant};
use crate::error::{Context, Error, Result, bail, failure};
use crate::name::ModelName;

/// What the folder of a model's repository is called, before its name.
const PREFIX: &str = "models--";

/// The ending of a blob that is not complete. Python's tools and ours have different ones.
const UNFINISHED: [&str; 2] = ["part", "incomplete"];

/// That a model of the hub is not here, or not all of it.
#[derive(Debug)]
pub struct NotDownloaded {
    /// The name that was looked for.
    pub name: ModelName,
    why: String,
}

impl std::error::Error for NotDownloaded {}

impl fmt::Display for NotDownloaded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}; `forebay pull {}` downloads it", self.why, self.name)
    }
}

/// Where downloads are.
pub struct Downloads {
    cache: Cache,
}

/// A model that is here.
pub struct Downloaded {
    /// How it is asked for.
    pub name: ModelName,
    /// Its files.
    pub variant: Variant,
    /// The folder of the version.
    pub snapshot: PathBuf,
}

impl Downloaded {
    /// What is to be opened.
    pub fn path(&self) -> PathBuf {
        match self.variant.entry() {
            "" => self.snapshot.clone(),
            entry => self.snapshot.join(entry),
        }
    }
}

/// A repository, of which some is here.
pub struct Held {
    /// `OWNER/NAME`.
    pub repo: String,
    /// The models of which files are here.
    pub models: Vec<Downloaded>,
    /// Bytes of downloads that were stopped.
    pub unfinished: u64,
}

impl Downloads {
    /// The downloads in a folder.
    pub fn new(folder: PathBuf) -> Downloads {
        Downloads { cache: Cache::new(folder) }
    }

    /// The folder of everything.
    pub fn folder(&self) -> &Path {
        self.cache.path()
    }

    /// The places of a repository's files.
    pub(crate) fn repo(&self, repo: &str) -> CacheRepo {
        self.cache.model(repo.to_owned())
    }

    /// The folder of a repository.
    pub(crate) fn repo_folder(&self, repo: &str) -> PathBuf {
        self.cache.path().join(Repo::model(repo.to_owned()).folder_name())
    }

    /// The model of this name.
    ///
    /// # Errors
    /// [`Error::NotDownloaded`] for what is not complete or not here; it says how to get it.
    pub fn find(&self, name: &ModelName) -> Result<Downloaded> {
        let missing = |why| Err(NotDownloaded { name: name.clone(), why }.into());
        let mut models = self.models(&name.repo)?;
        let variants: Vec<Variant> = models.iter().map(|m| m.variant.clone()).collect();
        // Half a model is meant only where there is nothing better.
        let whole: Vec<Variant> = variants.iter().filter(|v| v.missing == 0).cloned().collect();
        let chosen = choice::choose(&whole, name.quant.as_deref())
            .or_else(|_| choice::choose(&variants, name.quant.as_deref()));
        let chosen = match chosen {
            Ok(variant) => variant,
            Err(Undecided::Empty) => {
                return missing(format!("{name} is not a file here and is not downloaded"));
            }
            Err(Undecided::Unknown) => {
                return missing(format!(
                    "{name} is not downloaded (of {}, {} is)",
                    name.repo,
                    choice::list(&variants)
                ));
            }
            Err(Undecided::Several(all)) => {
                bail!(
                    "{name} could be several downloads: {}; choose one, as in {}:QUANT",
                    all.join(", "),
                    name.repo
                )
            }
        };
        if chosen.missing > 0 {
            let (missing, all) = (chosen.missing, chosen.missing + chosen.files.len());
            return Err(Error::from(NotDownloaded {
                name: ModelName { repo: name.repo.clone(), quant: Some(chosen.label.clone()) },
                why: format!("{missing} of the {all} files of {}:{} are missing", name.repo, chosen.label),
            }));
        }
        let at =
            models.iter().position(|m| m.variant.files == chosen.files && m.variant.label == chosen.label);
        Ok(models.swap_remove(at.expect("it was chosen among these")))
    }

    /// The models of a repository that are here, each in its latest version.
    ///
    /// # Errors
    /// If the folder cannot be listed.
    pub fn models(&self, repo: &str) -> Result<Vec<Downloaded>> {
        let mut models: Vec<Downloaded> = Vec::new();
        for snapshot in self.snapshots(repo)? {
            for variant in choice::variants(&files_below(&snapshot)?) {
                let name = ModelName { repo: repo.to_owned(), quant: Some(variant.label.clone()) };
                match models.iter_mut().find(|m| m.variant.label == variant.label) {
                    Some(newer) if newer.variant.missing > 0 && variant.missing == 0 => {
                        *newer = Downloaded { name, variant, snapshot: snapshot.clone() };
                    }
                    Some(_) => {}
                    None => models.push(Downloaded { name, variant, snapshot: snapshot.clone() }),
                }
            }
        }
        Ok(models)
    }

    /// Everything that is here.
    ///
    /// # Errors
    /// If the folder cannot be listed.
    pub fn all(&self) -> Result<Vec<Held>> {
        let mut repos = Vec::new();
        for folder in entries(self.folder())? {
            let name = folder.file_name().and_then(|name| name.to_str()).unwrap_or_default();
            let Some(repo) = name.strip_prefix(PREFIX) else { continue };
            // The folder's name has `--` for the one `/`; owners have no `--` in their names.
            let repo = repo.replacen("--", "/", 1);
            let unfinished: u64 =
                unfinished(&folder)?.iter().filter_map(|path| Some(fs::metadata(path).ok()?.len())).sum();
            repos.push(Held { models: self.models(&repo)?, repo, unfinished });
        }
        repos.sort_by(|a, b| a.repo.cmp(&b.repo));
        Ok(repos)
    }

    /// Removes a repository with all that it has.
    ///
    /// # Errors
    /// If a file cannot be removed.
    pub fn remove_repo(&self, repo: &str) -> Result<()> {
        let folder = self.repo_folder(repo);
        fs::remove_dir_all(&folder).with_context(|| format!("cannot remove {}", folder.display()))
    }

    /// Removes the files of a model from every version, and the blobs that no other file needs.
    ///
    /// # Errors
    /// If a file cannot be removed.
    pub fn remove(&self, model: &Downloaded) -> Result<()> {
        let repo = &model.name.repo;
        let snapshots = self.snapshots(repo)?;
        let mut blobs = BTreeSet::new();
        for snapshot in &snapshots {
            let here = choice::variants(&files_below(snapshot)?);
            let Some(same) = here.iter().find(|v| v.label == model.variant.label) else { continue };
            for file in &same.files {
                let path = snapshot.join(&file.name);
                let failed = || format!("cannot remove {}", path.display());
                blobs.extend(fs::canonicalize(&path));
                fs::remove_file(&path).with_context(failed)?;
                remove_empty(&path, snapshot.parent().unwrap_or(snapshot));
            }
        }
        let mut needed = BTreeSet::new();
        for snapshot in self.snapshots(repo)? {
            needed.extend(
                files_below(&snapshot)?.iter().filter_map(|f| fs::canonicalize(snapshot.join(&f.name)).ok()),
            );
        }
        for blob in blobs.difference(&needed) {
            // Where links cannot be had the file itself was in the version's folder.
            if blob.exists() {
                fs::remove_file(blob).with_context(|| format!("cannot remove {}", blob.display()))?;
            }
        }
        if needed.is_empty() && unfinished(&self.repo_folder(repo))?.is_empty() {
            self.remove_repo(repo)?;
        }
        Ok(())
    }

    /// The versions of a repository: the one of the main branch first, then the latest.
    fn snapshots(&self, repo: &str) -> Result<Vec<PathBuf>> {
        let folder = self.repo_folder(repo);
        let main = fs::read_to_string(folder.join("refs").join("main")).unwrap_or_default();
        let mut all = entries(&folder.join("snapshots"))?;
        let age = |path: &PathBuf| fs::metadata(path).and_then(|m| m.modified()).ok();
        all.sort_by_key(|path| {
            let is_main = path.file_name().is_some_and(|name| name == main.trim());
            std::cmp::Reverse((is_main, age(path)))
        });
        Ok(all)
    }
}

/// Gives a blob its name in a version.
pub fn link(blob: &Path, at: &Path) -> Result<()> {
    let failed = || format!("cannot link {} to {}", at.display(), blob.display());
    if let Some(folder) = at.parent() {
        fs::create_dir_all(folder).with_context(failed)?;
    }
    match fs::remove_file(at) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error).with_context(failed),
        _ => {}
    }
    // Both are in the folder of the repository: as many steps up as the file is deep in it.
    let root =
        blob.parent().and_then(Path::parent).ok_or_else(|| failure!("{} has no folder", blob.display()))?;
    let depth = at.strip_prefix(root).with_context(failed)?.components().count() - 1;
    let target = "../".repeat(depth) + "blobs";
    let target = Path::new(&target).join(blob.file_name().unwrap_or_default());
    #[cfg(unix)]
    std::os::unix::fs::symlink(target, at).with_context(failed)?;
    #[cfg(windows)]
    if std::os::windows::fs::symlink_file(target, at).is_err() {
        fs::rename(blob, at).with_context(failed)?;
    }
    Ok(())
}

/// The files below a folder that are whole, by their names from there.
fn files_below(folder: &Path) -> Result<Vec<File>> {
    let (mut files, mut folders) = (Vec::new(), vec![folder.to_owned()]);
    while let Some(next) = folders.pop() {
        for path in entries(&next)? {
            // A link to a blob that was removed is no file.
            let Ok(kind) = fs::metadata(&path) else { continue };
            if kind.is_dir() {
                folders.push(path);
            } else if let Some(name) = path.strip_prefix(folder).ok().and_then(Path::to_str) {
                files.push(File { name: name.replace('\\', "/"), bytes: kind.len() });
            }
        }
    }
    Ok(files)
}

/// The blobs of a repository that are not complete.
fn unfinished(repo: &Path) -> Result<Vec<PathBuf>> {
    let mut blobs = entries(&repo.join("blobs"))?;
    blobs.retain(|path| path.extension().is_some_and(|e| UNFINISHED.iter().any(|u| e == *u)));
    Ok(blobs)
}

/// What is in a folder; nothing if it is not there.
fn entries(folder: &Path) -> Result<Vec<PathBuf>> {
    match fs::read_dir(folder) {
        Ok(entries) => Ok(entries.flatten().map(|entry| entry.path()).collect()),
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
            Ok(Vec::new())
        }
        Err(error) => Err(error).with_context(|| format!("cannot list {}", folder.display())),
    }
}

/// Removes the folders that a file was in, up to `top`, as far as they are empty.
fn remove_empty(file: &Path, top: &Path) {
    for folder in file.ancestors().skip(1).take_while(|folder| *folder != top) {
        if fs::remove_dir(folder).is_err() {
            return;
        }
    }
}
