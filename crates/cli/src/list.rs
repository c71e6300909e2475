//! `forebay list`: lists downloaded models.

use std::process::ExitCode;

use anyhow::Result;
use clap::Args;
use forebay_engine::Bytes;
use forebay_hub::{self as hub, Downloaded};
use serde_json::json;

use crate::output::print;

/// List downloaded models
///
/// Shows the models that `forebay pull` downloaded, and those of other tools that use the same cache.
#[derive(Args)]
#[command(after_help = "\
Examples:
  forebay list
  forebay list --json | jq -r '.models[].path'")]
pub struct ListArgs {
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Runs the command.
pub fn run(args: &ListArgs) -> Result<ExitCode> {
    let downloads = hub::downloads()?;
    let repos = downloads.all()?;
    if args.json {
        let models: Vec<_> = repos.iter().flat_map(|repo| &repo.models).map(as_json).collect();
        let unfinished: Vec<_> = repos
            .iter()
            .filter(|repo| repo.unfinished > 0)
            .map(|repo| json!({ "repo": repo.repo, "bytes": repo.unfinished }))
            .collect();
        let folder = downloads.folder().display().to_string();
        let object = json!({ "folder": folder, "models": models, "unfinished": unfinished });
        print(&format!("{object:#}\n"))?;
        return Ok(ExitCode::SUCCESS);
    }
    let mut rows = Vec::new();
    for repo in &repos {
        for model in &repo.models {
            let note = match model.variant.missing {
                0 => String::new(),
                missing => format!("{missing} of {} files are missing", missing + model.variant.files.len()),
            };
            rows.push((model.name.to_string(), model.variant.bytes(), note));
        }
        if repo.unfinished > 0 {
            let note = "incomplete: `forebay pull` continues it, `forebay rm` removes it";
            rows.push((repo.repo.clone(), repo.unfinished, note.to_owned()));
        }
    }
    if rows.is_empty() {
        eprintln!(
            "no models are downloaded in {}; `forebay pull OWNER/NAME:QUANT` downloads one",
            downloads.folder().display()
        );
    }
    let width = rows.iter().map(|(name, ..)| name.len()).max().unwrap_or(0);
    let mut text = String::new();
    for (name, bytes, note) in rows {
        text += format!("{name:<width$}  {:>12}  {note}", Bytes(bytes).to_string()).trim_end();
        text.push('\n');
    }
    print(&text)?;
    Ok(ExitCode::SUCCESS)
}

fn as_json(model: &Downloaded) -> serde_json::Value {
    json!({
        "model": model.name.to_string(),
        "bytes": model.variant.bytes(),
        "files": model.variant.files.len(),
        "missing": model.variant.missing,
        "path": model.path().display().to_string(),
    })
}
