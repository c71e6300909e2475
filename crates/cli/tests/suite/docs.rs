//! What is made of the definitions of commands: documentation, man pages, completions.

#[cfg(unix)]
use forebay_testing::{Need, skipped};

use crate::common::{call, repository, text};

const RENEW: &str = "docs/cli.md is not what the commands say; renew it with\n\n    \
                     cargo run -p forebay -- docs markdown > docs/cli.md\n";

#[test]
fn the_page_of_commands_is_up_to_date() {
    let page = std::fs::read_to_string(repository("docs/cli.md")).unwrap_or_default();
    assert!(page == call(&["docs", "markdown"]).success(), "{RENEW}");
}

/// The README and the book have the table of families that the registry gives.
#[test]
fn the_tables_of_families_are_up_to_date() {
    let table = call(&["docs", "families"]).success();
    assert!(table.lines().count() > 30, "{table}");
    for page in ["README.md", "docs/models.md"] {
        let text = std::fs::read_to_string(repository(page)).unwrap();
        assert!(text.contains(&table), "{page} lacks the table that `forebay docs families` prints");
    }
}

#[test]
fn every_command_has_a_man_page() {
    let folder = tempfile::tempdir().unwrap();
    let pages = folder.path().join("man/man1");
    assert_eq!(call(&["docs", "man", &text(&pages)]).success(), "");
    let help = call(&["--help"]).success();
    let commands = help.lines().skip_while(|l| *l != "Commands:").skip(1).take_while(|l| !l.is_empty());
    let names: Vec<&str> =
        commands.filter_map(|l| l.strip_prefix("  ")?.split(' ').next()).filter(|n| !n.is_empty()).collect();
    assert!(
        names.contains(&"run") && names.contains(&"completions") && !names.contains(&"docs"),
        "{names:?}"
    );
    for name in names.into_iter().filter(|name| *name != "help") {
        let page = std::fs::read_to_string(pages.join(format!("forebay-{name}.1"))).unwrap();
        assert!(page.contains(&format!(".TH forebay-{name} 1")) && page.contains("Examples:"), "{page}");
    }
    assert!(std::fs::read_to_string(pages.join("forebay.1")).unwrap().contains("forebay\\-run(1)"));
    let message = call(&["docs", "man", "/dev/null/man"]).failure(1);
    assert!(message.starts_with("cannot write man pages to /dev/null/man: Not a directory"), "{message}");
}

#[test]
fn shells_get_scripts_that_know_the_flags() {
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let script = call(&["completions", shell]).success();
        assert!(script.contains("expert-memory") && script.contains("perplexity"), "{shell}");
    }
    assert_eq!(call(&["completions", "csh"]).code, Some(2));
}

/// Each script is read by its shell where it is installed.
#[cfg(unix)]
#[test]
fn shells_understand_their_scripts() {
    let folder = tempfile::tempdir().unwrap();
    for shell in ["bash", "zsh", "fish"] {
        let path = folder.path().join(shell);
        std::fs::write(&path, call(&["completions", shell]).success()).unwrap();
        match std::process::Command::new(shell).arg("-n").arg(&path).output() {
            Ok(output) => assert!(output.status.success(), "{shell}: {output:?}"),
            Err(_) => skipped(Need::Shell, format_args!("there is no {shell}")),
        }
    }
}
