//! `forebay logits`: the logits of every position, for comparison with other programs.

use std::path::PathBuf;
use std::process::ExitCode;
use std::str::FromStr;

use anyhow::{Context, Result};
use clap::Args;
use forebay_engine::TokenId;
use safetensors::tensor::{Dtype, TensorView};

use crate::args::{LoadArgs, RequiredModelArgs};
use crate::output::Output;
use crate::progress::Progress;
use crate::{errors, interrupt};

/// Write the logits of every position of a token sequence to a safetensors file
///
/// The file contains two tensors: `tokens`, i32 `[n]`, and `logits`, f32 `[n, vocabulary]`. Use it to compare Forebay with
/// other programs.
#[derive(Args)]
#[command(after_help = "\
Examples:
  forebay logits model.gguf --tokens 1,2,3 --out logits.safetensors
  ids=$(forebay tokenize model.gguf --text Hi --ids)
  forebay logits model.gguf --tokens \"$ids\" --out hi.safetensors")]
pub struct LogitsArgs {
    #[command(flatten)]
    model: RequiredModelArgs,
    /// Token numbers, separated by commas: 1,2,3
    #[arg(long, value_name = "IDS", help_heading = "Input and output")]
    tokens: TokenList,
    /// File to write
    #[arg(short, long, visible_alias = "output", value_name = "FILE", help_heading = "Input and output")]
    out: PathBuf,
    /// Compute the tokens one at a time, as when generating, instead of together, as when processing a prompt
    #[arg(long, help_heading = "Input and output")]
    one_by_one: bool,
    #[command(flatten)]
    load: LoadArgs,
}

/// Runs the command.
pub fn run(args: &LogitsArgs) -> Result<ExitCode> {
    let tokens = &args.tokens.0;
    // Whether the file can be written is checked before the work.
    Output::check(&args.out)?;
    let engine = args.load.load(&args.model.locate()?)?;
    let mut session = engine.session();
    interrupt::install(session.cancel())?;
    let out = Output::create(&args.out)?;

    let mut logits = Vec::new();
    let mut collect = |values: &[f32]| {
        logits.extend(values.iter().flat_map(|v| v.to_le_bytes()));
    };
    let bar = Progress::computing(tokens.len());
    let progress = |done| bar.set(done as u64, tokens.len() as u64);
    let failed = |error| errors::explain(&engine, error);
    if args.one_by_one {
        for (i, &token) in tokens.iter().enumerate() {
            session.push(token).map_err(failed)?;
            collect(session.logits());
            progress(i + 1);
        }
    } else {
        let mut rows = engine.all_logits(&mut session, tokens).map_err(failed)?;
        while let Some((position, values)) = rows.next_row().map_err(failed)? {
            collect(values);
            progress(position + 1);
        }
    }
    drop(bar);

    let ids: Vec<u8> = tokens.iter().flat_map(|t| t.0.to_le_bytes()).collect();
    let tensors = [
        ("tokens", TensorView::new(Dtype::I32, vec![tokens.len()], &ids)?),
        ("logits", TensorView::new(Dtype::F32, vec![tokens.len(), engine.vocab_size()], &logits)?),
    ];
    out.finish(&safetensors::serialize(tensors, None)?)?;
    Ok(ExitCode::SUCCESS)
}

#[derive(Clone)]
struct TokenList(Vec<TokenId>);

impl FromStr for TokenList {
    type Err = anyhow::Error;

    /// Reads `1,2,3`, also in brackets, as `tokenize --ids` prints it.
    fn from_str(s: &str) -> Result<TokenList> {
        let s = s.trim();
        let s = s.strip_prefix('[').and_then(|s| s.strip_suffix(']')).unwrap_or(s);
        let ids = s.split(',').map(|id| {
            let id = id.trim();
            Ok(TokenId(id.parse().with_context(|| format!("{id:?} is not a token number"))?))
        });
        ids.collect::<Result<_>>().map(TokenList)
    }
}
