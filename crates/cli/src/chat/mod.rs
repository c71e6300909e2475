//! The chat of `forebay run` on a terminal.

mod command;
mod input;
mod saved;

use std::path::Path;
use std::process::ExitCode;
use std::str::FromStr;

use anyhow::{Context, Result, anyhow, bail};
use forebay_engine::chat::Message;
use forebay_engine::{Answer, Bytes, Engine, Error, FinishReason, Grammar, Request, Session};

use self::command::{Command, help, unquoted};
use self::input::{Input, Typed};
use self::saved::{Saved, remembered};
use crate::errors::{TooLong, message};
use crate::output::print;
use crate::prompting::Prompting;
use crate::run::{Said, stream};
use crate::{interrupt, stats};

/// Loads the model again after a device was lost, for another; and what answers must be, if they must be something.
pub type Reload<'a> = dyn Fn(&str) -> Result<(Engine, Option<Grammar>)> + 'a;

/// Reads messages and answers them until the user leaves. `request` says how; its prompt is replaced.
pub fn run(
    session: Session,
    request: Request,
    prompting: Prompting,
    reload: &Reload<'_>,
) -> Result<ExitCode> {
    prompting.check(session.engine())?;
    let mut chat = Chat { session, request, prompting, messages: Vec::new(), last: None };
    eprintln!("Chat with {}.", chat.model_name());
    eprintln!("/help lists commands, Ctrl-C stops an answer, Ctrl-D leaves.\n");
    let mut input = Input::new()?;
    loop {
        let line = match input.read()? {
            Typed::Text(line) => line,
            Typed::End => return Ok(ExitCode::SUCCESS),
            Typed::Interrupt => return Ok(ExitCode::from(interrupt::EXIT_CODE)),
        };
        chat.session.cancel().reset();
        let done = match line.starts_with('/') {
            true => match Command::parse(&line) {
                Ok(Command::Quit) => return Ok(ExitCode::SUCCESS),
                Ok(command) => chat.obey(command),
                Err(mistake) => Err(mistake),
            },
            false => chat.say(&unquoted(&line)),
        };
        match done {
            Ok(()) => {}
            Err(error) if error.is::<TooLong>() => {
                eprintln!("error: {error}; /clear starts a new conversation, /undo takes a turn back\n");
            }
            Err(error) if matches!(error.downcast_ref(), Some(Error::DeviceLost(_))) => {
                chat = chat.reloaded(&error.to_string(), reload)?;
            }
            // Standard output is gone, or the drive or the machine fails.
            Err(error) if error.is::<std::io::Error>() || error.is::<forebay_engine::Error>() => {
                return Err(error);
            }
            Err(error) => eprintln!("{error:#}\n"),
        }
    }
}

/// A conversation on the terminal.
struct Chat {
    session: Session,
    request: Request,
    prompting: Prompting,
    /// Without the system message.
    messages: Vec<Message>,
    /// The last answer.
    last: Option<Answer>,
}

impl Chat {
    fn model_name(&self) -> String {
        self.session.engine().file().metadata.str("general.name").unwrap_or("the model").to_owned()
    }

    /// Goes on with the model loaded again. What was said is read again with the next question.
    fn reloaded(self, lost: &str, reload: &Reload<'_>) -> Result<Chat> {
        eprintln!("\n[the answer was cut]");
        let Chat { session, request, prompting, messages, last } = self;
        let cancel = session.cancel().clone();
        // Their memory is needed.
        drop((session, request.grammar));
        let (engine, grammar) = reload(lost)?;
        let mut session = engine.session();
        session.obey(&cancel);
        eprintln!("The last question was not answered: ask it again.\n");
        Ok(Chat { session, request: Request { grammar, ..request }, prompting, messages, last })
    }

    /// Says something to the model. What gets no answer is taken back.
    fn say(&mut self, text: &str) -> Result<()> {
        self.messages.push(Message::new("user", text));
        let before = self.messages.len();
        let answered = self.answer();
        if self.messages.len() == before {
            self.messages.pop();
        }
        answered
    }

    /// Has the last message answered.
    fn answer(&mut self) -> Result<()> {
        let full = self.request.max_tokens.is_none();
        let mut request = self.request.clone();
        let parser = self.prompting.ask(self.session.engine(), &self.messages, &mut request)?;
        let Said { answer, text, reasoning } = stream(&mut self.session, &request, parser)?;
        print(match answer.finish_reason {
            FinishReason::Cancelled => " [stopped]\n",
            FinishReason::Length if full => " [the context is full]\n",
            FinishReason::Length | FinishReason::Stop => "\n",
        })?;
        stats::close(self.session.engine(), &answer);
        eprintln!();
        let begun = answer.finish_reason != FinishReason::Cancelled || !answer.text.is_empty();
        if begun {
            let mut message = Message::new("assistant", text);
            if !reasoning.is_empty() {
                message.extra.insert("reasoning_content".into(), reasoning.into());
            }
            self.messages.push(message);
        }
        self.last = Some(answer);
        Ok(())
    }

    fn obey(&mut self, command: Command) -> Result<()> {
        match command {
            Command::Help => eprintln!("{}", help()),
            Command::Clear => self.messages.clear(),
            Command::Undo => {
                let Some(question) = self.last_question() else { bail!("there is nothing to take back") };
                self.messages.truncate(question);
                eprintln!("{}\n", self.position());
            }
            Command::Regen => {
                let Some(question) = self.last_question() else { bail!("there is no question yet") };
                let answers = self.messages.split_off(question + 1);
                // With the same seed it would be the same answer.
                self.request.sampling.seed = self.request.sampling.seed.map(|seed| seed.wrapping_add(1));
                let answered = self.answer();
                if self.messages.len() == question + 1 {
                    self.messages.extend(answers);
                }
                return answered;
            }
            Command::System(text) => {
                let before = std::mem::replace(&mut self.prompting.system, text);
                if let Err(error) = self.prompting.prompt(self.session.engine(), &self.messages) {
                    self.prompting.system = before;
                    return Err(error);
                }
            }
            Command::Set(None) => eprintln!("{}", settings(&self.request)),
            Command::Set(Some((name, value))) => set(&mut self.request, &name, &value)?,
            Command::Think(think) => self.prompting.think = Some(think),
            Command::Save(path) => self.save(&path)?,
            Command::Load(path) => self.load(&path)?,
            Command::Stats => eprintln!("{}\n", self.stats()),
            Command::Quit => unreachable!("leaving is the loop's matter"),
        }
        Ok(())
    }

    /// Where the last question is among the messages.
    fn last_question(&self) -> Option<usize> {
        self.messages.iter().rposition(|message| message.role == "user")
    }

    /// Where the conversation stands, in words.
    fn position(&self) -> String {
        let last = self.last_question().and_then(|at| self.messages[at].content.as_ref()?.as_str());
        match last {
            None => "This is the beginning of the conversation.".into(),
            Some(question) => {
                let start: String = question.chars().take(60).collect();
                format!("The last question is now: {}", start.replace('\n', " "))
            }
        }
    }

    fn save(&self, path: &Path) -> Result<()> {
        let saved = Saved::new(&self.model_name(), self.prompting.system.as_deref(), &self.messages);
        // A full drive is no reason to end the conversation.
        saved.write(path, &self.session).map_err(|error| anyhow!("error: {}", message(&error)))?;
        let count = self.messages.len();
        eprintln!(
            "Saved {count} messages to {0}, and what the model remembers to {0}.state.\n",
            path.display()
        );
        Ok(())
    }

    fn load(&mut self, path: &Path) -> Result<()> {
        let saved = Saved::read(path).map_err(|error| anyhow!("error: {}", message(&error)))?;
        let engine = self.session.engine().clone();
        match remembered(&engine, path) {
            Ok(mut session) => {
                session.obey(self.session.cancel());
                self.session = session;
            }
            Err(error) => eprintln!("The conversation is read again with the next question: {error}"),
        }
        if saved.model != self.model_name() {
            eprintln!("It was had with {}.", saved.model);
        }
        self.messages = saved.messages;
        self.prompting.system = saved.system;
        eprintln!("Loaded {} messages. {}\n", self.messages.len(), self.position());
        Ok(())
    }

    fn stats(&self) -> String {
        let engine = self.session.engine();
        let mut lines = Vec::new();
        if let Some(answer) = &self.last {
            lines.push(stats::line_of(engine, answer));
        }
        let (held, limit) = (self.session.tokens().len(), engine.context());
        lines.push(format!("context {held} of {limit} tokens"));
        let plan = engine.plan();
        let mut memory = format!("dense weights {}", Bytes(plan.dense));
        if plan.expert_count > 0 {
            let (slots, all) = (Bytes(engine.slot_bytes()), Bytes(plan.experts));
            memory.push_str(&format!(" · expert slots {slots} of {all}"));
        }
        lines.push(format!("{memory} · budget {}", Bytes(plan.budget)));
        lines.join("\n")
    }
}

/// The settings that `/set` knows, as they are.
fn settings(request: &Request) -> String {
    let sampling = &request.sampling;
    let optional = |value: Option<String>| value.unwrap_or_else(|| "none".into());
    let values = [
        ("temp", sampling.temperature.to_string()),
        ("top-k", sampling.top_k.to_string()),
        ("top-p", sampling.top_p.to_string()),
        ("min-p", sampling.min_p.to_string()),
        ("repeat-penalty", sampling.repeat_penalty.to_string()),
        ("presence-penalty", sampling.presence_penalty.to_string()),
        ("frequency-penalty", sampling.frequency_penalty.to_string()),
        ("penalty-last-n", sampling.penalty_last_n.to_string()),
        ("seed", optional(sampling.seed.map(|seed| seed.to_string()))),
        ("max-tokens", optional(request.max_tokens.map(|most| most.to_string()))),
    ];
    values.iter().map(|(name, value)| format!("  {name:<20}{value}\n")).collect()
}

/// Changes a setting; where the new value makes no sense, the old one stays.
fn set(request: &mut Request, name: &str, value: &str) -> Result<()> {
    fn number<T: FromStr>(value: &str) -> Result<T> {
        value.parse().map_err(|_| anyhow!("{value} is not a number that this takes"))
    }
    fn or_none<T: FromStr>(value: &str) -> Result<Option<T>> {
        if value == "none" { Ok(None) } else { number(value).map(Some) }
    }
    let mut changed = request.clone();
    let sampling = &mut changed.sampling;
    match name {
        "temp" => sampling.temperature = number(value)?,
        "top-k" => sampling.top_k = number(value)?,
        "top-p" => sampling.top_p = number(value)?,
        "min-p" => sampling.min_p = number(value)?,
        "repeat-penalty" => sampling.repeat_penalty = number(value)?,
        "presence-penalty" => sampling.presence_penalty = number(value)?,
        "frequency-penalty" => sampling.frequency_penalty = number(value)?,
        "penalty-last-n" => sampling.penalty_last_n = number(value)?,
        "seed" => sampling.seed = or_none(value)?,
        "max-tokens" => changed.max_tokens = or_none(value)?,
        _ => bail!("there is no setting {name}; /set shows those that there are"),
    }
    changed.sampling.validate().map_err(|error| anyhow!("{error}")).context("not changed")?;
    *request = changed;
    Ok(())
}

#[cfg(test)]
mod tests {
    use forebay_engine::generate::sampler::SamplingParams;

    use super::*;

    #[test]
    fn settings_change_or_stay() {
        let sampling = SamplingParams::default();
        let mut request = Request { sampling, ..Request::default() };
        set(&mut request, "temp", "0.25").unwrap();
        set(&mut request, "seed", "7").unwrap();
        set(&mut request, "max-tokens", "9").unwrap();
        assert_eq!((request.sampling.temperature, request.max_tokens), (0.25, Some(9)));
        set(&mut request, "max-tokens", "none").unwrap();
        assert_eq!(request.max_tokens, None);
        for (name, value) in
            [("temp", "hot"), ("temp", "-1"), ("top-p", "2"), ("colour", "1"), ("top-k", "none")]
        {
            assert!(set(&mut request, name, value).is_err(), "{name} {value}");
        }
        assert_eq!(request.sampling.temperature, 0.25);
        // Everything that is shown can be set.
        for line in settings(&request.clone()).lines() {
            let (name, value) = line.trim().split_once(' ').unwrap();
            set(&mut request, name, value.trim()).unwrap();
        }
    }
}
