//! Models from the Hugging Face hub, in the cache that its own tools use.
//!
//! The environment says where: `HF_ENDPOINT` (the hub), `HF_HUB_CACHE` or `HF_HOME` (the cache), `HF_TOKEN` (who asks),
//! `HF_HUB_OFFLINE` (nothing is asked).

mod cache;
mod choice;
mod client;
mod download;
mod header;
mod name;

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow, bail};
use forebay_engine::Cancel;

pub use cache::{Downloaded, Downloads, link};
pub use choice::{Undecided, Variant, choose, list, variants};
pub use client::{Client, Listing, RemoteFile};
pub use download::{Watcher, fetch, is_sound, partial};
pub use header::Shell;
pub use name::ModelName;

/// How often is asked again, where nobody says.
pub const RETRIES: usize = 10;

/// What a command works on: a path if there is something at it, or else a download of this name.
pub fn locate(model: &Path) -> Result<PathBuf> {
    match as_name(model) {
        Some(name) => Ok(downloads()?.find(&name)?.path()),
        None => Ok(model.to_owned()),
    }
}

/// A model to be looked at, which may be on the hub alone.
pub struct Sight {
    /// What is to be opened.
    pub path: PathBuf,
    remote: Option<(Shell, ModelName, Variant)>,
}

impl Sight {
    /// Whether its weights are not here.
    pub fn is_remote(&self) -> bool {
        self.remote.is_some()
    }

    /// What a person would call a file of it.
    pub fn name_of(&self, path: &Path) -> String {
        self.remote.as_ref().map_or(path, |(shell, ..)| shell.name_of(path)).display().to_string()
    }

    /// What is to be said of a model that is not here; otherwise nothing.
    pub fn note(&self) -> String {
        let Some((_, name, variant)) = &self.remote else { return String::new() };
        let (size, count) = (forebay_engine::Bytes(variant.bytes()), variant.files.len());
        let files = if count == 1 { "1 file".into() } else { format!("{count} files") };
        format!("{name} is not here: `forebay pull {name}` downloads {size} in {files}\n")
    }
}

/// [`locate`], but what is not here is looked at on the hub.
pub fn sight(model: &Path) -> Result<Sight> {
    let here = |path| Sight { path, remote: None };
    let Some(name) = as_name(model) else { return Ok(here(model.to_owned())) };
    let missing = match downloads()?.find(&name) {
        Ok(found) => return Ok(here(found.path())),
        Err(missing) => missing,
    };
    if is_offline() {
        return Err(missing.context("HF_HUB_OFFLINE is set"));
    }
    let client = client(RETRIES, &Cancel::default())?;
    let listing = client.listing(&name.repo)?;
    let (name, variant) = decide(&name, &listing)?;
    let shell = Shell::read(&client, &listing, &variant)?;
    Ok(Sight { path: shell.path.clone(), remote: Some((shell, name, variant)) })
}

/// The model that is meant, and its full name.
pub fn decide(name: &ModelName, listing: &Listing) -> Result<(ModelName, Variant)> {
    let files: Vec<_> = listing.files.iter().map(|file| file.file.clone()).collect();
    let all = variants(&files);
    let example = |label: &str| ModelName { repo: name.repo.clone(), quant: Some(label.to_owned()) };
    match choose(&all, name.quant.as_deref()) {
        Ok(variant) if variant.missing > 0 => {
            bail!(
                "{} lacks {} of its files on the hub; choose another",
                example(&variant.label),
                variant.missing
            )
        }
        Ok(variant) => Ok((example(&variant.label), variant.clone())),
        Err(Undecided::Empty) => {
            bail!(
                "{} has neither GGUF files nor safetensors files with a config.json: it is no model",
                name.repo
            )
        }
        Err(Undecided::Unknown) => bail!("there is no {name}; {} has {}", name.repo, list(&all)),
        Err(Undecided::Several(several)) => {
            let first = several[0].split(' ').next().unwrap_or_default();
            bail!("{name} could be {}; say which, as in {}", several.join(", "), example(first))
        }
    }
}

/// The downloads of this user.
pub fn downloads() -> Result<Downloads> {
    let folder = match variable("HF_HUB_CACHE") {
        Some(folder) => folder.into(),
        None => home()?.join("hub"),
    };
    // Links are made between folders, so where they are must not depend on where we are.
    Ok(Downloads::new(
        std::path::absolute(&folder).with_context(|| format!("cannot find {}", folder.display()))?,
    ))
}

/// A client for the hub.
pub fn client(retries: usize, cancel: &Cancel) -> Result<Client> {
    if is_offline() {
        bail!("HF_HUB_OFFLINE is set, so nothing is downloaded; unset it to ask the hub");
    }
    let stored = || {
        let place =
            variable("HF_TOKEN_PATH").map(PathBuf::from).or_else(|| Some(home().ok()?.join("token")))?;
        std::fs::read_to_string(place).ok()
    };
    let token = variable("HF_TOKEN").or_else(stored).map(|token| token.trim().to_owned());
    Client::new(variable("HF_ENDPOINT"), token.filter(|token| !token.is_empty()), retries, cancel)
}

fn is_offline() -> bool {
    let value = variable("HF_HUB_OFFLINE").unwrap_or_default().to_ascii_uppercase();
    matches!(value.as_str(), "1" | "ON" | "YES" | "TRUE")
}

/// The folder of the hub's tools.
fn home() -> Result<PathBuf> {
    let caches = || Some(PathBuf::from(variable("XDG_CACHE_HOME")?));
    let user = || Some(std::env::home_dir().filter(|home| !home.as_os_str().is_empty())?.join(".cache"));
    let home = || Some(caches().or_else(user)?.join("huggingface"));
    variable("HF_HOME")
        .map(PathBuf::from)
        .or_else(home)
        .ok_or_else(|| anyhow!("there is no home folder to keep downloads in; set HF_HOME to a folder"))
}

fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}

/// The name of a repository, unless it is a path.
fn as_name(model: &Path) -> Option<ModelName> {
    if model.symlink_metadata().is_ok() {
        return None;
    }
    let name: ModelName = model.to_str()?.parse().ok()?;
    // A misspelt path is more likely than a repository that is called like a file.
    let like_a_file = [".gguf", ".safetensors", ".json"].iter().any(|ending| name.repo.ends_with(ending));
    (!like_a_file).then_some(name)
}
