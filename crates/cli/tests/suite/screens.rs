//! Snapshots of help and of screens, so that words are reviewed as code is. `UPDATE_EXPECT=1` writes them anew.

use expect_test::expect_file;

use crate::common::hub::{Hub, REPO};
use crate::common::{Outcome, demo_model, forebay, golden};

/// Every command that help lists.
const COMMANDS: [&str; 17] = [
    "run",
    "serve",
    "batch",
    "pull",
    "list",
    "rm",
    "inspect",
    "tokenize",
    "logits",
    "perplexity",
    "bench",
    "plan",
    "doctor",
    "trace",
    "simulate",
    "synth",
    "completions",
];

/// What a call writes, as wide as a terminal of 100 columns, without spaces at the ends of lines.
fn screen(args: &[&str]) -> String {
    let text = Outcome::from(forebay(args).env("COLUMNS", "100").output().unwrap()).success();
    text.lines().map(|line| format!("{}\n", line.trim_end())).collect()
}

#[test]
fn help_is_as_reviewed() {
    let summary = screen(&["--help"]);
    let listed =
        summary.lines().skip_while(|line| *line != "Commands:").skip(1).take_while(|l| !l.is_empty());
    let listed: Vec<&str> = listed.filter_map(|line| line.split_whitespace().next()).collect();
    assert_eq!(listed, [&COMMANDS[..], &["help"]].concat());
    expect_file!["../snapshots/help/forebay.txt"].assert_eq(&summary);
    for command in COMMANDS {
        let [short, long] = ["-h", "--help"].map(|flag| screen(&[command, flag]));
        let rule = "-".repeat(100);
        let both = format!("$ forebay {command} -h\n{short}\n{rule}\n\n$ forebay {command} --help\n{long}");
        expect_file![format!("../snapshots/help/{command}.txt")].assert_eq(&both);
    }
}

/// A text with every number that a machine or its load decides as `#`.
fn without_numbers(text: &str) -> String {
    let mut shown = String::new();
    for c in text.chars() {
        let digit = c.is_ascii_digit() || (c == '.' && shown.ends_with('#'));
        match (digit, shown.ends_with('#')) {
            (true, true) => {}
            (true, false) => shown.push('#'),
            (false, _) => shown.push(c),
        }
    }
    shown
}

#[test]
fn a_model_is_described_as_reviewed() {
    let text = screen(&["inspect", &demo_model()]);
    // How much memory it needs depends on the number of processors.
    let needs = |line: &str| line.starts_with("least memory") || line.starts_with("all in memory");
    let text: String = text
        .lines()
        .map(|line| if needs(line) { without_numbers(line) } else { line.to_owned() } + "\n")
        .collect();
    expect_file!["../snapshots/inspect.txt"].assert_eq(&text);
}

#[test]
fn downloads_are_listed_as_reviewed() {
    let model = std::fs::read(golden("qwen3moe.gguf")).unwrap();
    let home = tempfile::tempdir().unwrap();
    let hub = Hub::new(vec![("M-Q4_K_M.gguf", model.clone()), ("M-Q8_0.gguf", model[..].to_vec())]);
    for quant in ["Q4_K_M", "Q8_0"] {
        hub.call(home.path(), &["pull", &format!("{REPO}:{quant}")]).success();
    }
    expect_file!["../snapshots/list.txt"].assert_eq(&hub.call(home.path(), &["list"]).success());
    let plan = hub.call(home.path(), &["pull", &format!("{REPO}:Q8_0"), "--dry-run"]).success();
    // How much is free is the machine's.
    let (plan, free) = plan.trim_end().rsplit_once(", ").unwrap();
    assert!(free.ends_with(" free on the drive"), "{free}");
    let plan = format!("{plan}\n");
    expect_file!["../snapshots/pull.txt"].assert_eq(&plan);
}

#[test]
fn measurements_are_shown_as_reviewed() {
    let args = ["bench", &demo_model(), "-p", "8", "-n", "4", "-r", "1", "-t", "2", "--expert-memory", "25%"];
    let table = screen(&[&args[..], &["--heat", "off", "--device", "cpu"]].concat());
    // The backend's name and what bounds it are the machine's, too.
    let lines = table.lines().filter(|line| !line.is_empty()).map(|line| match line.starts_with("| ") {
        true if line.contains("model") || line.contains("---") => line.to_owned() + "\n",
        true => {
            let cells: Vec<&str> = line.trim_matches('|').split('|').map(str::trim).collect();
            format!("{} | … | {} {} {}\n", cells[0], cells[4], cells[5], cells[10])
        }
        false => without_numbers(line) + "\n",
    });
    // Columns are as wide as the backend's name.
    let text: String =
        lines.map(|line| line.split_whitespace().collect::<Vec<_>>().join(" ") + "\n").collect();
    expect_file!["../snapshots/bench.txt"].assert_eq(&without_rules(&text));
}

/// Without lines of dashes, which are as long as the names of processors.
fn without_rules(table: &str) -> String {
    table.lines().filter(|line| !line.contains("---")).map(|line| format!("{line}\n")).collect()
}
