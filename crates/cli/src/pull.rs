//! `forebay pull`: a model from the hub.

use std::cell::{Cell, OnceCell, RefCell};
use std::io::{IsTerminal, stderr, stdin};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::Args;
use forebay_engine::{Bytes, Cancel, Error};
use forebay_hub::{self as hub, File, ModelName, NotDownloaded, Pull, Sight, Watcher};
use serde_json::json;

use crate::errors::of_engine;
use crate::interrupt;
use crate::output::print;
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
    match pull(args, client) {
        Err(error) if matches!(of_engine(&error), Some(Error::Cancelled)) => {
            eprintln!("stopped; run the same command again to continue");
            Ok(ExitCode::from(interrupt::EXIT_CODE))
        }
        result => result.map(|()| ExitCode::SUCCESS),
    }
}

/// The path of the model that was named, or of the demo model.
pub fn locate_or_demo(model: Option<&Path>) -> Result<PathBuf> {
    model.map_or_else(|| Ok(hub::demo()?), locate)
}

/// The path of a model. One of the hub that is not here is offered for download, if somebody can answer.
pub fn locate(model: &Path) -> Result<PathBuf> {
    let missing = match hub::locate(model) {
        Err(error) if stdin().is_terminal() && stderr().is_terminal() && !hub::is_offline() => error,
        other => return Ok(other?),
    };
    let hub::Error::NotDownloaded(NotDownloaded { name, .. }) = &missing else { return Err(missing.into()) };
    eprintln!("{name} is not downloaded; asking the hub for its size.");
    // Ctrl-C ends the program, and what has come is kept.
    let pull = Pull::new(hub::client(hub::RETRIES, &Cancel::default())?, name)?;
    if name.quant.is_none() {
        tell_choices(&pull);
    }
    pull.check_space()?;
    eprint!("Download {} ({}) now? [y/N] ", pull.name(), Bytes(pull.left().iter().sum()));
    let mut answer = String::new();
    stdin().read_line(&mut answer).context("cannot read the answer")?;
    if !matches!(answer.trim(), "y" | "Y" | "yes") {
        return Err(missing.into());
    }
    download(&pull, false)?;
    Ok(pull.path())
}

/// A model to be looked at. If only the hub has it, a bar shows that its headers are read.
pub fn sight(model: &Path) -> Result<Sight> {
    Ok(hub::sight(model, &Reading(OnceCell::new()))?)
}

fn pull(args: &PullArgs, client: hub::Client) -> Result<()> {
    let pull = Pull::new(client, &args.model)?;
    if args.model.quant.is_none() {
        tell_choices(&pull);
    }
    let left = pull.left();
    if args.dry_run {
        return report(&pull, &left, args.json, true);
    }
    pull.check_space()?;
    download(&pull, args.verify)?;
    report(&pull, &left, args.json, false)
}

/// Names the models that were not taken, where nobody said which.
fn tell_choices(pull: &Pull) {
    let others = pull.others();
    if !others.is_empty() {
        eprintln!(
            "downloading {} ({}); the repository also has {}",
            pull.name(),
            Bytes(pull.variant().bytes()),
            hub::list(&others)
        );
    }
}

fn download(pull: &Pull, verify: bool) -> Result<()> {
    let total = pull.variant().bytes();
    let here = if verify { 0 } else { total - pull.left().iter().sum::<u64>() };
    let bar = Bar { bar: Progress::pulling(here, total), file: RefCell::default(), noted: Cell::new(false) };
    Ok(pull.download(verify, &bar)?)
}

/// Says what was downloaded, or would be.
fn report(pull: &Pull, left: &[u64], json: bool, dry: bool) -> Result<()> {
    let (path, variant) = (pull.path(), pull.variant());
    let need: u64 = left.iter().sum();
    let free = pull.free_space();
    if json {
        let files = variant.files.iter().zip(left);
        let files =
            files.map(|(f, left)| json!({ "name": f.name, "bytes": f.bytes, "downloaded": f.bytes - left }));
        let object = json!({
            "model": pull.name().to_string(),
            "commit": pull.commit(),
            "path": path.display().to_string(),
            "bytes": variant.bytes(),
            "to_download": if dry { need } else { 0 },
            "free": free,
            "files": if dry { files.collect::<serde_json::Value>() } else { json!(variant.files.len()) },
        });
        return print(&format!("{object:#}\n"));
    }
    if !dry {
        return print(&format!("{}\n", path.display()));
    }
    let mut text = String::new();
    for (file, left) in variant.files.iter().zip(left) {
        let state = if *left == 0 { "downloaded" } else { "" };
        text += format!("{:>12}  {}  {state}", Bytes(file.bytes).to_string(), file.name).trim_end();
        text.push('\n');
    }
    let free = free.map_or(String::new(), |free| format!(", {} free on the drive", Bytes(free)));
    text += &format!("{}: {} to download{free}\n", pull.name(), Bytes(need));
    print(&text)
}

/// The progress of a download.
struct Bar {
    bar: Progress,
    /// What is said of the present file.
    file: RefCell<String>,
    /// Whether the bar says something else.
    noted: Cell<bool>,
}

impl Watcher for Bar {
    fn begins(&self, file: &File, number: usize, count: usize) {
        let name = file.name.rsplit('/').next().unwrap_or_default();
        let text = if count == 1 {
            name.to_owned()
        } else {
            format!("{number} of {count}: {name} ({})", Bytes(file.bytes))
        };
        self.bar.say(text.clone());
        self.file.replace(text);
        self.noted.set(false);
    }

    fn at(&self, done: u64, total: u64) {
        if self.noted.take() {
            self.bar.say(self.file.borrow().clone());
        }
        self.bar.set(done, total);
    }

    fn note(&self, text: &str) {
        self.noted.set(true);
        self.bar.say(text.to_owned());
    }

    fn damaged(&self, file: &File) {
        eprintln!("{} was damaged; downloading it again", file.name);
    }
}

/// The progress of reading headers, if any are read.
struct Reading(OnceCell<Progress>);

impl Watcher for Reading {
    fn note(&self, text: &str) {
        self.0.get_or_init(Progress::measuring).say(text.to_owned());
    }
}
