//! The chat of `forebay run` on a terminal.

use std::process::ExitCode;

use anyhow::Result;
use forebay_engine::chat::Message;
use forebay_engine::{Error, FinishReason, Request, Session};
use rustyline::DefaultEditor;
use rustyline::error::ReadlineError;

use crate::run::{chat_template, conversation_tokens, stream};
use crate::stats;

/// Reads messages and answers them until the user leaves. `request` says how; its prompt is replaced.
pub fn run(session: &mut Session, request: &Request) -> Result<ExitCode> {
    chat_template(session.engine())?;
    let name = session.engine().file().metadata.str("general.name").unwrap_or("the model").to_owned();
    eprintln!("Chat with {name}. Ctrl-C stops an answer, Ctrl-D leaves.\n");
    let mut editor = DefaultEditor::new()?;
    let mut messages: Vec<Message> = Vec::new();
    loop {
        let line = match editor.readline("> ") {
            Ok(line) => line,
            Err(ReadlineError::Eof | ReadlineError::Interrupted) => return Ok(ExitCode::SUCCESS),
            Err(error) => return Err(error.into()),
        };
        if line.trim().is_empty() {
            continue;
        }
        editor.add_history_entry(&line)?;
        messages.push(Message::new("user", &line));
        session.cancel().reset();
        let prompt = conversation_tokens(session.engine(), &messages)?;
        match stream(session, &Request { prompt, ..request.clone() }) {
            Ok(answer) => {
                let end = if answer.finish_reason == FinishReason::Cancelled { " [stopped]" } else { "" };
                println!("{end}");
                eprintln!("{}\n", stats::line(&answer.stats));
                messages.push(Message::new("assistant", &answer.text));
            }
            // The conversation has outgrown its context, but nothing of it is lost.
            Err(error) if matches!(error.downcast_ref(), Some(Error::Context { .. })) => {
                eprintln!("error: {error}; start again with a larger --ctx for longer conversations\n");
                messages.pop();
            }
            Err(error) => return Err(error),
        }
    }
}
