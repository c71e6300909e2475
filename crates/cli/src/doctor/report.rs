//! The text of `doctor --report`: the measurements as one block of Markdown, to send to the developers.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};

/// A table of these rows, under a title, followed by the results of the suite.
pub fn markdown(title: &str, rows: &[(String, String)], suite: Option<&Suite>) -> String {
    let mut text = format!("### {title}\n\n| | |\n|---|---|\n");
    for (name, value) in rows {
        text += &format!("| {} | {} |\n", name.trim(), value.replace('|', "\\|"));
    }
    match suite {
        None => text += "\nThe suite for GPUs was not run.\n",
        Some(suite) => text += &suite.text(),
    }
    text
}

/// What a run of the suite for GPUs printed.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Suite {
    passed: usize,
    failed: Vec<String>,
    skipped: Vec<String>,
}

impl Suite {
    /// Reads the output of `cargo test -p forebay-gpu --test suite`.
    ///
    /// # Errors
    /// If it cannot be read, or has no results of tests.
    pub fn read(path: &Path) -> Result<Suite> {
        let text = fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
        let suite = Suite::of(&text);
        anyhow::ensure!(
            suite != Suite::default(),
            "{} has no results of tests; write it with `cargo test -p forebay-gpu --test suite 2>&1 | tee FILE`",
            path.display()
        );
        Ok(suite)
    }

    fn of(output: &str) -> Suite {
        let mut suite = Suite::default();
        for line in output.lines() {
            if let Some(reason) = line.strip_prefix("skipped: ") {
                if !suite.skipped.iter().any(|known| known == reason) {
                    suite.skipped.push(reason.to_owned());
                }
                continue;
            }
            let Some((name, result)) = line.strip_prefix("test ").and_then(|test| test.split_once(" ... "))
            else {
                continue;
            };
            match result {
                "ok" => suite.passed += 1,
                "FAILED" => suite.failed.push(name.to_owned()),
                _ => {}
            }
        }
        suite
    }

    fn text(&self) -> String {
        let mut text = format!("\nSuite for GPUs: {} passed, {} failed.\n", self.passed, self.failed.len());
        self.failed.iter().for_each(|name| text += &format!("- failed: `{name}`\n"));
        self.skipped.iter().for_each(|reason| text += &format!("- skipped: {reason}\n"));
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OUTPUT: &str = "\
running 3 tests
test best::golden::one ... ok
skipped: no such model
test best::golden::two ... FAILED
skipped: no such model
test plain::kernels::three ... ok
test result: FAILED. 2 passed; 1 failed; 0 ignored
";

    #[test]
    fn results_of_the_suite_are_counted_and_failures_named() {
        let suite = Suite::of(OUTPUT);
        assert_eq!((suite.passed, suite.failed.len(), suite.skipped.len()), (2, 1, 1));
        assert!(suite.text().contains("2 passed, 1 failed") && suite.text().contains("`best::golden::two`"));
        assert_eq!(Suite::of("nothing ran"), Suite::default());
    }

    #[test]
    fn a_report_is_a_table() {
        let rows = [("  CPU".to_owned(), "a | b".to_owned())];
        let text = markdown("Forebay", &rows, None);
        assert!(text.contains("| CPU | a \\| b |\n") && text.contains("was not run"), "{text}");
    }
}
