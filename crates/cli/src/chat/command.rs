//! The commands of a chat: lines that begin with a slash.

use std::path::PathBuf;

use anyhow::{Result, anyhow, bail};

/// What somebody can ask for besides an answer.
#[derive(Clone, Debug, PartialEq)]
pub enum Command {
    Help,
    Clear,
    Undo,
    Regen,
    /// Without a text the system message is taken back.
    System(Option<String>),
    /// Without a setting all are shown.
    Set(Option<(String, String)>),
    Think(bool),
    Save(PathBuf),
    Load(PathBuf),
    Stats,
    Quit,
}

/// Name, what follows it, what it does.
pub const COMMANDS: [(&str, &str, &str); 11] = [
    ("/help", "", "this list"),
    ("/clear", "", "start a new conversation; the system message stays"),
    ("/undo", "", "take the last question and its answer back"),
    ("/regen", "", "answer the last question again, otherwise"),
    ("/system", "[TEXT]", "what the model is told first; without a text, nothing"),
    ("/set", "[NAME VALUE]", "change how tokens are chosen, such as temp 0.7; alone: show all"),
    ("/think", "on|off", "let the model reason first, where its template can say that"),
    ("/save", "FILE", "write the conversation to a file"),
    ("/load", "FILE", "go on with a conversation from a file"),
    ("/stats", "", "how fast the last answer came, and what is in memory"),
    ("/quit", "", "leave, as Ctrl-D does"),
];

impl Command {
    /// Reads a line that begins with a slash.
    ///
    /// # Errors
    /// If there is no such command, or what follows it makes no sense; the message says what would.
    pub fn parse(line: &str) -> Result<Command> {
        let (name, rest) = line.split_once(char::is_whitespace).unwrap_or((line, ""));
        let rest = rest.trim();
        let Some((_, arguments, _)) = COMMANDS.iter().find(|(known, ..)| *known == name) else {
            let names: Vec<&str> = COMMANDS.iter().map(|(name, ..)| *name).collect();
            bail!("there is no {name}; there is {}", names.join(" "));
        };
        let usage = || anyhow!("it is {name} {arguments}");
        if arguments.is_empty() && !rest.is_empty() {
            bail!("{name} takes nothing after it");
        }
        let path = || if rest.is_empty() { Err(usage()) } else { Ok(PathBuf::from(rest)) };
        Ok(match name {
            "/help" => Command::Help,
            "/clear" => Command::Clear,
            "/undo" => Command::Undo,
            "/regen" => Command::Regen,
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

/// The list of commands, for people.
pub fn help() -> String {
    let mut text = String::new();
    for (name, arguments, does) in COMMANDS {
        text.push_str(&format!("  {:<22}{does}\n", format!("{name} {arguments}")));
    }
    text.push_str("  \"\"\"                   begin and end a message of several lines with three quotes\n");
    text.push_str("  Ctrl-C                stop an answer and keep it; Ctrl-D leaves\n");
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
        assert!(parse("/undo 3").unwrap_err().contains("nothing after it"));
        assert!(parse("/exit").unwrap_err().contains("/quit"));
        // Every command of the list can be given.
        for (name, arguments, _) in COMMANDS {
            let argument = if arguments == "on|off" { "on" } else { arguments };
            Command::parse(&format!("{name} {argument}")).unwrap();
        }
    }
}
