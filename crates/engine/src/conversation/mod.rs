//! Chat requests and replies: from messages to a prompt, and from generated text to reasoning, content and tool calls.
//!
//! A [`ChatRequest`] has the messages. A [`Prompter`] converts it to a [`Question`]: it renders and encodes the prompt,
//! compiles the grammar, and finds every error in the request. A [`Session`](crate::Session) or a
//! [`Driver`](crate::Driver) answers the question. The answer comes as [`ReplyEvent`]s, and a [`Draft`] collects these
//! into a [`Reply`].

mod assembler;
mod chat;
mod messages;
mod prompter;
mod reasoning;
mod reply;
mod request;

pub(crate) use self::assembler::Assembler;
pub use self::chat::Chat;
pub use self::messages::text_of;
pub use self::prompter::{Prompt, Prompter, Question};
pub use self::reply::{Call, Draft, Reply, ReplyEvent};
pub use self::request::{ChatRequest, Format, ReplyOptions, ToolChoice};
