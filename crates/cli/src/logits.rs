//! `forebay logits`: what a model thinks at every position, for comparison with other programs.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::str::FromStr;

use anyhow::{Context, Result};
use clap::Args;
use forebay_engine::{TokenId, Watch};
use safetensors::tensor::{Dtype, TensorView};

use crate::args::LoadArgs;
use crate::progress;

/// Write the logits of every position of a token sequence to a safetensors file
///
/// The file holds `tokens` (i32 [n]) and `logits` (f32 [n, vocabulary]).
#[derive(Args)]
pub struct LogitsArgs {
    /// A GGUF file, or any part of a split one
    model: PathBuf,
    /// The tokens, separated by commas: 1,2,3
    #[arg(long, value_name = "IDS")]
    tokens: TokenList,
    /// The file to write
    #[arg(long, value_name = "FILE")]
    out: PathBuf,
    #[command(flatten)]
    load: LoadArgs,
}

/// Runs the command.
pub fn run(args: &LogitsArgs) -> Result<ExitCode> {
    let tokens = &args.tokens.0;
    let engine = args.load.load(&args.model)?;
    let mut logits = Vec::new();
    let mut collect = |_: usize, values: &[f32]| {
        logits.extend(values.iter().flat_map(|v| v.to_le_bytes()));
    };
    let bar = progress::Reading::new();
    let mut progress = |done, total| bar.set(done, total);
    let watch = Watch { progress: Some(&mut progress), logits: Some(&mut collect) };
    engine.session().extend_watched(tokens, watch)?;
    let ids: Vec<u8> = tokens.iter().flat_map(|t| t.0.to_le_bytes()).collect();
    let tensors = [
        ("tokens", TensorView::new(Dtype::I32, vec![tokens.len()], &ids)?),
        ("logits", TensorView::new(Dtype::F32, vec![tokens.len(), engine.vocab_size()], &logits)?),
    ];
    write(&args.out, tensors).with_context(|| format!("cannot write {}", args.out.display()))?;
    Ok(ExitCode::SUCCESS)
}

/// Writes the file whole or not at all.
fn write(path: &Path, tensors: [(&str, TensorView<'_>); 2]) -> Result<()> {
    let mut partial = path.as_os_str().to_owned();
    partial.push(".partial");
    let partial = PathBuf::from(partial);
    let written = safetensors::serialize_to_file(tensors, None::<HashMap<String, String>>, &partial)
        .map_err(anyhow::Error::from)
        .and_then(|()| Ok(std::fs::rename(&partial, path)?));
    if written.is_err() {
        let _ = std::fs::remove_file(&partial);
    }
    written
}

#[derive(Clone)]
struct TokenList(Vec<TokenId>);

impl FromStr for TokenList {
    type Err = anyhow::Error;

    /// `1,2,3`, also in the brackets in which `tokenize --ids` prints it.
    fn from_str(s: &str) -> Result<TokenList> {
        let s = s.trim().trim_start_matches('[').trim_end_matches(']');
        let ids = s.split(',').map(|id| {
            let id = id.trim();
            Ok(TokenId(id.parse().with_context(|| format!("{id:?} is not a token's number"))?))
        });
        ids.collect::<Result<_>>().map(TokenList)
    }
}
