//! `forebay tokenize`: a text as a model sees it.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use clap::Args;
use forebay_engine::internals::format::ModelFile;
use forebay_engine::tokenizer::{Bos, EncodeOptions, Tokenizer};

use crate::args::TextArgs;
use crate::hub;
use crate::output::print;

/// Show the tokens of a text
///
/// Works on every GGUF file with a vocabulary and on folders with a tokenizer.json. One token a line, its number and its text; or only the
/// numbers, with --ids.
#[derive(Args)]
#[command(after_help = "\
Examples:
  forebay tokenize model.gguf --text 'Hello there'
  forebay tokenize model.gguf --file story.txt --ids
  cat story.txt | forebay tokenize model.gguf | wc -l")]
pub struct TokenizeArgs {
    /// A GGUF file, any part of a split one, a folder with safetensors files, or a download, as OWNER/NAME:QUANT
    model: PathBuf,
    #[command(flatten)]
    text: TextArgs,
    /// Print only the numbers, as one list
    #[arg(long)]
    ids: bool,
    /// Do not start with the BOS token, whatever the file says
    #[arg(long)]
    no_bos: bool,
    /// Take the names of control tokens, such as <|im_end|>, as plain text
    #[arg(long)]
    no_special: bool,
}

/// Runs the command.
pub fn run(args: &TokenizeArgs) -> Result<ExitCode> {
    let file = ModelFile::open(&hub::locate(&args.model)?)?;
    let tokenizer = Tokenizer::of(&file)?;
    let bos = if args.no_bos { Bos::Never } else { Bos::AsFileSays };
    let tokens = tokenizer.encode(&args.text.read()?, EncodeOptions { special: !args.no_special, bos })?;
    let mut text = String::new();
    if args.ids {
        let ids: Vec<_> = tokens.iter().map(|t| t.0.to_string()).collect();
        text = format!("[{}]\n", ids.join(", "));
    } else {
        for &token in &tokens {
            text += &format!("{:>7}  {:?}\n", token.0, tokenizer.token_text(token));
        }
    }
    print(&text)?;
    Ok(ExitCode::SUCCESS)
}
