//! `forebay rm`: removes downloads.

use std::io::{IsTerminal, Write, stdin, stdout};
use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use clap::Args;
use forebay_engine::Bytes;
use forebay_hub::{self as hub, Downloaded, Downloads, ModelName};

use crate::errors;
use crate::output::print;

/// Remove downloaded models
///
/// With a QUANT, that model is removed; without one, the whole repository, including interrupted downloads. Other tools that
/// use the same cache lose these models, too.
#[derive(Args)]
#[command(after_help = "\
Examples:
  forebay rm OWNER/NAME:Q8_0
  forebay rm OWNER/NAME --yes")]
pub struct RmArgs {
    /// Models to remove, by the names that `forebay list` shows
    #[arg(value_name = "OWNER/NAME[:QUANT]", required = true)]
    models: Vec<ModelName>,
    /// Remove without asking
    #[arg(short, long)]
    yes: bool,
}

/// The files that a name removes.
enum Doomed {
    Repo(String, u64),
    Model(Box<Downloaded>),
}

/// Runs the command.
pub fn run(args: &RmArgs) -> Result<ExitCode> {
    let downloads = hub::downloads()?;
    // All names are resolved before anything is removed.
    let doomed: Vec<Doomed> = args.models.iter().map(|name| find(&downloads, name)).collect::<Result<_>>()?;
    if !args.yes && !stdin().is_terminal() {
        return Err(errors::usage(
            "standard input is not a terminal, so there is nobody to ask; --yes removes without asking",
        ));
    }
    for one in doomed {
        let (what, bytes) = match &one {
            Doomed::Repo(repo, bytes) => (repo.clone(), *bytes),
            Doomed::Model(model) => (model.name.to_string(), model.variant.bytes()),
        };
        if !args.yes && !agreed(&what, bytes)? {
            continue;
        }
        match one {
            Doomed::Repo(repo, _) => downloads.remove_repo(&repo)?,
            Doomed::Model(model) => downloads.remove(&model)?,
        }
        print(&format!("removed {what} ({})\n", Bytes(bytes)))?;
    }
    Ok(ExitCode::SUCCESS)
}

fn find(downloads: &Downloads, name: &ModelName) -> Result<Doomed> {
    let repos = downloads.all()?;
    let Some(held) = repos.into_iter().find(|held| held.repo == name.repo) else {
        bail!(
            "{} is not downloaded in {}; `forebay list` shows what is",
            name.repo,
            downloads.folder().display()
        );
    };
    let Some(quant) = &name.quant else {
        let bytes = held.models.iter().map(|m| m.variant.bytes()).sum::<u64>() + held.unfinished;
        return Ok(Doomed::Repo(held.repo, bytes));
    };
    let mut models = held.models;
    match models.iter().position(|m| m.variant.label.eq_ignore_ascii_case(quant)) {
        Some(at) => Ok(Doomed::Model(Box::new(models.swap_remove(at)))),
        None => bail!("{name} is not downloaded; `forebay list` shows what is"),
    }
}

fn agreed(what: &str, bytes: u64) -> Result<bool> {
    print!("remove {what} ({})? [y/N] ", Bytes(bytes));
    stdout().flush()?;
    let mut answer = String::new();
    stdin().read_line(&mut answer).context("cannot read the answer")?;
    Ok(matches!(answer.trim(), "y" | "Y" | "yes"))
}
