//! The messages between the last stage and the others: a length, a head in JSON, and floats.

use std::borrow::Cow;

use bytemuck::cast_slice;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::Part;
use crate::TokenId;
use crate::error::Error;
use crate::models::Span;

/// What is asked of a stage.
#[derive(Serialize, Deserialize)]
pub enum Call<'a> {
    /// What it is. It forgets all conversations.
    Hello,
    /// To compute a batch, from the hidden states of the stage before.
    Forward {
        /// What to do first.
        orders: Vec<Order>,
        /// The parts of the batch.
        turns: Vec<TurnCall<'a>>,
    },
}

/// What a stage does between batches.
#[derive(Clone, Copy, Serialize, Deserialize)]
pub enum Order {
    /// Copy the first tokens of a conversation to a new one.
    Fork { from: u64, to: u64, len: usize },
    /// Keep the mark at this length.
    Pin { conversation: u64, len: usize },
    /// Drop a conversation.
    Forget { conversation: u64 },
}

/// A conversation's part in a batch.
#[derive(Serialize, Deserialize)]
pub struct TurnCall<'a> {
    pub conversation: u64,
    /// How many tokens it has before.
    pub start: usize,
    pub tokens: Cow<'a, [TokenId]>,
    /// Lengths that it can later be rewound to.
    pub marks: Cow<'a, [usize]>,
}

impl<'a> TurnCall<'a> {
    pub fn of(part: &Part<'a>) -> TurnCall<'a> {
        let &Part { conversation, before, tokens, marks } = part;
        TurnCall { conversation, start: before.len(), tokens: tokens.into(), marks: marks.into() }
    }
}

/// What a stage answers.
#[derive(Serialize, Deserialize)]
pub enum Reply {
    /// What it is.
    Facts(Facts),
    /// The hidden states follow.
    Through,
    /// It lacks tokens of some conversations and has computed nothing.
    Missing(Vec<Missing>),
    /// It computes nothing any more.
    Lost(String),
    Failed(Failure),
}

/// A conversation of which a stage has too few tokens, or cannot go back to the right length.
#[derive(Clone, Copy, Serialize, Deserialize)]
pub struct Missing {
    pub conversation: u64,
    /// How many of its tokens the stage can start from.
    pub have: usize,
}

/// What a stage is.
#[derive(Clone, Copy, Serialize, Deserialize)]
pub struct Facts {
    pub span: Span,
    /// Identifies the model and the precision.
    pub model: u64,
    /// Channels of a hidden state.
    pub hidden: usize,
    /// The most tokens of a batch.
    pub chunk: usize,
    /// The most tokens of a conversation.
    pub context: usize,
    /// Bytes of a conversation, as long as memory is reserved for.
    pub conversation: u64,
}

impl Facts {
    /// Whether a stage can take the place of the other.
    pub fn is_like(&self, other: &Facts) -> bool {
        let Facts { span, model, hidden, chunk, context, .. } = *self;
        (span, model, hidden) == (other.span, other.model, other.hidden)
            && chunk >= other.chunk
            && context >= other.context
    }
}

/// An error of a stage.
#[derive(Serialize, Deserialize)]
pub enum Failure {
    Budget { need: u64, have: u64, what: String, remedy: String },
    Other(String),
}

impl Failure {
    pub fn of(error: Error) -> Failure {
        match error {
            Error::Budget { need, have, what, remedy } => Failure::Budget { need, have, what, remedy },
            other => Failure::Other(other.to_string()),
        }
    }

    pub fn error(self, name: &str) -> Error {
        match self {
            Failure::Budget { need, have, what, remedy } => Error::Budget { need, have, what, remedy },
            Failure::Other(message) => Error::Backend(format!("{name}: {message}")),
        }
    }
}

/// A message is not one of ours.
pub struct Damaged;

pub fn encode(head: &impl Serialize, floats: &[f32]) -> Vec<u8> {
    let head = serde_json::to_vec(head).expect("these types are valid JSON");
    let mut message = Vec::with_capacity(8 + head.len() + 4 * floats.len());
    message.extend((head.len() as u64).to_le_bytes());
    message.extend(head);
    message.extend_from_slice(cast_slice(floats));
    message
}

pub fn decode<T: DeserializeOwned>(message: &[u8]) -> Result<(T, Vec<f32>), Damaged> {
    let (len, rest) = message.split_first_chunk().ok_or(Damaged)?;
    let len = usize::try_from(u64::from_le_bytes(*len)).map_err(|_| Damaged)?;
    let (head, floats) = rest.split_at_checked(len).ok_or(Damaged)?;
    let head = serde_json::from_slice(head).map_err(|_| Damaged)?;
    let (floats, []) = floats.as_chunks() else { return Err(Damaged) };
    Ok((head, floats.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()))
}
