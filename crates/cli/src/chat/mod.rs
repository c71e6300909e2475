//! The chat of `forebay run` on a terminal.

mod command;
mod input;
mod room;
mod saved;

use std::path::Path;
use std::process::ExitCode;
use std::str::FromStr;

use anyhow::{Context, Result, anyhow, bail};
use forebay_engine::chat::Message;
use forebay_engine::conversation::Format;
use forebay_engine::internals::generate::sampler::SamplingOverrides;
use forebay_engine::{Answer, Bytes, ChatRequest, Error, FinishReason, Prompter, Reply, Session};

use self::command::{Command, help, unquoted};
use self::input::{Input, Typed};
use self::room::{oldest_turn, warning};
use self::saved::{Saved, remembered};
use crate::errors::{TooLong, explain, message};
use crate::output::print;
use crate::prompting::check_template;
use crate::run::stream;
use crate::wrap::tell;
use crate::{interrupt, stats};

/// Loads the model again for another device after one was lost. Returns its prompter and the format of answers.
pub type Reload<'a> = dyn Fn(&str) -> Result<(Prompter, Format)> + 'a;

/// Reads messages and answers them until the user leaves. `request` has the options of answers; its messages are replaced.
/// `system` is the system prompt.
pub fn run(
    session: Session,
    prompter: Prompter,
    request: ChatRequest,
    system: Option<String>,
    reload: &Reload<'_>,
) -> Result<ExitCode> {
    check_template(&prompter)?;
    let mut chat = Chat { session, prompter, request, system, messages: Vec::new(), last: None };
    tell(&format!("{}\n", greeting(&chat.model_name(), chat.session.engine().context())));
    let mut input = Input::new()?;
    // Whether the last input was Ctrl-C.
    let mut leaving = false;
    loop {
        let line = match input.read()? {
            Typed::Text(line) => line,
            Typed::End => return Ok(ExitCode::SUCCESS),
            Typed::Interrupt if leaving => return Ok(ExitCode::from(interrupt::EXIT_CODE)),
            Typed::Interrupt => {
                tell("To leave, press Ctrl-C again, press Ctrl-D or type /quit.\n");
                leaving = true;
                continue;
            }
        };
        leaving = false;
        chat.session.cancel().reset();
        let done = match line.starts_with('/') {
            true => match Command::parse(&line) {
                Ok(Command::Quit) => return Ok(ExitCode::SUCCESS),
                Ok(command) => {
                    chat.make_room_for(&mut input, |chat, input| chat.obey(command.clone(), input))
                }
                Err(mistake) => Err(mistake),
            },
            false => {
                let text = unquoted(&line);
                chat.make_room_for(&mut input, |chat, input| chat.say(&text, input))
            }
        };
        match done {
            Ok(()) => {}
            Err(error) if error.is::<TooLong>() => tell(&format!("error: {error}\n")),
            Err(error) if matches!(error.downcast_ref(), Some(Error::DeviceLost(_))) => {
                chat = chat.reloaded(&error.to_string(), reload)?;
            }
            // Standard output is gone, or the drive or the machine fails.
            Err(error) if error.is::<std::io::Error>() || error.is::<forebay_engine::Error>() => {
                return Err(error);
            }
            Err(error) => tell(&format!("{}\n", message(&error))),
        }
    }
}

/// The first lines of a chat.
fn greeting(model: &str, context: usize) -> String {
    format!(
        "Chat with {model} (context: {context} tokens).\n\
         Type a message, or /help for commands and keys. Ctrl-C stops an answer, Ctrl-D leaves."
    )
}

/// A conversation on the terminal.
struct Chat {
    session: Session,
    prompter: Prompter,
    /// The options of answers, without messages.
    request: ChatRequest,
    /// The system prompt.
    system: Option<String>,
    /// Without the system message.
    messages: Vec<Message>,
    /// The last answer.
    last: Option<Answer>,
}

impl Chat {
    fn model_name(&self) -> String {
        self.session.engine().file().metadata.str("general.name").unwrap_or("the model").to_owned()
    }

    /// Continues with the model loaded again. The next message processes the whole conversation again.
    fn reloaded(self, lost: &str, reload: &Reload<'_>) -> Result<Chat> {
        tell("\n[the answer was cut off]");
        let Chat { session, prompter, mut request, system, messages, last } = self;
        let cancel = session.cancel().clone();
        // The new model needs their memory.
        drop((session, prompter, std::mem::take(&mut request.options.format)));
        let (prompter, format) = reload(lost)?;
        let mut session = prompter.engine().session();
        session.obey(&cancel);
        request.options.format = format;
        tell("Your last message has no answer. Send it again: the up arrow key brings it back.\n");
        Ok(Chat { session, prompter, request, system, messages, last })
    }

    /// A request for the next message.
    fn request(&self) -> ChatRequest {
        let mut request = self.request.clone();
        request.messages = self.system.iter().map(|text| Message::new("system", text)).collect();
        request.messages.extend_from_slice(&self.messages);
        request
    }

    /// Does something. If the context is too full for it and the user agrees, drops the oldest turns until it fits.
    fn make_room_for(
        &mut self,
        input: &mut Input,
        act: impl Fn(&mut Chat, &mut Input) -> Result<()>,
    ) -> Result<()> {
        let mut agreed = false;
        loop {
            match act(self, input) {
                Err(error) if error.is::<TooLong>() && !self.messages.is_empty() => {
                    if !agreed {
                        tell(&format!("The context is full: {error}."));
                        agreed = self.offer_to_drop(input)?;
                    }
                    if !agreed {
                        return Ok(());
                    }
                    self.drop_oldest()?;
                }
                done => return done,
            }
        }
    }

    /// Asks whether turns may be dropped. If not, names the alternatives.
    fn offer_to_drop(&self, input: &mut Input) -> Result<bool> {
        let agreed = input.confirm("Drop the oldest turns and go on? The system prompt stays.")?;
        if !agreed {
            tell(
                "Nothing was dropped. /drop drops the oldest turns, /undo the last one, /clear all of them.\n",
            );
        }
        Ok(agreed)
    }

    /// Drops oldest turns until half of the context is free, at least one. The last turn stays unless it is the only one.
    fn drop_oldest(&mut self) -> Result<()> {
        let context = self.session.engine().context();
        let mut dropped = 0;
        let left = loop {
            self.messages.drain(..oldest_turn(&self.messages));
            dropped += 1;
            let left = self.prompt_tokens()?;
            if oldest_turn(&self.messages) == self.messages.len() || 2 * left <= context {
                break left;
            }
        };
        let turns =
            if dropped == 1 { "the oldest turn".into() } else { format!("the {dropped} oldest turns") };
        tell(&match left {
            0 => format!("Dropped {turns}. No other turns are left.\n"),
            _ => format!(
                "Dropped {turns}. The remaining turns take {left} of {context} tokens. They are processed again with the \
                 next message.\n"
            ),
        });
        Ok(())
    }

    /// Tokens of the conversation as the model sees it.
    fn prompt_tokens(&self) -> Result<usize> {
        if self.messages.is_empty() {
            // Some templates refuse a conversation without messages.
            return Ok(0);
        }
        let prompt = self.prompter.prompt(&self.request());
        Ok(prompt.map_err(|error| explain(self.prompter.engine(), error))?.tokens.len())
    }

    /// Sends a message to the model. A message without an answer is removed again.
    fn say(&mut self, text: &str, input: &mut Input) -> Result<()> {
        self.messages.push(Message::new("user", text));
        let before = self.messages.len();
        let answered = self.answer(input);
        if self.messages.len() == before {
            self.messages.pop();
        }
        answered
    }

    /// Generates the answer to the last message.
    fn answer(&mut self, input: &mut Input) -> Result<()> {
        let question = self.prompter.chat(self.request());
        let question = question.map_err(|error| explain(self.prompter.engine(), error))?;
        let reply = stream(&mut self.session, &question)?;
        let context = self.session.engine().context();
        let used = reply.answer.stats.prompt_tokens + reply.answer.stats.generated_tokens;
        let is_full = reply.answer.finish_reason == FinishReason::Length && used >= context;
        print(match reply.answer.finish_reason {
            FinishReason::Cancelled => " [stopped]\n",
            FinishReason::Length if is_full => " [the context is full]\n",
            FinishReason::Length | FinishReason::Stop | FinishReason::Calls => "\n",
        })?;
        stats::close(self.session.engine(), &reply.answer);
        if let Some(warning) = warning(used, context) {
            tell(&warning);
        }
        tell("");
        if reply.answer.finish_reason != FinishReason::Cancelled || !reply.answer.text.is_empty() {
            self.messages.push(reply.message());
        }
        let Reply { answer, .. } = reply;
        self.last = Some(answer);
        if is_full {
            tell(&format!("The context of {context} tokens is full, so the answer ends early."));
            if oldest_turn(&self.messages) == self.messages.len() {
                tell("/undo removes the message and its answer, /clear starts a new conversation.\n");
            } else if self.offer_to_drop(input)? {
                self.drop_oldest()?;
                tell("Ask the model to go on, or send another message.\n");
            }
        }
        Ok(())
    }

    fn obey(&mut self, command: Command, input: &mut Input) -> Result<()> {
        match command {
            Command::Help => tell(&help()),
            Command::Clear => {
                self.messages.clear();
                let system = if self.system.is_some() { " The system prompt stays." } else { "" };
                tell(&format!("This is a new conversation.{system}\n"));
            }
            Command::Drop => {
                if oldest_turn(&self.messages) == self.messages.len() {
                    bail!("there are no older turns to drop; /clear starts a new conversation");
                }
                self.drop_oldest()?;
            }
            Command::Undo => {
                let Some(question) = self.last_question() else { bail!("there is no message to remove") };
                self.messages.truncate(question);
                tell(&format!("{}\n", self.position()));
            }
            Command::Regen => {
                let Some(question) = self.last_question() else { bail!("there is no message to answer") };
                let answers = self.messages.split_off(question + 1);
                // The same seed would give the same answer.
                let seed = &mut self.request.options.sampling.seed;
                *seed = seed.map(|seed| seed.wrapping_add(1));
                let answered = self.answer(input);
                if self.messages.len() == question + 1 {
                    self.messages.extend(answers);
                }
                return answered;
            }
            Command::System(text) => {
                let before = std::mem::replace(&mut self.system, text);
                if let Err(error) = self.prompter.prompt(&self.request()) {
                    self.system = before;
                    return Err(explain(self.prompter.engine(), error));
                }
                let set = if self.system.is_some() { "set" } else { "removed" };
                tell(&format!("The system prompt is {set}. This applies from the next message on.\n"));
            }
            Command::Set(None) => tell(&settings(&self.request)),
            Command::Set(Some((name, value))) => {
                set(&mut self.request, &name, &value)?;
                tell(&format!("{name} is now {value}.\n"));
            }
            Command::Think(think) => {
                self.request.think = Some(think);
                tell(match (self.switches_reasoning(), think) {
                    (false, _) => {
                        "The chat template of this model has no switch for reasoning: this changes nothing.\n"
                    }
                    (true, true) => "Reasoning is on from the next message on.\n",
                    (true, false) => "Reasoning is off from the next message on.\n",
                });
            }
            Command::Save(path) => self.save(&path)?,
            Command::Load(path) => self.load(&path)?,
            Command::Stats => tell(&format!("{}\n", self.stats())),
            Command::Quit => unreachable!("leaving is the loop's matter"),
        }
        Ok(())
    }

    /// Whether the chat template writes another prompt if reasoning is wanted than if it is not.
    fn switches_reasoning(&self) -> bool {
        let prompt = |think| {
            let mut request = self.request.clone();
            request.messages = vec![Message::new("user", "Hello")];
            request.think = Some(think);
            self.prompter.prompt(&request).ok().map(|prompt| prompt.text)
        };
        prompt(true) != prompt(false)
    }

    /// The index of the user's last message.
    fn last_question(&self) -> Option<usize> {
        self.messages.iter().rposition(|message| message.role == "user")
    }

    /// A sentence that names the last message.
    fn position(&self) -> String {
        let last = self.last_question().and_then(|at| self.messages[at].content.as_ref()?.as_str());
        match last {
            None => "The conversation is empty.".into(),
            Some(question) => {
                let start: String = question.chars().take(60).collect();
                format!("The last message is now: {}", start.replace('\n', " "))
            }
        }
    }

    fn save(&self, path: &Path) -> Result<()> {
        let saved = Saved::new(&self.model_name(), self.system.as_deref(), &self.messages);
        // A failed save, for example on a full drive, does not end the chat.
        saved.write(path, &self.session).map_err(|error| anyhow!("error: {}", message(&error)))?;
        let count = self.messages.len();
        tell(&format!(
            "Saved {count} messages to {0}, and the state of the model to {0}.state.\n",
            path.display()
        ));
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
            Err(error) => tell(&format!(
                "The conversation is processed again with the next message, because its state cannot be loaded: {}",
                message(&error.into())
            )),
        }
        if saved.model != self.model_name() {
            tell(&format!("It was saved with another model: {}.", saved.model));
        }
        self.messages = saved.messages;
        self.system = saved.system;
        tell(&format!("Loaded {} messages. {}\n", self.messages.len(), self.position()));
        Ok(())
    }

    fn stats(&self) -> String {
        let engine = self.session.engine();
        let mut lines = Vec::new();
        if let Some(answer) = &self.last {
            lines.push(stats::line_of(engine, answer));
        }
        let (held, limit) = (self.session.tokens().len(), engine.context());
        lines.push(format!("context {held} of {limit} tokens used"));
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

/// The settings that `/set` knows, with their values.
fn settings(request: &ChatRequest) -> String {
    fn text<T: ToString>(value: Option<T>) -> String {
        value.map_or_else(|| "none".into(), |value| value.to_string())
    }
    let sampling = &request.options.sampling;
    let values = [
        ("temp", text(sampling.temperature)),
        ("top-k", text(sampling.top_k)),
        ("top-p", text(sampling.top_p)),
        ("min-p", text(sampling.min_p)),
        ("repeat-penalty", text(sampling.repeat_penalty)),
        ("presence-penalty", text(sampling.presence_penalty)),
        ("frequency-penalty", text(sampling.frequency_penalty)),
        ("penalty-last-n", text(sampling.penalty_last_n)),
        ("seed", text(sampling.seed)),
        ("max-tokens", text(request.options.max_tokens)),
    ];
    values.iter().map(|(name, value)| format!("  {name:<20}{value}\n")).collect()
}

/// Changes a setting. If the new value is invalid, the old one stays.
fn set(request: &mut ChatRequest, name: &str, value: &str) -> Result<()> {
    fn number<T: FromStr>(value: &str) -> Result<Option<T>> {
        value.parse().map(Some).map_err(|_| anyhow!("{value} is not a value that this setting takes"))
    }
    fn or_none<T: FromStr>(value: &str) -> Result<Option<T>> {
        if value == "none" { Ok(None) } else { number(value) }
    }
    let mut sampling: SamplingOverrides = request.options.sampling.clone();
    let mut max_tokens = request.options.max_tokens;
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
        "max-tokens" => max_tokens = or_none(value)?,
        _ => bail!("there is no setting {name}; /set without a name shows all settings"),
    }
    sampling.validate().map_err(|error| anyhow!("{error}")).context("not changed")?;
    (request.options.sampling, request.options.max_tokens) = (sampling, max_tokens);
    Ok(())
}

#[cfg(test)]
mod tests {
    use expect_test::expect_file;
    use forebay_engine::internals::generate::sampler::SamplingParams;

    use super::*;

    #[test]
    fn the_chats_own_words_are_reviewed() {
        let screen = format!("{}\n\n> /help\n{}", greeting("the model", 8192), help());
        expect_file!["../../tests/snapshots/chat.txt"].assert_eq(&screen);
    }

    #[test]
    fn settings_change_or_stay() {
        let mut request = ChatRequest::default();
        request.options.sampling = SamplingParams::default().into();
        set(&mut request, "temp", "0.25").unwrap();
        set(&mut request, "seed", "7").unwrap();
        set(&mut request, "max-tokens", "9").unwrap();
        let asked =
            |request: &ChatRequest| (request.options.sampling.temperature, request.options.max_tokens);
        assert_eq!(asked(&request), (Some(0.25), Some(9)));
        set(&mut request, "max-tokens", "none").unwrap();
        assert_eq!(asked(&request).1, None);
        for (name, value) in
            [("temp", "hot"), ("temp", "-1"), ("top-p", "2"), ("colour", "1"), ("top-k", "none")]
        {
            assert!(set(&mut request, name, value).is_err(), "{name} {value}");
        }
        assert_eq!(asked(&request).0, Some(0.25));
        // Every shown setting can be set.
        for line in settings(&request.clone()).lines() {
            let (name, value) = line.trim().split_once(' ').unwrap();
            set(&mut request, name, value.trim()).unwrap();
        }
    }
}
