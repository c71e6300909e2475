//! The chat of `forebay run` on a terminal.

use std::process::ExitCode;

use anyhow::Result;
use forebay_engine::chat::Message;
use forebay_engine::{FinishReason, Request, Session};
use rustyline::DefaultEditor;
use rustyline::error::ReadlineError;

use crate::errors::TooLong;
use crate::output::print;
use crate::run::{chat_template, conversation_tokens, stream};
use crate::{interrupt, stats};

/// Reads messages and answers them until the user leaves. `request` says how; its prompt is replaced.
pub fn run(session: &mut Session, request: &Request) -> Result<ExitCode> {
    chat_template(session.engine())?;
    let name = session.engine().file().metadata.str("general.name").unwrap_or("the model").to_owned();
    eprintln!("Chat with {name}.");
    eprintln!("Ctrl-C stops an answer, /clear starts a new conversation, Ctrl-D leaves.\n");
    let mut editor = DefaultEditor::new()?;
    let mut messages: Vec<Message> = Vec::new();
    loop {
        let line = match editor.readline("> ") {
            Ok(line) => line,
            Err(ReadlineError::Eof) => return Ok(ExitCode::SUCCESS),
            Err(ReadlineError::Interrupted) => return Ok(ExitCode::from(interrupt::EXIT_CODE)),
            Err(error) => return Err(error.into()),
        };
        let line = line.trim();
        if line.is_empty() {
            continue;
        }
        editor.add_history_entry(line)?;
        if line == "/clear" {
            messages.clear();
            continue;
        }
        messages.push(Message::new("user", line));
        session.cancel().reset();
        match answer(session, request, &messages) {
            Ok(Some(answer)) => messages.push(Message::new("assistant", &answer)),
            Ok(None) => drop(messages.pop()),
            Err(error) if error.is::<TooLong>() => {
                eprintln!("error: {error}; /clear starts a new conversation\n");
                messages.pop();
            }
            Err(error) => return Err(error),
        }
    }
}

/// Answers the last message. None if the answer was stopped before it began.
fn answer(session: &mut Session, request: &Request, messages: &[Message]) -> Result<Option<String>> {
    let prompt = conversation_tokens(session.engine(), messages)?;
    let full = request.max_tokens.is_none();
    let answer = stream(session, &Request { prompt, ..request.clone() })?;
    print(match answer.finish_reason {
        FinishReason::Cancelled => " [stopped]\n",
        FinishReason::Length if full => " [the context is full]\n",
        FinishReason::Length | FinishReason::Stop => "\n",
    })?;
    stats::close(session.engine(), &answer);
    eprintln!();
    let begun = answer.finish_reason != FinishReason::Cancelled || !answer.text.is_empty();
    Ok(begun.then_some(answer.text))
}
