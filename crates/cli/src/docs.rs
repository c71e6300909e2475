//! `forebay docs`: generates the documentation of commands from their definitions.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::builder::PossibleValue;
use clap::{Arg, Args, Command, Subcommand};
use forebay_engine::internals::models::{ARCHS, Reference};

use crate::output::print;

/// Write the documentation of all commands
#[derive(Args)]
#[command(after_help = "\
Examples:
  forebay docs markdown > docs/cli.md
  forebay docs families
  forebay docs man ~/.local/share/man/man1")]
pub struct DocsArgs {
    #[command(subcommand)]
    kind: Format,
}

#[derive(Subcommand)]
enum Format {
    /// Print one page of Markdown
    Markdown,
    /// Print the table of model families, as in docs/models.md
    Families,
    /// Write a man page for each command
    Man {
        /// Folder for the man pages; it is created if needed
        folder: PathBuf,
    },
}

/// Runs the command for a program of these definitions.
pub fn run(args: &DocsArgs, mut program: Command) -> Result<ExitCode> {
    match &args.kind {
        Format::Markdown => {
            program.build();
            print(&page(&program))?;
        }
        Format::Families => print(&families())?,
        Format::Man { folder } => {
            std::fs::create_dir_all(folder)
                .and_then(|()| clap_mangen::generate_to(program, folder))
                .with_context(|| format!("cannot write man pages to {}", folder.display()))?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// The table of the model families.
fn families() -> String {
    let mut text = String::from(
        "| family | models | `general.architecture` in GGUF | MLX | logits compared with |\n|---|---|---|---|---|\n",
    );
    for arch in ARCHS {
        let mlx = if arch.mlx { "yes" } else { "no" };
        let reference = match arch.reference {
            Reference::Transformers => "transformers",
            Reference::Formulas => "own reference, llama.cpp",
            Reference::FormulasOnly => "own reference",
        };
        let (name, models, gguf) = (arch.name, arch.models, arch.gguf);
        text.push_str(&format!("| {name} | {models} | `{gguf}` | {mlx} | {reference} |\n"));
    }
    text
}

/// All commands on one page.
fn page(program: &Command) -> String {
    let mut text = String::from(
        "# The command line\n\n`forebay docs markdown` generates this page from the definitions of the command line. In a terminal, \
         `forebay help COMMAND` shows the same.\n\n",
    );
    let commands: Vec<&Command> =
        program.get_subcommands().filter(|c| !c.is_hide_set() && c.get_name() != "help").collect();
    for command in &commands {
        let about = command.get_about().map(ToString::to_string).unwrap_or_default();
        let name = command.get_name();
        text.push_str(&format!("- [`forebay {name}`](#forebay-{name}): {}\n", plain(&about)));
    }
    text.push_str("\nFlags of every command:\n\n");
    text.push_str(&flags(program.get_arguments().filter(|arg| arg.is_global_set())));
    for command in commands {
        text.push_str(&section(command));
    }
    text
}

fn section(command: &Command) -> String {
    let mut text = format!("\n## forebay {}\n", command.get_name());
    if let Some(about) = command.get_long_about().or(command.get_about()) {
        text.push_str(&format!("\n{}\n", plain(&about.to_string())));
    }
    let usage = command.clone().render_usage().to_string();
    text.push_str(&format!("\n```text\n{}\n```\n", usage.trim_start_matches("Usage: ")));
    let own = command.get_arguments().filter(|arg| !arg.is_global_set() && arg.get_id() != "help");
    let own: Vec<&Arg> = own.filter(|arg| !arg.is_hide_set()).collect();
    // Arguments without a heading come first, as in help.
    let heading = |arg: &Arg| match arg.is_positional() {
        true => String::new(),
        false => arg.get_help_heading().unwrap_or_default().to_owned(),
    };
    let mut headings = vec![String::new()];
    for arg in &own {
        if !headings.contains(&heading(arg)) {
            headings.push(heading(arg));
        }
    }
    for name in headings {
        let mut below: Vec<&Arg> = own.iter().copied().filter(|arg| heading(arg) == name).collect();
        below.sort_by_key(|arg| !arg.is_positional());
        if !below.is_empty() {
            text.push_str(&if name.is_empty() { "\n".into() } else { format!("\n### {name}\n\n") });
            text.push_str(&flags(below.into_iter()));
        }
    }
    if let Some(more) = command.get_after_help() {
        text.push_str(&format!("\n```text\n{}\n```\n", more.to_string().trim()));
    }
    for sub in command.get_subcommands().filter(|c| !c.is_hide_set() && c.get_name() != "help") {
        let about = sub.get_about().map(ToString::to_string).unwrap_or_default();
        text.push_str(&format!("\n`{} {}`: {}\n", command.get_name(), sub.get_name(), plain(&about)));
    }
    text
}

/// A line of a list for each argument.
fn flags<'a>(args: impl Iterator<Item = &'a Arg>) -> String {
    args.map(|arg| {
        let value = if takes_value(arg) {
            let names = arg.get_value_names().unwrap_or_default();
            names.iter().map(|name| format!(" {name}")).collect::<String>()
        } else {
            String::new()
        };
        let mut names = Vec::new();
        names.extend(arg.get_short().map(|short| format!("`-{short}`")));
        match arg.get_long() {
            Some(long) => {
                let aliases = arg.get_visible_aliases().unwrap_or_default();
                names.push(format!("`--{long}{value}`"));
                names.extend(aliases.into_iter().map(|alias| format!("`--{alias}`")));
            }
            // Two names for one argument have brackets between them in the line of usage.
            None => names.push(format!("`{}`", value.trim_start().replace("] [", " "))),
        }
        let help = arg.get_long_help().or(arg.get_help()).map(ToString::to_string).unwrap_or_default();
        let mut line = format!("- {}: {}", names.join(", "), plain(&help.replace('\n', " ")));
        let defaults: Vec<_> = arg.get_default_values().iter().map(|v| v.to_string_lossy()).collect();
        if !defaults.is_empty() && takes_value(arg) && !help.contains("[default: ") {
            line.push_str(&format!(" [default: {}]", defaults.join(",")));
        }
        line + "\n" + &values(arg)
    })
    .collect()
}

/// The values of an enumeration and their meanings; empty if the flag's line lists them.
fn values(arg: &Arg) -> String {
    let mut values = arg.get_possible_values();
    values.retain(|value| !value.is_hide_set());
    if !takes_value(arg) || arg.is_hide_possible_values_set() || values.is_empty() {
        return String::new();
    }
    if values.iter().all(|value| value.get_help().is_none()) {
        let names: Vec<_> = values.iter().map(|value| format!("`{}`", value.get_name())).collect();
        return format!("  - One of {}\n", names.join(", "));
    }
    let line = |value: &PossibleValue| match value.get_help() {
        Some(help) => format!("  - `{}`: {}\n", value.get_name(), plain(&help.to_string())),
        None => format!("  - `{}`\n", value.get_name()),
    };
    values.iter().map(line).collect()
}

fn takes_value(arg: &Arg) -> bool {
    arg.get_action().takes_values() && arg.get_num_args().is_none_or(|values| values.takes_values())
}

/// Escapes characters that Markdown would take for markup.
fn plain(text: &str) -> String {
    text.replace('<', "\\<").replace('*', "\\*")
}
