//! OpenAI's API: its bodies, their answers, and the endpoints.

pub(crate) mod answer;
mod answers;
pub(crate) mod ask;
pub(crate) mod chat;
mod chunks;
pub(crate) mod completions;
mod endpoint;
pub(crate) mod fields;
pub(crate) mod logprobs;
pub(crate) mod models;
pub(crate) mod responses;
pub(crate) mod unsupported;
mod volatile;

use std::collections::BTreeMap;

use forebay_engine::chat::Message;
use forebay_engine::{Error, Result};
use serde::Deserialize;
use serde_json::{Map, Value};

pub use self::answer::{Envelope, Form};
pub use self::answers::Answers;
use self::fields::{Fields, Integer, Unchecked, Unsupported, integer, or_default};
pub(crate) use self::volatile::drop_volatile_lines;

/// The kind of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Endpoint {
    /// The next message of a conversation.
    Chat,
    /// The continuation of a text.
    Completions,
}

impl Endpoint {
    const ALL: [(&'static str, Endpoint); 2] =
        [("/v1/chat/completions", Endpoint::Chat), ("/v1/completions", Endpoint::Completions)];

    /// What the ids of its answers begin with.
    pub fn prefix(self) -> &'static str {
        match self {
            Endpoint::Chat => "chatcmpl-",
            Endpoint::Completions => "cmpl-",
        }
    }

    /// The kind for an address; a chat without one.
    ///
    /// # Errors
    /// If the address is of neither kind.
    pub fn of(url: Option<&str>) -> Result<Endpoint> {
        let Some(url) = url else { return Ok(Endpoint::Chat) };
        Endpoint::ALL.into_iter().find(|(known, _)| *known == url).map(|(_, endpoint)| endpoint).ok_or_else(
            || {
                let known = Endpoint::ALL.map(|(known, _)| known).join(" and ");
                Error::field("url", format!("{url} is not supported here; supported are {known}"))
            },
        )
    }
}

/// The body of a request. Fields that are neither here nor known not to be supported are ignored.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct Body {
    #[serde(deserialize_with = "or_default")]
    pub(crate) messages: Vec<Message>,
    pub(crate) prompt: Option<PromptField>,
    /// Some clients send -1 for no limit.
    #[serde(deserialize_with = "integer")]
    max_tokens: Option<i64>,
    #[serde(deserialize_with = "integer")]
    max_completion_tokens: Option<i64>,
    /// llama.cpp's name for `max_tokens`.
    #[serde(deserialize_with = "integer")]
    n_predict: Option<i64>,
    /// Whether the answer continues after the model's end token.
    pub(crate) ignore_eos: Option<bool>,
    temperature: Option<f32>,
    top_p: Option<f32>,
    /// Some clients send -1 for all tokens.
    #[serde(deserialize_with = "integer")]
    top_k: Option<i64>,
    min_p: Option<f32>,
    presence_penalty: Option<f32>,
    frequency_penalty: Option<f32>,
    #[serde(alias = "repetition_penalty")]
    repeat_penalty: Option<f32>,
    /// Number of last tokens that penalties apply to; -1 for all.
    #[serde(deserialize_with = "integer")]
    repeat_last_n: Option<i64>,
    logit_bias: Option<BTreeMap<String, f32>>,
    #[serde(deserialize_with = "integer")]
    seed: Option<i64>,
    stop: Option<Stop>,
    pub(crate) tools: Option<Vec<Value>>,
    pub(crate) tool_choice: Option<Value>,
    pub(crate) parallel_tool_calls: Option<bool>,
    chat_template_kwargs: Option<Map<String, Value>>,
    add_generation_prompt: Option<bool>,
    continue_final_message: Option<bool>,
    reasoning_effort: Option<String>,
    /// Some clients send -1 for no limit.
    #[serde(
        alias = "thinking_budget_tokens",
        alias = "reasoning_budget_tokens",
        deserialize_with = "integer"
    )]
    thinking_budget: Option<i64>,
    #[serde(deserialize_with = "integer")]
    pub(crate) n: Option<u64>,
    /// Whether the answer is to be streamed.
    pub stream: Option<bool>,
    pub(crate) stream_options: Option<StreamOptions>,
    pub(crate) return_progress: Option<bool>,
    /// A boolean in chats, a number in completions.
    pub(crate) logprobs: Option<Value>,
    #[serde(deserialize_with = "integer")]
    pub(crate) top_logprobs: Option<usize>,
    pub(crate) response_format: Option<Value>,
    /// llama.cpp's field for a schema of the answer.
    pub(crate) json_schema: Option<Value>,
    pub(crate) echo: Option<bool>,
    /// Whether the beginning-of-sequence token is added to a prompt of `/v1/completions`.
    pub(crate) add_special_tokens: Option<bool>,
    // These are supported with only one value:
    #[serde(deserialize_with = "integer")]
    best_of: Option<u64>,
    modalities: Option<Vec<String>>,
}

impl Fields for Body {
    const UNSUPPORTED: &'static [&'static [Unsupported]] = &[unsupported::CHAT, unsupported::ANY];
}

/// One or several prompts, as text or as tokens.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
pub(crate) enum PromptField {
    Text(String),
    Texts(Vec<String>),
    Tokens(Vec<Integer<u32>>),
    Several(Vec<Vec<Integer<u32>>>),
}

#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Stop {
    One(String),
    Several(Vec<String>),
}

/// The options of a stream.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct StreamOptions {
    pub include_usage: Option<bool>,
}

impl Body {
    /// Parses a body.
    ///
    /// # Errors
    /// If a field is wrong or not supported, which [`Error::Field`] names.
    pub fn read(value: Value) -> Result<Body> {
        read_fields::<Unchecked<Body>>(value)?.supported()
    }
}

/// Parses an object. Errors name the wrong field.
pub(crate) fn read_fields<T: for<'de> Deserialize<'de>>(value: Value) -> Result<T> {
    let Value::Object(fields) = &value else {
        return Err(Error::Invalid("the body is not a JSON object".into()));
    };
    T::deserialize(&value).map_err(|error| {
        // The field that fails on its own is the wrong one.
        let wrong = fields.iter().find_map(|(name, value)| {
            let alone = Value::Object(Map::from_iter([(name.clone(), value.clone())]));
            Some((name, T::deserialize(alone).err()?))
        });
        match wrong {
            Some((name, error)) => Error::field(name, format!("{name} is invalid: {error}")),
            None => Error::Invalid(format!("the body is invalid: {error}")),
        }
    })
}
