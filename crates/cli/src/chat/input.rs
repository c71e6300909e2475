//! What is typed: lines with editing and a history, texts of several lines, commands that complete.

use std::borrow::Cow;
use std::path::{Path, PathBuf};

use anyhow::Result;
use rustyline::completion::Completer;
use rustyline::error::ReadlineError;
use rustyline::highlight::Highlighter;
use rustyline::hint::Hinter;
use rustyline::history::DefaultHistory;
use rustyline::validate::{ValidationContext, ValidationResult, Validator};
use rustyline::{Config, Context, Editor, Helper};

use super::command::{COMMANDS, QUOTES};

/// Lines that are remembered from chat to chat.
const REMEMBERED: usize = 1000;

/// Where lines come from.
pub struct Input {
    editor: Editor<Assistant, DefaultHistory>,
    history: Option<PathBuf>,
}

/// What came.
pub enum Typed {
    Text(String),
    /// Ctrl-C where there was nothing to stop.
    Interrupt,
    /// Ctrl-D.
    End,
}

impl Input {
    /// Begins to read from the terminal. A history that cannot be read is as good as none.
    pub fn new() -> Result<Input> {
        let config = Config::builder().max_history_size(REMEMBERED)?.bracketed_paste(true).build();
        let mut editor = Editor::with_config(config)?;
        editor.set_helper(Some(Assistant));
        let history = history_path(|name| std::env::var_os(name).map(PathBuf::from));
        if let Some(path) = &history {
            let _ = editor.load_history(path);
        }
        Ok(Input { editor, history })
    }

    /// The next text, which is not empty.
    pub fn read(&mut self) -> Result<Typed> {
        loop {
            let text = match self.editor.readline("> ") {
                Ok(text) => text,
                Err(ReadlineError::Eof) => return Ok(Typed::End),
                Err(ReadlineError::Interrupted) => return Ok(Typed::Interrupt),
                Err(error) => return Err(error.into()),
            };
            let text = text.trim();
            if text.is_empty() {
                continue;
            }
            self.editor.add_history_entry(text)?;
            if let Some(path) = &self.history {
                if let Some(folder) = path.parent() {
                    let _ = std::fs::create_dir_all(folder);
                }
                let _ = self.editor.append_history(path);
            }
            return Ok(Typed::Text(text.to_owned()));
        }
    }
}

/// Where lines are remembered: with the user's other state.
fn history_path(environment: impl Fn(&str) -> Option<PathBuf>) -> Option<PathBuf> {
    let set = |name| environment(name).filter(|path| path != Path::new(""));
    let state = set("XDG_STATE_HOME").or_else(|| Some(set("HOME")?.join(".local/state")));
    Some(state.or_else(|| set("LOCALAPPDATA"))?.join("forebay/history"))
}

/// Knows when a text goes on, and what commands there are.
struct Assistant;

impl Helper for Assistant {}
impl Highlighter for Assistant {
    fn highlight_hint<'h>(&self, hint: &'h str) -> Cow<'h, str> {
        Cow::Owned(format!("\x1b[2m{hint}\x1b[0m"))
    }
}

impl Hinter for Assistant {
    type Hint = String;

    /// What follows a command.
    fn hint(&self, line: &str, position: usize, _: &Context<'_>) -> Option<String> {
        let (_, arguments, _) = COMMANDS.iter().find(|(name, ..)| *name == line)?;
        (position == line.len() && !arguments.is_empty()).then(|| format!(" {arguments}"))
    }
}

impl Completer for Assistant {
    type Candidate = String;

    fn complete(
        &self,
        line: &str,
        position: usize,
        _: &Context<'_>,
    ) -> rustyline::Result<(usize, Vec<String>)> {
        let typed = &line[..position];
        let names = COMMANDS.iter().map(|(name, ..)| *name);
        let fitting = names.filter(|name| typed.starts_with('/') && name.starts_with(typed));
        Ok((0, fitting.map(str::to_owned).collect()))
    }
}

impl Validator for Assistant {
    fn validate(&self, context: &mut ValidationContext<'_>) -> rustyline::Result<ValidationResult> {
        let goes_on = is_open(context.input());
        Ok(if goes_on { ValidationResult::Incomplete } else { ValidationResult::Valid(None) })
    }
}

/// Whether a text has begun with three quotes, after a command or without, and not ended.
fn is_open(text: &str) -> bool {
    let text = text.trim();
    let text = match text.split_once(char::is_whitespace) {
        Some((command, rest)) if command.starts_with('/') => rest.trim_start(),
        _ => text,
    };
    text.strip_prefix(QUOTES).is_some_and(|inner| !inner.ends_with(QUOTES))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn three_quotes_go_on_until_three_quotes() {
        for open in ["\"\"\"", "\"\"\"\nline", "/system \"\"\"\nBe", "  \"\"\"a\"\""] {
            assert!(is_open(open), "{open}");
        }
        for closed in
            ["", "a", "\"\"\"a\nb\"\"\"", "\"\"\"\"\"\"", "/system \"\"\"a\"\"\"", "say \"\"\"", "\"a"]
        {
            assert!(!is_open(closed), "{closed}");
        }
    }

    #[test]
    fn the_history_is_with_the_users_state() {
        let path = |set: &[(&str, &str)]| {
            history_path(|name| set.iter().find(|(n, _)| *n == name).map(|(_, value)| value.into()))
        };
        assert_eq!(path(&[("HOME", "/home/me")]), Some("/home/me/.local/state/forebay/history".into()));
        assert_eq!(path(&[("XDG_STATE_HOME", "/s"), ("HOME", "/h")]), Some("/s/forebay/history".into()));
        assert_eq!(path(&[("HOME", "")]), None);
    }
}
