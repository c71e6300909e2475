//! A conversation: from messages to a prompt, and from what the model writes to reasoning, text and calls.
//!
//! A [`ChatRequest`] says what is asked. A [`Prompter`] makes a [`Question`] of it: it renders and encodes the prompt, compiles
//! the grammar, and finds everything that is wrong with the request. A [`Session`](crate::Session) or a
//! [`Driver`](crate::Driver) answers the question. The answer comes as [`ReplyEvent`]s, and a [`Draft`] collects these into
//! a [`Reply`].

mod assembler;
mod messages;
mod prompter;
mod reply;
mod request;

pub(crate) use self::assembler::Assembler;
pub use self::messages::text_of;
pub use self::prompter::{Prompt, Prompter, Question};
pub use self::reply::{Call, Draft, Reply, ReplyEvent};
pub use self::request::{ChatRequest, Format, ReplyOptions, ToolChoice};
