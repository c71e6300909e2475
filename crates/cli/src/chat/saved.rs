//! Saves conversations: the messages as JSON, for people and for other models, and beside them the state of the model,
//! so that the messages need not be processed again.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use forebay_engine::chat::Message;
use forebay_engine::{Engine, Error, Session};
use serde::{Deserialize, Serialize};

use crate::args::read_text;
use crate::output::Output;

/// A conversation.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
pub struct Saved {
    /// The version of the file format.
    forebay_chat: u32,
    /// The model of the conversation.
    pub model: String,
    /// The system prompt.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub system: Option<String>,
    /// The messages.
    pub messages: Vec<Message>,
}

const VERSION: u32 = 1;

impl Saved {
    pub fn new(model: &str, system: Option<&str>, messages: &[Message]) -> Saved {
        let system = system.map(str::to_owned);
        Saved { forebay_chat: VERSION, model: model.to_owned(), system, messages: messages.to_vec() }
    }

    /// Writes the conversation, and beside it the state of the session.
    pub fn write(&self, path: &Path, session: &Session) -> Result<()> {
        // Opened first: if it cannot be written, the error names the file that was asked for.
        let output = Output::private(path)?;
        session.save(&state_path(path))?;
        let text = serde_json::to_string_pretty(self)? + "\n";
        output.finish(text.as_bytes())
    }

    pub fn read(path: &Path) -> Result<Saved> {
        let text = read_text(path)?;
        let saved: Saved = serde_json::from_str(&text)
            .with_context(|| format!("{} is not a conversation that /save wrote", path.display()))?;
        ensure!(
            saved.forebay_chat == VERSION,
            "{}: a conversation of version {}; this program reads version {VERSION}",
            path.display(),
            saved.forebay_chat
        );
        Ok(saved)
    }
}

/// The saved state of the model, or why the messages must be processed again.
pub fn remembered(engine: &Engine, path: &Path) -> Result<Session, Error> {
    Session::load(engine, &state_path(path))
}

fn state_path(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".state");
    name.into()
}
