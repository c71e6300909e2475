//! `forebay tokenize`: shows the tokens of a text.

use std::process::ExitCode;

use anyhow::Result;
use clap::Args;
use forebay_engine::internals::format::ModelFile;
use forebay_engine::tokenizer::{Bos, EncodeOptions, Tokenizer};

use crate::args::{RequiredModelArgs, TextArgs};
use crate::output::print;

/// Show the tokens of a text
///
/// Prints one token per line: its number and its text. Works on every GGUF file with a vocabulary and on folders with a
/// tokenizer.json.
#[derive(Args)]
#[command(after_help = "\
Examples:
  forebay tokenize model.gguf --text 'Hello there'
  forebay tokenize model.gguf --file story.txt --ids
  cat story.txt | forebay tokenize model.gguf | wc -l")]
pub struct TokenizeArgs {
    #[command(flatten)]
    model: RequiredModelArgs,
    #[command(flatten)]
    text: TextArgs,
    /// Print only the token numbers, as one list
    #[arg(long, help_heading = "Output")]
    ids: bool,
    /// Leave out the BOS token, even if the model asks for it
    #[arg(long, help_heading = "Text")]
    no_bos: bool,
    /// Treat the names of control tokens, such as <|im_end|>, as plain text
    #[arg(long, help_heading = "Text")]
    no_special: bool,
}

/// Runs the command.
pub fn run(args: &TokenizeArgs) -> Result<ExitCode> {
    let file = ModelFile::open(&args.model.locate()?)?;
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
