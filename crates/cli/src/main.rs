//! The `forebay` program.

mod args;
mod chat;
mod demo;
mod inspect;
mod interrupt;
mod logits;
mod progress;
mod run;
mod stats;
mod tokenize;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Run Mixture-of-Experts language models that are larger than memory.
#[derive(Parser)]
#[command(name = "forebay", version, after_help = EXAMPLES)]
struct Cli {
    #[command(subcommand)]
    command: Command,
    /// Say more on stderr about what happens; twice for every detail
    #[arg(short, long, action = clap::ArgAction::Count, global = true)]
    verbose: u8,
}

#[derive(Subcommand)]
enum Command {
    Run(run::RunArgs),
    Inspect(inspect::InspectArgs),
    Tokenize(tokenize::TokenizeArgs),
    Logits(logits::LogitsArgs),
}

const EXAMPLES: &str = "\
Examples:
  forebay run                                   chat with the demo model
  forebay run model.gguf -p 'Why is the sky blue?'
  cat question.txt | forebay run model.gguf > answer.txt
  forebay inspect model.gguf                    what is in a file";

fn main() -> ExitCode {
    let cli = Cli::parse();
    let level = ["warn", "info", "debug"][usize::from(cli.verbose.min(2))];
    tracing_subscriber::fmt()
        .with_env_filter(tracing_subscriber::EnvFilter::new(level))
        .with_writer(std::io::stderr)
        .init();
    let result = match cli.command {
        Command::Run(args) => run::run(&args),
        Command::Inspect(args) => inspect::run(&args),
        Command::Tokenize(args) => tokenize::run(&args),
        Command::Logits(args) => logits::run(&args),
    };
    match result {
        Ok(code) => code,
        // Whoever read our output has had enough: that is no failure.
        Err(error) if is_broken_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn is_broken_pipe(error: &anyhow::Error) -> bool {
    error.downcast_ref::<std::io::Error>().is_some_and(|e| e.kind() == std::io::ErrorKind::BrokenPipe)
}
