//! An answer told apart: as it comes, and as a whole.

use serde_json::{Value, json};

use super::Question;
use crate::blocks::PromptMeter;
use crate::chat::Message;
use crate::error::Result;
use crate::generate::Answer;
use crate::generate::sampler::Scored;
use crate::session::Session;

/// What happens while a question is answered.
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
    /// Prompt processing starts. The meter shows at any time how far it is, also while a pass computes.
    Start(PromptMeter),
    /// More of the prompt has been processed: told after each pass.
    Progress {
        /// Tokens processed.
        done: usize,
        /// Tokens to process.
        total: usize,
    },
    /// What the model says to itself.
    Reasoning(String),
    /// What it says.
    Content {
        /// More text.
        text: String,
        /// How likely the tokens were that led to the text, if that was asked for.
        scored: Vec<Scored>,
    },
    /// It calls a tool.
    Call {
        /// Tells the call from others.
        id: String,
        /// The tool.
        name: String,
    },
    /// More of the JSON text of the arguments of the call that began last.
    Arguments(String),
    /// The answer has ended: what the model wrote, and what it took. Nothing comes after it.
    End(Box<Answer>),
}

/// A whole answer.
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
    /// What the model said to itself.
    pub reasoning: String,
    /// What it said.
    pub content: String,
    /// The tools that it called.
    pub calls: Vec<Call>,
    /// How likely the tokens of the content were, if that was asked for.
    pub scored: Vec<Scored>,
    /// All that it wrote, why it ended, and what it took.
    pub answer: Answer,
}

/// A call of a tool.
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
    /// Tells the call from others: the result that is sent back has the same.
    pub id: String,
    /// The tool.
    pub name: String,
    /// JSON text. Where the answer was cut off, it may not be complete.
    pub arguments: String,
}

impl Reply {
    /// The message with which the conversation goes on.
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

/// A reply that is being collected.
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
///     // The event could be shown to somebody here.
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
    /// Takes what happens; gives the reply when it has ended, after which the draft is empty.
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
    /// Answers a question and tells what the model says as it comes. As [`generate`](Self::generate), of which the answer is:
    /// a reply that was cancelled is no error.
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
