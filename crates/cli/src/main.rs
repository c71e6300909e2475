//! The `forebay` program.

mod args;
mod batch;
mod bench;
mod chat;
mod completions;
mod config;
mod device;
mod docs;
mod doctor;
mod drive_probe;
mod errors;
mod foreign;
mod inspect;
mod interrupt;
mod list;
mod logits;
mod measured;
mod memory_speed;
mod output;
mod perplexity;
mod plan;
mod progress;
mod prompting;
mod pull;
mod remove;
mod run;
mod serve;
mod simulate;
mod stats;
mod synth;
mod tokenize;
mod trace;
mod values;
mod wrap;

use std::process::ExitCode;

use anyhow::Result;
use clap::{CommandFactory, Parser, Subcommand};

/// Run Mixture-of-Experts language models that are larger than memory.
#[derive(Parser)]
#[command(name = "forebay", version, after_help = EXAMPLES, arg_required_else_help = true, disable_help_flag = true)]
struct Cli {
    #[command(subcommand)]
    command: Option<Command>,
    /// Log to standard error; twice for every detail
    #[arg(short, long, action = clap::ArgAction::Count, global = true, display_order = 1000, help_heading = GENERAL)]
    verbose: u8,
    /// Print help; -h is shorter, --help is complete
    #[arg(short, long, action = clap::ArgAction::Help, global = true, display_order = 1003, help_heading = GENERAL)]
    help: Option<bool>,
    #[command(flatten)]
    config: config::ConfigArgs,
}

/// What every command has, after its own flags.
pub const GENERAL: &str = "General";

#[derive(Subcommand)]
enum Command {
    Run(run::RunArgs),
    Serve(serve::ServeArgs),
    Batch(batch::BatchArgs),
    Pull(pull::PullArgs),
    List(list::ListArgs),
    Rm(remove::RmArgs),
    Inspect(inspect::InspectArgs),
    Tokenize(tokenize::TokenizeArgs),
    Logits(logits::LogitsArgs),
    Perplexity(perplexity::PerplexityArgs),
    Bench(bench::BenchArgs),
    Plan(plan::PlanArgs),
    Doctor(doctor::DoctorArgs),
    Trace(trace::TraceArgs),
    Simulate(simulate::SimulateArgs),
    Synth(synth::SynthArgs),
    Completions(completions::CompletionsArgs),
    #[command(hide = true)]
    Docs(docs::DocsArgs),
}

const EXAMPLES: &str = "\
Examples:
  forebay run                      Chat with the demo model, which tells stories
  forebay pull OWNER/NAME:Q4_K_M   Download a model
  forebay plan OWNER/NAME:Q4_K_M   Show the memory it needs, and its speed on this machine
  forebay run OWNER/NAME:Q4_K_M    Chat with it
  forebay serve model.gguf         Serve a model file to programs and to a browser
  forebay bench model.gguf         Measure its speed
  forebay doctor model.gguf        Find out what limits its speed on this machine

`forebay help COMMAND` explains a command. Exit codes: 0 success, 1 error, 2 wrong
flags or settings, 130 stopped by Ctrl-C.";

fn main() -> ExitCode {
    forebay_engine::internals::memory::keep_little_freed();
    config::parse().and_then(run).unwrap_or_else(|error| errors::report(&error))
}

fn run(parsed: config::Parsed<Cli>) -> Result<ExitCode> {
    if let Some(settings) = parsed.shown {
        output::print(&settings)?;
        return Ok(ExitCode::SUCCESS);
    }
    let cli = parsed.cli;
    // A server tells what it does.
    let told = u8::from(matches!(&cli.command, Some(Command::Serve(args)) if !args.is_quiet()));
    let level = ["warn", "info", "debug"][usize::from((cli.verbose + told).min(2))];
    tracing_subscriber::fmt()
        .with_env_filter(tracing_subscriber::EnvFilter::new(level))
        .with_writer(std::io::stderr)
        .init();
    let Some(command) = cli.command else {
        return Err(errors::usage("no command was given; `forebay --help` lists the commands"));
    };
    match command {
        Command::Run(args) => run::run(&args),
        Command::Serve(args) => serve::run(&args),
        Command::Batch(args) => batch::run(&args),
        Command::Pull(args) => pull::run(&args),
        Command::List(args) => list::run(&args),
        Command::Rm(args) => remove::run(&args),
        Command::Inspect(args) => inspect::run(&args),
        Command::Tokenize(args) => tokenize::run(&args),
        Command::Logits(args) => logits::run(&args),
        Command::Perplexity(args) => perplexity::run(&args),
        Command::Bench(args) => bench::run(&args),
        Command::Plan(args) => plan::run(&args),
        Command::Doctor(args) => doctor::run(&args),
        Command::Trace(args) => trace::run(&args),
        Command::Simulate(args) => simulate::run(&args),
        Command::Synth(args) => synth::run(&args),
        Command::Completions(args) => completions::run(&args, Cli::command()),
        Command::Docs(args) => docs::run(&args, Cli::command()),
    }
}
