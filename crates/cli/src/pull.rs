//! `forebay pull`: a model from the hub.

use std::cell::Cell;
use std::fs;
use std::io::{IsTerminal, stderr, stdin};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use clap::Args;
use forebay_engine::{Bytes, Cancel, Error};
use serde_json::json;

use crate::hub::{self, Client, Downloads, Listing, ModelName, NotDownloaded, RemoteFile, Variant, Watcher};
use crate::interrupt;
use crate::output::{free_space, print};
use crate::progress::Progress;

/// Download a model from the Hugging Face hub
///
/// QUANT, such as Q4_K_M, selects one of the GGUF files in a repository; a split file is downloaded with all its parts. If
/// there are no GGUF files, the safetensors files are downloaded, with configuration and tokenizer. An address copied from
/// the hub's site works, too.
///
/// Downloads are kept in the cache of the hub's own tools, and models that those tools downloaded are found there. An
/// interrupted download continues where it stopped. The checksum of every file is compared with the hub's. The path of the
/// model is printed; every command also takes OWNER/NAME:QUANT.
///
/// `forebay plan OWNER/NAME:QUANT` says what a model needs before it is downloaded.
#[derive(Args)]
#[command(after_help = "\
Examples:
  forebay pull OWNER/NAME:Q4_K_M              then: forebay run OWNER/NAME:Q4_K_M
  forebay pull OWNER/NAME --dry-run           show what would be downloaded
  forebay pull https://huggingface.co/OWNER/NAME
  HF_HOME=/big/drive forebay pull OWNER/NAME:Q8_0

Environment:
  HF_HOME, HF_HUB_CACHE  folder of the downloads
  HF_TOKEN               access token for private and gated models; `hf auth login` stores one
  HF_ENDPOINT            address of another hub
  HF_HUB_OFFLINE         1: never use the network")]
pub struct PullArgs {
    /// Repository, and which of its models [default: the only one, otherwise Q4_K_M or the closest to it]
    #[arg(value_name = "OWNER/NAME[:QUANT]")]
    model: ModelName,
    /// Show what would be downloaded, and download nothing
    #[arg(long)]
    dry_run: bool,
    /// Compare the checksums of files that are already downloaded, too
    #[arg(long)]
    verify: bool,
    /// Maximum number of attempts to continue a download that makes no progress
    #[arg(long, value_name = "N", default_value_t = hub::RETRIES)]
    retries: usize,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Runs the command.
pub fn run(args: &PullArgs) -> Result<ExitCode> {
    let cancel = Cancel::default();
    let client = hub::client(args.retries, &cancel)?;
    interrupt::install(&cancel)?;
    match pull(args, &client) {
        Err(error) if matches!(error.downcast_ref(), Some(Error::Cancelled)) => {
            eprintln!("stopped; run the same command again to continue");
            Ok(ExitCode::from(interrupt::EXIT_CODE))
        }
        result => result.map(|()| ExitCode::SUCCESS),
    }
}

/// The path of a model. One of the hub that is not here is offered for download, if somebody can answer.
pub fn locate(model: &Path) -> Result<PathBuf> {
    let missing = match hub::locate(model) {
        Err(error) if stdin().is_terminal() && stderr().is_terminal() && !hub::is_offline() => error,
        other => return other,
    };
    let Some(NotDownloaded { name, .. }) = missing.downcast_ref() else { return Err(missing) };
    eprintln!("{name} is not downloaded; asking the hub for its size.");
    // Ctrl-C ends the program, and what has come is kept.
    let client = hub::client(hub::RETRIES, &Cancel::default())?;
    let downloads = hub::downloads()?;
    let listing = client.listing(&name.repo)?;
    let (full_name, variant) = hub::decide(name, &listing)?;
    if name.quant.is_none() {
        tell_choices(&full_name, &variant, &listing);
    }
    let order = Order {
        client: &client,
        downloads: &downloads,
        listing: &listing,
        name: &full_name,
        variant: &variant,
    };
    let left = order.left();
    order.check_space(&left)?;
    eprint!("Download {full_name} ({}) now? [y/N] ", Bytes(left.iter().sum()));
    let mut answer = String::new();
    stdin().read_line(&mut answer).context("cannot read the answer")?;
    if !matches!(answer.trim(), "y" | "Y" | "yes") {
        return Err(missing);
    }
    order.download(false)?;
    Ok(order.path())
}

fn pull(args: &PullArgs, client: &Client) -> Result<()> {
    let downloads = hub::downloads()?;
    let listing = client.listing(&args.model.repo)?;
    let (name, variant) = hub::decide(&args.model, &listing)?;
    if args.model.quant.is_none() {
        tell_choices(&name, &variant, &listing);
    }
    let order = Order { client, downloads: &downloads, listing: &listing, name: &name, variant: &variant };
    let left = order.left();
    if args.dry_run {
        return order.report(&left, args.json, true);
    }
    order.check_space(&left)?;
    order.download(args.verify)?;
    order.report(&left, args.json, false)
}

/// Names the models that were not taken, where nobody said which.
fn tell_choices(name: &ModelName, taken: &Variant, listing: &Listing) {
    let files: Vec<_> = listing.files.iter().map(|file| file.file.clone()).collect();
    let mut others = hub::variants(&files);
    others.retain(|v| v.label != taken.label);
    if !others.is_empty() {
        eprintln!(
            "downloading {name} ({}); the repository also has {}",
            Bytes(taken.bytes()),
            hub::list(&others)
        );
    }
}

/// What is to be downloaded, and to where.
struct Order<'a> {
    client: &'a Client,
    downloads: &'a Downloads,
    listing: &'a Listing,
    name: &'a ModelName,
    variant: &'a Variant,
}

impl Order<'_> {
    fn files(&self) -> impl Iterator<Item = &RemoteFile> {
        self.variant.files.iter().map(|file| self.listing.file(&file.name))
    }

    fn blob(&self, file: &RemoteFile) -> PathBuf {
        self.downloads.repo(&self.listing.repo).blob_path(file.blob())
    }

    /// Where a file is when it has been downloaded.
    fn place(&self, file: &RemoteFile) -> PathBuf {
        self.snapshot().join(&file.file.name)
    }

    fn snapshot(&self) -> PathBuf {
        self.downloads.repo(&self.listing.repo).pointer_path(&self.listing.commit)
    }

    /// Whether the file is here: as a blob, or in the version's folder where links cannot be had.
    fn is_here(&self, file: &RemoteFile) -> bool {
        let has_size =
            |path: &Path| fs::metadata(path).is_ok_and(|m| m.is_file() && m.len() == file.file.bytes);
        has_size(&self.blob(file)) || has_size(&self.place(file))
    }

    /// Bytes of a file that are here.
    fn held(&self, file: &RemoteFile) -> u64 {
        if self.is_here(file) {
            return file.file.bytes;
        }
        let part = fs::metadata(hub::partial(&self.blob(file))).map_or(0, |m| m.len());
        if part > file.file.bytes { 0 } else { part }
    }

    /// The bytes that are to be downloaded of each file.
    fn left(&self) -> Vec<u64> {
        self.files().map(|file| file.file.bytes - self.held(file)).collect()
    }

    /// Refuses what the drive has no room for, before hours go into it.
    fn check_space(&self, left: &[u64]) -> Result<()> {
        let need = left.iter().fold(0u64, |sum, bytes| sum.saturating_add(*bytes));
        let folder = self.downloads.folder();
        match free_space(folder) {
            Some(free) if need > free => bail!(
                "{} needs {}, but {} is free in {}; remove downloads (`forebay list`, `forebay rm`), or set HF_HOME to a \
                 folder on a larger drive",
                self.name,
                Bytes(need),
                Bytes(free),
                folder.display()
            ),
            _ => Ok(()),
        }
    }

    fn download(&self, verify: bool) -> Result<()> {
        let total = self.variant.files.iter().map(|file| file.bytes).sum();
        let here: u64 = self.files().map(|file| self.held(file)).sum();
        let bar = Progress::pulling(if verify { 0 } else { here }, total);
        let count = self.variant.files.len();
        let mut done = 0;
        for (i, file) in self.files().enumerate() {
            let watcher =
                Bar { bar: &bar, file, number: (i + 1, count), before: done, total, noted: Cell::new(false) };
            watcher.name();
            let (blob, place) = (self.blob(file), self.place(file));
            if verify && self.is_here(file) {
                let path = if blob.exists() { &blob } else { &place };
                if !hub::is_sound(self.client, path, file, &watcher)? {
                    eprintln!("{} was damaged; downloading it again", file.file.name);
                    fs::remove_file(path)?;
                }
            }
            if !self.is_here(file) {
                hub::fetch(self.client, self.listing, file, &blob, &watcher)?;
            }
            if blob.exists() {
                hub::link(&blob, &place)?;
            }
            done += file.file.bytes;
            bar.set(done, total);
        }
        Ok(self.downloads.repo(&self.listing.repo).create_ref(&self.listing.commit)?)
    }

    /// What is to be opened when it has been downloaded.
    fn path(&self) -> PathBuf {
        match self.variant.entry() {
            "" => self.snapshot(),
            entry => self.snapshot().join(entry),
        }
    }

    /// What was downloaded, or would be.
    fn report(&self, left: &[u64], json: bool, dry: bool) -> Result<()> {
        let path = self.path();
        let need: u64 = left.iter().sum();
        let free = free_space(self.downloads.folder());
        if json {
            let files = self.variant.files.iter().zip(left);
            let files = files
                .map(|(f, left)| json!({ "name": f.name, "bytes": f.bytes, "downloaded": f.bytes - left }));
            let object = json!({
                "model": self.name.to_string(),
                "commit": self.listing.commit,
                "path": path.display().to_string(),
                "bytes": self.variant.bytes(),
                "to_download": if dry { need } else { 0 },
                "free": free,
                "files": if dry { files.collect::<serde_json::Value>() } else { json!(self.variant.files.len()) },
            });
            return print(&format!("{object:#}\n"));
        }
        if !dry {
            return print(&format!("{}\n", path.display()));
        }
        let mut text = String::new();
        for (file, left) in self.variant.files.iter().zip(left) {
            let state = if *left == 0 { "downloaded" } else { "" };
            text += format!("{:>12}  {}  {state}", Bytes(file.bytes).to_string(), file.name).trim_end();
            text.push('\n');
        }
        let free = free.map_or(String::new(), |free| format!(", {} free on the drive", Bytes(free)));
        text += &format!("{}: {} to download{free}\n", self.name, Bytes(need));
        print(&text)
    }
}

/// A file's progress, on the bar of all files.
struct Bar<'a> {
    bar: &'a Progress,
    file: &'a RemoteFile,
    /// Which file of how many.
    number: (usize, usize),
    /// Bytes of the files before it.
    before: u64,
    total: u64,
    /// Whether the bar says something else than the file's name.
    noted: Cell<bool>,
}

impl Bar<'_> {
    fn name(&self) {
        let (number, count) = self.number;
        let name = self.file.file.name.rsplit('/').next().unwrap_or_default();
        let size = Bytes(self.file.file.bytes);
        self.bar.say(if count == 1 {
            name.to_owned()
        } else {
            format!("{number} of {count}: {name} ({size})")
        });
    }
}

impl Watcher for Bar<'_> {
    fn at(&self, bytes: u64) {
        if self.noted.take() {
            self.name();
        }
        self.bar.set(self.before + bytes, self.total);
    }

    fn note(&self, text: String) {
        self.noted.set(true);
        self.bar.say(text);
    }
}
