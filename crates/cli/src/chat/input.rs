//! Reads the user's input: lines with editing and a history, messages of several lines, completion of commands and paths.

use std::borrow::Cow;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::Result;
use rustyline::completion::Completer;
use rustyline::error::ReadlineError;
use rustyline::highlight::Highlighter;
use rustyline::hint::Hinter;
use rustyline::history::DefaultHistory;
use rustyline::validate::{ValidationContext, ValidationResult, Validator};
use rustyline::{
    Cmd, CompletionType, ConditionalEventHandler, Config, Context, Editor, Event, EventContext, EventHandler,
    Helper, KeyCode, KeyEvent, Modifiers, Movement, RepeatCount,
};

use super::command::{COMMANDS, QUOTES};
use crate::wrap::tell;

/// Lines that are remembered from chat to chat.
const REMEMBERED: usize = 1000;

/// The terminal's input.
pub struct Input {
    editor: Editor<Assistant, DefaultHistory>,
    history: Option<PathBuf>,
}

/// One input of the user.
pub enum Typed {
    Text(String),
    /// Ctrl-C on an empty line.
    Interrupt,
    /// Ctrl-D.
    End,
}

impl Input {
    /// Starts to read from the terminal. A history that cannot be read is ignored.
    pub fn new() -> Result<Input> {
        let config = Config::builder()
            .max_history_size(REMEMBERED)?
            .bracketed_paste(true)
            .completion_type(CompletionType::List)
            .build();
        let mut editor = Editor::with_config(config)?;
        editor.set_helper(Some(Assistant));
        editor.bind_sequence(KeyEvent(KeyCode::Enter, Modifiers::ALT), Cmd::Newline);
        editor.bind_sequence(KeyEvent(KeyCode::Enter, Modifiers::NONE), conditional(Backslash));
        editor.bind_sequence(KeyEvent::ctrl('C'), conditional(Clear));
        let history = history_path(|name| std::env::var_os(name).map(PathBuf::from));
        if let Some(path) = &history {
            let _ = editor.load_history(path);
        }
        Ok(Input { editor, history })
    }

    /// Reads the next input that is not empty.
    pub fn read(&mut self) -> Result<Typed> {
        loop {
            let text = match self.editor.readline("> ") {
                Ok(text) => text,
                Err(ReadlineError::Eof) => return Ok(Typed::End),
                Err(ReadlineError::Interrupted) => return Ok(Typed::Interrupt),
                Err(error) => return Err(error.into()),
            };
            let text = joined(&text).trim().to_owned();
            if text.is_empty() {
                continue;
            }
            self.editor.add_history_entry(&text)?;
            if let Some(path) = &self.history {
                if let Some(folder) = path.parent() {
                    let _ = fs::create_dir_all(folder);
                }
                let _ = self.editor.append_history(path);
            }
            return Ok(Typed::Text(text));
        }
    }

    /// Asks a question until it is answered. Enter says yes; Ctrl-C and Ctrl-D say no.
    pub fn confirm(&mut self, question: &str) -> Result<bool> {
        loop {
            match self.editor.readline(&format!("{question} [Y/n] ")) {
                Ok(text) => match yes_or_no(&text) {
                    Some(answer) => return Ok(answer),
                    None => tell("Please answer y or n."),
                },
                Err(ReadlineError::Eof | ReadlineError::Interrupted) => return Ok(false),
                Err(error) => return Err(error.into()),
            }
        }
    }
}

/// What an answer means; `None` if it is something else, such as the next message.
fn yes_or_no(text: &str) -> Option<bool> {
    match &*text.trim().to_lowercase() {
        "" | "y" | "yes" => Some(true),
        "n" | "no" => Some(false),
        _ => None,
    }
}

/// The file of the history, in the folder for the user's state.
fn history_path(environment: impl Fn(&str) -> Option<PathBuf>) -> Option<PathBuf> {
    let set = |name| environment(name).filter(|path| path != Path::new(""));
    let state = set("XDG_STATE_HOME").or_else(|| Some(set("HOME")?.join(".local/state")));
    Some(state.or_else(|| set("LOCALAPPDATA"))?.join("forebay/history"))
}

fn conditional(handler: impl ConditionalEventHandler + 'static) -> EventHandler {
    EventHandler::Conditional(Box::new(handler))
}

/// Enter after a backslash starts a new line. Text that is pasted keeps its backslashes.
struct Backslash;

/// What Enter inserts after a backslash: a character without width, which marks a typed backslash, and a line break.
const CONTINUED: &str = "\u{2060}\n";

/// A text without the backslashes that continue its lines.
fn joined(text: &str) -> String {
    text.replace(&format!("\\{CONTINUED}"), "\n").replace(CONTINUED, "\n")
}

impl ConditionalEventHandler for Backslash {
    fn handle(&self, _: &Event, _: RepeatCount, _: bool, context: &EventContext<'_>) -> Option<Cmd> {
        let before = &context.line()[..context.pos()];
        let goes_on = before.ends_with('\\') && !is_open(context.line());
        goes_on.then(|| Cmd::Insert(1, CONTINUED.into()))
    }
}

/// Ctrl-C clears what is typed.
struct Clear;

impl ConditionalEventHandler for Clear {
    fn handle(&self, _: &Event, _: RepeatCount, _: bool, context: &EventContext<'_>) -> Option<Cmd> {
        (!context.line().is_empty()).then_some(Cmd::Kill(Movement::WholeBuffer))
    }
}

/// Completes commands and paths, and determines whether a message is complete.
struct Assistant;

impl Helper for Assistant {}
impl Highlighter for Assistant {
    fn highlight_hint<'h>(&self, hint: &'h str) -> Cow<'h, str> {
        Cow::Owned(format!("\x1b[2m{hint}\x1b[0m"))
    }
}

impl Hinter for Assistant {
    type Hint = String;

    /// The arguments of a command, as a hint.
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
        if let Some(path) = ["/save ", "/load "].iter().find_map(|command| typed.strip_prefix(command)) {
            let path = path.trim_start();
            return Ok((position - path.len(), paths(path)));
        }
        let names = COMMANDS.iter().map(|(name, ..)| *name);
        let fitting = names.filter(|name| typed.starts_with('/') && name.starts_with(typed));
        Ok((0, fitting.map(str::to_owned).collect()))
    }
}

/// Paths that begin with `typed`. Paths of folders end with a slash.
fn paths(typed: &str) -> Vec<String> {
    let (folder, start) = typed.split_at(typed.rfind('/').map_or(0, |slash| slash + 1));
    let Ok(entries) = fs::read_dir(if folder.is_empty() { "." } else { folder }) else { return Vec::new() };
    let mut paths: Vec<String> = entries
        .flatten()
        .filter_map(|entry| {
            let name = entry.file_name().into_string().ok()?;
            let is_meant = name.starts_with(start) && (!name.starts_with('.') || start.starts_with('.'));
            let slash = if entry.path().is_dir() { "/" } else { "" };
            is_meant.then(|| format!("{folder}{name}{slash}"))
        })
        .collect();
    paths.sort();
    paths
}

impl Validator for Assistant {
    fn validate(&self, context: &mut ValidationContext<'_>) -> rustyline::Result<ValidationResult> {
        let goes_on = is_open(context.input());
        Ok(if goes_on { ValidationResult::Incomplete } else { ValidationResult::Valid(None) })
    }
}

/// Whether a text starts with three quotes, perhaps after a command, and has no closing quotes yet.
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
    fn a_message_is_neither_yes_nor_no() {
        assert_eq!(["", " y ", "Yes"].map(yes_or_no), [Some(true); 3]);
        assert_eq!(["n", "NO"].map(yes_or_no), [Some(false); 2]);
        assert_eq!(["now tell me more", "yesterday", "/drop"].map(yes_or_no), [None; 3]);
    }

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
    fn only_a_typed_backslash_continues_a_line() {
        assert_eq!(joined(&format!("one\\{CONTINUED}two\\\nthree")), "one\ntwo\\\nthree");
        assert_eq!(joined(&format!("one{CONTINUED}two")), "one\ntwo", "its backslash was deleted");
    }

    #[test]
    fn paths_are_completed() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("my chat.json"), "").unwrap();
        fs::write(folder.path().join(".my-secrets"), "").unwrap();
        fs::create_dir(folder.path().join("my chats")).unwrap();
        let at = |name: &str| format!("{}/{name}", folder.path().display());
        assert_eq!(paths(&at("my c")), [at("my chat.json"), at("my chats/")]);
        assert_eq!(paths(&at("")), [at("my chat.json"), at("my chats/")], "hidden files are not offered");
        assert_eq!(paths(&at(".my")), [at(".my-secrets")]);
        assert!(paths(&at("nowhere/")).is_empty());
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
