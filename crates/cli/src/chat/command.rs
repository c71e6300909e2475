//! The commands of a chat: lines that begin with a slash.

use std::path::PathBuf;

use anyhow::{Result, anyhow, bail};

use crate::stats::LEGEND;

/// A command.
#[derive(Clone, Debug, PartialEq)]
pub enum Command {
    Help,
    Clear,
    Undo,
    Regen,
    /// Without a text, the system prompt is removed.
    System(Option<String>),
    /// Without a setting, all are shown.
    Set(Option<(String, String)>),
    Think(bool),
    Save(PathBuf),
    Load(PathBuf),
    /// Makes room in the context.
    Drop,
    Stats,
    Quit,
}

/// The name of each command, its arguments, and what it does.
pub const COMMANDS: [(&str, &str, &str); 12] = [
    ("/help", "", "show this help"),
    ("/clear", "", "start a new conversation; the system prompt stays"),
    ("/undo", "", "remove the last message and its answer"),
    ("/regen", "", "generate another answer to the last message"),
    ("/drop", "", "drop the oldest turns, so that half of the context is free"),
    ("/system", "[TEXT]", "set the system prompt; without a text, remove it"),
    ("/set", "[NAME VALUE]", "change a setting, such as temp 0.7; alone, show all settings"),
    ("/think", "on|off", "turn reasoning on or off, if the chat template supports it"),
    ("/save", "FILE", "save the conversation to a file"),
    ("/load", "FILE", "load a conversation from a file and continue it"),
    ("/stats", "", "show the speed of the last answer, the context and the memory"),
    ("/quit", "", "leave; also /bye, /exit and Ctrl-D"),
];

/// Other names of commands.
const ALIASES: [(&str, &str); 2] = [("/bye", "/quit"), ("/exit", "/quit")];

impl Command {
    /// Reads a line that begins with a slash.
    ///
    /// # Errors
    /// If there is no such command, or its arguments are wrong. The message says what is expected.
    pub fn parse(line: &str) -> Result<Command> {
        let (name, rest) = line.split_once(char::is_whitespace).unwrap_or((line, ""));
        let rest = rest.trim();
        let name = ALIASES.iter().find(|(alias, _)| *alias == name).map_or(name, |(_, name)| name);
        let Some((_, arguments, _)) = COMMANDS.iter().find(|(known, ..)| *known == name) else {
            let names: Vec<&str> = COMMANDS.iter().map(|(name, ..)| *name).collect();
            bail!("there is no command {name}; the commands are {}", names.join(", "));
        };
        let usage = || anyhow!("usage: {name} {arguments}");
        if arguments.is_empty() && !rest.is_empty() {
            bail!("{name} takes no argument");
        }
        let path = || if rest.is_empty() { Err(usage()) } else { Ok(PathBuf::from(rest)) };
        Ok(match name {
            "/help" => Command::Help,
            "/clear" => Command::Clear,
            "/undo" => Command::Undo,
            "/regen" => Command::Regen,
            "/drop" => Command::Drop,
            "/system" => Command::System((!rest.is_empty()).then(|| unquoted(rest))),
            "/set" if rest.is_empty() => Command::Set(None),
            "/set" => {
                let separator = |c: char| c.is_whitespace() || c == '=';
                let (name, value) = rest.split_once(separator).ok_or_else(usage)?;
                let value = value.trim_matches(separator);
                if value.is_empty() {
                    return Err(usage());
                }
                Command::Set(Some((name.to_owned(), value.to_owned())))
            }
            "/think" => match rest {
                "on" => Command::Think(true),
                "off" => Command::Think(false),
                _ => return Err(usage()),
            },
            "/save" => Command::Save(path()?),
            "/load" => Command::Load(path()?),
            "/stats" => Command::Stats,
            _ => Command::Quit,
        })
    }
}

/// Keys, and what they do.
const KEYS: [(&str, &str); 5] = [
    ("Alt-Enter", "start a new line in the message; a backslash before Enter does the same"),
    ("\"\"\"", "start and end a message of several lines"),
    ("Tab", "complete a command, or the path after /save and /load"),
    ("Ctrl-C", "stop the answer, or clear the line; twice on an empty line, leave"),
    ("Ctrl-D", "leave"),
];

/// The commands, the keys, and what the line after an answer says.
pub fn help() -> String {
    let mut text = String::from("Commands:\n");
    for (name, arguments, does) in COMMANDS {
        text.push_str(&format!("  {:<22}{does}\n", format!("{name} {arguments}")));
    }
    text.push_str("\nKeys:\n");
    for (key, does) in KEYS {
        text.push_str(&format!("  {key:<22}{does}\n"));
    }
    text.push_str("\nThe line after an answer:\n");
    for (part, means) in LEGEND {
        text.push_str(&format!("  {part:<22}{means}\n"));
    }
    text
}

/// A text without the three quotes around it, if it has them.
pub fn unquoted(text: &str) -> String {
    match text.strip_prefix(QUOTES) {
        None => text.to_owned(),
        Some(inner) => inner.strip_suffix(QUOTES).unwrap_or(inner).trim_matches('\n').to_owned(),
    }
}

/// What begins and ends a text of several lines.
pub const QUOTES: &str = "\"\"\"";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_are_read_and_mistakes_are_explained() {
        let parse = |line: &str| Command::parse(line).map_err(|error| error.to_string());
        assert_eq!(parse("/undo"), Ok(Command::Undo));
        assert_eq!(parse("/system Be brief."), Ok(Command::System(Some("Be brief.".into()))));
        assert_eq!(parse("/system \"\"\"\na\nb\n\"\"\""), Ok(Command::System(Some("a\nb".into()))));
        assert_eq!(parse("/system"), Ok(Command::System(None)));
        let temperature = Command::Set(Some(("temp".into(), "0.5".into())));
        assert_eq!(parse("/set temp 0.5"), Ok(temperature.clone()));
        assert_eq!(parse("/set temp = 0.5"), Ok(temperature));
        assert_eq!(parse("/save my chat.json"), Ok(Command::Save("my chat.json".into())));
        assert_eq!(parse("/think on"), Ok(Command::Think(true)));
        assert!(parse("/save").unwrap_err().contains("/save FILE"));
        assert!(parse("/set temp").unwrap_err().contains("NAME VALUE"));
        assert!(parse("/think maybe").unwrap_err().contains("on|off"));
        assert!(parse("/undo 3").unwrap_err().contains("takes no argument"));
        assert!(parse("/leave").unwrap_err().contains("/quit"));
        assert_eq!([parse("/bye"), parse("/exit"), parse("/quit")], [(); 3].map(|()| Ok(Command::Quit)));
        // Every command of the list is understood.
        for (name, arguments, _) in COMMANDS {
            let argument = if arguments == "on|off" { "on" } else { arguments };
            Command::parse(&format!("{name} {argument}")).unwrap();
        }
    }
}
