//! Replies: answers split into reasoning, content and tool calls, as events or as a whole.

use serde_json::{Value, json};

use super::Question;
use crate::blocks::PromptMeter;
use crate::chat::Message;
use crate::error::Result;
use crate::generate::Answer;
use crate::generate::sampler::Scored;
use crate::session::Session;

/// An event of a reply in progress.
///
/// # Examples
/// ```
/// use forebay_engine::{ChatRequest, Driver, DriverOptions, ReplyEvent};
///
/// # let model = std::path::Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/tales-qwen3moe-Q4_K_M.gguf"));
/// # let engine = forebay_engine::Engine::open(model, &forebay_engine::Options::new().threads(1))?;
/// # let driver = Driver::start(&engine, DriverOptions::new(1))?;
/// for event in driver.chat(ChatRequest::user("Tell me a story.").max_tokens(8))? {
///     match event? {
///         ReplyEvent::Start(meter) => eprintln!("{} tokens to process", meter.read().total),
///         ReplyEvent::Progress { done, total } => eprintln!("{done} of {total} tokens processed"),
///         ReplyEvent::Reasoning(text) => eprint!("{text}"),
///         ReplyEvent::Content { text, .. } => print!("{text}"),
///         ReplyEvent::Call { name, .. } => print!("[calls {name}] "),
///         ReplyEvent::Arguments(json) => print!("{json}"),
///         ReplyEvent::End(answer) => eprintln!("[{}]", answer.finish_reason.name()),
///     }
/// }
/// # Ok::<(), forebay_engine::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub enum ReplyEvent {
    /// Prompt processing starts. The meter shows its progress at any time, even during a pass.
    Start(PromptMeter),
    /// More of the prompt has been processed. Sent after each pass.
    Progress {
        /// Prompt tokens processed so far.
        done: usize,
        /// Prompt tokens to process.
        total: usize,
    },
    /// More reasoning.
    Reasoning(String),
    /// More content.
    Content {
        /// The text.
        text: String,
        /// The probabilities of the text's tokens, if requested.
        scored: Vec<Scored>,
    },
    /// A tool call begins.
    Call {
        /// The call's unique id.
        id: String,
        /// The tool's name.
        name: String,
    },
    /// More of the arguments (JSON text) of the last call.
    Arguments(String),
    /// The end of the reply, with the whole text and its measurements. It is the last event.
    End(Box<Answer>),
}

/// A finished reply.
///
/// # Examples
/// ```
/// use forebay_engine::chat::Message;
/// use forebay_engine::{ChatRequest, Driver, DriverOptions};
///
/// # let model = std::path::Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/tales-qwen3moe-Q4_K_M.gguf"));
/// # let engine = forebay_engine::Engine::open(model, &forebay_engine::Options::new().threads(1))?;
/// # let driver = Driver::start(&engine, DriverOptions::new(1))?;
/// let mut messages = vec![Message::new("user", "Tell me a story.")];
/// let reply = driver.chat(ChatRequest::new(messages.clone()).max_tokens(8))?.whole()?;
/// messages.push(reply.message());
/// messages.push(Message::new("user", "Go on."));
///
/// assert!(!reply.content.is_empty());
/// assert_eq!(messages[1].role, "assistant");
/// # Ok::<(), forebay_engine::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct Reply {
    /// The model's reasoning.
    pub reasoning: String,
    /// The model's answer.
    pub content: String,
    /// The tool calls.
    pub calls: Vec<Call>,
    /// The probabilities of the content's tokens, if requested.
    pub scored: Vec<Scored>,
    /// The whole generated text, why it ended, and measurements.
    pub answer: Answer,
}

/// A tool call.
///
/// # Examples
/// ```
/// use forebay_engine::chat::Message;
/// use forebay_engine::conversation::Call;
///
/// # let call = Call { id: "call_1".into(), name: "weather".into(), arguments: r#"{"city": "Oslo"}"#.into() };
/// let arguments: serde_json::Value = serde_json::from_str(&call.arguments)?;
/// let mut result = Message::new("tool", format!("It rains in {}.", arguments["city"]));
/// result.extra.insert("tool_call_id".into(), call.id.into());
/// # assert_eq!(result.content, Some("It rains in \"Oslo\".".into()));
/// # Ok::<(), serde_json::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Call {
    /// The call's unique id. The message with the tool's result must have the same id.
    pub id: String,
    /// The tool's name.
    pub name: String,
    /// JSON text. It may be incomplete if the answer was cut off.
    pub arguments: String,
}

impl Reply {
    /// The reply as a message, to continue the conversation with.
    pub fn message(&self) -> Message {
        // A message that only calls tools has no content.
        let says = !self.content.is_empty() || self.calls.is_empty();
        let content = if says { self.content.as_str().into() } else { Value::Null };
        let mut message = Message { content: Some(content), ..Message::new("assistant", "") };
        if !self.reasoning.is_empty() {
            message.extra.insert("reasoning_content".into(), self.reasoning.as_str().into());
        }
        if !self.calls.is_empty() {
            let calls = self.calls.iter().map(|Call { id, name, arguments }| {
                json!({ "id": id, "type": "function", "function": { "name": name, "arguments": arguments } })
            });
            message.extra.insert("tool_calls".into(), calls.collect());
        }
        message
    }
}

/// Collects the events of a reply.
///
/// # Examples
/// ```
/// use forebay_engine::conversation::Draft;
/// use forebay_engine::{ChatRequest, Driver, DriverOptions};
///
/// # let model = std::path::Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/tales-qwen3moe-Q4_K_M.gguf"));
/// # let engine = forebay_engine::Engine::open(model, &forebay_engine::Options::new().threads(1))?;
/// # let driver = Driver::start(&engine, DriverOptions::new(1))?;
/// let (mut draft, mut reply) = (Draft::default(), None);
/// for event in driver.chat(ChatRequest::user("Tell me a story.").max_tokens(8))? {
///     // The event could be displayed here.
///     reply = draft.take(event?);
/// }
/// assert!(reply.is_some_and(|reply| !reply.content.is_empty()));
/// # Ok::<(), forebay_engine::Error>(())
/// ```
#[derive(Debug, Default)]
pub struct Draft {
    reasoning: String,
    content: String,
    calls: Vec<Call>,
    scored: Vec<Scored>,
}

impl Draft {
    /// Adds an event. Returns the reply at its end, after which the draft is empty.
    pub fn take(&mut self, event: ReplyEvent) -> Option<Reply> {
        match event {
            ReplyEvent::Start(_) | ReplyEvent::Progress { .. } => {}
            ReplyEvent::Reasoning(text) => self.reasoning.push_str(&text),
            ReplyEvent::Content { text, mut scored } => {
                self.content.push_str(&text);
                self.scored.append(&mut scored);
            }
            ReplyEvent::Call { id, name } => self.calls.push(Call { id, name, arguments: String::new() }),
            ReplyEvent::Arguments(text) => {
                if let Some(call) = self.calls.last_mut() {
                    call.arguments.push_str(&text);
                }
            }
            ReplyEvent::End(answer) => {
                let Draft { reasoning, content, calls, scored } = std::mem::take(self);
                return Some(Reply { reasoning, content, calls, scored, answer: *answer });
            }
        }
        None
    }
}

impl Session {
    /// Answers a question and reports each event. Like [`generate`](Self::generate), it does not treat a cancelled
    /// reply as an error.
    ///
    /// # Errors
    /// As [`generate`](Self::generate).
    pub fn reply(&mut self, question: &Question, on_event: &mut dyn FnMut(ReplyEvent)) -> Result<Reply> {
        let (engine, cancel) = (self.engine().clone(), self.cancel().clone());
        let mut assembler = question.assembler();
        let mut draft = Draft::default();
        let mut tell = |event: ReplyEvent| {
            draft.take(event.clone());
            on_event(event);
        };
        let answer = self.generate(&question.request, &mut |event| {
            if !assembler.push(event, &mut tell) {
                cancel.cancel();
            }
        })?;
        let answer = assembler.finish(&engine, answer, &mut tell);
        on_event(ReplyEvent::End(Box::new(answer.clone())));
        Ok(draft.take(ReplyEvent::End(Box::new(answer))).expect("it has ended"))
    }
}
