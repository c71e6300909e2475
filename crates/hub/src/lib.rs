//! Models from the Hugging Face hub, in the cache that its own tools use.
//!
//! The environment says where: `HF_ENDPOINT` (the hub), `HF_HUB_CACHE` or `HF_HOME` (the cache), `HF_TOKEN` (who asks),
//! `HF_HUB_OFFLINE` (nothing is asked).
//!
//! # Examples
//! ```
//! // A path is itself; a name such as OWNER/NAME:Q4_K_M is found among the downloads.
//! let demo = forebay_hub::demo()?;
//! assert_eq!(forebay_hub::locate(&demo)?, demo);
//! # Ok::<(), forebay_hub::Error>(())
//! ```
//!
//! ```no_run
//! use forebay_engine::Cancel;
//! use forebay_hub::{Pull, RETRIES, Watcher};
//!
//! struct Print;
//!
//! impl Watcher for Print {
//!     fn at(&self, done: u64, total: u64) {
//!         eprint!("\r{} %", 100 * done / total.max(1));
//!     }
//! }
//!
//! let client = forebay_hub::client(RETRIES, &Cancel::default())?;
//! let pull = Pull::new(client, &"OWNER/NAME:Q4_K_M".parse()?)?;
//! pull.check_space()?;
//! pull.download(false, &Print)?;
//! println!("{}", pull.path().display());
//! # Ok::<(), forebay_hub::Error>(())
//! ```

mod cache;
mod choice;
mod client;
mod demo;
mod download;
mod error;
mod header;
mod name;
mod pull;

use std::path::{Path, PathBuf};

use forebay_engine::Cancel;

pub use self::cache::{Downloaded, Downloads, Held, NotDownloaded};
pub use self::choice::{File, Variant, list};
use self::choice::{Undecided, choose, variants};
pub use self::client::Client;
use self::client::Listing;
pub use self::demo::{cache_folder, demo};
use self::error::{Context, bail, failure};
pub use self::error::{Error, Result};
use self::header::Shell;
pub use self::name::ModelName;
pub use self::pull::{Pull, Watcher, free_space};

/// How often is asked again, where nobody says.
pub const RETRIES: usize = 10;

/// The path of a model: the one that is given, if there is something at it, or else that of a download of this name.
///
/// # Errors
/// [`Error::NotDownloaded`] if it is a name of the hub that is not here; other errors if it can be neither.
pub fn locate(model: &Path) -> Result<PathBuf> {
    match Meant::of(model)? {
        Meant::Name(name) => Ok(downloads()?.find(&name)?.path()),
        Meant::Path => Ok(model.to_owned()),
    }
}

/// What somebody means by a model.
enum Meant {
    /// A file or folder.
    Path,
    /// A model of the hub.
    Name(ModelName),
}

impl Meant {
    /// # Errors
    /// If it can be neither: with what models are called, and what is downloaded under a similar name.
    fn of(model: &Path) -> Result<Meant> {
        let Some(text) = model.to_str().filter(|_| model.symlink_metadata().is_err()) else {
            return Ok(Meant::Path);
        };
        // A misspelt path is more likely than a repository that is called like a file.
        let like_a_file =
            |s: &str| [".gguf", ".safetensors", ".json"].iter().any(|ending| s.ends_with(ending));
        match text.parse::<ModelName>() {
            Ok(name) if name::is_address(text) || !like_a_file(&name.repo) => return Ok(Meant::Name(name)),
            Err(error) if text.contains("://") || name::is_address(text) => bail!("{text}: {error}"),
            _ => {}
        }
        if text.is_empty() || text.contains(['/', '\\']) || like_a_file(text) {
            return Ok(Meant::Path);
        }
        let advice = if text.contains(char::is_whitespace) {
            ". A prompt goes after the model or after -p".to_owned()
        } else {
            match similar(text) {
                names if names.is_empty() => String::new(),
                names => format!(". Downloaded under a similar name: {}", names.join(", ")),
            }
        };
        bail!(
            "there is no file {text:?}; models of the hub have names such as OWNER/NAME:Q4_K_M: `forebay pull` downloads \
             a model, `forebay list` shows the downloaded models{advice}"
        )
    }
}

/// The downloaded models whose names have this one in them, whatever is between its letters and digits.
fn similar(name: &str) -> Vec<String> {
    let letters = |s: &str| -> String {
        s.chars().filter(|c| c.is_alphanumeric()).flat_map(char::to_lowercase).collect()
    };
    let wanted = letters(name.split(':').next().unwrap_or(name));
    let repos = downloads().and_then(|downloads| downloads.all()).unwrap_or_default();
    let names = repos.iter().flat_map(|repo| &repo.models).map(|model| model.name.to_string());
    names.filter(|name| !wanted.is_empty() && letters(name).contains(&wanted)).collect()
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
        format!("{name} is not downloaded: `forebay pull {name}` downloads {size} in {files}\n")
    }
}

/// [`locate`], but what is not here is looked at on the hub, a few megabytes.
///
/// # Errors
/// As [`locate`], and if the hub cannot be asked.
pub fn sight(model: &Path, watcher: &dyn Watcher) -> Result<Sight> {
    let here = |path| Sight { path, remote: None };
    let Meant::Name(name) = Meant::of(model)? else { return Ok(here(model.to_owned())) };
    let missing = match downloads()?.find(&name) {
        Ok(found) => return Ok(here(found.path())),
        Err(missing) => missing,
    };
    if is_offline() {
        return Err(Error::caused("HF_HUB_OFFLINE is set", missing));
    }
    let client = client(RETRIES, &Cancel::default())?;
    let listing = client.listing(&name.repo)?;
    let (name, variant) = decide(&name, &listing)?;
    let shell = Shell::read(&client, &listing, &variant, watcher)?;
    Ok(Sight { path: shell.path.clone(), remote: Some((shell, name, variant)) })
}

/// The model that is meant, and its full name.
fn decide(name: &ModelName, listing: &Listing) -> Result<(ModelName, Variant)> {
    let files: Vec<_> = listing.files.iter().map(|file| file.file.clone()).collect();
    let all = variants(&files);
    let example = |label: &str| ModelName { repo: name.repo.clone(), quant: Some(label.to_owned()) };
    match choose(&all, name.quant.as_deref()) {
        Ok(variant) if variant.missing > 0 => {
            bail!(
                "{} is incomplete on the hub ({} of its files are missing); choose another one",
                example(&variant.label),
                variant.missing
            )
        }
        Ok(variant) => Ok((example(&variant.label), variant.clone())),
        Err(Undecided::Empty) => {
            bail!(
                "{} has neither GGUF files nor safetensors files with a config.json, so it is not a model",
                name.repo
            )
        }
        Err(Undecided::Unknown) => bail!("{name} does not exist; {} has {}", name.repo, list(&all)),
        Err(Undecided::Several(several)) => {
            let first = several[0].split(' ').next().unwrap_or_default();
            bail!("{name} could be {}; choose one, as in {}", several.join(", "), example(first))
        }
    }
}

/// The downloads of this user.
///
/// # Errors
/// If there is no home folder for them.
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

/// A client for the hub, which asks so often again if the hub fails.
///
/// # Errors
/// If the user forbids to ask the hub.
pub fn client(retries: usize, cancel: &Cancel) -> Result<Client> {
    if is_offline() {
        bail!("HF_HUB_OFFLINE is set, so Forebay does not use the network; unset it to reach the hub");
    }
    let stored = || {
        let place =
            variable("HF_TOKEN_PATH").map(PathBuf::from).or_else(|| Some(home().ok()?.join("token")))?;
        std::fs::read_to_string(place).ok()
    };
    let token = variable("HF_TOKEN").or_else(stored).map(|token| token.trim().to_owned());
    Client::new(variable("HF_ENDPOINT"), token.filter(|token| !token.is_empty()), retries, cancel)
}

/// Whether the user forbids to ask the hub.
pub fn is_offline() -> bool {
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
        .ok_or_else(|| failure!("there is no home folder for downloads; set HF_HOME to a folder"))
}

fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}
