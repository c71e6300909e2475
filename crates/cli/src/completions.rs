//! `forebay completions`: scripts that complete commands and flags in a shell.

use std::process::ExitCode;

use anyhow::Result;
use clap::Args;
use clap_complete::Shell;

use crate::output::print;

/// Print a shell script that completes commands, flags and their values
#[derive(Args)]
#[command(after_help = "\
Examples:
  forebay completions bash > ~/.local/share/bash-completion/completions/forebay
  forebay completions zsh > ~/.zfunc/_forebay       with ~/.zfunc in fpath
  forebay completions fish > ~/.config/fish/completions/forebay.fish
  forebay completions powershell >> $PROFILE")]
pub struct CompletionsArgs {
    /// Shell
    shell: Shell,
}

/// Runs the command for a program with these definitions.
pub fn run(args: &CompletionsArgs, mut program: clap::Command) -> Result<ExitCode> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut program, "forebay", &mut script);
    print(&String::from_utf8(script)?)?;
    Ok(ExitCode::SUCCESS)
}
